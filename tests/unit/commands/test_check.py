"""``brayx check``: the job with its defaults, what it refuses, and what is built for a contract."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from brayx.bridges.gym import contract_of
from brayx.commands import check
from brayx.components import load_named
from brayx.errors import ConfigError
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from tests.unit.conftest import Run

CARTPOLE, GAME = TEMPLATES / "cartpole.yaml", TEMPLATES / "game.yaml"
CONTRACT = {
    "contract": 1,
    "observations": {"speed": {"shape": [2]}},
    "actions": {"dash": {"kind": "discrete", "size": 2}},
}


def checked(*overrides: str, contract: str | None = None, env: str | None = None) -> int:
    return check.run(argparse.Namespace(config=str(GAME), overrides=list(overrides), contract=contract, env=env))


def test_what_is_built_for_a_contract_is_printed_instead_of_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(CONTRACT))
    assert checked(contract=str(tmp_path / "mine.json")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("behaviour agent, team 0; learned by ppo; vectors normalised\n")
    assert "\nobservations: speed: 2 float32\nactions: dash: one of 2 choices from 0\n" in out
    assert out.rstrip().endswith("parameters in all")
    assert err == f"{GAME}: ok\n"
    assert checked("actor.forced.dash=0", contract=str(tmp_path / "mine.json")) == 0
    out, err = capsys.readouterr()
    assert "limits: dash always 0\n" in out
    assert "note: for `brayx serve` only: actor.forced.dash limits an action while the model learns" in err
    assert checked() == 0
    assert "contract: null" in capsys.readouterr().out, "without one, the options"


def test_the_contract_of_an_environment_is_printed_with_what_is_built_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert checked(env="CartPole-v1") == 0
    contract, *built = capsys.readouterr().out.splitlines()
    assert Contract.parse(json.loads(contract)) == contract_of("CartPole-v1")
    assert built[2] == "actions: action: one of 2 choices from 0"


def test_an_environment_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register = 'gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv")'
    (tmp_path / "own_games.py").write_text(f"import gymnasium\n\n{register}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert checked(env="own_games:Own-v0") == 0
    assert "4 float32" in capsys.readouterr().out


def test_a_shipped_job_finds_modules_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_test_eyes.py").write_text(
        "from torch import nn\n\ndef eyes(spec):\n    return nn.Linear(2, 3)\n\ndef reward(tick):\n    return 1.0\n"
    )
    (tmp_path / "mine.json").write_text(json.dumps(CONTRACT))
    (tmp_path / "brayx").mkdir()  # as beside a checkout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = ["network.encoders.speed=own_test_eyes.eyes", "actor.reward=own_test_eyes.reward"]
    assert checked(*own, contract="mine.json") == 0
    assert "encoders: speed: own_test_eyes.eyes" in capsys.readouterr().out
    monkeypatch.chdir("/")
    stored = JobConfig.of(JobConfig.load(CARTPOLE).as_dict(), str(tmp_path), ["agent.module=own_test_eyes"])
    assert stored.agents["agent"].module == "own_test_eyes", "a checkpoint's job finds them from anywhere"
    assert load_named(f"{stored.models['model'].module}.build_model", stored.folder), "so does it brayx's own"


def test_options_of_the_network_are_checked_before_there_is_a_contract() -> None:
    with pytest.raises(ConfigError, match=r"network\.hiden: unknown key; nearest is 'hidden'"):
        checked("network.hiden=[7]")


def test_check_prints_the_job_with_its_defaults(command: Run) -> None:
    shown = command("check", str(CARTPOLE), "--set", "trainer.learning_rate=2e-3")
    assert shown.returncode == 0, shown.stderr
    assert "learning_rate: 0.002" in shown.stdout
    assert "max_failures: 3" in shown.stdout


def test_check_ends_with_ok_and_names_missing_programs_and_files(command: Run) -> None:
    assert command("check", str(CARTPOLE)).stderr == f"{CARTPOLE}: ok\n"
    for words, missing in (
        ("pythn game.py", "there is no program 'pythn'"),
        ("python no_such_game.py {ws_url}", "there is no file 'no_such_game.py'"),
    ):
        result = command("check", str(CARTPOLE), "--set", f"actor.gamecores.0.command={words}")
        assert result.returncode == 2
        assert f"actor.gamecores.0.command: {missing}" in result.stderr
