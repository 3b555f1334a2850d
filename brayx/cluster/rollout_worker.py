"""A rollout worker as a Ray actor. It collects on leases, so that its owner can follow its progress.

Knows nothing of environments or models, which `brayx.rollout.worker` does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brayx.cluster.hub import HubClient
from brayx.cluster.named import WEIGHT_STORE, get_actor
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.statistics import RemoteExchange
from brayx.cluster.weights import WeightSubscriber
from brayx.errors import DeadlineExceeded
from brayx.jobs.config import JobConfig
from brayx.jobs.environments import normalises, spec_of
from brayx.rollout.spec import RolloutSpec, make_collector, naming
from brayx.rollout.worker import Newest, Worker, WorkerProgress
from brayx.threads import LoopThread

_PUSHES = 2
"""Fragments that may wait for a push in flight, in calls that may drop."""
_STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(RolloutSpec):
    """A rollout and the Ray actors that its workers use.

    Attributes:
        buffer, weight_store, hub, moments: their names. Without a hub, nothing is counted; without moments, each worker
            normalises by its own samples.
    """

    buffer: str
    weight_store: str
    hub: str = ""
    moments: str = ""


def worker_spec(job: JobConfig, name: str, names: Mapping[str, str], env_steps: int = 0) -> WorkerSpec:
    """As `spec_of`, for workers on a cluster.

    Args:
        job, name, env_steps: as for `spec_of`.
        names: Ray actors by part: ``hub``, ``weights``, ``moments``, and ``buffer/NAME`` of each buffer.
    """
    config = job.rollouts[name]
    return WorkerSpec(
        **vars(spec_of(job, name, env_steps)),
        buffer=names[f"buffer/{config.buffer}"],
        weight_store=names["weights"],
        hub=names["hub"],
        moments=names["moments"] if normalises(config) else "",
    )


class StoredWeights(Newest):
    """The newest weights of a store, followed in a thread.

    Args:
        store: handle of the weight store.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._loop = LoopThread("brayx-rollout-weights")
        self._subscriber = WeightSubscriber(store, self.put)
        self._starting = self._loop.start(self._subscriber.start())

    def close(self) -> None:
        """Stops following the store."""
        with contextlib.suppress(DeadlineExceeded):
            self._loop.run(self._subscriber.stop(), _STOP_S)
        self._loop.close()


class RolloutWorker:
    """The Ray actor. It runs one call of `collect` or `leave` at a time; `stop` may run concurrently.

    Args:
        spec: the worker's settings.
        index: index of the worker in its rollout.
        past: number of earlier workers with this index.
    """

    def __init__(self, spec: WorkerSpec, index: int, past: int) -> None:
        self._spec = spec
        self._index = index
        self._past = past
        self._stopping = threading.Event()
        self._parts: _ConnectedWorker | None = None

    def stop(self) -> None:
        """Ends the running lease after its current fragment, and later leases at once."""
        self._stopping.set()

    def leave(self) -> None:
        """Pushes the remaining fragments, and collects no more; runs after the current lease."""
        self._stopping.set()
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def collect(self, lease_s: float, workers: int) -> WorkerProgress:
        """Collects for about ``lease_s``, and returns the progress.

        Args:
            lease_s: duration in seconds; a started fragment is finished.
            workers: current number of workers; blocking ones share the fragments of an update.

        Raises:
            BrayxError: an environment failed or could not be made, or an actor of the job has ended; names the worker.
        """
        until = time.monotonic() + lease_s
        with naming(f"worker {self._index} of rollout {self._spec.name!r} ({self._spec.env_name})"):
            done = WorkerProgress()
            if self._stopping.is_set():
                return done
            if self._parts is None:
                self._parts = _ConnectedWorker(self._spec, self._index, self._past, self._stopping)
            while not self._stopping.is_set() and time.monotonic() < until:
                done = done + self._parts.worker.turn(until, workers)
            return done


class _ConnectedWorker:
    """A worker, and its connections to the cluster's actors."""

    def __init__(self, spec: WorkerSpec, index: int, past: int, stopping: threading.Event) -> None:
        self._newest = StoredWeights(get_actor(spec.weight_store, WEIGHT_STORE))
        self._recorder = HubClient.of(spec.hub)
        self._buffer = RemoteBuffer.attach(spec.buffer, max_pending=_PUSHES, recorder=self._recorder)
        self._collector = make_collector(spec, index=index, past=past)
        self.worker = Worker(
            spec,
            self._collector,
            newest=self._newest,
            buffer=self._buffer,
            sink=self._recorder,
            moments=RemoteExchange(spec.moments, self._collector) if spec.moments else None,
            stopping=stopping,
        )

    def close(self) -> None:
        """Pushes the remaining fragments and closes everything; the environments last, since they may hang."""
        self._newest.close()
        self.worker.finish()
        self._buffer.close(1.0)
        self._recorder.close(1.0)
        self._collector.close()
