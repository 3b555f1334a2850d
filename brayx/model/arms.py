"""Arms: the version of a model that a session gets, and results by version. Pure; knows no Ray, MLflow or sessions.

A model that is served by an alias has one arm, or two with a canary. An arm is an alias, and the version it points to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from brayx.metrics import Metric, Part

RESULTS = {
    "arm_sessions": "sessions",
    "arm_ticks": "ticks",
    "arm_refusals": "refusals",
    "arm_errors": "errors",
    "arm_return_squared": "squares",
    "arm_return": "episode_return",
}
"""brayx's metrics of arms, and their names in MLflow; the last is a mean over games, and the squares give its error."""


class Arm(NamedTuple):
    """The model version of a session, by an alias.

    Attributes:
        model: the component's name.
        alias: the alias.
        version: the alias's version in the registry; 0: the model as built.
    """

    model: str
    alias: str
    version: int

    @property
    def label(self) -> str:
        """Label in metrics."""
        return f"{self.model}/{self.alias}/{self.version}"


@dataclass(frozen=True)
class Followed:
    """A model that is served by an alias.

    Attributes:
        name: name in the registry.
        alias: alias for most sessions.
        canary: alias for a share of the sessions; empty: none.
        share: the canary's share, from 0 to 1.
        every_s: interval at which aliases are read.
    """

    name: str
    alias: str = "champion"
    canary: str = ""
    share: float = 0.0
    every_s: float = 10.0

    def choose(self, session: str, versions: Mapping[str, int]) -> str:
        """The alias of a session, a function of its id.

        Args:
            session: id of the session.
            versions: the version of each alias that has one.
        """
        if not self.canary or self.canary not in versions:
            return self.alias
        digest = hashlib.blake2b(f"{self.name}/{session}".encode(), digest_size=8).digest()
        return self.canary if int.from_bytes(digest, "big") < self.share * 2**64 else self.alias


@dataclass(frozen=True)
class WeightSource:
    """The source of a model's weights: a weight store, a checkpoint, or neither (as built).

    Attributes:
        store: name of the weight store's Ray actor.
        checkpoint: folder with ``weights.npz`` and ``meta.json``, or ``models:/name/3`` of a registry.
        tracking: MLflow's URI, of such a reference.
        version: of a registered checkpoint, the version that sessions act with; None: as its files say.
        followed: the alias it is served by, which may move; None: the version stays.
        name: in the registry, of a model that is served from there.
    """

    store: str = ""
    checkpoint: str = ""
    tracking: str = ""
    version: int | None = None
    followed: Followed | None = None
    name: str = ""


@dataclass
class Results:
    """Results of the sessions of one arm.

    Attributes:
        totals: sums by name, as in MLflow; also ``games``, and the sums of their ``returns`` and ``squares``.
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
        """Adds the results of another arm."""
        for name, value in other.totals.items():
            self._sum(name, value)

    def numbers(self) -> dict[str, float]:
        """Numbers as MLflow has them."""
        games = self.totals.get("games", 0.0)
        counts = dict.fromkeys(("sessions", "ticks", "refusals", "errors", "games"), 0.0)
        counts |= {name: value for name, value in self.totals.items() if name not in ("returns", "squares")}
        if not games:
            return counts
        mean = self.totals["returns"] / games
        variance = self.totals.get("squares", math.nan) - games * mean**2
        if games < 2 or math.isnan(variance):
            return counts | {"episode_return": mean}
        variance = max(variance, 0.0) / (games - 1)
        return counts | {"episode_return": mean, "return_error": math.sqrt(variance / games)}

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Results:
        """Results from MLflow's numbers."""
        means = ("episode_return", "return_error")
        totals = {name: value for name, value in numbers.items() if name not in means}
        mean, games = numbers.get("episode_return", 0.0), numbers.get("games", 0.0)
        totals["returns"] = mean * games
        error = numbers.get("return_error", math.nan if games > 1 else 0.0)  # NaN: written before errors were
        totals["squares"] = error**2 * games * (games - 1) + games * mean**2
        return cls(totals)

    def _sum(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value


def results_of(part: tuple[Part, Mapping[str, Metric]]) -> dict[Arm, Results]:
    """Results by arm, from a recorder's drained metrics."""
    by_arm: dict[Arm, Results] = {}
    for (metric, label), cell in part[0].items():
        if metric in RESULTS and label.count("/") >= 2:
            model, alias, version = label.rsplit("/", 2)
            by_arm.setdefault(Arm(model, alias, int(version)), Results()).add(metric, cell.count, cell.total)
    return by_arm
