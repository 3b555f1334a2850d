"""A rollout worker as a Ray actor. It collects on leases, so that its owner can follow its progress.

Knows nothing of environments or models, which `brayx.rollout.worker` does.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from brayx.cluster.hub import HubClient, get_hub
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.statistics import RemoteExchange, get_moments
from brayx.cluster.weight_store import get_weight_store
from brayx.cluster.weights import WeightSubscriber
from brayx.rollout.spec import RolloutSpec, make_collector, naming
from brayx.rollout.worker import Newest, Progress, Worker

_PUSHES = 2
"""Fragments that may wait for a push that is on its way, once one may drop."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(RolloutSpec):
    """A rollout and the Ray actors that its workers use.

    Attributes:
        namespace: Ray namespace of the actors below.
        buffer, weight_store, hub, moments: their names; no hub: nothing is counted; no moments: each worker normalises
            by what it has seen itself.
    """

    namespace: str
    buffer: str
    weight_store: str
    hub: str = ""
    moments: str = ""


class StoredWeights(Newest):
    """The newest weights of a store, followed in a thread.

    Args:
        store: handle of the weight store.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._subscriber = WeightSubscriber(store, self.put)
        self._thread = threading.Thread(target=self._run, name="brayx-rollout-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follows no longer."""
        asyncio.run_coroutine_threadsafe(self._subscriber.stop(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = self._loop.create_task(self._subscriber.start())  # kept, or it might be collected
        self._loop.run_forever()
        del starting


class RolloutWorker:
    """The Ray actor. One call of `collect` or `leave` at a time; `stop` and `pid` may come meanwhile.

    Args:
        spec: what to do.
        index: of the worker among those of its rollout.
        past: how many workers had this index before.
    """

    def __init__(self, spec: WorkerSpec, index: int, past: int) -> None:
        self._spec = spec
        self._index = index
        self._past = past
        self._stopping = threading.Event()
        self._parts: _Parts | None = None

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def stop(self) -> None:
        """Ends the lease that runs after the fragment it is at, and those that follow at once."""
        self._stopping.set()

    def leave(self) -> None:
        """Hands over what is left, and collects no more; comes after the lease that runs."""
        self._stopping.set()
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def collect(self, lease_s: float, workers: int) -> Progress:
        """Collects for about ``lease_s``, and says how much.

        Args:
            lease_s: how long; a fragment that was begun is finished.
            workers: how many there are now: blocking ones share out what an update takes.

        Raises:
            BrayxError: an environment failed or could not be made, or an actor of the job is gone; names the worker.
        """
        until = time.monotonic() + lease_s
        with naming(f"worker {self._index} of rollout {self._spec.name!r} ({self._spec.env_name})"):
            done = Progress()
            if self._stopping.is_set():
                return done
            if self._parts is None:
                self._parts = _Parts(self._spec, self._index, self._past, self._stopping)
            while not self._stopping.is_set() and time.monotonic() < until:
                done = done + self._parts.worker.turn(until, workers)
            return done


class _Parts:
    """A worker, and what it has of the cluster."""

    def __init__(self, spec: WorkerSpec, index: int, past: int, stopping: threading.Event) -> None:
        self._newest = StoredWeights(get_weight_store(spec.weight_store, spec.namespace))
        self._recorder = HubClient(get_hub(spec.hub, spec.namespace) if spec.hub else None)
        self._buffer = RemoteBuffer.attach(
            spec.buffer,
            namespace=spec.namespace,
            max_pending=_PUSHES,
            on_dropped=lambda reason, steps: self._recorder.add("fragments_dropped", steps, label=reason),
        )
        self._collector = make_collector(spec, index=index, past=past)
        store = get_moments(spec.moments, spec.namespace) if spec.moments else None
        self.worker = Worker(
            spec,
            self._collector,
            newest=self._newest,
            buffer=self._buffer,
            sink=self._recorder,
            moments=None if store is None else RemoteExchange(store, self._collector),
            stopping=stopping,
        )

    def close(self) -> None:
        """Hands over what is left, and closes everything; the environments last, since they may hang."""
        self._newest.close()
        self.worker.finish()
        self._buffer.close(1.0)
        self._recorder.close(1.0)
        self._collector.close()
