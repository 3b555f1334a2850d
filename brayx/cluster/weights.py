"""Distributes new weights from the learner to the acting models: a versioned store, its publisher, its subscribers.

The store is a named actor that keeps the newest few weight sets. It owns their objects, so they outlive the learner
that published them. Subscribers on one node share one read-only copy of each set. A relay on each node announces new
versions; it runs in the store itself, or on other nodes in an actor that the store starts. So a version costs the store
one request per node. Without a relay, each subscriber calls the store.

Versions start at 1 and only grow. After a restart, the first subscriber with the newest version gives it back to the
store, under the same number. Without a subscriber the store stays empty until the next publish, whose version and step
follow the last ones. Older versions are lost. Knows nothing of engines or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brayx.cluster.named import ANSWER_S, Restarts, call_with_retry, end_actor, find_actor, named_actor
from brayx.cluster.ray_private import KeyValueStore
from brayx.cluster.relay import Line, Relay, available, weights_in
from brayx.engines.base import check_finite
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, ModelError, StartupError, first_line
from brayx.model.versions import version_unknown
from brayx.types import Weights

_log = logging.getLogger(__name__)

_MARGIN_S = 10.0
"""Extra time for a call to the store, or a fetch, beyond its own wait."""

AGAIN_S = 2.0
"""Seconds after which a fetch requests a new reference. When two threads fetch the same object at once, Ray leaves
about one in a thousand waiting forever; a new reference resolves."""

_AGAIN_AFTER_S = 0.2
"""Pause after a failed call to the store."""

_PLACED_S = 5.0
"""Longest wait of a subscriber for a relay; without one, it calls the store."""

_DIAL_AGAIN_S = 10.0
"""Pause before a subscriber tries to connect to a relay again."""

_MUTE_S = 60.0
"""Seconds without an answer after which a relay is killed and replaced."""

KEPT_VERSIONS = 4
"""Default number of weight sets that a store keeps."""

_LAST = KeyValueStore("brayx-weights")
"""Version and step of each store's last publish, by actor id, so that a restarted store continues from them."""

_WRITTEN_S = 2.0
"""Longest wait of a publish for that write."""

Kept = TypeVar("Kept")

StoreHandle: TypeAlias = Any
"""Ray's handle of a weight store. Ray creates its methods at run time, so it has no precise type."""


