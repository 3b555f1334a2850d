"""A session's view of the models: the version of its arm, and the state of a recurrent policy.

Agents call models by `brayx.forward`. The wrappers here keep each session's version, and each agent's state of each
recurrent model. Knows nothing of where versions come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from brayx.actor.agent import Outcome, Services
from brayx.engines.base import Recurrence
from brayx.errors import BrayxError, DeadlineExceeded
from brayx.metrics import Recorder
from brayx.types import Forward, NestedArray, PinnedHandle


class ArmLike(Protocol):
    """The model version of a session, by an alias; pickles."""

    @property
    def alias(self) -> str:
        """The alias."""

    @property
    def label(self) -> str:
        """Label in metrics."""


class Arms(Protocol):
    """Chooses each session's version of the models that are served by an alias."""

    def choose(self, session: str) -> Mapping[str, ArmLike]:
        """The arm of a new session, by model; ``session`` is the game's name if sessions share a game."""

    async def pinned(self, model: str, arm: Any) -> PinnedHandle:
        """The version of an arm, which stays ready while the returned handle exists."""


@dataclass(frozen=True)
class Carried:
    """The part of `SessionModels` that moves with a session. Pickles.

    Attributes:
        arms: arm of the session, by model.
        states: each agent's state, by recurrent model.
        outcome: how the game went so far.
    """

    arms: Mapping[str, Any]
    states: Sequence[Mapping[str, NestedArray]]
    outcome: Outcome


class SessionModels:
    """The services of one session's agents.

    Attributes:
        shared: services outside of ticks: pinned versions, without state.
        arms: arm of the session, by model.
    """

    def __init__(self, services: Services, arms: Mapping[str, ArmLike], pinned: Mapping[str, PinnedHandle]) -> None:
        self.arms = arms
        labels = [arm.label for arm in arms.values()]
        models: dict[str, Any] = dict(services.models)
        for name, handle in pinned.items():
            models[name] = _ArmModel(models[name], handle, services.recorder, arms[name].label)
        self.shared = replace(services, models=models, arms=labels)
        self._recurrent = [name for name, model in services.models.items() if _has_state(model)]
        self._states: list[dict[str, Recurrence]] = []

    @classmethod
    async def open(
        cls, services: Services, arms: Arms | None, session: str, carried: Carried | None = None, fixed: str = ""
    ) -> SessionModels:
        """The services of a session that begins, or that continues with ``carried``.

        ``fixed`` names a model that plays at its own version, whatever its aliases say.

        Raises:
            VersionUnknown, Overloaded, DeadlineExceeded, ModelError: its arm's version is not available.
        """
        # Each session is a separate caller, so that none starves the others of a shared model.
        models = {
            name: getattr(model, "as_caller", lambda model=model: model)() for name, model in services.models.items()
        }
        services = replace(services, models=models, outcome=Outcome() if carried is None else carried.outcome)
        if arms is None:
            return cls(services, {}, {})
        chosen = arms.choose(session) if carried is None else carried.arms
        chosen = {model: arm for model, arm in chosen.items() if model != fixed}
        pinned = {model: await arms.pinned(model, arm) for model, arm in chosen.items()}
        return cls(services, chosen, pinned)

    def for_agents(self, count: int, carried: Carried | None = None) -> list[Services]:
        """The services of each agent's ticks; with the states of ``carried``, or initial ones."""
        self._states = []
        if not self._recurrent:
            return [self.shared] * count
        services = []
        for index in range(count):
            models: dict[str, Any] = dict(self.shared.models)
            states: dict[str, Recurrence] = {}
            for name in self._recurrent:
                spec = models[name].spec
                states[name] = Recurrence(spec)
                if carried is not None:
                    states[name].state = carried.states[index][name]
                models[name] = _RecurrentModel(models[name], spec, states[name], asyncio.Lock())
            self._states.append(states)
            services.append(replace(self.shared, models=models))
        return services

    def count(self, name: str, value: float) -> None:
        """Counts for each arm of the session."""
        for arm in self.arms.values():
            self.shared.recorder.add(name, value, label=arm.label)

    def carried(self) -> Carried:
        """State with which another replica continues the session."""
        states = [{name: memory.state for name, memory in memories.items()} for memories in self._states]
        return Carried(dict(self.arms), states, self.shared.outcome)


def _has_state(model: Any) -> bool:
    return getattr(getattr(model, "spec", None), "state", None) is not None


class _ArmModel:
    """A model at the version of a session's arm."""

    def __init__(self, model: Any, pinned: PinnedHandle, recorder: Recorder, label: str) -> None:
        self._model = model
        self._pinned = pinned
        self._recorder = recorder
        self._label = label

    @property
    def spec(self) -> Any:
        return self._model.spec

    @property
    def version(self) -> int:
        return self._pinned.version

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        try:
            return await self._pinned.forward(*args, deadline_s=deadline_s)
        except BrayxError:
            self._recorder.add("arm_refusals", 1.0, label=self._label)
            raise

    def pinned(self, version: int | None = None) -> Any:
        return self if version is None else self._model.pinned(version)


class _RecurrentModel:
    """A recurrent model with one agent's state for all versions; it fills in the argument ``state``.

    Forwards of one agent run one after the other, since each continues from the previous state; the deadline includes
    that wait. A failed forward does not change the state.
    """

    def __init__(self, model: Any, spec: Any, memory: Recurrence, turn: asyncio.Lock) -> None:
        self._model = model
        self.spec = spec
        self._memory = memory
        self._takes = len(spec.input_tree.children())
        self._turn = turn

    @property
    def version(self) -> int:
        version: int = self._model.version
        return version

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        if len(args) == self._takes:  # the agent passes the state itself
            given: Forward = await self._model.forward(*args, deadline_s=deadline_s)
            return given
        left_s = await self._take_turn(deadline_s)
        try:
            before = self._memory.state
            outputs, version = await self._model.forward(*self._memory.args(*args), deadline_s=left_s)
            return Forward({**self._memory.keep(outputs), "state": before}, version)
        finally:
            self._turn.release()

    async def _take_turn(self, deadline_s: float | None) -> float | None:
        """Waits for the agent's previous forward; returns the seconds that are left."""
        if deadline_s is None or not self._turn.locked():
            await self._turn.acquire()
            return deadline_s
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"a forward waited {deadline_s:.3g} s for the same agent's previous forward"
            ) from None
        return max(until - loop.time(), 0.0)

    def pinned(self, version: int | None = None) -> _RecurrentModel:
        return _RecurrentModel(self._model.pinned(version), self.spec, self._memory, self._turn)
