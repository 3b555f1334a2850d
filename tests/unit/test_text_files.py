"""Text files of users: their encodings, and the errors for those that are not UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.errors import ConfigError
from brayx.text_files import read_text, write_whole


@pytest.mark.parametrize("data", ["é\nb".encode(), "é\r\nb".encode(), "\ufeffé\nb".encode()])
def test_a_mark_and_windows_line_ends_are_dropped(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    assert read_text(path) == "é\nb"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("a".encode("utf-16"), "UTF-16"),
        ("a".encode("utf-32"), "UTF-32"),
        ("a".encode("utf-16-le"), "NUL"),
        (b"a\nb\xff", "line 2 has the byte 0xff"),
    ],
)
def test_another_encoding_is_named_with_the_file(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    with pytest.raises(OSError, match=why) as refused:
        read_text(path)
    assert refused.value.filename == str(path)


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text in ("é", "second"):
        write_whole(path, text)
        assert read_text(path) == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "job.yaml"
    with pytest.raises(ConfigError) as refused:
        write_whole(path, "x")
    assert refused.value.details == {"file": str(path)}
