"""``brayx bridge``: ``brayx gamecore`` for an engine's project, which plays at a training or a service elsewhere."""

from __future__ import annotations

import argparse

from brayx.commands import gamecore

HELP = "join an engine's project to a training elsewhere: `brayx bridge godot --url URL`"
KINDS = {kind: gamecore.KINDS[kind] for kind in ("unity", "godot")}
run = gamecore.run


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds."""
    gamecore.add_kinds(parser, KINDS)
