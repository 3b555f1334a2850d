"""``brayx completion``: the script has each command, its options and its verbs."""

from __future__ import annotations

import argparse

import pytest

from brayx.commands.completion import script


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser()
    commands = root.add_subparsers()
    play = commands.add_parser("play")
    play.add_argument("--speed")
    play.add_argument("--former", help=argparse.SUPPRESS)
    keys = commands.add_parser("keys")
    keys.add_subparsers().add_parser("new").add_argument("--file")
    return root


def test_options_and_verbs_are_offered_and_hidden_options_are_not(parser: argparse.ArgumentParser) -> None:
    text = script(parser, "bash", {})
    assert '1:*) words="play keys"' in text
    assert '*:"play "*) words="-h --help --speed"' in text
    assert "--former" not in text
    assert text.index('"keys new "') < text.index('"keys "'), "the script takes the first that fits"


def test_a_parser_that_stands_elsewhere_replaces_the_name(parser: argparse.ArgumentParser) -> None:
    other = argparse.ArgumentParser()
    other.add_argument("--elsewhere")
    assert '*:"play "*) words="-h --help --elsewhere"' in script(parser, "bash", {"play": other})


def test_zsh_loads_the_completion_of_bash_first(parser: argparse.ArgumentParser) -> None:
    assert script(parser, "zsh", {}).startswith("autoload")
