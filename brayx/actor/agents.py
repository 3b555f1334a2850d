"""`SessionAgents`: the agents of one session, and the services that each of them uses in its ticks.

Knows nothing of bodies, replies and episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from brayx.actor.actor import is_cancelled
from brayx.actor.agent import Agent, Services, State
from brayx.actor.failures import SessionFailures, note
from brayx.actor.models import Carried, SessionModels
from brayx.errors import AgentError, BadLimits, BrayxError
from brayx.faults import AGENTS_LOGGER
from brayx.logs import limited
from brayx.types import Forward

logger = limited(__name__)
_agents_logger = limited(AGENTS_LOGGER)


class SessionAgents:
    """Makes the agents of one session, and runs their hooks. Iterates over the agents.

    Args:
        classes: the agents' classes by component name, in the order in which they are created.
        config: the whole job as plain dicts.
        state: the session's first state.
        models: the session's view of the models.
        failures: counts what the agents raise.
        carried: state of a session that continues.

    Attributes:
        services: for ticks. Logs see their forwards, but none of `Agent.on_episode`.

    Raises:
        AgentError: an agent's constructor raised; the game counts as failed, since it has no end.
    """

    def __init__(
        self,
        classes: Mapping[str, type[Agent]],
        config: Mapping[str, Any],
        state: State,
        models: SessionModels,
        failures: SessionFailures,
        carried: Carried | None = None,
    ) -> None:
        self.services = replace(models.shared)
        self._session = state.session
        self._failures = failures
        self._agents: list[Agent] = []
        self._of_agent = [
            self.services if services is models.shared else services
            for services in models.for_agents(len(classes), carried)
        ]
        for (name, agent_class), services in zip(classes.items(), self._of_agent, strict=True):
            try:
                with services.use():
                    self._agents.append(agent_class(name, config, state))
            except Exception as error:
                failures.add(name, "constructor", error)
                if not isinstance(error, BadLimits):
                    failures.count_game()
                if isinstance(error, BrayxError):
                    raise
                raise AgentError(f"agent {name!r} raised in the constructor", agent=name) from error

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def last(self) -> str:
        """Name of the last agent, which leaves the output."""
        return self._agents[-1].name

    def release(self) -> None:
        """Drops the agents, after the session's end."""
        self._agents = []

    def watch(self, seen: Callable[[str, Forward, float], None] | None) -> None:
        """Sets `Services.seen` for the ticks."""
        for services in (self.services, *self._of_agent):
            services.seen = seen

    async def act(self, state: State, services: Sequence[Services] | None = None) -> None:
        """Runs all agents; the first one that raises cancels the others. Call it with `services` in use.

        Args:
            state: the tick.
            services: services of each agent, instead of the session's.
        """
        of_agent = self._of_agent if services is None else services
        if len(self._agents) == 1:
            await self._on_tick(self._agents[0], state, of_agent[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for agent, agent_services in zip(self._agents, of_agent, strict=True):
                    group.create_task(self._on_tick(agent, state, agent_services))
        except* BrayxError as errors:
            first = _first(errors)
            raise first from first.__cause__

    async def _on_tick(self, agent: Agent, state: State, services: Services) -> None:
        try:
            if services is self.services:  # which are in use
                await agent.on_tick(state)
                return
            with services.use():
                await agent.on_tick(state)
        except asyncio.CancelledError as error:
            self._failures.cut_off("on_tick", note(agent.name, "on_tick", error))
            raise
        except Exception as error:
            self._failures.add(agent.name, "on_tick", error)
            if isinstance(error, BrayxError):
                raise
            raise AgentError(
                f"agent {agent.name!r} raised in on_tick at tick {state.tick}", agent=agent.name
            ) from error

    async def end(self, reason: str) -> None:
        """Tells each agent of the session's end; exceptions are logged and counted."""
        for agent in self._agents:
            try:
                await agent.on_session_end(reason)
            except asyncio.CancelledError as error:
                logger.error("session %s: %s.on_session_end was cancelled", self._session, agent.name)
                if reason != "drained":  # then the service ends, and waits for no hook
                    self._failures.add(agent.name, "on_session_end", error)
                if is_cancelled():
                    raise
            except Exception as error:
                _agents_logger.exception("session %s: %s.on_session_end raised", self._session, agent.name)
                self._failures.add(agent.name, "on_session_end", error)


def _first(group: BaseExceptionGroup[BrayxError]) -> BrayxError:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        return error
    raise AssertionError("an exception group is never empty")
