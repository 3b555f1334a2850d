"""The command line: what it says, and how it fails, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ["demo", "train", "evaluate", "check", "gamecore"]
CARTPOLE = Path(__file__).parents[2] / "pipelines" / "templates" / "cartpole.yaml"


def brayx(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *words], capture_output=True, text=True, timeout=120, check=False
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
from pipelines.cli import main
try:
    main(["gamecore", "gym", "--help"])
finally:
    heavy = {"ray", "torch", "mlflow"} & set(sys.modules)
    assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--url" in result.stdout
