"""The running moments for normalisation, shared by a rollout's workers and merged in one actor.

Each worker sends the moments of its new samples and gets back those of all workers, with one small call at a time. A
restarted store gets all moments back from the first worker that calls. A learner saves the moments with its checkpoint
and restores them (`StoredMoments`). Knows nothing of the data behind the moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.cluster.named import call_with_retry, get_actor, is_done, named_actor, result, result_or
from brayx.engines.scaling import Scaling
from brayx.errors import BrayxError, DeadlineExceeded, ModelError, StartupError
from brayx.rollout.collector import Collector
from brayx.rollout.moments import AllMoments, MomentsStore, count_of, from_arrays, obs_scalings, to_arrays

_ANSWER_S = 10.0
_STORE = "the store of the rollouts' moments"


def create_moments(name: str) -> Any:
    """Starts the named store as a Ray actor that Ray restarts, and returns its handle."""
    return named_actor(MomentsStore, name).remote()


class StoredMoments:
    """The moments as a learner saves and restores them: `brayx.trainer.checkpoint.Normaliser`.

    Args:
        store: name of the actor.

    Raises:
        StartupError: it is not running.
    """

    def __init__(self, store: str) -> None:
        self._store = get_actor(store, _STORE)
        self._last: dict[str, np.ndarray] = {}
        self._scalings: dict[str, Scaling] = {}
        self._call: Any = None

    def scalings(self) -> dict[str, Scaling]:
        """As `Collector.scalings`; does not wait, so they may be as old as the last call."""
        if self._call is not None and is_done(self._call):
            moments: AllMoments | None = result_or(None, self._call)  # None: the store is being restarted
            self._call = None
            if moments is not None:
                self._know(moments)
        if self._call is None:
            self._call = self._store.get.remote()
        return self._scalings

    def _know(self, moments: AllMoments) -> None:
        self._scalings = obs_scalings(moments)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As `Collector.state_dict`; if the store does not answer, the last known moments, so that a checkpoint never
        waits."""
        moments: AllMoments | None = result_or(None, self._store.get.remote(), _ANSWER_S)
        if moments is not None:
            self._know(moments)
            self._last = to_arrays(moments)
        return self._last

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores a `state_dict`.

        Raises:
            StartupError: the store does not answer.
        """
        moments = from_arrays(state)
        try:
            result(self._store.restore.remote(moments), _ANSWER_S, _STORE)
        except BrayxError as error:
            raise StartupError(f"the rollouts' moments could not be restored: {error.message}") from error
        self._last = dict(state)
        self._know(moments)


class RemoteExchange:
    """A worker's connection to the store: one call in flight at a time, never awaited in `turn`.

    Args:
        store: name of the actor.
        collector: its normalisers provide new moments and get the shared ones.

    Raises:
        StartupError: the actor is not running.
    """

    def __init__(self, store: str, collector: Collector) -> None:
        self._store = get_actor(store, _STORE)
        self._collector = collector
        self._call: Any = None
        self._known = 0
        self.catch_up()

    def catch_up(self) -> None:
        """Waits for the store's moments and adopts them; if it does not answer, a later turn gets them."""
        with contextlib.suppress(DeadlineExceeded, ModelError):
            self._adopt(call_with_retry(self._store.get, timeout_s=_ANSWER_S, what=_STORE))

    def turn(self) -> None:
        """Adopts the moments of a finished call, and sends the new ones."""
        if self._call is not None:
            if not is_done(self._call):
                return
            # None also while the store restarts: it gets all moments back below.
            moments: AllMoments | None = result_or(None, self._call)
            if moments is not None:
                self._adopt(moments)
            else:
                self._give_back()
        self._call = self._store.exchange.remote(self._collector.drain_moments(), self._known)

    def _give_back(self) -> None:
        """Restores the store from all moments known to this worker, which include its unsent ones."""
        self._collector.drain_moments()
        everything = self._collector.moments()
        self._known = count_of(everything)
        self._store.restore.remote(everything)

    def _adopt(self, all_: AllMoments) -> None:
        self._collector.adopt_moments(all_)
        self._known = count_of(all_)