class WeightStore(Generic[Kept]):
    """Keeps the newest published items, and lets callers wait for a newer one. Pure asyncio, knows no Ray.

    Args:
        keep: number of items kept; a new one replaces the oldest.
        last: version and step of the last publish before a restart; the next publish continues from them.
    """

    def __init__(self, keep: int = KEPT_VERSIONS, last: tuple[int, int] = (0, 0)) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self._keep = keep
        self._last = last
        self._kept: OrderedDict[int, tuple[int, int, Kept]] = OrderedDict()
        self._changed = asyncio.Event()
        self._asked_until = 0.0

    def following(self, step: int, at_least: int = 1) -> tuple[int, int]:
        """The version and step that a publish with these arguments would get now.

        Args:
            step: the learner's step; -1: one more than the last.
            at_least: least version; the version also exceeds all earlier ones.
        """
        version, last_step = self._last
        # Plain integers, since NumPy's serialise differently.
        return int(max(at_least, version + 1)), int(last_step + 1 if step < 0 else step)

    def publish(self, step: int, kept: Kept, at_least: int = 1) -> int:
        """Makes ``kept`` the newest and returns its version; other arguments as for `following`."""
        version, step = self.following(step, at_least)
        self._add(version, step, kept)
        return version

    def restore(self, version: int, step: int, kept: Kept) -> bool:
        """Restores an item that was lost in a restart; returns False if the store already has one at least as new."""
        newest = self.newest()
        if newest is not None and newest[0] >= version:
            return False
        self._add(version, step, kept)
        return True

    def newest(self) -> tuple[int, int, Kept] | None:
        """Version, step and content of the newest; None before the first."""
        return next(reversed(self._kept.values()), None)

    def standing(self) -> tuple[int, int]:
        """Version and step of the newest kept item, or else of the last publish; zeros before the first publish."""
        newest = self.newest()
        return self._last if newest is None else newest[:2]

    def get(self, version: int) -> tuple[int, int, Kept] | None:
        """Version, step and content of that version; None if it is not kept."""
        return self._kept.get(version)

    def steps(self) -> dict[int, int]:
        """Steps of all kept versions, by version, in order."""
        return {version: step for version, step, _ in self._kept.values()}

    async def wait_newer(self, than: int, timeout_s: float) -> tuple[int, int, Kept] | int | None:
        """Waits for a version above ``than`` and returns the newest; None after ``timeout_s``.

        Returns an integer if the caller has newer weights than this restarted store: the caller should then call
        `restore`. Only one caller at a time gets this answer.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    newest = self.newest()
                    version = newest[0] if newest is not None else 0
                    if newest is not None and version > than:
                        return newest
                    if version < than and loop.time() >= self._asked_until:
                        self._asked_until = loop.time() + _MARGIN_S
                        return version
                    await self._changed.wait()
        except TimeoutError:
            return None

    def _add(self, version: int, step: int, kept: Kept) -> None:
        self._kept[version] = (version, step, kept)
        self._last = max(self._last, (version, step))
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        self._asked_until = 0.0
        self._changed.set()
        self._changed = asyncio.Event()


class _WeightStoreActor:
    """The store as a Ray actor. Items are lists of one object reference, because Ray resolves bare references."""

    def __init__(self, keep: int, about: bytes) -> None:
        context = ray.get_runtime_context()
        self._id = context.get_actor_id() or ""  # unique, and the same after a restart
        self._store: WeightStore[list[Any]] = WeightStore(keep, self._read_last())
        self._turn = asyncio.Lock()
        self._about = about
        self._node = context.get_node_id()
        self._relay: Relay | None = None
        self._relays: dict[str, Any] = {}  # actors, by node; they end with this one
        self._mute: dict[str, float] = {}  # by node: time of the first unanswered call

    async def publish(self, step: int, weights: Weights, at_least: int) -> tuple[int, int]:
        async with self._turn:
            version, step = self._store.following(step, at_least)
            # Write first: otherwise, after a kill, other weights could get a version that subscribers already know.
            _LAST.write(self._id, [version, step])
            if not await asyncio.to_thread(_LAST.flush, _WRITTEN_S):
                _log.warning("version %d is published before it was written down", version)
            # A second put costs a copy in shared memory, but makes this actor the owner. An object is lost with its
            # owner's process, and learners end before the store does.
            self._store.publish(step, [ray.put(weights)], version)
            if self._relay is not None:
                self._relay.changed(version)
        return version, step

    def _read_last(self) -> tuple[int, int]:
        """Version and step of the last publish; zeros before the first, or if they cannot be read."""
        try:
            version, step = _LAST.read(self._id) or (0, 0)
            return int(version), int(step)
        except Exception as error:  # an error of Ray's, or an invalid value
            _log.warning("the last version that was published cannot be read: %s: %s", type(error).__name__, error)
            return 0, 0

    async def restore(self, version: int, step: int, weights: Weights) -> bool:
        async with self._turn:  # never while a publish has a version but not yet its weights
            taken = self._store.restore(version, step, [ray.put(weights)])
            if taken and self._relay is not None:
                self._relay.changed(version)
            return taken

    async def newest(self) -> tuple[int, int, list[Any]] | None:
        return self._store.newest()

    async def get(self, version: int) -> tuple[int, int, list[Any]] | None:
        return self._store.get(version)

    async def standing(self) -> tuple[int, int]:
        return self._store.standing()

    async def steps(self) -> dict[int, int]:
        return self._store.steps()

    async def wait_newer(self, than: int, timeout_s: float) -> tuple[int, int, list[Any]] | int | None:
        return await self._store.wait_newer(than, timeout_s)

    async def relay(self, node: str) -> str | None:
        """Address of the relay on a node; None: no relay runs there now."""
        if node == self._node:
            return self._own_relay()
        if node not in self._relays:
            actor: Any = ray.remote(_WeightRelayActor)
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._relays[node] = actor.options(num_cpus=0, scheduling_strategy=there).remote(
                ray.get_runtime_context().current_actor
            )
        handle: Any = self._relays[node]
        now = time.monotonic()
        try:
            async with asyncio.timeout(_PLACED_S):
                address: str | None = await handle.address.remote()
            self._mute.pop(node, None)
            return address
        except TimeoutError:
            ended = now - self._mute.setdefault(node, now) > _MUTE_S
        except RayError as error:
            ended = isinstance(error, ActorDiedError)
        if ended and self._relays.get(node) is handle:  # the next call starts another one
            end_actor(self._relays.pop(node))
            self._mute.pop(node, None)
        return None

    def _own_relay(self) -> str | None:
        if self._relay is None:
            self._relay = _open_relay(self._read_newest)
            newest = self._store.newest()
            if self._relay is not None and newest is not None:
                self._relay.changed(newest[0])
        return None if self._relay is None else self._relay.address

    async def _read_newest(self) -> tuple[int, int, Weights] | None:
        found = self._store.newest()
        if found is None:
            return None
        version, step, [reference] = found
        return version, step, await asyncio.to_thread(ray.get, reference, timeout=_MARGIN_S)

    async def about(self) -> bytes:
        return self._about

    async def pid(self) -> int:
        return os.getpid()


class _WeightRelayActor:
    """The relay on a node without the store: it follows the store for all subscribers of the node."""

    def __init__(self, store: StoreHandle) -> None:
        self._subscriber = WeightSubscriber(store, self._came, relayed=False)
        self._relay: Relay | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def address(self) -> str | None:
        if self._relay is None:
            self._loop = asyncio.get_running_loop()
            self._relay = _open_relay(self._newest)
            if self._relay is None:
                return None
            await self._subscriber.start()
        return self._relay.address

    async def pid(self) -> int:
        return os.getpid()

    async def _newest(self) -> tuple[int, int, Weights] | None:
        return self._subscriber.newest

    def _came(self, version: int, weights: Weights) -> None:
        assert self._relay is not None
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._relay.changed, version)


def _open_relay(newest: Callable[[], Awaitable[tuple[int, int, Weights] | None]]) -> Relay | None:
    """Opens a relay, if the system supports it."""
    try:
        return Relay(newest) if available() else None
    except OSError as error:
        _log.warning("no relay of weights here: %s", error)
        return None


def create_weight_store(
    name: str,
    namespace: str | None = None,
    *,
    keep: int = KEPT_VERSIONS,
    about: bytes = b"",
    detached: bool = False,
) -> StoreHandle:
    """Finds the weight store of that name, or starts it.

    Args:
        name: name of the actor.
        namespace: Ray's namespace.
        keep: number of weight sets that it keeps.
        about: a small opaque value for readers of the store; it survives a restart.
        detached: the store lives until it is killed; otherwise it ends with its Ray job.
    """
    lifetime = "detached" if detached else None
    actor = named_actor(_WeightStoreActor, name, namespace, max_concurrency=10_000, lifetime=lifetime)
    handle: StoreHandle = actor.remote(keep, about)
    return handle


def get_weight_store(name: str, namespace: str | None = None) -> StoreHandle:
    """Finds the weight store of that name.

    Raises:
        StartupError: it does not exist.
    """
    handle: StoreHandle | None = find_actor(name, namespace)
    if handle is None:
        raise StartupError(f"no weight store {name!r} is running in namespace {namespace!r}", name=name)
    return handle


def end_weight_store(store: StoreHandle) -> None:
    """Ends a weight store and deletes its record of the last publish."""
    end_actor(store)
    try:
        _LAST.put(store._actor_id.hex(), None)
    except Exception as error:  # Ray's own
        _log.warning("what a weight store left in Ray stays: %s: %s", type(error).__name__, error)


async def fetch_weights(store: StoreHandle, version: int, timeout_s: float = _MARGIN_S) -> Weights:
    """The weights of a version that the store keeps: read-only views of shared memory.

    Raises:
        VersionUnknown: the store does not keep that version; names the nearest.
        DeadlineExceeded: the store did not answer in time.
        ModelError: the weights were lost with their node or process, or the store has ended.
    """
    longest_s, restarts = AGAIN_S, Restarts()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    found = await store.get.remote(version)
                    if found is None:
                        raise version_unknown(version, await store.steps.remote())
                    _, _, [reference] = found
                    weights: Weights = await asyncio.to_thread(ray.get, reference, timeout=min(longest_s, timeout_s))
                    return weights
                except GetTimeoutError:
                    longest_s *= 2  # large weights may take longer between nodes
                except RayActorError as error:
                    await asyncio.sleep(restarts.wait_s(error))
    except TimeoutError as error:
        raise DeadlineExceeded(f"the weight store did not give version {version} in {timeout_s:g} s") from error
    except RayError as error:
        raise ModelError(f"the weights of version {version} are lost: {first_line(error)}") from error


class WeightPublisher:
    """Publishes the learner's weights to a store. Blocking; use it from one thread.

    Args:
        store: handle of the store.
        timeout_s: deadline of one publish, including a restart of the store.
        last_version: newest version of a resumed trial; the next version is higher.
    """

    def __init__(self, store: StoreHandle, *, timeout_s: float = ANSWER_S, last_version: int = 0) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._last_version = last_version
        self._last_step = 0

    @property
    def last_version(self) -> int:
        """Version of the last publish."""
        return self._last_version

    @property
    def last_step(self) -> int:
        """Step of the last publish; 0 before the first."""
        return self._last_step

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
        self._last_version, self._last_step = call_with_retry(
            self._store.publish, step, weights, self._last_version + 1, timeout_s=self._timeout_s
        )
        return self._last_version


def _checked_step(step: Any) -> int:
    """Checks a step, and converts NumPy integers to Python's."""
    if not isinstance(step, bool):
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
        self._version = 0
        self._newest: tuple[int, int, Weights] | None = None
        self._refused = False
        self._line: Line | None = None
        self._dial_at = 0.0
        self._warned = False
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Newest version passed to ``on_weights``; 0 before the first."""
        return self._version

    @property
    def newest(self) -> tuple[int, int, Weights] | None:
        """Version, step and weights of the newest received, accepted or refused."""
        return self._newest

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
        return self._version

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
                    raise StartupError(f"no weights to begin with: version {self._version} was not taken")
                if self._version > 0 or standing == 0:
                    break
                why = f"has lost version {standing}, the newest, and nobody gives it back"
            except (RayError, TimeoutError) as error:
                why = f"does not answer: {first_line(error) or type(error).__name__}"
            if time.monotonic() > ends:
                raise StartupError(f"no weights to begin with in {timeout_s:g} s: the weight store {why}")
            await asyncio.sleep(_AGAIN_AFTER_S)
        self._task = asyncio.get_running_loop().create_task(self._follow())
        return self._version

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
                except (RayError, TimeoutError) as error:
                    if not away:
                        _log.warning("no news from the weight store (%s), asking again", type(error).__name__)
                    away = True
                    await asyncio.sleep(_AGAIN_AFTER_S)
                except Exception:
                    # Nothing awaits this task: an error that ended it would silently end all updates.
                    if not away:
                        _log.exception("following the weight store failed, asking again")
                    away = True
                    await asyncio.sleep(_AGAIN_AFTER_S)
        finally:
            self._hang_up()

    def _disconnected(self) -> bool:
        """Whether this process has left Ray: a call to the store would then start a new local cluster."""
        return isinstance(self._store, ray.actor.ActorHandle) and not ray.is_initialized()

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
            found = await self._line.newer(self._version, self._quiet_s)
        except OSError as error:  # the relay has ended, perhaps with the store
            _log.info("the line to the relay of this node has ended: %s", error)
            self._hang_up()
            await asyncio.sleep(_AGAIN_AFTER_S)
            return
        if found is not None:
            self._dial_at = 0.0  # relays work here: if this one ends, connect to the next one at once
            version, step, content = found
            await asyncio.to_thread(lambda: self._take(version, step, weights_in(content)))
            return
        before = self._version
        await self._poll(0.0)
        if self._version > before:
            _log.warning("the relay of this node did not tell of version %d, asking the store", self._version)
            self._hang_up()

    async def _dial(self) -> Line | None:
        async with asyncio.timeout(_MARGIN_S):
            address = await self._store.relay.remote(ray.get_runtime_context().get_node_id())
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
        async with asyncio.timeout(timeout_s + _MARGIN_S):
            found = await self._store.wait_newer.remote(self._version, timeout_s)
        if found is None:
            return
        if isinstance(found, int):
            await self._give_back()
            return
        version, step, [reference] = found
        # A blocking get in a thread polls for the object. Awaiting a borrowed reference relies on one notification;
        # that hung once on a loaded machine.
        await asyncio.to_thread(lambda: self._take(version, step, ray.get(reference, timeout=_MARGIN_S)))

    def _take(self, version: int, step: int, weights: Weights) -> None:
        """Passes weights to ``on_weights``; runs in a thread."""
        self._newest = (version, step, weights)
        self._refused = True
        try:
            self._on_weights(version, weights)
            self._refused = False
        except BrayxError as error:
            _log.error("weights of version %d were refused: %s", version, error)
        except Exception:
            _log.exception("weights of version %d were not taken", version)
        self._version = version

    async def _give_back(self) -> None:
        """Restores this process's newest weights, a view of the lost object, in a restarted store."""
        if self._newest is None:
            return
        async with asyncio.timeout(_MARGIN_S):
            if await self._store.restore.remote(*self._newest):
                _log.warning("the weight store was restarted: it has version %d back from here", self._version)
