"""`Episodes`: the states of a session, cut into episodes that its agents get while later ticks run.

Knows nothing of bodies, replies, or of when a session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from brayx.actor.actor import is_cancelled
from brayx.actor.agent import Agent, Services, State
from brayx.actor.failures import LOAD, SessionFailures, note, was_cut_off
from brayx.faults import AGENTS_LOGGER
from brayx.logs import limited
from brayx.metrics import OVERLOADED

logger = limited(__name__)
_agents_logger = limited(AGENTS_LOGGER)


class Episodes:
    """Collects a session's states, and gives them to its agents. Call its methods with the session's services in use.

    Args:
        session: the session's id, for the log.
        agents: its agents.
        services: the agents' services; their recorder counts lost fragments, their outcome keeps why an episode was
            lost.
        failures: counts the failures of `Agent.on_episode`.
        length: transitions an episode is cut at; None: no cut.

    Attributes:
        states: the states of the current episode.
    """

    def __init__(
        self,
        session: str,
        agents: Sequence[Agent],
        services: Services,
        failures: SessionFailures,
        length: int | None,
    ) -> None:
        self.states: list[State] = []
        self._session = session
        self._agents = agents
        self._services = services
        self._failures = failures
        self._cut = length + 1 if length else None
        self._handed_over: asyncio.Task[None] | None = None

    def add(self, state: State) -> bool:
        """Adds a state; returns whether the episode is full: then call `hand_over`."""
        self.states.append(state)
        return self._cut is not None and len(self.states) >= self._cut

    async def hand_over(self, *, done: bool) -> None:
        """Gives the episode to the agents, concurrently with later ticks; the next episode begins with its last state.

        One hand-over runs at a time: the next waits, so that an agent slower than its game slows that game alone
        instead of piling up episodes. If the wait is cancelled the episode stays where it is, for the session's end.
        """
        await self.settle()
        episode = self.states
        self.states = [] if done else episode[-1:]
        self._handed_over = asyncio.create_task(self._on_episode(episode, done))

    async def break_off(self) -> None:
        """Gives the episode to the agents, and begins the next one without its last state."""
        episode, self.states = self.states, []
        if len(episode) > 1:
            await self.settle()
            self._handed_over = asyncio.create_task(self._on_episode(episode, False))

    async def settle(self) -> None:
        """Waits until the current hand-over ends, in any way; cancelling the caller does not cancel it."""
        if self._handed_over is None:
            return
        try:
            await asyncio.wait({self._handed_over})
        except asyncio.CancelledError:
            self._failures.cut_off("on_episode", f"{was_cut_off('on_episode')}, and a tick waited for it")
            raise

    def give_up(self) -> None:
        """Counts states that are not handed over as lost, because the session's end ran out of time."""
        was_running = self._handed_over is not None and self._handed_over.cancel()
        if was_running or self.states:
            self._lose("on_episode")
        if self.states:
            logger.error("session %s: no time to hand over its last episode, it is lost", self._session)
            why = f"{was_cut_off('on_episode')}, and the last episode waited for it"
            self._services.recorder.add("fragments_dropped", float(len(self._agents)), label="deadline", note=why)

    async def _on_episode(self, episode: list[State], done: bool) -> None:
        agents = self._agents
        for index, agent in enumerate(agents):
            try:
                await agent.on_episode(episode, done)
            except asyncio.CancelledError as error:
                logger.error("session %s: %s.on_episode was cancelled, the episode is lost", self._session, agent.name)
                self._lose("on_episode")
                lost = len(agents) - index if is_cancelled() else 1  # the agents after it do not get the episode
                why = note(agent.name, "on_episode", error)
                self._services.recorder.add("fragments_dropped", float(lost), label="cancelled", note=why)
                if is_cancelled():
                    raise
            except Exception as error:
                _agents_logger.exception(
                    "session %s: %s.on_episode raised, its episode is lost", self._session, agent.name
                )
                loaded = isinstance(error, LOAD)
                label, why = (OVERLOADED, note(agent.name, "on_episode", error)) if loaded else ("agent_error", "")
                self._services.recorder.add("fragments_dropped", 1.0, label=label, note=why)
                self._failures.add(agent.name, "on_episode", error)
                self._lose(OVERLOADED if loaded else "on_episode")

    def _lose(self, label: str) -> None:
        """Records that an episode was lost, and why: a return recorded later would lack its rewards."""
        self._failures.fail(label)
        self._services.outcome.lost = label
