"""The command line: an interrupt ends a command wherever it comes, and an error is one line."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.command_line import Switch
from brayx.commands import cli, gamecore
from brayx.jobs.shipped import TEMPLATES
from tests.unit.conftest import Run

ROOT = Path(__file__).parents[3]
CARTPOLE = TEMPLATES / "cartpole.yaml"

DROPPED = """
import os, signal, sys, time
from brayx.commands import check, cli

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python drops what is raised here

def work(arguments):
    Finalised()
    print("went on", flush=True)
    time.sleep(60)
    return 0

check.run = work
sys.exit(cli.main(["check", "job.yaml"]))
"""


def test_an_interrupt_that_python_drops_is_repeated() -> None:
    command = [sys.executable, "-c", DROPPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.stdout == "went on\n"
    assert done.returncode == 130
    assert done.stderr == ""


UNTYPED = """
import os, signal, sys, time
from brayx.commands import check, cli

def work(arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise ValueError("while it ended") from None

check.run = work
sys.exit(cli.main(["check", "job.yaml"]))
"""


def test_an_error_after_an_interrupt_keeps_its_traceback() -> None:
    command = [sys.executable, "-c", UNTYPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ValueError: while it ended\n")


def test_a_command_in_the_background_of_a_script_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGINT is ignored from the start, as a command's after an interrupt."""

    def run(arguments: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("brayx.commands.bridge.run", run)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["bridge", "unity", "game"])


def test_every_command_is_a_file_and_every_file_with_a_help_is_a_command() -> None:
    folder = Path(cli.__file__).parent
    files = {file.stem for file in folder.glob("*.py") if "\nHELP = " in file.read_text()}
    assert files == {name.replace("-", "_") for name in cli.COMMANDS}


LOADED = """
import sys
from brayx.commands import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["gamecore", "--help"]])
def test_help_loads_no_engine_and_a_command_no_other(words: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "ray", "mlflow", "numpy", "gymnasium", "pydantic"}
    commands = {name for name in cli.COMMANDS if f"brayx.commands.{name.replace('-', '_')}" in loaded}
    assert commands == (set(cli.COMMANDS) if words == ["--help"] else {words[0]})


HANGING = """
import sys, time
try:
    if {word!r} in sys.argv:  # its child imports this, too
        print("importing", flush=True)
    time.sleep(600)
except BaseException:
    {raised}
"""


@pytest.mark.slow  # starts the command and waits for its first line
@pytest.mark.parametrize(
    ("words", "when", "raised"),
    [
        (["train", "none.yaml"], " before training began", "raise"),
        (["demo", "--set", "none=1"], " before the demo was over", "raise"),
        (["train", "none.yaml"], ": numpy has no 'ndarray'", "raise AttributeError(\"numpy has no 'ndarray'\")"),
    ],
)
def test_a_training_reports_its_first_step_at_once_and_when_it_was_interrupted(
    words: list[str], when: str, raised: str, tmp_path: Path
) -> None:
    (tmp_path / "pydantic.py").write_text(HANGING.format(word=words[0], raised=raised))
    command = [sys.executable, "-m", "brayx", *words]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipes) as process:  # type: ignore[call-overload]
        assert process.stderr is not None
        assert process.stderr.readline().endswith(".yaml: checking the job ...\n")
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert (out, err, process.returncode) == ("", f"brayx: interrupted{when}\n", 130)


def test_an_interrupt_while_a_command_is_imported_ends_it_silently(tmp_path: Path) -> None:
    (tmp_path / "difflib.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    command, variables = [sys.executable, "-m", "brayx", "ppo"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert (out, err, process.returncode) == ("", "", 130)


@pytest.mark.parametrize(
    "words", ["ppo --env CartPoll-v1", "tune --env CartPole-v1 --search x=none(1)", "visualize none --out none.png"]
)
def test_a_pipeline_as_a_module_reports_an_error_in_one_line_as_its_command_does(words: str, tmp_path: Path) -> None:
    name, *rest = words.split()
    command = [sys.executable, "-m", f"pipelines.{name}", *rest]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("brayx: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", "brayx"),
        ("trian job.yaml", "brayx"),
        ("train", "brayx train"),
        ("evaluate --games 0", "brayx evaluate"),
        ("keys new --fil", "brayx keys new"),
        ("gamecore chess", "brayx gamecore"),
        ("gamecore gym", "brayx gamecore gym"),
        ("gamecore pettingzoo a:b --games many", "brayx gamecore pettingzoo"),
        ("bridge gym", "brayx bridge"),
        ("bridge godot", "brayx bridge godot"),
        ("ppo", "brayx ppo"),
        ("mlagents-learn --num-envs many", "brayx mlagents-learn"),
        ("tune --num-trials many", "brayx tune"),
        ("visualize --save-fig perhaps", "brayx visualize"),
    ],
)
def test_wrong_arguments_are_reported_like_any_error_after_the_usage(
    words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    first, *_, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first.startswith(f"usage: {command} [-h]")
    assert last.startswith("brayx: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", str(CARTPOLE), "--set", "trainer.learning_rat=1"), "trainer.learning_rat: unknown key; nearest is"),
        (("check", "no-such.yaml"), "no-such.yaml: cannot be read"),
        (("train", str(CARTPOLE), "--set", "trainer.epochs=x"), "trainer.epochs: unknown key"),
        (("train", str(CARTPOLE), "--tracking", "/dev/null/x"), "database /dev/null/x/mlflow.db is not writable"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(command: Run, words: tuple[str, ...], said: str) -> None:
    result = command(*words)
    assert result.returncode == 2
    *before, last = result.stderr.strip().splitlines()
    assert said in last
    assert len(before) == (words[0] == "train"), f"beside what it is at: {result.stderr}"


@pytest.mark.parametrize("kind", ["gym", "pettingzoo"])
def test_a_gamecores_error_begins_like_any_other(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gamecore", kind, "no_such_game", "--url", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("brayx: ")
    assert "no_such_game" in line


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def test_every_switch_can_be_negated(capsys: pytest.CaptureFixture[str]) -> None:
    bridges = [importlib.import_module(f"brayx.bridges.{kind}").parser() for kind in gamecore.KINDS]
    every = [*parsers(cli.parser()), *bridges]
    switches = {
        option
        for parser in every
        for action in parser._actions
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreConstAction | Switch)
        for option in action.option_strings
    }
    switches -= {"--no-graphics", "--no-graphics-monitor"}  # of mlagents-learn, which has no other form of them
    plain = {option for option in switches if not option.startswith("--no-")}
    assert {"--new", "--rate", "--json", "--quiet", "--state"} <= plain
    assert {f"--no-{option.removeprefix('--')}" for option in plain} == switches - plain
    assert cli.main(["completion", "bash"]) == 0
    assert "--new --no-new --tracking" in capsys.readouterr().out


def test_the_last_of_a_switch_and_its_negation_counts() -> None:
    assert not cli.parser().parse_args(["train", "cartpole.yaml", "--new", "--no-new"]).new
    assert cli.parser().parse_args(["doctor", "ws://x", "--no-json", "--json"]).json
    assert not cli.parser().parse_args(["ppo", "--env", "CartPole-v1", "--new", "--no-new"]).new
