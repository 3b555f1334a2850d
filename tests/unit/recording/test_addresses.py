"""Addresses of recordings: which become absolute, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.errors import BadRecording
from brayx.recording.addresses import absolute, files_of


def test_a_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("recordings") == str(tmp_path / "recordings")
    assert absolute("~/recordings") == str(Path.home() / "recordings")


@pytest.mark.parametrize("address", ["", "s3://bucket/recordings", "runs:/abc/recordings"])
def test_an_address_stays(address: str) -> None:
    assert absolute(address) == address


def test_a_paths_files_are_those_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    files, path = files_of(str(tmp_path))
    assert [Path(name).name for name in files.ls(path, detail=False)] == ["a"]


@pytest.mark.parametrize("address", ["", "nonsense://bucket/recordings"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BadRecording) as refused:
        files_of(address)
    assert refused.value.details["file"] == address
