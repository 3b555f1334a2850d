"""``brayx gamecore``: every word after the kind is left to the bridge, also one that looks like an option of brayx."""

from __future__ import annotations

import pytest

from brayx.commands import cli, gamecore


@pytest.mark.parametrize("words", [[], ["CartPole-v1", "--url", "http://x"], ["--help"], ["--", "--games=3"]])
def test_words_are_left_to_the_bridge(words: list[str]) -> None:
    arguments = cli.parser(["gamecore"]).parse_args(["gamecore", "gym", *words])
    assert arguments.kind == "gym"
    assert arguments.words == words


def test_each_kind_has_a_bridge() -> None:
    for kind in gamecore.KINDS:
        module = __import__(f"brayx.bridges.{kind}", fromlist=["main", "parser"])
        assert callable(module.main)
        assert callable(module.parser)
