"""Models, buffers and recorders for the sessions of a league's players, on every host.

Knows nothing of how a league draws players, or of games.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from brayx.actor.agent import Agent, Services
from brayx.actor.players import SeatedPlayer
from brayx.metrics import Kind, Recorder

_FAULTS = ("agent_errors", "fragments_dropped", "games_failed")
"""Metrics that are recorded also for sessions that nobody learns from."""


@dataclass(frozen=True)
class LearningPlayer:
    """Model, buffers and recorder of a player that learns.

    Attributes:
        model: its acting model, at its newest weights.
        buffers: its replay buffers by name.
        numbers: its recorder.
    """

    model: Any
    buffers: Mapping[str, Any]
    numbers: Recorder


class Seating:
    """Makes the `SeatedPlayer` of a session whose player is known.

    Attributes:
        model: as given.

    Args:
        model: name of the model component that all play with.
        snapshot: returns the model that acts with the weights of a snapshot, by its version.
        others: the job's other models by name, which every player shares.
        scripts: agents of the scripted players, by the player's name.
        numbers: the league's recorder.
        nothing: buffers by name that drop everything, for sessions that nobody learns from.
    """

    def __init__(
        self,
        model: str,
        snapshot: Callable[[int], Any],
        others: Mapping[str, Any],
        scripts: Mapping[str, type[Agent]],
        numbers: Recorder,
        nothing: Mapping[str, Any],
    ) -> None:
        self.model = model
        self._snapshot = snapshot
        self._others = dict(others)
        self._scripts = dict(scripts)
        self._faults = _Faults(numbers)
        self._nothing = dict(nothing)
        self._learns: dict[str, Services] = {}
        self._only_acts: dict[str, Services] = {}

    def learn(self, name: str, player: LearningPlayer) -> None:
        """Sets the parts of a player that learns, for sessions that start from now on."""
        self._learns[name] = self._services(player.model, player.buffers, player.numbers)
        self._only_acts[name] = self._services(player.model, self._nothing, self._faults)

    def act(self, name: str, model: Any) -> None:
        """As `learn`, for a player whose sessions nobody learns from."""
        self._learns[name] = self._only_acts[name] = self._services(model, self._nothing, self._faults)

    def seated(
        self,
        player: str,
        version: int,
        *,
        learns: bool,
        report: Callable[[Any], None],
        leave: Callable[[str], None],
        release: Callable[[], None] = lambda: None,
    ) -> SeatedPlayer:
        """The player of a session.

        Args:
            player: its name.
            version: that of a snapshot; 0: the live player, or a script.
            learns: its trajectory is learned from.
            report, leave, release: as in `SeatedPlayer`.
        """
        label = f"{player}:{version}" if version else player
        script = self._scripts.get(player)
        if script is not None:
            services = Services({}, self._nothing, self._faults)
        elif version:
            services = self._services(self._snapshot(version), self._nothing, self._faults)
        else:
            services = (self._learns if learns else self._only_acts)[player]
        return SeatedPlayer(label, services, script, report, leave, release=release)

    def _services(self, model: Any, buffers: Mapping[str, Any], recorder: Recorder) -> Services:
        return Services({**self._others, self.model: model}, buffers, recorder)


class _Faults(Recorder):
    """The recorder of sessions that nobody learns from: records `_FAULTS` only."""

    def __init__(self, to: Recorder) -> None:
        super().__init__()
        self._to = to

    def add(
        self,
        name: str,
        value: float,
        *,
        label: str = "",
        kind: Kind | None = None,
        weight: float = 1.0,
        note: str = "",
    ) -> None:
        if name in _FAULTS:
            self._to.add(name, value, label=label, kind=kind, weight=weight, note=note)
