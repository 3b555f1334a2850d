"""``brayx gamecore``. Each kind has its own parser in its bridge, which ``python -m brayx.bridges.gym`` uses, too."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

HELP = "play as a game: `brayx gamecore gym ENV_ID --url URL`"
KINDS = {
    "gym": "any Gymnasium environment",
    "pettingzoo": "any PettingZoo environment, a session for each agent",
    "unity": "any Unity project with the package ML-Agents",
    "godot": "any Godot project with the add-on godot_rl",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds."""
    add_kinds(parser, KINDS)


def add_kinds(parser: argparse.ArgumentParser, kinds: Mapping[str, str]) -> None:
    """Adds kinds by name and help. Their options stay with the bridge: importing one needs its environment's
    packages."""
    commands = parser.add_subparsers(title="kinds", required=True, metavar="KIND")
    for kind, help_text in kinds.items():
        # No word begins with this prefix, so all words are left to the bridge's parser.
        words = commands.add_parser(kind, help=help_text, add_help=False, prefix_chars="\0")
        words.add_argument("words", nargs=argparse.REMAINDER)
        words.set_defaults(kind=kind)


def run(arguments: argparse.Namespace) -> int:
    """Plays; exit codes as for `brayx.gamecore.games.run_command`."""
    code: int = importlib.import_module(f"brayx.bridges.{arguments.kind}").main(arguments.words)
    return code
