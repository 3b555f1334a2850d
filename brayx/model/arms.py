"""Which of a model's versions a session gets, and what came of it. Pure; knows no Ray, MLflow or sessions.

A model that is served by an alias has one arm, or two with a canary. An arm is an alias, and the version it points to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from brayx.metrics import Metric, Part

RESULTS = {
    "arm_sessions": "sessions",
    "arm_ticks": "ticks",
    "arm_refusals": "refusals",
    "arm_errors": "errors",
    "arm_return": "episode_return",
}
"""brayx's metrics of arms, and how the books name them; the last is a mean over games."""


class Arm(NamedTuple):
    """What a session acts with.

    Attributes:
        model: the component's name.
        alias: whose version it is.
        version: in the registry; 0: as built.
    """

    model: str
    alias: str
    version: int

    @property
    def label(self) -> str:
        """Of metrics."""
        return f"{self.model}/{self.alias}/{self.version}"


@dataclass(frozen=True)
class Followed:
    """A model that is served by an alias.

    Attributes:
        name: in the registry.
        alias: what most sessions get.
        canary: alias of what a share of them gets; empty: none does.
        share: how many of them, from 0 to 1.
        every_s: how often it is looked where the aliases point.
    """

    name: str
    alias: str = "champion"
    canary: str = ""
    share: float = 0.0
    every_s: float = 10.0

    def choose(self, session: str, at: Mapping[str, int]) -> str:
        """The alias that a session gets, the same each time it is asked: by its id alone.

        Args:
            session: its id.
            at: the version of each alias that has one.
        """
        if not self.canary or self.canary not in at:
            return self.alias
        digest = hashlib.blake2b(f"{self.name}/{session}".encode(), digest_size=8).digest()
        return self.canary if int.from_bytes(digest, "big") < self.share * 2**64 else self.alias


@dataclass
class Results:
    """What came of the sessions of one arm.

    Attributes:
        totals: sums by name, as in the books; ``games``, and ``returns`` of all of them, too.
    """

    totals: dict[str, float] = field(default_factory=dict)

    def add(self, metric: str, count: float, total: float) -> None:
        """Adds samples of one of `RESULTS`."""
        if metric == "arm_return":
            self._sum("games", count)
            self._sum("returns", total)
        else:
            self._sum(RESULTS[metric], total)

    def join(self, other: Results) -> None:
        """Adds another's."""
        for name, value in other.totals.items():
            self._sum(name, value)

    def numbers(self) -> dict[str, float]:
        """As the books have them."""
        games = self.totals.get("games", 0.0)
        mean = {"episode_return": self.totals["returns"] / games} if games else {}
        counts = dict.fromkeys(("sessions", "ticks", "refusals", "errors", "games"), 0.0)
        return counts | {name: value for name, value in self.totals.items() if name != "returns"} | mean

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Results:
        """From what the books had."""
        totals = {name: value for name, value in numbers.items() if name != "episode_return"}
        totals["returns"] = numbers.get("episode_return", 0.0) * numbers.get("games", 0.0)
        return cls(totals)

    def _sum(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value


def results_of(part: tuple[Part, Mapping[str, Metric]]) -> dict[Arm, Results]:
    """The results in what a recorder drained, by arm."""
    found: dict[Arm, Results] = {}
    for (metric, label), cell in part[0].items():
        if metric in RESULTS and label.count("/") >= 2:
            model, alias, version = label.rsplit("/", 2)
            found.setdefault(Arm(model, alias, int(version)), Results()).add(metric, cell.count, cell.total)
    return found
