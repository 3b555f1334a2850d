"""``brayx keys new``: each call adds a key that a service and a client read."""

from __future__ import annotations

from pathlib import Path

from brayx.gamecore.auth import Keys
from tests.unit.conftest import Run


def test_new_keys_are_added_to_the_file_and_no_secret_is_printed(command: Run, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    printed = [command("keys", "new", "--file", str(file), "--id", name) for name in ("studio", "other")]
    assert [done.returncode for done in printed] == [0, 0]
    keys = Keys.load(file)
    assert len(keys) == 2
    for done, name in zip(printed, ("studio", "other"), strict=True):
        assert name in done.stdout
        assert keys.secret(name).decode() not in done.stdout + done.stderr
    assert file.stat().st_mode & 0o077 == 0


def test_an_id_that_is_there_is_refused_and_stays(command: Run, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    command("keys", "new", "--file", str(file), "--id", "studio")
    before = file.read_text()
    assert command("keys", "new", "--file", str(file), "--id", "studio").returncode == 2
    assert file.read_text() == before
