"""`RowPlayer`: who plays a session of several agents of one team in self-play.

Such a session lasts as long as its game's connection, so its player changes when a stretch ends: for all agents at
once, and in the middle of their episodes. Knows nothing of how opponents are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from brayx.actor.agent import Services
from brayx.actor.players import SeatedPlayer
from brayx.actor.rows import outputs_of_rows
from brayx.league.games import Game
from brayx.metrics import Recorder
from brayx.types import NOT_LEARNED, Forward, Fragment, NestedArray

if TYPE_CHECKING:
    from brayx.gamecore.contract_ticks import Tick
    from brayx.league.sides import Stretch

_OF_EPISODES = ("episode_return", "episode_length", "reward_sum")
"""Metrics of whole episodes. Agents hand episodes over later, when another one may play, and record none of those that
the learner has not played alone."""


class Stretches(Protocol):
    """The sides of a behaviour's self-play, as a player needs them."""

    def stretch(self) -> Stretch | None:
        """The sides of games that begin now; None: there are none yet, and all agents learn."""

    def services_of(self, stretch: Stretch | None, team: int) -> tuple[Services, bool]:
        """The services of a team's agents, and whether their steps are learned from."""

    def count(self, game: Game) -> None:
        """Counts a game that has ended."""

    def count_episodes(self, session: str, agents: int, episodes: int) -> None:
        """See `brayx.league.sides.Sides.count_episodes`."""

    def count_steps(self, steps: int) -> None:
        """Counts steps of agents."""


class RowPlayer:
    """The player of one session.

    Args:
        session: the session's id.
        team: its team.
        stretches: knows the sides.

    Attributes:
        services: the services of the stretch that runs.
        learner: the services of the newest stretch that was learned from.
        learns: whether its steps are learned from.
    """

    def __init__(self, session: str, team: int, stretches: Stretches) -> None:
        self._session, self._team, self._stretches = session, team, stretches
        self._began: dict[int, Stretch | None] = {}
        """The stretch in which each agent's episode began."""
        self.learner, _ = stretches.services_of(None, team)
        self._caught_up = self.learner.caught_up
        self._enter(stretches.stretch())

    def seated(self, leave: Callable[[str], None]) -> SeatedPlayer:
        """The player as its session has it; ``leave`` is called with the reason of its end."""
        services = Services(
            {name: _TeamModel(self, name) for name in self.services.models},
            {name: _TeamBuffer(self, name) for name in self.services.buffers},
            _TeamRecorder(self),
            caught_up=self._caught_up,
        )
        return SeatedPlayer(f"team {self._team}", services, None, None, leave, sees=self.sees)

    def sees(self, tick: Tick) -> None:
        """Counts steps and the results of episodes that end, and follows the stretch.

        An episode counts if it began and ended in one stretch. Its result is the sign of its last reward.
        """
        if tick is None or tick.agents is None:  # a stop without rows
            return
        now, ended, agents = self._stretch, (tick.terminated | tick.truncated).tolist(), tick.agents.tolist()
        count, episodes = len(self._began.keys() | agents), 0
        for agent, reward, is_over in zip(agents, tick.reward.tolist(), ended, strict=True):
            began = self._began.pop(agent, None) if is_over else None
            if began is not None and began is now and self._team == now.learning:
                self._stretches.count(now.game(reward))
                episodes += 1
        self._stretches.count_episodes(self._session, count, episodes)
        self._stretches.count_steps(ended.count(False))
        if (stretch := self._stretches.stretch()) is not now:
            self._enter(stretch)
        for agent, is_over in zip(agents, ended, strict=True):
            if not is_over:
                self._began.setdefault(agent, stretch)

    def push(self, name: str, fragments: tuple[Fragment, ...]) -> None:
        """Sends fragments that the learner has played alone to its buffer."""
        learned = [fragment for fragment in fragments if fragment.policy_version.min() != NOT_LEARNED]
        if learned:
            self.learner.buffers[name].push(*learned)

    def _enter(self, stretch: Stretch | None) -> None:
        self._stretch = stretch
        self.services, self.learns = self._stretches.services_of(stretch, self._team)
        if self.learns:
            self.learner = self.services


class _TeamModel:
    """A model that acts with the weights of the stretch."""

    def __init__(self, player: RowPlayer, name: str) -> None:
        self._player, self._name = player, name

    @property
    def _handle(self) -> Any:
        return self._player.services.models[self._name]

    @property
    def spec(self) -> Any:
        return self._handle.spec

    @property
    def version(self) -> int:
        version: int = self._handle.version
        return version

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        learns = self._player.learns
        outputs, version = await self._handle.forward(*args, deadline_s=deadline_s)
        return Forward(outputs, version if learns else NOT_LEARNED)

    async def forward_rows(self, *args: NestedArray) -> Forward:
        learns = self._player.learns
        outputs, versions = await outputs_of_rows(self._handle, args)
        return Forward(outputs, versions if learns else np.full_like(versions, NOT_LEARNED))  # type: ignore[arg-type]

    def pinned(self, version: int | None = None) -> Any:
        return self if version is None else self._handle.pinned(version)


class _TeamBuffer:
    """Takes what the learner has played."""

    def __init__(self, player: RowPlayer, name: str) -> None:
        self._player, self._name = player, name

    def push(self, *fragments: Fragment) -> None:
        self._player.push(self._name, fragments)


class _TeamRecorder(Recorder):
    """The recorder of the stretch; for metrics of whole episodes the learner's."""

    def __init__(self, player: RowPlayer) -> None:
        super().__init__()
        self._player = player

    def add(self, name: str, value: float, **options: Any) -> None:
        services = self._player.learner if name in _OF_EPISODES else self._player.services
        services.recorder.add(name, value, **options)
