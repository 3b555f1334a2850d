"""The import paths that guides and templates had before work for one release, with a warning that names the new one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

FORMER = {
    "brayx.gamecore.gym": (
        "brayx.bridges.gym",
        {"GameResult", "game_of", "main", "make_env", "parser", "play_game", "run_games"},
    ),
    "brayx.gamecore.pettingzoo": (
        "brayx.bridges.pettingzoo",
        {"Clients", "MultiAgentResult", "main", "make_env", "parser", "play_game", "run_games", "session_id"},
    ),
    "pipelines.models": ("brayx.jobs.models", {"build_model"}),
}
"""Where each is now, and the names that it had."""


@pytest.mark.parametrize("former", FORMER)
def test_a_former_module_warns_and_has_its_names(former: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, names = FORMER[former]
    module = importlib.import_module(path)
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(FutureWarning, match=path):
        alias = importlib.import_module(former)
    assert {name for name in names if getattr(alias, name, None) is not getattr(module, name)} == set()


def test_the_former_command_warns_and_runs() -> None:
    command = [sys.executable, "-W", "error::FutureWarning", "-m", "pipelines.cli", "--version"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 1
    assert "FutureWarning: python -m pipelines.cli is python -m brayx now" in refused.stderr
    ran = subprocess.run([*command[:1], *command[3:]], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.startswith("brayx ")
