"""A mistake in a job or its modules is one line and exit code 2, before anything starts that would have to be stopped.

The jobs are those of `tests/end_to_end/test_own_game.py` and `tests/end_to_end/test_league.py`.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.jobs import FREE_PORTS, setting
from tests.end_to_end.test_league import PARTS
from tests.end_to_end.test_own_game import OWN_GAME
from tests.unit.conftest import Run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of both jobs' files, where commands run; the modules that they load are forgotten."""
    folder = tmp_path / "jobs"
    for job in (OWN_GAME, PARTS):
        shutil.copytree(job, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for name, module in sys.modules.copy().items():
        if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
            del sys.modules[name]


@pytest.fixture
def refused(command: Run, folder: Path) -> Callable[..., None]:
    def check(said: str, *options: str, job: str = "game.yaml") -> None:
        children, files = psutil.Process().children(recursive=True), {*folder.iterdir()}
        training = command("train", job, *setting(*FREE_PORTS, *options))
        assert training.returncode == 2
        checking, *slow, error = training.stderr.strip().splitlines()
        assert checking == f"{job}: checking the job ..."
        assert all(line.startswith(f"{job}: ") for line in slow), "where a machine takes long"
        assert error.startswith("brayx: ")
        assert said in error
        assert training.stdout == ""
        assert psutil.Process().children(recursive=True) == children
        assert {*folder.iterdir()} - files <= {folder / "__pycache__"}

    return check


@pytest.mark.parametrize(
    ("file", "was", "now", "said"),
    [
        ("game.yaml", "gamma:", "gama:", "game.yaml:45: trainer.algorithm.gama: unknown key; nearest is 'gamma'"),
        ("game.yaml", "module: model", "module: modle", "player.module: module 'modle' is neither in"),
        ("game.yaml", "class: Keeper", "class: Keper", "has no 'Keper'; nearest is 'Keeper'"),
        ("game.yaml", "Sight}", "Sigth}", "signals_pb2.py) has no 'Sigth'; nearest is 'Sight'"),
        ("model.py", "def build_model", "def make_model", "model.py) has no 'build_model'; nearest is 'make_model'"),
        ("agents.py", "import numpy", "import nunpy", "module 'agents' needs the module 'nunpy', which is not"),
        ("league.yaml", "model: model\n  resident", "model: other\n  resident", "there is no model 'other'"),
        ("league.yaml", "league_parts.zero", "league_parts.one", "has no 'one'"),
        (
            "league.yaml",
            "share: 0.3",
            "share: 0.3, trainer: {learning_rat: 1}",
            "league.yaml:28: league.players.exploiter.trainer.learning_rat: unknown key; nearest is 'learning_rate'",
        ),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, refused: Callable[..., None], file: str, was: str, now: str, said: str
) -> None:
    text = (folder / file).read_text()
    assert was in text
    (folder / file).write_text(text.replace(was, now))
    refused(said, job=file if file == "league.yaml" else "game.yaml")


def test_a_module_cannot_have_the_name_of_another(folder: Path, refused: Callable[..., None]) -> None:
    shutil.move(folder / "agents.py", folder / "random.py")
    (folder / "game.yaml").write_text((folder / "game.yaml").read_text().replace("module: agents", "module: random"))
    refused("random.py cannot be loaded, because another module 'random' was loaded before from")


def test_a_port_that_is_taken_is_named_with_its_holder(folder: Path, refused: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refused(f"port {port} of 127.0.0.1 is taken by", f"actor.port={port}")
        refused(f"pid {os.getpid()}", f"actor.port={port}")
