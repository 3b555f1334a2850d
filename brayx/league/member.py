"""Member: a player at one version, and its points. Pure."""

from __future__ import annotations

from typing import NamedTuple

from brayx.errors import LeagueError

INCUMBENT = "champion"
"""Player name of a champion from outside the league; no player of a league has this name."""


class Member(NamedTuple):
    """A player at one version.

    Attributes:
        player: the player's name.
        version: version in the registry; 0: the live learner, or a script.
    """

    player: str
    version: int = 0

    @property
    def label(self) -> str:
        """``main`` or ``main:7``."""
        return f"{self.player}:{self.version}" if self.version else self.player

    @classmethod
    def parse(cls, label: str) -> Member:
        """The member of a `label`.

        Raises:
            LeagueError: it is neither a name nor ``NAME:VERSION`` with a version of 1 or more.
        """
        player, mark, version = label.partition(":")
        if not player or (mark and not (version.isascii() and version.isdigit() and int(version) > 0)):
            raise LeagueError(f"member is {label!r}, expected NAME or NAME:VERSION", member=label)
        return cls(player, int(version) if mark else 0)


class Rated(NamedTuple):
    """A member and its points, see `brayx.league.ratings.Rating.points`."""

    member: Member
    points: float
