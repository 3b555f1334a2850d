"""Names of behaviours with a team, as Unity's package ML-Agents sends them: ``Striker?team=1``."""

from __future__ import annotations


def behaviour_and_team(name: str) -> tuple[str, int]:
    """The behaviour of a name, and its team; 0 if it names none."""
    behaviour, _, options = name.partition("?")
    team = options.removeprefix("team=")
    return behaviour, int(team) if team.isdecimal() else 0
