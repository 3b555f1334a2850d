"""The command line: its output and its failures, in separate processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import brayx as brayx_package
from brayx.commands import cli
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.tracking import Trial, register

COMMANDS = ["demo", "train", "serve", "evaluate", "check", "trials", "gamecore", "completion"]
CARTPOLE = Path(__file__).parents[2] / "pipelines" / "templates" / "cartpole.yaml"


def brayx(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "brayx", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_command() -> None:
    shown = brayx("--help")
    assert shown.returncode == 0
    for command in COMMANDS:
        assert command in shown.stdout
    for command in ("demo", "train"):
        assert "--set KEY=VALUE" in brayx(command, "--help").stdout


def test_check_prints_the_job_with_its_defaults() -> None:
    shown = brayx("check", str(CARTPOLE), "--set", "trainer.learning_rate=2e-3")
    assert shown.returncode == 0, shown.stderr
    assert "learning_rate: 0.002" in shown.stdout
    assert "max_failures: 3" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", str(CARTPOLE), "--set", "trainer.learning_rat=1"), "trainer.learning_rat: unknown key; nearest is"),
        (("check", "no-such.yaml"), "no-such.yaml: cannot be read"),
        (("train", str(CARTPOLE), "--set", "trainer.epochs=x"), "trainer.epochs: unknown key"),
        (("train", str(CARTPOLE), "--tracking", "/dev/null/x"), "is not writable"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    result = brayx(*words)
    assert result.returncode == 2
    *before, last = result.stderr.strip().splitlines()
    assert said in last
    assert len(before) == (words[0] == "train"), f"beside what it is at: {result.stderr}"


def test_a_gamecore_starts_without_ray_and_torch() -> None:
    code = """
import sys
from brayx.commands.cli import main
try:
    main(["gamecore", "gym", "--help"])
finally:
    heavy = {"ray", "torch", "mlflow"} & set(sys.modules)
    assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--url" in result.stdout


def test_every_command_has_a_line_and_completion_offers_it() -> None:
    words = [name for name, action in parser_of_commands().items() if action]
    assert len(words) > 12
    script = brayx("completion", "bash").stdout
    offered = 'COMP_WORDS=(brayx {}); COMP_CWORD={}; _brayx; echo "${{COMPREPLY[@]}}"'

    def complete(line: str) -> list[str]:
        bash = script + offered.format(line, len(line.split()))
        return subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True).stdout.split()

    assert complete("tr") == ["train", "trials"]
    assert complete("train --cl") == ["--cluster"]
    assert complete("ppo --gamma") == ["--gamma"]
    assert complete("tune --me") == ["--method"]
    assert complete("tune --t") == ["--target-return", "--tracking"], "not a flag of earlier versions"
    assert complete("visualize --o") == ["--out"]
    assert complete("keys n") == ["new"]
    assert complete("keys new --f") == ["--file"]
    assert complete("gamecore gy") == ["gym"]
    assert complete("gamecore gym --at") == ["--at-once"]
    assert complete("gamecore pettingzoo CartPole-v1 --st") == ["--state"]
    assert brayx("completion", "zsh").stdout.startswith("autoload")


def parser_of_commands() -> dict[str, str]:
    """The help line of each command."""
    (commands,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    lines = {action.dest: action.help or "" for action in commands._choices_actions}
    assert set(lines) == set(commands.choices)
    return lines


def test_the_version_is_that_of_the_package() -> None:
    assert brayx("--version").stdout == f"brayx {brayx_package.__version__}\n"


def test_check_ends_with_ok_and_names_missing_programs_and_files(tmp_path: Path) -> None:
    assert brayx("check", str(CARTPOLE)).stderr == f"{CARTPOLE}: ok\n"
    for command, missing in (
        ("pythn game.py", "there is no program 'pythn'"),
        ("python no_such_game.py {ws_url}", "there is no file 'no_such_game.py'"),
    ):
        result = brayx("check", str(CARTPOLE), "--set", f"actor.gamecores.0.command={command}")
        assert result.returncode == 2
        assert f"actor.gamecores.0.command: {missing}" in result.stderr


def test_trials_are_listed_with_their_champion(tmp_path: Path, tracking_db: str) -> None:
    ids = []
    for name, value in (("first", 20.0), ("second", 480.0)):
        trial = Trial.open("cartpole", name, tracking_db)
        ids.append(trial.run_id)
        trial.log_metrics({CHARTS["env_steps"]: 1000.0, RETURN_CHART: value}, 1000)
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.npz").write_bytes(b"weights")
        register(trial, trial.save_checkpoint(tmp_path / name, 1000), "cartpole", alias="champion")
        trial.finish("FINISHED")
    trial = Trial.open("cartpole", "third", tracking_db)
    ids.append(trial.run_id)
    trial.finish("KILLED")
    shown = brayx("trials", "--tracking", tracking_db)
    heading, third, second, first = (line.split() for line in shown.stdout.splitlines())
    assert heading[:2] == ["project", "trial"]
    assert third == ["cartpole", "third", "interrupted", "-", "-", ids[2]]
    assert second == ["cartpole", "second", "finished", "1,000", "480", "cartpole", "version", "2", ids[1]]
    assert first == ["cartpole", "first", "finished", "1,000", "20", ids[0]]
    nowhere = brayx("trials", "--project", "none", "--tracking", tracking_db)
    assert nowhere.returncode == 2
    assert "there is no project 'none'" in nowhere.stderr
