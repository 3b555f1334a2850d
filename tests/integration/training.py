"""A training on the session's Ray, in a thread of the test."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from brayx.cluster.cluster import Cluster
from brayx.cluster.job import layout_of, train_on
from brayx.jobs.config import JobConfig
from brayx.jobs.result import TrainResult
from tests.integration.conftest import Ingress
from tests.waiting import until

WAIT_S = 600.0
"""Every step is of a few seconds; only a hanging one takes as long."""


class Training(threading.Thread):
    """Trains in the background; leaving its context interrupts a training that goes on.

    Attributes:
        result: of the training, once it has ended.
    """

    def __init__(self, job: JobConfig, ingress: Ingress, uri: str) -> None:
        super().__init__(name="training", daemon=True)
        self._job, self._uri = job, uri
        self._cluster = Cluster(port=int(ingress.http.rpartition(":")[2]), address="auto")
        self.result: TrainResult | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Training:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), interrupt)
        self.join(WAIT_S)

    def run(self) -> None:
        try:
            self.result = train_on(self._cluster, self._job, layout_of(self._job), self._uri)
        except BaseException as error:
            self._error = error

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition, while the training goes on."""
        until(lambda: self._error or condition(), what, timeout_s=WAIT_S)
        if self._error is not None:
            raise self._error
