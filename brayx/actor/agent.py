"""What a user writes to decide: `Agent`, the `State` it sees each tick, and the services it calls.

Inside an agent's methods the functions `forward`, `pinned`, `push` and `record` reach the job's models, replay
buffers and metrics by name. They find them in the session's context, so that an agent holds no handles and the same
class trains, serves and runs in a unit test (`Services.use`). Knows nothing of sessions, doors, Ray or torch: models
and buffers are whatever has the methods of `ModelHandle` and `BufferHandle`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from brayx.errors import ConfigError, DeadlineExceeded
from brayx.gamecore.protocol import AGENT_MARK
from brayx.metrics import Kind, Recorder, kind_of, label_of
from brayx.types import Forward, Fragment, NestedArray


class ModelHandle(Protocol):
    """The one method an agent needs of a model."""

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        """One observation in, its outputs and the policy version that computed them out.

        ``deadline_s`` is given where the agent asks for less than the model's own.
        """


class PinnedHandle(ModelHandle, Protocol):
    """A model at one policy version, for as long as the agent holds this."""

    @property
    def version(self) -> int:
        """The version."""


class BufferHandle(Protocol):
    """The one method an agent needs of a replay buffer."""

    def push(self, *fragments: Fragment) -> None:
        """Takes fragments on their way to the buffer without waiting for it."""


@dataclass
class Services:
    """What the agents of one actor may call.

    Attributes:
        models: model handles by component name.
        buffers: replay handles by component name; empty when serving, where pushes are counted and let go.
        recorder: where metrics gather.
        arms: metric labels of the versions that the session acts with, where models are served by an alias.
        returns: of the session's newest game, as its agents recorded it.
    """

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    buffers: Mapping[str, BufferHandle] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=Recorder)
    arms: Sequence[str] = ()
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=1))

    def use(self) -> AbstractContextManager[Services]:
        """Makes these the services that `forward`, `push` and `record` find, for the block and tasks begun in it."""
        return _Use(self)


class _Use(AbstractContextManager[Services]):
    """`Services.use`, once a tick: written out, as a generator's context manager costs three times as much."""

    __slots__ = ("_of", "_token")

    def __init__(self, of: Services) -> None:
        self._of = of

    def __enter__(self) -> Services:
        self._token = _services.set(self._of)
        return self._of

    def __exit__(self, *_: object) -> None:
        _services.reset(self._token)


_services: contextvars.ContextVar[Services] = contextvars.ContextVar("brayx_services")


def services_here() -> Services | None:
    """The services in use where this is called; None: it is not called from an agent's methods."""
    return _services.get(None)


def _current() -> Services:
    services = _services.get(None)
    if services is None:
        raise ConfigError(
            "brayx.forward, push and record work inside an agent's methods; elsewhere use `with Services(...).use():`"
        )
    return services


def _named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    try:
        return known[name]
    except KeyError:
        raise ConfigError(f"no {kind} is named {name!r}; this job has: {', '.join(known) or 'none'}") from None


async def forward(model: str, *args: NestedArray, deadline_s: float | None = None) -> Forward:
    """Runs one observation through a model.

    Args:
        model: name of a model component.
        *args: the module's arguments, nested arrays without a batch axis.
        deadline_s: the outputs are there within so many seconds, or it fails; at most the model's own deadline.

    Returns:
        ``outputs`` (nested arrays without a batch axis) and the ``policy_version`` that computed them; the pair
        unpacks.

    Raises:
        ShapeMismatch: the arguments do not fit the model; shows expected and got for each leaf.
        QueueFull, DeadlineExceeded: the model has no room, or took too long.
    """
    handle: ModelHandle = _named("model", model, _current().models)
    if deadline_s is None:
        return await handle.forward(*args)
    return await handle.forward(*args, deadline_s=deadline_s)


def pinned(model: str, version: int | None = None) -> PinnedHandle:
    """A model at one policy version, whatever is published meanwhile; for a whole session when its constructor asks.

    Args:
        model: name of a model component.
        version: the version; None: the one that acts now.

    Returns:
        What has a ``version``, and `forward` for observations. Keep it as long as the version is needed.

    Raises:
        VersionUnknown: that version is not ready; names the nearest.
        Overloaded: sessions have pinned as many versions as may be kept.
    """
    handle: PinnedHandle = _named("model", model, _current().models).pinned(version)
    return handle


def push(buffer: str, *fragments: Fragment) -> None:
    """Sends fragments to a replay buffer without waiting for it; when serving they are let go."""
    services = _current()
    if services.buffers:
        _named("buffer", buffer, services.buffers).push(*fragments)


