"""Running moments equal those of all samples together, for any partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import ConfigError
from brayx.rollout.moments import Moments, MomentsStore, ObsNormaliser, RewardNormaliser, SharedMoments


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_parts_merge_to_the_whole_in_any_order(sizes, seed):
    rng = np.random.default_rng(seed)
    parts = [1e4 + rng.standard_normal((size, 3)) * [1, 10, 100] for size in sizes]
    whole, merged = Moments((3,)), Moments((3,))
    for part in parts:
        whole.add(part)
    for index in rng.permutation(len(parts)):
        part_moments = Moments((3,))
        part_moments.add(parts[index])
        merged.merge(part_moments)
    samples = np.concatenate(parts)
    for moments in (whole, merged):
        assert moments.count == len(samples)
        if len(samples) > 1:
            np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-9)
            np.testing.assert_allclose(moments.m2 / moments.count, samples.var(0), rtol=1e-6, atol=1e-9)


def test_a_saved_state_continues():
    moments = Moments((2,))
    moments.add(np.asarray([[1.0, 2.0], [3.0, 6.0]]))
    again = Moments.from_state(moments.state_dict())
    again.add(np.asarray([[5.0, 10.0]]))
    assert again.count == 3
    assert again.mean.tolist() == [3, 6]
    assert moments.mean.tolist() == [2, 4]  # copies


def test_processes_with_shared_moments_count_every_sample_once():
    rng, samples, merged = np.random.default_rng(0), [], Moments()
    processes = [SharedMoments(), SharedMoments()]
    for turn in range(6):
        for process in processes:
            samples.append(rng.standard_normal(5) + turn)
            process.add(samples[-1])
        if turn % 2:
            for process in processes:
                merged.merge(process.drain())
            processes[0].add(samples.append(np.ones(3)) or samples[-1])  # between its drain and its adopt
            for process in processes:
                process.adopt(merged)
    merged.merge(processes[0].drain())
    everything = np.concatenate(samples)
    assert merged.count == len(everything)
    np.testing.assert_allclose(merged.std, everything.std(), rtol=1e-6)
    assert processes[0].total.count == len(everything)
    assert processes[1].total.count == len(everything) - 3


def test_moments_of_other_shapes_do_not_merge():
    with pytest.raises(ConfigError, match=r"\[2\] cannot be merged with \[3\]"):
        Moments((2,)).merge(Moments((3,)))


def test_only_floats_are_normalised_and_outliers_are_clipped():
    normaliser = ObsNormaliser(
        {"obs/x": (1,), "obs/image": (2,)}, {"obs/x": np.dtype(np.float32), "obs/image": np.dtype(np.uint8)}
    )
    normaliser.add("obs/x", np.asarray([[1.0], [3.0]], np.float32))
    assert normaliser("obs/x", np.asarray([[3.0]], np.float32)).tolist() == [[3.0]]  # not before the refresh
    normaliser.refresh()
    assert normaliser("obs/x", np.asarray([[3.0], [2.0], [1e9]], np.float32)).tolist() == [[1.0], [0.0], [10.0]]
    image = np.asarray([[7, 8]], np.uint8)
    assert normaliser("obs/image", image) is image


def test_a_discounted_sum_ends_with_its_episode():
    normaliser = RewardNormaliser(2, gamma=0.5)
    reward = np.asarray([[1, 1, 1, 1], [2, 2, 2, 2]], np.float32)
    done = np.asarray([[0, 1, 0, 0], [0, 0, 0, 0]], bool)
    mask = np.asarray([[1, 1, 0, 1], [1, 1, 1, 1]], np.float32)
    scaled = normaliser(reward * mask, done, mask)
    sums = [1, 1.5, 1, 2, 3, 3.5, 3.75]  # of the unmasked steps
    np.testing.assert_allclose(scaled, reward * mask / np.std(sums), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_sample_is_left_out_and_counted(bad):
    samples = np.random.default_rng(0).normal(3, 2, (50, 2)).astype(np.float32)
    whole, shared = Moments((2,)), SharedMoments((2,))
    whole.add(np.delete(samples, [3, 20], axis=0))
    samples[3, 1], samples[20] = bad, bad
    shared.add(samples)
    shared.add(np.full((4, 2), bad, np.float32))
    for moments in (shared.total, shared.drain()):
        assert moments.count == 48
        np.testing.assert_allclose(moments.mean, whole.mean)
        np.testing.assert_allclose(moments.m2, whole.m2)
    assert shared.skipped == 6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_reward_is_unchanged_and_affects_no_other(bad):
    clean, spoilt = RewardNormaliser(2, gamma=0.5), RewardNormaliser(2, gamma=0.5)
    reward, done, mask = np.ones((2, 6), np.float32), np.zeros((2, 6), bool), np.ones((2, 6), np.float32)
    worse = reward.copy()
    worse[1, 2] = bad
    for _ in range(3):
        expected, got = clean(reward, done, mask), spoilt(worse, done, mask)
    assert np.flatnonzero(~np.isfinite(got)).tolist() == [8]
    assert spoilt.moments.skipped == 3
    np.testing.assert_allclose(got[0], expected[0], rtol=0.3)


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
