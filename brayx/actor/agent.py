"""The user's side of an actor: `Agent`, the `State` of each tick, and the services that agents call.

Inside an agent's methods the functions `forward`, `pinned`, `push`, `record`, `result` and `keep_recording` reach the
job's models, replay buffers, metrics, league and recordings. They find them in the session's context, so that an agent
holds no handles and the same class trains, serves and runs in a unit test (`Services.use`). Knows nothing of sessions,
doors, Ray or torch: models and buffers are whatever has the methods of `ModelHandle` and `BufferHandle`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from brayx.errors import BadResult, ConfigError, DeadlineExceeded
from brayx.gamecore.protocol import AGENT_MARK
from brayx.metrics import WINDOWED, Kind, Recorder, kind_of, label_of
from brayx.types import Forward, Fragment, ModelHandle, NestedArray, PinnedHandle


class BufferHandle(Protocol):
    """The part of a replay buffer that an agent uses."""

    def push(self, *fragments: Fragment) -> None:
        """Sends fragments to the buffer without waiting for room."""


@dataclass
class Outcome:
    """How a session's game went so far. Pickles.

    Attributes:
        result: the newest return that the agents recorded; None: there is none.
        lost: why an episode was lost, as a label of ``games_failed``; empty: none was. A return or length recorded
            afterwards lacks that episode, so it is ignored.
    """

    result: float | None = None
    lost: str = ""


@dataclass
class Services:
    """The models, buffers and metrics that an actor's agents can reach.

    Attributes:
        models: model handles by component name.
        buffers: replay handles by component name; empty when serving, where pushes are only counted.
        recorder: collects metrics.
        arms: metric labels of the session's model versions, if models are served by an alias.
        outcome: how the session's game went so far.
        report: takes the result of the session's seat in a league; None: there is no league.
        keep: keeps the session's recording, given a reason; None: the job records nothing.
        caught_up: waits until the learner has caught up with the play, for a limited time; None: nothing learns, or the
            games must not wait.
        seen: called with each forward of a tick: the model's name, the result, and the seconds that it took; None:
            nothing logs the session's ticks.
    """

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    buffers: Mapping[str, BufferHandle] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=Recorder)
    arms: Sequence[str] = ()
    outcome: Outcome = field(default_factory=Outcome)
    report: Callable[[str | float], None] | None = None
    keep: Callable[[str], None] | None = None
    caught_up: Callable[[], Awaitable[None]] | None = None
    seen: Callable[[str, Forward, float], None] | None = None

    def use(self) -> AbstractContextManager[Services]:
        """Makes `forward`, `push` and `record` use these services in the block and in tasks started in it."""
        return _Use(self)


class _Use(AbstractContextManager[Services]):
    """Context manager of `Services.use`. A class, because a generator costs three times as much per tick."""

    __slots__ = ("_services", "_token")

    def __init__(self, services: Services) -> None:
        self._services = services

    def __enter__(self) -> Services:
        self._token = _services.set(self._services)
        return self._services

    def __exit__(self, *_: object) -> None:
        _services.reset(self._token)


_services: contextvars.ContextVar[Services] = contextvars.ContextVar("brayx_services")


def services_in_use() -> Services | None:
    """The services in use in the calling task; None outside an agent's methods."""
    return _services.get(None)