def record(name: str, value: float, *, label: str = "", kind: Kind | str | None = None, **labels: object) -> None:
    """Records a sample of a metric: one of brayx's, or the game's own (``record("hp_left", 3, hero="knight")``).

    Args:
        name: of the metric.
        value: the sample.
        label: one short word that splits the metric.
        kind: how samples of the game's own metric combine, one of `brayx.metrics.Kind` by name (default: ``mean``).
        **labels: further ones by name. A metric has 64 labels at most; samples under others count as ``other``.

    Raises:
        ConfigError: there is no such kind; or this is not called inside an agent's method or a trainer's hook.
    """
    if labels:
        label = f"{label}.{label_of(labels)}" if label else label_of(labels)
    services = _current()
    services.recorder.add(name, value, label=label, kind=None if kind is None else kind_of(kind))
    if name == "episode_return":
        services.returns.append(float(value))
        for arm in services.arms:
            services.recorder.add("arm_return", value, label=arm)


class State:
    """One tick as the agents of an actor see it, and what they leave there for each other.

    Attributes:
        session, game, agent: the session's id; of an id ``GAME-agent-AGENT`` (Bray's form) also its two parts.
        tick: number of the tick in the session, from 0.
        kind: ``start``, ``tick``, or ``stop`` for the last state of an episode whose gamecore said how it ended.
        input: the tick's body, parsed as configured (JSON value, protobuf message or bytes).
        output: what the agents reply; starts as ``{}``, an empty message, or ``b""``.
        end: on the last state of a session's last episode: why it ended (``stop``, ``idle``, ``disconnect``,
            ``error``, …); otherwise empty.

    Agents of one actor share the object: set any further attribute, and wait for one another's with `wait`. With the
    actor's ``share: game`` the sessions of one game find them, too: see `brayx.actor.games.SharedState`.
    """

    session: str
    game: str
    agent: str
    tick: int
    kind: str
    input: Any
    output: Any
    end: str

    def __init__(self, session: str, *, tick: int = 0, kind: str = "tick", input: Any = None, output: Any = None):
        game, found, agent = session.rpartition(AGENT_MARK)
        if not found:
            game, agent = session, ""
        self.__dict__.update(
            session=session, game=game, agent=agent, tick=tick, kind=kind, input=input, output=output, end=""
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        waiters: dict[str, asyncio.Future[None]] | None = self.__dict__.get("_waiters")
        if waiters and (waiter := waiters.pop(name, None)) and not waiter.done():
            waiter.set_result(None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this tick's state has no {name!r} yet; to wait for it: await state.wait({name!r})")

    async def wait(self, name: str, timeout_s: float = 10.0) -> Any:
        """The attribute ``name``, as soon as an agent has set it.

        Raises:
            DeadlineExceeded: nobody set it within ``timeout_s``.
        """
        if name not in self.__dict__:
            waiters = self.__dict__.setdefault("_waiters", {})
            waiter = waiters.setdefault(name, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(waiter)
            except TimeoutError:
                raise nobody_set(name, timeout_s, self.tick) from None
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_waiters"}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __repr__(self) -> str:
        return f"<State {self.__getstate__()}>"


def nobody_set(name: str, timeout_s: float, tick: int) -> DeadlineExceeded:
    """What `State.wait` raises at its deadline."""
    return DeadlineExceeded(
        f"state.wait({name!r}): no agent set it within {timeout_s} s at tick {tick}", attribute=name
    )


class Agent:
    """One decision maker of a session. Subclass it; one instance lives from a session's start to its end.

    Args:
        name: the component's name.
        config: the whole job as plain dicts; ``config[name]`` is this agent's part and ``config["mode"]`` is
            ``train`` or ``serve``.
        state: the session's first state (``kind == "start"``), with the start's body as ``input``.
    """

    def __init__(self, name: str, config: Mapping[str, Any], state: State) -> None:
        self.name = name
        self.config = config

    async def on_tick(self, state: State) -> None:
        """Decides: reads ``state.input``, writes ``state.output``."""
        raise NotImplementedError

    async def on_episode(self, episode: list[State], done: bool) -> None:
        """Learns from what happened. Called when ``episode_length`` is reached and when the session ends.

        It runs beside the session's further ticks, one call of an agent at a time.

        Args:
            episode: consecutive states. ``episode[t + 1]`` holds what came of ``episode[t]``'s action, so ``n + 1``
                states make ``n`` transitions; the last state of one episode is the first of the next. At the end of
                a session the last state is the stop's (``kind == "stop"``, its body as ``input``) if the stop had a
                body; otherwise the game was cut off and the last state's action never had an outcome.
            done: the session is over; ``episode[-1].end`` says why.
        """

    async def on_session_end(self, reason: str) -> None:
        """Called once, last: it ended by ``stop``, ``idle``, ``disconnect``, ``drained``, ``lost`` or ``error``."""

    def on_deadline(self, state: State) -> None:
        """Chooses at once, with ``fallback: agent``, since `on_tick` is late: reads ``state.input``, writes ``output``.

        `on_tick` still runs to its end with a state of its own; that state is in no episode, which is cut before it.
        """
        raise NotImplementedError

    def snapshot(self) -> bytes | None:
        """What another instance needs to go on after this tick, in another process; None: this agent cannot be moved.

        With it, a session survives its replica (``actor.snapshot_every``) and is moved when a replica ends.
        """
        return None

    def restore(self, snapshot: bytes) -> None:
        """Goes on from what `snapshot` gave; called after the constructor, which gets the session's start again."""
        raise NotImplementedError
