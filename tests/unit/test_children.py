"""A child process imports from where this process does, and not from the folder where it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brayx.children import start_module


def test_a_child_imports_from_this_process_paths_and_not_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, here = tmp_path / "ours", tmp_path / "here"
    for folder in (ours, here):
        folder.mkdir()
        text = (
            f"import os, sys\nsys.stdout.write({folder.name!r} + sys.argv[1] + os.environ['ADDED'] + sys.stdin.read())"
        )
        (folder / "said.py").write_text(text)
    monkeypatch.syspath_prepend(str(ours))
    monkeypatch.chdir(here)
    child = start_module("said", " a word", ADDED=" a variable")
    assert os.getpgid(child.pid) != os.getpgid(0), "Ctrl-C in a terminal does not reach it"
    out, _ = child.communicate(b" an input", timeout=60)
    assert out == b"ours a word a variable an input"
