"""Options with underscores, switches, counts, and the lines around a command's result."""

from __future__ import annotations

import math

import pytest

from brayx import command_line
from brayx.command_line import Parser, Switch, announced, count, say, say_after_silence


def parser() -> Parser:
    made = Parser("brayx test")
    made.add_argument("--max-steps", type=count, default=1)
    made.add_argument("--under_score", default="")
    made.add_argument("--on", action=Switch, default=False)
    made.add_argument("words", nargs="*")
    return made


def test_published_options_with_underscores_are_accepted() -> None:
    options = parser().parse_args(["--max_steps=2", "--under_score", "a_b", "--", "--max_steps"])
    assert (options.max_steps, options.under_score, options.words) == (2, "a_b", ["--max_steps"])


@pytest.mark.parametrize(
    ("words", "on"),
    [([], False), (["--on"], True), (["--no-on"], False), (["--on", "Yes"], True), (["--on=0"], False)],
)
def test_a_switch_has_an_optional_value(words: list[str], on: bool) -> None:
    assert parser().parse_args(words).on is on


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--on", "maybe"], "'maybe'"),
        (["--no-on", "true"], "--no-on"),
        (["--max-steps", "0"], "--max-steps: is '0', expected a whole number, 1 or more"),
        (["--max-steps", "many"], "--max-steps: is 'many', expected a whole number, 1 or more"),
        (["--none"], "--none"),
    ],
)
def test_a_bad_option_ends_with_2_and_an_error_that_names_it(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(words)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.split("\nbrayx: ")
    assert usage.startswith("usage: brayx test")
    assert named in error


@pytest.mark.parametrize("note", ["", "after version 3"])
def test_an_interrupt_says_what_was_left(note: str, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt = KeyboardInterrupt()
    if note:
        interrupt.add_note(note)
    with pytest.raises(KeyboardInterrupt), announced("job.yaml", "before it began"):
        raise interrupt
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("job.yaml: ")
    assert last == f"brayx: interrupted {note or 'before it began'}"


@pytest.mark.parametrize("test", [1, 2])
def test_what_one_test_says_is_no_line_of_the_next(test: int) -> None:
    assert command_line._said_at == math.inf
    say("a line")


def test_a_long_step_is_said_after_a_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for said_at, line in ((math.inf, "at once"), (-math.inf, "late")):
        monkeypatch.setattr(command_line, "_said_at", said_at)
        say_after_silence(line)
    assert capsys.readouterr().err == "late\n"
