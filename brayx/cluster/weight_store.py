"""The weight store: a named actor that keeps the newest few weight sets, and its relays, one on each node.

It owns their objects, so they outlive the learner that published them. Subscribers on one node share one read-only copy
of each set. A relay on each node announces new versions; it runs in the store itself, or on other nodes in an actor
that the store starts. So a version costs the store one request per node. Without a relay, each subscriber calls the
store.

Versions start at 1 and only grow. After a restart, the first subscriber with the newest version gives it back to the
store, under the same number. Without a subscriber the store stays empty until the next publish, whose version and step
follow the last ones. Older versions are lost. Knows nothing of engines or models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brayx.cluster.named import end_actor, named_actor
from brayx.cluster.ray_private import KeyValueStore
from brayx.cluster.relay import Relay, available
from brayx.cluster.weights import MARGIN_S, StoreHandle, WeightSubscriber
from brayx.types import Weights

_log = logging.getLogger(__name__)

_PLACED_S = 5.0
"""Longest wait of a subscriber for a relay; without one, it calls the store."""

_MUTE_S = 60.0
"""Seconds without an answer after which a relay is killed and replaced."""

KEPT_VERSIONS = 4
"""Default number of weight sets that a store keeps."""

_LAST = KeyValueStore("brayx-weights")
"""Version and step of each store's last publish, by actor id, so that a restarted store continues from them."""

_WRITTEN_S = 2.0
"""Longest wait of a publish for that write."""

Kept = TypeVar("Kept")


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
        self._claimed_until = 0.0

    def following(self, step: int, at_least: int = 1) -> tuple[int, int]:
        """The version and step that a publish with these arguments would get now.

        Args:
            step: the learner's step; -1: one more than the last.
            at_least: least version; the version also exceeds all earlier ones.
        """
        version, last_step = self._last
        # Plain integers, since NumPy's serialise differently.
        return int(max(at_least, version + 1)), int(last_step + 1 if step < 0 else step)

    def publish(self, step: int, item: Kept, at_least: int = 1) -> int:
        """Makes ``item`` the newest and returns its version; other arguments as for `following`."""
        version, step = self.following(step, at_least)
        self._add(version, step, item)
        return version

    def restore(self, version: int, step: int, item: Kept) -> bool:
        """Restores an item that was lost in a restart; returns False if the store already has one at least as new."""
        newest = self.newest()
        if newest is not None and newest[0] >= version:
            return False
        self._add(version, step, item)
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
                    if version < than and loop.time() >= self._claimed_until:
                        self._claimed_until = loop.time() + MARGIN_S
                        return version
                    await self._changed.wait()
        except TimeoutError:
            return None

    def _add(self, version: int, step: int, item: Kept) -> None:
        self._kept[version] = (version, step, item)
        self._last = max(self._last, (version, step))
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        self._claimed_until = 0.0
        self._changed.set()
        self._changed = asyncio.Event()


class _WeightStoreActor(WeightStore[list[Any]]):
    """The store as a Ray actor. Items are lists of one object reference, because Ray resolves bare references."""

    def __init__(self, keep: int, about: bytes) -> None:
        context = ray.get_runtime_context()
        self._id = context.get_actor_id() or ""  # unique, and the same after a restart
        super().__init__(keep, self._read_last())
        self._turn = asyncio.Lock()
        self._about = about
        self._node = context.get_node_id()
        self._relay: Relay | None = None
        self._relays: dict[str, Any] = {}  # actors, by node; they end with this one
        self._mute: dict[str, float] = {}  # by node: time of the first unanswered call

    async def publish(  # type: ignore[override]  # callers await Ray's reference
        self, step: int, weights: Weights, at_least: int
    ) -> tuple[int, int]:
        async with self._turn:
            version, step = self.following(step, at_least)
            # Write first: otherwise, after a kill, other weights could get a version that subscribers already know.
            _LAST.write(self._id, [version, step])
            if not await asyncio.to_thread(_LAST.flush, _WRITTEN_S):
                _log.warning("version %d is published before it was written down", version)
            # A second put costs a copy in shared memory, but makes this actor the owner. An object is lost with its
            # owner's process, and learners end before the store does.
            super().publish(step, [ray.put(weights)], version)
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

    async def restore(self, version: int, step: int, weights: Weights) -> bool:  # type: ignore[override]
        async with self._turn:  # never while a publish has a version but not yet its weights
            taken = super().restore(version, step, [ray.put(weights)])
            if taken and self._relay is not None:
                self._relay.changed(version)
            return taken

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
            newest = self.newest()
            if self._relay is not None and newest is not None:
                self._relay.changed(newest[0])
        return None if self._relay is None else self._relay.address

    async def _read_newest(self) -> tuple[int, int, Weights] | None:
        newest = self.newest()
        if newest is None:
            return None
        version, step, [reference] = newest
        return version, step, await asyncio.to_thread(ray.get, reference, timeout=MARGIN_S)

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
    *,
    keep: int = KEPT_VERSIONS,
    about: bytes = b"",
    detached: bool = False,
) -> StoreHandle:
    """Finds the weight store of that name, or starts it.

    Args:
        name: name of the actor.
        keep: number of weight sets that it keeps.
        about: a small opaque value for readers of the store; it survives a restart.
        detached: the store lives until it is killed; otherwise it ends with its Ray job.
    """
    lifetime = "detached" if detached else None
    actor = named_actor(_WeightStoreActor, name, max_concurrency=10_000, lifetime=lifetime)
    return actor.remote(keep, about)


def end_weight_store(store: StoreHandle) -> None:
    """Ends a weight store and deletes its record of the last publish."""
    end_actor(store)
    try:
        _LAST.put(store._actor_id.hex(), None)
    except Exception as error:  # Ray's own
        _log.warning("what a weight store left in Ray stays: %s: %s", type(error).__name__, error)
