"""The running moments that a rollout's workers normalise by, put together in one actor.

Each worker hands over what it has seen since its last call and takes back the moments of all workers. It has one small
call under way at a time. A store that was restarted gets everything back from the first worker that calls. A learner
saves the moments with its checkpoint and restores them (`StoredMoments`). Knows nothing of what the moments are of.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.engines.scaling import Scaling
from brayx.errors import StartupError
from brayx.rollout.collector import Collector
from brayx.rollout.moments import AllMoments, MomentsStore, count_of, from_arrays, obs_scalings, to_arrays

_ANSWER_S = 10.0
_AGAIN_S = 0.2


def create_moments(name: str, namespace: str) -> Any:
    """Starts the named store as a Ray actor that Ray restarts, and gives its handle."""
    import ray

    actor: Any = ray.remote(MomentsStore)
    return actor.options(name=name, namespace=namespace, num_cpus=0, max_restarts=-1, get_if_exists=True).remote()


def get_moments(name: str, namespace: str) -> Any:
    """The store of that name.

    Raises:
        StartupError: there is none.
    """
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise StartupError(f"no moments {name!r} in namespace {namespace!r}: the job is not running") from None


def stored_moments(name: str, namespace: str) -> StoredMoments:
    """The moments of the store of that name, for checkpoints; errors as `get_moments`."""
    return StoredMoments(get_moments(name, namespace))


class StoredMoments:
    """The moments as a learner saves and restores them: `brayx.trainer.checkpoint.Normaliser`.

    Args:
        store: handle of the actor.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[str, np.ndarray] = {}
        self._scalings: dict[str, Scaling] = {}
        self._asked: Any = None

    def scalings(self) -> dict[str, Scaling]:
        """As `Collector.scalings` has them; does not wait: they may be those of the last time it was asked."""
        import ray

        try:
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                asked, self._asked = self._asked, None
                self._know(ray.get(asked))
            if self._asked is None:
                self._asked = self._store.get.remote()
        except ray.exceptions.RayError:  # it is being restarted
            self._asked = None
        return self._scalings

    def _know(self, found: AllMoments) -> None:
        self._scalings = obs_scalings(found)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As `Collector.state_dict` has them; the last that were known while the store does not answer."""
        import ray

        try:
            found: AllMoments = ray.get(self._store.get.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError:  # it is being restarted: a checkpoint does not wait for it
            return self._last
        self._know(found)
        self._last = to_arrays(found)
        return self._last

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Brings back what `state_dict` gave.

        Raises:
            StartupError: the store does not answer.
        """
        import ray

        moments = from_arrays(state)
        try:
            ray.get(self._store.restore.remote(moments), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise StartupError(f"the rollouts' moments could not be restored: {type(error).__name__}") from error
        self._last = dict(state)
        self._know(moments)


class RemoteExchange:
    """A worker's end of the store: one call on its way at a time, and never waited for.

    Args:
        store: handle of the actor.
        collector: whose normalisers see, and are told what all have seen.
    """

    def __init__(self, store: Any, collector: Collector) -> None:
        self._store = store
        self._collector = collector
        self._call: Any = None
        self._known = 0
        self.catch_up()

    def catch_up(self) -> None:
        """Waits for what the store has now and takes that in; one that is being restarted is asked again. One that does
        not answer is let be: the next turns make up for it."""
        import ray

        deadline = time.monotonic() + _ANSWER_S
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._adopt(ray.get(self._store.get.remote(), timeout=left_s))
                return
            except ray.exceptions.RayActorError:
                time.sleep(_AGAIN_S)
            except ray.exceptions.RayError:
                return

    def turn(self) -> None:
        """Takes in what has come back, and hands over what was seen since."""
        import ray

        if self._call is not None:
            if not ray.wait([self._call], timeout=0)[0]:
                return
            try:
                found: AllMoments | None = ray.get(self._call)
            except ray.exceptions.RayError:  # the store is being restarted, and gets everything back below
                found = None
            if found is not None:
                self._adopt(found)
            else:
                self._give_back()
        self._call = self._store.exchange.remote(self._collector.drain_moments(), self._known)

    def _give_back(self) -> None:
        """All that this worker knows of; what it was about to hand over is in that."""
        self._collector.drain_moments()
        everything = self._collector.moments()
        self._known = count_of(everything)
        self._store.restore.remote(everything)

    def _adopt(self, all_: AllMoments) -> None:
        self._collector.adopt_moments(all_)
        self._known = count_of(all_)
