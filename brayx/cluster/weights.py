"""Distributes new weights from the learner to the acting models: the publisher and the subscribers of a weight store.

A relay on the subscribers' node announces new versions; without one, each subscriber calls the store.
`brayx.cluster.weight_store` has the store and its relays. Knows nothing of engines or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from brayx.cluster.named import ANSWER_S, WEIGHT_STORE, answer_with_retry, call_with_retry, result_or
from brayx.cluster.relay import Line, weights_in
from brayx.engines.base import check_finite
from brayx.errors import BrayxError, ConfigError, ConnectFailed, StartupError, first_line
from brayx.model.versions import version_unknown
from brayx.types import Weights

_log = logging.getLogger(__name__)

MARGIN_S = 10.0
"""Extra time for a call to the store, or a fetch, beyond its own wait."""

AGAIN_S = 2.0
"""Seconds after which a fetch requests a new reference. When two threads fetch the same object at once, Ray leaves
about one in a thousand waiting forever; a new reference resolves."""

_AGAIN_AFTER_S = 0.2
"""Pause after a failed call to the store."""

_DIAL_AGAIN_S = 10.0
"""Pause before a subscriber tries to connect to a relay again."""

StoreHandle: TypeAlias = Any
"""Ray's handle of a weight store. Ray creates its methods at run time, so it has no precise type."""


async def fetch_weights(store: StoreHandle, version: int, timeout_s: float = MARGIN_S) -> Weights:
    """The weights of a version that the store keeps: read-only views of shared memory.

    Raises:
        VersionUnknown: the store does not keep that version; names the nearest.
        DeadlineExceeded: the store did not answer in time.
        ModelError: the weights were lost with their node or process, or the store has ended.
    """
    longest_s = AGAIN_S

    async def call() -> Weights:
        nonlocal longest_s
        while True:
            entry = await store.get.remote(version)
            if entry is None:
                raise version_unknown(version, await store.steps.remote())
            _, _, [reference] = entry
            try:
                return await asyncio.to_thread(ray.get, reference, timeout=min(longest_s, timeout_s))
            except GetTimeoutError:
                longest_s *= 2  # large weights may take longer between nodes

    weights: Weights = await answer_with_retry(call, timeout_s, WEIGHT_STORE)
    return weights


def fetch_newest(store: StoreHandle, timeout_s: float = MARGIN_S) -> Weights | None:
    """The newest weights, as read-only views; None: there are none, or they did not come in time. Blocking."""
    newest = result_or(None, store.newest.remote(), timeout_s)
    if newest is None:
        return None
    _, _, [reference] = newest
    weights: Weights | None = result_or(None, reference, timeout_s)
    return weights


