"""`SelfPlays`: the self-play of all behaviours of a job, on any host.

Knows nothing of when a behaviour begins to play itself, or others.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from brayx.errors import TrackingError
from brayx.league.config import MAIN, POOLS
from brayx.league.ledger import Ledger
from brayx.league.member import INCUMBENT

if TYPE_CHECKING:
    from brayx.league.training import LeagueTraining

_RETRY_S = 10.0
"""Time between a failure of MLflow and the next try."""


class Play(Protocol):
    """The self-play of one behaviour, which has begun."""

    training: LeagueTraining[Any]


P = TypeVar("P", bound=Play)


class SelfPlays(Generic[P]):
    """The self-play of behaviours by name.

    Args:
        say: prints a line above the display.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._playing: dict[str, P] = {}
        self._try_at = 0.0

    def league(self, name: str) -> LeagueTraining[Any] | None:
        """The league of a behaviour; None: it does not play itself."""
        return self._playing[name].training if name in self._playing else None

    def standings(self) -> str:
        """The tables of all."""
        return "\n".join(f"{name}:\n{play.training.standings()}" for name, play in self._playing.items())

    def _begin(self, name: str, make: Callable[[Callable[[str], None]], P]) -> bool:
        """Begins a behaviour's self-play. Returns False if MLflow does not answer, or has just failed: try again.

        Args:
            name: the behaviour.
            make: makes it; its argument prints a line.
        """
        if time.monotonic() < self._try_at:
            return False
        try:
            self._playing[name] = make(lambda line: self._say(f"{name!r}: {line}"))
        except TrackingError as error:
            if not self._try_at:
                self._say(f"behaviour {name!r} waits with its self-play until MLflow answers: {error.message}")
            self._try_at = time.monotonic() + _RETRY_S
            return False
        self._try_at = 0.0
        return True

    def _say_teams(self, name: str, teams: str) -> None:
        self._say(f"behaviour {name!r} has teams {teams}: one learns, past versions of its model play the others")

    def _say_rival(self, name: str, teams: str) -> None:
        self._say(f"behaviour {name!r} has team {teams}: while another team learns, past versions of its model play")


def player_name(behaviour: str, taken: Collection[str]) -> str:
    """A behaviour's name as a player of a league, which is no other one's."""
    name = re.sub(r"^(?=\d)|\W", "_", behaviour, flags=re.ASCII)
    while name in (*taken, *POOLS, INCUMBENT, MAIN):
        name += "_"
    return name


def players_before(books: Path) -> set[str]:
    """The players with snapshots in the books of a trial: `MAIN` alone if its behaviour played itself, else rivals."""
    if not books.exists():
        return set()
    with contextlib.closing(Ledger(books, read_only=True)) as ledger:
        return {snapshot.member.player for snapshot in ledger.snapshots()}
