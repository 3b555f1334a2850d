from __future__ import annotations

from pathlib import Path

import pytest

from brayx.commands.arguments import SHIPPED_JOBS
from brayx.jobs.shipped import TEMPLATES, job_file


def test_a_shipped_job_is_found_by_its_name_and_a_file_here_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_file("cartpole.yaml") == str(TEMPLATES / "cartpole.yaml")
    assert job_file(Path("catch", "rl.yaml")) == str(TEMPLATES / "catch" / "rl.yaml")
    assert job_file("catch") == "catch", "a folder is no job"
    assert job_file("no-such.yaml") == "no-such.yaml"
    for name in SHIPPED_JOBS.split(", "):
        assert Path(job_file(name)).is_file(), "as the help says"
    Path("cartpole.yaml").touch()
    assert job_file("cartpole.yaml") == "cartpole.yaml"
