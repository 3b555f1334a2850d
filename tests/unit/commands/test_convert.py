"""``brayx convert``: its exit code says whether something is left to fill in."""

from __future__ import annotations

from pathlib import Path

from tests.unit.conftest import Run


def test_a_file_that_cannot_be_read_is_one_line(command: Run, tmp_path: Path) -> None:
    done = command("convert", str(tmp_path / "none.yaml"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "none.yaml" in done.stderr


def test_what_is_left_to_do_is_listed_beside_the_job(command: Run, tmp_path: Path) -> None:
    (tmp_path / "bray.yaml").write_text("project: p\ntrial: t\nagent:\n  kind: agent\n  module: mine\n")
    done = command("convert", str(tmp_path / "bray.yaml"))
    assert done.returncode == 1
    assert done.stderr == "brayx: to do: agent.class: is missing\n"
    assert "kind: agent" in done.stdout