def model_in_use(name: str) -> tuple[Services, Any]:
    """The services in use, and their model of a component's name.

    Raises:
        ConfigError: there is no such model, or no services are in use.
    """
    services = _current()
    return services, _named("model", name, services.models)


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
        deadline_s: seconds until the forward fails; at most the model's own deadline.

    Returns:
        ``outputs`` (nested arrays without a batch axis) and the ``policy_version`` that computed them; the pair
        unpacks.

    Raises:
        ShapeMismatch: the arguments do not fit the model; shows expected and got for each leaf.
        BadBody: an argument holds NaN or infinity, or an action mask allows no action; names the leaf and the index.
            Unless the agent catches it, the client gets it. The session continues.
        QueueFull, DeadlineExceeded: the model has no room, or took too long.
    """
    handle: ModelHandle
    services, handle = model_in_use(model)
    if services.seen is None:
        if deadline_s is None:
            return await handle.forward(*args)
        return await handle.forward(*args, deadline_s=deadline_s)
    began = monotonic()
    result = await (handle.forward(*args) if deadline_s is None else handle.forward(*args, deadline_s=deadline_s))
    services.seen(model, result, monotonic() - began)
    return result


def pinned(model: str, version: int | None = None) -> PinnedHandle:
    """A model at one policy version, whatever is published later. Pin in the constructor to keep it for the session.

    Args:
        model: name of a model component.
        version: the version; None: the current one.

    Returns:
        A handle with ``version`` and `forward`. Keep it as long as you need the version.

    Raises:
        VersionUnknown: that version is not ready; names the nearest.
        Overloaded: too many versions are pinned.
    """
    handle: PinnedHandle = _named("model", model, _current().models).pinned(version)
    return handle


def push(buffer: str, *fragments: Fragment) -> None:
    """Sends fragments to a replay buffer without waiting for room; does nothing when serving."""
    services = _current()
    if services.buffers:
        _named("buffer", buffer, services.buffers).push(*fragments)


def record(name: str, value: float, *, label: str = "", kind: Kind | str | None = None, **labels: object) -> None:
    """Records a sample of a metric: one of brayx's, or the game's own (``record("hp_left", 3, hero="knight")``).

    Ignores the return and length of a game after one of its episodes was lost (`Agent.on_episode` failed or was cut
    off): they lack that episode, and the game counts as failed.

    Args:
        name: name of the metric.
        value: the sample.
        label: one short word that splits the metric.
        kind: how samples of the game's own metric combine, one of `brayx.metrics.Kind` by name (default: ``mean``).
        **labels: further labels by name. A metric has 64 labels at most; samples under others count as ``other``.

    Raises:
        ConfigError: there is no such kind; or this is not called inside an agent's method or a trainer's hook.
    """
    if labels:
        label = f"{label}.{label_of(labels)}" if label else label_of(labels)
    services = _current()
    if name in WINDOWED and services.outcome.lost:
        if name == "episode_return":  # the actor counts a game without a return as failed
            services.outcome.result = None
        return
    services.recorder.add(name, value, label=label, kind=None if kind is None else kind_of(kind))
    if name == "episode_return":
        services.outcome.result = float(value)
        for arm in services.arms:
            services.recorder.add("arm_return", value, label=arm)
            services.recorder.add("arm_return_squared", float(value) ** 2, label=arm)


def result(value: str | float) -> None:
    """Reports how the game ended for this session's seat; does nothing in a job without a league.

    A gamecore can report it instead: as ``result`` in the JSON body of the seat's stop.

    Args:
        value: ``win``, ``draw`` or ``loss``; or a score, where the seat with the highest wins.

    Raises: ValueError: it is none of these, or a different result was reported before. ConfigError: this is not called
        inside an agent's method.
    """
    report = _current().report
    if report is not None:
        try:
            report(value)
        except BadResult as error:  # of a client's body it is the client's error, and the session continues
            raise ValueError(error.message) from None


def keep_recording(why: str) -> None:
    """Records this session even if no option chooses it; does nothing in a job without a recording.

    Args:
        why: a word or two, stored in the recording; also the label in the metric ``recordings``.

    Raises:
        ConfigError: this is not called inside an agent's method.
    """
    keep = _current().keep
    if keep is not None:
        keep(why)


STATE_OWN = frozenset(
    ("session", "game", "agent", "tick", "kind", "input", "output", "end", "_waiters", "_seat", "_board")
)
"""Attributes of a `State` that no agent has set."""


class State:
    """One tick: its input, the reply, and attributes that the actor's agents share.

    Attributes:
        session, game, agent: the session's id; of an id ``GAME-agent-AGENT`` (Bray's form) also its two parts.
        tick: number of the tick in the session, from 0.
        kind: ``start``, ``tick``, or ``stop`` for the last state of an episode whose gamecore said how it ended.
        input: the tick's body, parsed as configured (JSON value, protobuf message or bytes).
        output: the agents' reply; starts as ``{}``, an empty message, or ``b""``.
        end: on the last state of a session's last episode: why it ended (``stop``, ``idle``, ``disconnect``,
            ``error``, …); otherwise empty.

    Agents of one actor share the object: set further attributes, and wait for another agent's with `wait`. With the
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
        game, mark, agent = session.rpartition(AGENT_MARK)
        if not mark:
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
            DeadlineExceeded: no agent set it within ``timeout_s``.
        """
        if name not in self.__dict__:
            waiters = self.__dict__.setdefault("_waiters", {})
            waiter = waiters.setdefault(name, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(waiter)
            except TimeoutError:
                raise unset_error(name, timeout_s, self.tick) from None
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_waiters"}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __repr__(self) -> str:
        return f"<State {self.__getstate__()}>"


def unset_error(name: str, timeout_s: float, tick: int) -> DeadlineExceeded:
    """The error of `State.wait` at its deadline."""
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
        """Turns an episode into training data. Called at ``episode_length`` transitions and at the session's end.

        It runs concurrently with later ticks, one call of an agent at a time.

        Args:
            episode: consecutive states. ``episode[t + 1]`` holds the outcome of ``episode[t]``'s action, so ``n + 1``
                states make ``n`` transitions; the last state of one episode is the first of the next. At the end of
                a session the last state is the stop's (``kind == "stop"``, its body as ``input``) if the stop had a
                body; otherwise the game was cut off and the last state's action never had an outcome.
            done: the session has ended; ``episode[-1].end`` is the reason.
        """

    async def on_session_end(self, reason: str) -> None:
        """Called once, last. Reasons: ``stop``, ``idle``, ``disconnect``, ``drained``, ``lost`` or ``error``."""

    def on_deadline(self, state: State) -> None:
        """Chooses at once because `on_tick` is late (``fallback: agent``): reads ``state.input``, writes ``output``.

        `on_tick` still runs to its end with a separate state, which is in no episode: the episode is cut before it.
        """
        raise NotImplementedError

    def snapshot(self) -> bytes | None:
        """State from which another instance continues after this tick; None: this agent cannot be moved.

        With it, a session survives its replica (``actor.snapshot_every``) and is moved when a replica ends.
        """
        return None

    def restore(self, snapshot: bytes) -> None:
        """Continues from a snapshot; called after the constructor, which gets the session's start again."""
        raise NotImplementedError
