"""The flags of ``brayx tune``."""

from __future__ import annotations

import argparse
import inspect

import pytest

from brayx.commands import cli
from brayx.commands.tune import options
from brayx.search.tune import tune


def test_an_option_has_the_same_name_on_the_command_line_and_in_python() -> None:
    parser = argparse.ArgumentParser()
    options(parser)
    flags = vars(parser.parse_args(["--env", "CartPole-v1"]))
    assert set(flags) - {"lines"} <= set(inspect.signature(tune).parameters)
    for action in parser._actions:
        if action.help != "==SUPPRESS==" and action.dest not in ("help", "lines"):
            assert action.option_strings == [f"--{action.dest.replace('_', '-')}"]


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("--trials", "num_trials"),
        ("--timesteps", "num_steps"),
        ("--total-steps", "num_steps"),
        ("--interval", "interval_steps"),
    ],
)
def test_flags_of_earlier_versions_still_work(old: str, name: str) -> None:
    assert vars(cli.parser(["tune"]).parse_args(["tune", "--env", "CartPole-v1", old, "3"]))[name] == 3
