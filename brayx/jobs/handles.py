"""Handles of the models and buffers of a job in this process, by their names.

An agent's methods find the same models and buffers as `brayx.forward` and `brayx.push`. Other code finds those that a
local host offers (`offer`). Knows nothing of how models act or buffers store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from brayx.actor.agent import services_in_use
from brayx.errors import ConfigError, DeadlineExceeded, ModelError
from brayx.replay.packing import transitions
from brayx.types import Columns, Fragment, NestedArray

_ANSWER_S = 60.0
"""Longest wait for a model, in addition to the model's own deadline."""


class JobModel:
    """A handle of a model of the job that runs in this process.

    Attributes:
        name: name of the model component.
    """

    def __init__(self, name: str, model: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._model, self._loop = model, loop

    @property
    def spec(self) -> Any:
        """Signature of the model."""
        return self._model.spec

    @property
    def version(self) -> int:
        """Policy version of the newest weights; 0 before the first published ones."""
        version: int = self._model.version
        return version

    async def forward(self, *args: NestedArray, batch: bool = False, deadline_s: float | None = None) -> NestedArray:
        """Returns the model's outputs; works on any event loop.

        Args:
            *args: the model's arguments, nested arrays; without a batch axis unless ``batch``.
            batch: every leaf has a leading batch axis ``[N, ...]``, and so have the outputs.
            deadline_s: seconds until the forward fails; at most the model's own deadline.

        Raises:
            ShapeMismatch: they do not fit; shows expected and got for each leaf.
            QueueFull, DeadlineExceeded: the model has no room, or took too long.
            ModelError: the engine failed, or the session's own view of the model takes one observation at a time.
        """
        work = self._forward(args, batch, deadline_s)
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def __call__(self, *args: NestedArray, batch: bool = False, deadline_s: float | None = None) -> NestedArray:
        """`forward` for code that does not await; blocks the calling thread.

        Raises:
            ModelError: it would block the loop that the model acts on.
        """
        with contextlib.suppress(RuntimeError):  # there is no running loop
            if asyncio.get_running_loop() is self._loop:
                raise ModelError(f"this would block all sessions: await model {self.name!r}.forward(...) in an agent")
        future = asyncio.run_coroutine_threadsafe(self._forward(args, batch, deadline_s), self._loop)
        try:
            return future.result(_ANSWER_S)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"model {self.name!r} gave no answer within {_ANSWER_S:g} s") from None

    def client(self) -> Any:
        """The model with the interface that agents use: results have versions, which can be requested or pinned. Use it
        on its own event loop."""
        return self._model

    def close(self) -> None:
        """Does nothing: the model is the job's."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a model of the running job has no {name!r}: only its learner publishes and saves weights"
        )

    def __repr__(self) -> str:
        return f"<JobModel {self.name!r}>"

    async def _forward(self, args: tuple[NestedArray, ...], batch: bool, deadline_s: float | None) -> NestedArray:
        if not batch:
            outputs, _ = await self._model.forward(*args, deadline_s=deadline_s)
            return outputs
        from brayx.model.inputs import to_columns

        if not hasattr(self._model, "forward_columns"):  # it has a version, or a state, of the session's own
            raise ModelError(f"model {self.name!r} takes one observation at a time in this session, not a batch")
        leaves, _ = await self._model.forward_columns(to_columns(self.spec, args), deadline_s=deadline_s)
        return self.spec.unflatten_outputs([np.asarray(leaf) for leaf in leaves])


class JobBuffer:
    """A handle of a replay buffer of the job that runs in this process.

    Attributes:
        name: name of the buffer component.
    """

    def __init__(self, name: str, buffer: Any) -> None:
        self.name = name
        self._buffer = buffer

    def push(self, *replays: Fragment | Columns, drop: bool = True, timeout_s: float = 60.0) -> None:
        """Pushes fragments and columns; see `brayx.cluster.remote_buffer.RemoteBuffer.push`."""
        if drop:
            self._buffer.push(*replays)
        elif left := self.offer(*replays, timeout_s=timeout_s):
            lost = sum(map(transitions, left))
            raise DeadlineExceeded(
                f"buffer {self.name!r} had no room for {lost} transitions within {timeout_s:g} s", left=lost
            )

    async def push_async(self, *replays: Fragment | Columns, drop: bool = True, timeout_s: float = 60.0) -> None:
        """As `push`, in an event loop, which goes on while this waits."""
        if drop:
            self.push(*replays)
        else:
            await asyncio.to_thread(self.push, *replays, drop=False, timeout_s=timeout_s)

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Pushes as much as has room within ``timeout_s``, and returns the rest. Drops nothing.

        Raises:
            BadFragment: one was refused; those before it were taken.
            ReplayError: the buffer takes no more.
        """
        left: list[Fragment | Columns] = self._buffer.offer(*replays, timeout_s=timeout_s)
        return left

    def close(self) -> None:
        """Does nothing: the buffer is the job's."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a buffer of the running job has no {name!r}: only its learner reads and ends it")

    def __repr__(self) -> str:
        return f"<JobBuffer {self.name!r}>"


@dataclass(frozen=True)
class _Offer:
    """The models and buffers of a local host in this process, and the loop that its models act on."""

    models: Mapping[str, Any]
    buffers: Mapping[str, Any]
    loop: asyncio.AbstractEventLoop


_offers: list[_Offer] = []
"""Offers of the local hosts in this process, the newest last."""


@contextlib.contextmanager
def offer(models: Mapping[str, Any], buffers: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """A context in which code in this process finds a host's models and buffers by name.

    Args:
        models: `brayx.model.local.Model` by component name.
        buffers: objects with ``push`` and ``offer``, by component name.
        loop: event loop that the models act on.
    """
    offered = _Offer(models, buffers, loop)
    _offers.append(offered)
    try:
        yield
    finally:
        _offers.remove(offered)


def model_by_name(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> JobModel | None:
    """The model of that name in this process; None: there is none.

    Raises:
        ConfigError: there is one, but the call passes more than its name.
    """
    named = _find(lambda parts: parts.models, name)
    if named is None:
        return None
    _refuse_options("model", name, args, options)
    return JobModel(name, *named)


def buffer_by_name(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> JobBuffer | None:
    """The buffer of that name in this process; errors and None as for `model_by_name`."""
    named = _find(lambda parts: parts.buffers, name)
    if named is None:
        return None
    _refuse_options("buffer", name, args, options)
    return JobBuffer(name, named[0])


def _find(kind: Callable[[Any], Mapping[str, Any]], name: str) -> tuple[Any, asyncio.AbstractEventLoop] | None:
    """The model or buffer of that name in this process (in an agent, the session's view of it), and its event loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    services = services_in_use()
    if loop is not None and services is not None and name in kind(services):
        return kind(services)[name], loop
    for offered in reversed(_offers):
        if name in kind(offered):
            return kind(offered)[name], offered.loop
    return None


def _refuse_options(kind: str, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if there are options: for a job's own model or buffer, the name is the only argument."""
    if args or options:
        given = ", ".join([*(type(arg).__name__ for arg in args), *options])
        raise ConfigError(f"{kind} {name!r} is the job's: its options are in the job, got {given}", key=given)
