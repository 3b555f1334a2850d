"""Moments of several workers are merged exactly, shared with all, and survive the store's process."""

from __future__ import annotations

import numpy as np

from brayx.rollout.moments import Moments, MomentsStore, SharedMoments


class Worker:
    """A worker's exchange with the store: it gives its new samples and adopts the moments of all."""

    def __init__(self, store: MomentsStore) -> None:
        self.store = store
        self.shared = SharedMoments((2,))

    def sees(self, samples: np.ndarray) -> None:
        self.shared.add(samples)

    def calls(self) -> None:
        newer = self.store.exchange({"obs": self.shared.drain()}, known=0)
        assert newer is not None
        self.shared.adopt(newer["obs"])


def close(moments: Moments, samples: np.ndarray) -> None:
    assert moments.count == len(samples)
    np.testing.assert_allclose(moments.mean, samples.mean(0))
    np.testing.assert_allclose(moments.m2 / moments.count, samples.var(0))


def test_all_workers_normalise_by_the_samples_of_all() -> None:
    rng, store = np.random.default_rng(0), MomentsStore()
    samples = rng.normal([3.0, -1.0], [2.0, 0.1], (900, 2))
    workers = [Worker(store) for _ in range(3)]
    for turn in range(3):
        for index, worker in enumerate(workers):
            worker.sees(samples[300 * turn + 100 * index :][:100])
            worker.calls()
    for worker in workers:
        worker.calls()
        close(worker.shared.total, samples)


def test_a_restarted_store_restores_the_moments_with_the_most_samples() -> None:
    few, many = Moments((1,)), Moments((1,))
    few.add(np.array([[1.0], [2.0]]))
    many.add(np.array([[1.0], [2.0], [6.0]]))
    store = MomentsStore()
    assert store.exchange({"obs": Moments((1,))}, known=3) is None
    store.restore({"obs": few})
    assert store.exchange({"obs": Moments((1,))}, known=3) is None, "fewer samples than this worker knows of"
    store.restore({"obs": many})
    store.restore({"obs": few})
    restored = store.exchange({"obs": Moments((1,))}, known=3)
    assert restored is not None
    close(restored["obs"], np.array([[1.0], [2.0], [6.0]]))
