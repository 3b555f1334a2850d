"""The command line in separate processes: help, completion, and what a command loads."""

from __future__ import annotations

import argparse
import subprocess
import sys

import brayx as brayx_package
from brayx.commands import cli

COMMANDS = ["demo", "train", "serve", "evaluate", "check", "trials", "gamecore", "completion"]


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
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