class WeightPublisher:
    """Publishes the learner's weights to a store. Blocking; use it from one thread.

    Args:
        store: handle of the store.
        timeout_s: deadline of one publish, including a restart of the store.
        last_version: newest version of a resumed trial; the next version is higher.
        published: called with each published version.

    Attributes:
        last_version, last_step: version and step of the last publish.
    """

    def __init__(
        self,
        store: StoreHandle,
        *,
        timeout_s: float = ANSWER_S,
        last_version: int = 0,
        published: Callable[[int], object] = lambda version: None,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._published = published
        self.last_version, self.last_step = last_version, 0

    def publish(self, weights: Weights, step: int) -> int:
        """Makes ``weights`` the newest and returns their version.

        Args:
            weights: copied before this returns.
            step: the learner's step, an integer from 0; -1: one more than the store's last.

        Raises:
            ConfigError: the step is invalid; nothing was published.
            BadWeights: the weights contain NaN or infinity; names the leaf. Nothing was published.
            DeadlineExceeded: the store did not answer in time.
            ModelError: the store has ended.
        """
        step = _checked_step(step)
        check_finite(weights)
        # Safe to retry: a publish that is applied twice, around a restart, only skips a version.
        self.last_version, self.last_step = call_with_retry(
            self._store.publish, step, weights, self.last_version + 1, timeout_s=self._timeout_s
        )
        self._published(self.last_version)
        return self.last_version


def _checked_step(step: Any) -> int:
    """Checks a step, and converts NumPy integers to Python's."""
    if not isinstance(step, bool | np.bool):
        with contextlib.suppress(TypeError):
            number = operator.index(step)
            if number >= -1:
                return number
    raise ConfigError(f"step is {step!r}, expected an integer from 0, or -1: one more than the last", key="step")


class WeightSubscriber:
    """Follows a weight store: calls ``on_weights(version, weights)`` for the newest, one call at a time, in a thread.

    The call runs in a thread, because an engine may take long to load weights, and ticks must not wait for it.

    Versions only grow; some are skipped when they follow each other quickly. Arrays are read-only views of shared
    memory. If the store does not answer, the subscriber retries until `stop`; a restarted store gets the newest weights
    back from it. If ``on_weights`` refuses weights, they are logged and skipped, and the previous ones stay in use.

    Args:
        store: handle of the store.
        on_weights: takes a version and its weights; not a coroutine. `stop` does not wait for a running call.
        poll_s: longest time that one call waits in the store.
        relayed: get new weights from the relay on this node, if it has one.
        quiet_s: seconds without a message from the relay after which the subscriber calls the store.

    Attributes:
        version: newest version passed to ``on_weights``; 0 before the first.
        newest: version, step and weights of the newest received, accepted or refused.
    """

    def __init__(
        self,
        store: StoreHandle,
        on_weights: Callable[[int, Weights], None],
        *,
        poll_s: float = 10.0,
        relayed: bool = True,
        quiet_s: float = 30.0,
    ) -> None:
        self._store = store
        self._on_weights = on_weights
        self._poll_s = poll_s
        self._relayed = relayed
        self._quiet_s = quiet_s
        self.version = 0
        self.newest: tuple[int, int, Weights] | None = None
        self._refused = False
        self._line: Line | None = None
        self._dial_at = 0.0
        self._warned = False
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it follows the store now, for health checks."""
        return self._task is not None and not self._task.done()

    @property
    def relayed(self) -> bool:
        """Whether it is connected to a relay now."""
        return self._line is not None

    async def start(self, first_timeout_s: float = 0.0) -> int:
        """Passes on the store's newest weights, then follows the store in a task; returns the version passed on.

        Args:
            first_timeout_s: longest wait for weights in an empty store; it then starts without them and returns 0.
        """
        try:
            await self._poll(first_timeout_s)
        except (RayError, TimeoutError) as error:
            _log.warning("no weights yet, the weight store does not answer: %s", error)
        self._task = asyncio.get_running_loop().create_task(self._follow())
        return self.version

    async def start_abreast(self, timeout_s: float = ANSWER_S) -> int:
        """As `start`, for replicas: if any weights were ever published, it must not act with its initial ones.

        Args:
            timeout_s: longest wait for a restarted store to get its weights back.

        Raises:
            StartupError: the weights did not arrive in time or were refused, or the store did not answer.
        """
        ends = time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(max(ends - time.monotonic(), _AGAIN_AFTER_S)):
                    await self._poll(0.0)
                    standing, _ = await self._store.standing.remote()
                if self._refused:
                    raise StartupError(f"no initial weights: version {self.version} was refused")
                if self.version > 0 or standing == 0:
                    break
                why = f"has lost version {standing}, the newest, and no process has restored it"
            except (RayError, TimeoutError) as error:
                why = f"does not answer: {first_line(error) or type(error).__name__}"
            if time.monotonic() > ends:
                raise StartupError(f"no initial weights within {timeout_s:g} s: the weight store {why}")
            await asyncio.sleep(_AGAIN_AFTER_S)
        self._task = asyncio.get_running_loop().create_task(self._follow())
        return self.version

    async def stop(self) -> None:
        """Ends the task; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        away = False
        try:
            while not self._disconnected():
                try:
                    await self._hear()
                    away = False
                except Exception as error:
                    if self._disconnected():  # which is why the call failed
                        return
                    # Any error: nothing awaits this task, so one that ended it would silently end all updates.
                    if not away and isinstance(error, RayError | TimeoutError):
                        _log.warning("no news from the weight store (%s), asking again", type(error).__name__)
                    elif not away:
                        _log.exception("following the weight store failed, asking again")
                    away = True
                    await asyncio.sleep(_AGAIN_AFTER_S)
        finally:
            self._hang_up()

    def _disconnected(self) -> bool:
        """Whether this process has left Ray: a call to the store would then start a new local cluster."""
        return isinstance(self._store, ray.actor.ActorHandle) and not ray.is_initialized()

    def _connected_store(self) -> StoreHandle:
        """The store, for a call right now: the process may have left Ray during the call before.

        Raises:
            ConnectFailed: it has.
        """
        if self._disconnected():
            raise ConnectFailed("this process has left Ray, where the weight store is")
        return self._store

    async def _hear(self) -> None:
        """Waits some time for the next weights, from the relay if connected, otherwise from the store."""
        if self._line is None and self._relayed and time.monotonic() >= self._dial_at:
            self._dial_at = time.monotonic() + _DIAL_AGAIN_S
            await self._poll(0.0)  # first restore what the store lost in a restart
            self._line = await self._dial()
        if self._line is None:
            await self._poll(self._poll_s)
            return
        try:
            newer = await self._line.newer(self.version, self._quiet_s)
        except OSError as error:  # the relay has ended, perhaps with the store
            _log.info("the line to the relay of this node has ended: %s", error)
            self._hang_up()
            await asyncio.sleep(_AGAIN_AFTER_S)
            return
        if newer is not None:
            self._dial_at = 0.0  # relays work here: if this one ends, connect to the next one at once
            version, step, content = newer
            await asyncio.to_thread(lambda: self._take(version, step, weights_in(content)))
            return
        before = self.version
        await self._poll(0.0)
        if self.version > before:
            _log.warning("the relay of this node did not report version %d; asking the store", self.version)
            self._hang_up()

    async def _dial(self) -> Line | None:
        async with asyncio.timeout(MARGIN_S):
            address = await self._connected_store().relay.remote(ray.get_runtime_context().get_node_id())
        try:
            return None if address is None else Line(address)
        except OSError as error:
            if not self._warned:  # may be permanent, in a container with a separate network
                _log.warning("no line to the relay of this node (%s), asking the store", error)
            self._warned = True
            return None

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    async def _poll(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s + MARGIN_S):
            newer = await self._connected_store().wait_newer.remote(self.version, timeout_s)
        if newer is None:
            return
        if isinstance(newer, int):
            await self._give_back()
            return
        version, step, [reference] = newer
        self._connected_store()
        # A blocking get in a thread polls for the object. Awaiting a borrowed reference relies on one notification;
        # that hung once on a loaded machine.
        await asyncio.to_thread(lambda: self._take(version, step, ray.get(reference, timeout=MARGIN_S)))

    def _take(self, version: int, step: int, weights: Weights) -> None:
        """Passes weights to ``on_weights``; runs in a thread."""
        self.newest = (version, step, weights)
        self._refused = True
        try:
            self._on_weights(version, weights)
            self._refused = False
        except BrayxError as error:
            _log.error("weights of version %d were refused: %s", version, error)
        except Exception:
            _log.exception("weights of version %d were not taken", version)
        self.version = version

    async def _give_back(self) -> None:
        """Restores this process's newest weights, a view of the lost object, in a restarted store."""
        if self.newest is None:
            return
        async with asyncio.timeout(MARGIN_S):
            if await self._connected_store().restore.remote(*self.newest):
                _log.warning("the weight store was restarted: this process gave version %d back to it", self.version)
