"""`brayx.algorithms.returns` against slow NumPy written like the papers, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms import returns
from brayx.replay.packing import BatchPacker
from brayx.types import Fragment

GAMMA, LAM = 0.97, 0.9


def paper_gae(r, terminated, truncated, values, gamma=GAMMA, lam=LAM):
    """Equation 16 as an explicit sum: each advantage on its own, to the end of its trajectory."""
    steps, columns = r.shape
    advantages = np.zeros_like(r)
    for b in range(columns):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, b] else values[k + 1, b]
                advantages[t, b] += weight * (r[k, b] + gamma * bootstrap - values[k, b])
                if terminated[k, b] or truncated[k, b]:
                    break
                weight *= gamma * lam
    return advantages


def random_batch(seed, steps=23, columns=5):
    rng = np.random.default_rng(seed)
    terminated = rng.random((steps, columns)) < 0.1
    truncated = ~terminated & (rng.random((steps, columns)) < 0.1)
    return rng.normal(size=(steps, columns)), terminated, truncated, rng.normal(size=(steps + 1, columns))


def torch_gae(r, terminated, truncated, values, function=returns.gae):
    discount_t, lambda_t = torch_discounts(terminated, truncated)
    return function(torch.from_numpy(r), discount_t, lambda_t, torch.from_numpy(values)).numpy()


def torch_discounts(terminated, truncated, lam=LAM, own_turn_t=None):
    return returns.discounts(
        torch.from_numpy(terminated),
        torch.from_numpy(truncated),
        gamma=GAMMA,
        lam=lam,
        own_turn_t=None if own_turn_t is None else torch.from_numpy(own_turn_t),
        dtype=torch.float64,
    )


def paper_n_steps(r, terminated, truncated, values, n, gamma=GAMMA):
    """Equation 7.1, every return on its own."""
    steps, columns = r.shape
    result = np.zeros_like(r)
    for b in range(columns):
        for t in range(steps):
            weight = 1.0
            for k in range(t, min(t + n, steps)):
                result[t, b] += weight * r[k, b]
                weight *= 0.0 if terminated[k, b] else gamma
                if terminated[k, b] or truncated[k, b] or k == min(t + n, steps) - 1:
                    result[t, b] += weight * values[k + 1, b]
                    break
    return result


def paper_vtrace(r, terminated, truncated, values, log_rho, own_turn_t, lam=LAM, clips=(1.0, 1.0, 1.0), gamma=GAMMA):
    """Equation 1 as an explicit sum, and section 4.2's advantage."""
    clip_rho, clip_c, clip_pg = clips
    steps, columns = r.shape
    ratio = np.exp(log_rho)
    v, advantage = np.zeros_like(r), np.zeros_like(r)
    for b in range(columns):
        for s in range(steps):
            v[s, b] = values[s, b]
            trace = 1.0
            for t in range(s, steps):
                bootstrap = 0.0 if terminated[t, b] else values[t + 1, b]
                v[s, b] += trace * min(clip_rho, ratio[t, b]) * (r[t, b] + gamma * bootstrap - values[t, b])
                if terminated[t, b] or truncated[t, b]:
                    break
                trace *= gamma * (lam if own_turn_t[t, b] else 1.0) * min(clip_c, ratio[t, b])
        for s in range(steps):
            if terminated[s, b]:
                after = 0.0
            elif truncated[s, b] or s == steps - 1:
                after = values[s + 1, b]
            else:
                mix = lam if own_turn_t[s, b] else 1.0
                after = mix * v[s + 1, b] + (1 - mix) * values[s + 1, b]
            advantage[s, b] = min(clip_pg, ratio[s, b]) * (r[s, b] + gamma * after - values[s, b])
    return v, advantage


def torch_vtrace(r, terminated, truncated, values, log_rho, own_turn_t=None, lam=LAM, clips=(1.0, 1.0, 1.0)):
    discount_t, lambda_t = torch_discounts(terminated, truncated, lam, own_turn_t)
    result = returns.vtrace(
        torch.from_numpy(r),
        discount_t,
        lambda_t,
        torch.from_numpy(values),
        torch.from_numpy(log_rho),
        clip_rho=clips[0],
        clip_c=clips[1],
        clip_pg_rho=clips[2],
    )
    return result.target.numpy(), result.advantage.numpy()


@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_the_papers_sum(seed):
    batch = random_batch(seed)
    np.testing.assert_allclose(torch_gae(*batch), paper_gae(*batch), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_return_equals_the_books_recursion(seed):
    r, terminated, truncated, values = random_batch(seed)
    expected = np.zeros_like(r)
    for b in range(r.shape[1]):
        after = values[-1, b]
        for t in reversed(range(len(r))):
            lam = 0.0 if terminated[t, b] or truncated[t, b] else LAM
            bootstrap = (1 - lam) * values[t + 1, b] + lam * after
            after = expected[t, b] = r[t, b] + (0.0 if terminated[t, b] else GAMMA) * bootstrap
    got = torch_gae(r, terminated, truncated, values, returns.lambda_returns)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def n_step_returns(r_t, discount_t, lambda_t, values, n):
    """Rewards of `n_steps` and the value to bootstrap from, ``[T, ...]``."""
    result = returns.n_steps(r_t, discount_t, lambda_t, n)
    return result.reward + result.discount * values.gather(0, result.at)


@pytest.mark.parametrize("n", [1, 2, 5, 22, 23, 100])
def test_n_step_return_equals_the_books_sum(n):
    batch = random_batch(n)
    discount_t, lambda_t = torch_discounts(*batch[1:3], lam=1.0)
    r, values = torch.from_numpy(batch[0]), torch.from_numpy(batch[3])
    got = n_step_returns(r, discount_t, lambda_t, values, n)
    np.testing.assert_allclose(got.numpy(), paper_n_steps(*batch, n), rtol=0, atol=1e-9)


def test_n_step_returns_lie_between_one_step_and_the_lambda_return():
    batch = random_batch(0)
    discount_t, lambda_t = torch_discounts(*batch[1:3], lam=1.0)
    arguments = torch.from_numpy(batch[0]), discount_t, lambda_t, torch.from_numpy(batch[3])
    one_step = arguments[0] + discount_t * arguments[3][1:]
    torch.testing.assert_close(n_step_returns(*arguments, 1), one_step, rtol=0, atol=1e-12)
    torch.testing.assert_close(n_step_returns(*arguments, 23), returns.lambda_returns(*arguments), rtol=0, atol=1e-12)


def test_n_steps_returns_the_bootstrap_positions():
    """Three columns of four: one has no end, one is truncated after its second transition, one terminates there."""
    r = torch.tensor([[1.0], [2.0], [4.0], [8.0]]).expand(4, 3)
    end = torch.tensor([[False, False, False], [False, True, True], [False, False, False], [False, False, False]])
    terminated = end & torch.tensor([False, False, True])
    discount_t, lambda_t = returns.discounts(terminated, end & ~terminated, gamma=0.5, lam=1.0)
    result = returns.n_steps(r, discount_t, lambda_t, 3)
    assert result.reward.T.tolist() == [[3.0, 6.0, 8.0, 8.0], [2.0, 2.0, 8.0, 8.0], [2.0, 2.0, 8.0, 8.0]]
    assert result.discount.T.tolist() == [[0.125, 0.125, 0.25, 0.5], [0.25, 0.5, 0.25, 0.5], [0.0, 0.0, 0.25, 0.5]]
    assert result.at.T.tolist() == [[3, 4, 4, 4], [2, 2, 4, 4], [2, 2, 4, 4]]
    with pytest.raises(ValueError, match="n: "):
        returns.n_steps(r, discount_t, lambda_t, 0)


@pytest.mark.parametrize("clips", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.5), (1e9, 1e9, 1e9)])
@pytest.mark.parametrize("seed", range(3))
def test_vtrace_equals_the_papers_sum(seed, clips):
    batch = random_batch(seed)
    rng = np.random.default_rng(100 + seed)
    log_rho, own_turn_t = rng.normal(scale=0.5, size=batch[0].shape), rng.random(batch[0].shape) < 0.6
    expected = paper_vtrace(*batch, log_rho, own_turn_t, clips=clips)
    for got, want in zip(torch_vtrace(*batch, log_rho, own_turn_t, clips=clips), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


def test_vtrace_without_clips_equals_huge_clips():
    batch = random_batch(0)
    log_rho = np.random.default_rng(0).normal(size=batch[0].shape)
    for got, want in zip(
        torch_vtrace(*batch, log_rho, clips=(None, None, None)),
        torch_vtrace(*batch, log_rho, clips=(1e9, 1e9, 1e9)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_on_policy_vtrace_equals_the_lambda_return_and_gae(lam):
    r, terminated, truncated, values = random_batch(3)
    target, advantage = torch_vtrace(r, terminated, truncated, values, np.zeros_like(r), lam=lam)
    discount_t, lambda_t = torch_discounts(terminated, truncated, lam)
    arguments = torch.from_numpy(r), discount_t, lambda_t, torch.from_numpy(values)
    np.testing.assert_allclose(target, returns.lambda_returns(*arguments).numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(advantage, returns.gae(*arguments).numpy(), rtol=0, atol=1e-12)


def test_a_truncation_bootstraps_from_its_last_value_and_ignores_later_steps():
    r, terminated, truncated, values = random_batch(5, steps=6, columns=1)
    terminated[:], truncated[:] = False, False
    truncated[2] = True
    log_rho = np.random.default_rng(1).normal(size=r.shape)
    target, advantage = torch_vtrace(r, terminated, truncated, values, log_rho)
    changed = r.copy()
    changed[3:] += 100.0
    other = values.copy()
    other[4:] -= 100.0
    again, advantage_again = torch_vtrace(changed, terminated, truncated, other, log_rho)
    np.testing.assert_array_equal(target[:3], again[:3])
    np.testing.assert_array_equal(advantage[:3], advantage_again[:3])
    expected = min(1.0, np.exp(log_rho[2, 0])) * (r[2, 0] + GAMMA * values[3, 0] - values[2, 0])
    assert advantage[2, 0] == pytest.approx(expected, abs=1e-12)


def test_targets_ignore_values_where_other_players_move():
    r, terminated, truncated, values = random_batch(6, steps=8, columns=2)
    terminated[:], truncated[:] = False, False
    own_turn_t = np.ones_like(terminated)
    own_turn_t[2:5] = False
    log_rho = np.zeros_like(r)
    strange = values.copy()
    strange[3:6] += 50.0  # the states after transitions 2, 3 and 4
    for got, want in zip(
        torch_vtrace(r, terminated, truncated, strange, log_rho, own_turn_t, lam=0.3),
        torch_vtrace(r, terminated, truncated, values, log_rho, own_turn_t, lam=0.3),
        strict=True,
    ):
        np.testing.assert_allclose(got[:3], want[:3], rtol=0, atol=1e-12)
    strange_targets = torch_vtrace(r, terminated, truncated, strange, log_rho, lam=0.3)[0]
    targets = torch_vtrace(r, terminated, truncated, values, log_rho, lam=0.3)[0]
    assert np.abs(strange_targets - targets)[:3].min() > 1e-3  # without turns they differ


@pytest.mark.parametrize("which", ["gae", "lambda", "n_step", "vtrace"])
def test_packed_episodes_equal_separate_episodes(which):
    """A truncated episode is followed by its last state, as packing lays it out: a row that only bootstraps."""
    rng = np.random.default_rng(9)
    lengths, kinds = (
        [5, 1, 7, 1, 4, 3],
        ["terminated", "truncated", "truncated", "truncated", "terminated", "truncated"],
    )
    episodes = []
    for length, kind in zip(lengths, kinds, strict=True):
        ends = np.zeros((2, length, 1), bool)
        ends[0 if kind == "terminated" else 1, -1] = True
        episodes.append(
            (rng.normal(size=(length, 1)), *ends, rng.normal(size=(length, 1)), rng.normal(size=(length, 1)))
        )

    def compute(r, terminated, truncated, values, log_rho):
        discount_t, lambda_t = torch_discounts(terminated, truncated, 1.0 if which == "n_step" else LAM)
        arguments = [
            torch.from_numpy(x) for x in (r, discount_t.numpy(), lambda_t.numpy(), np.append(values, [[7.0]], 0))
        ]
        if which == "gae":
            return returns.gae(*arguments).numpy()
        if which == "lambda":
            return returns.lambda_returns(*arguments).numpy()
        if which == "n_step":
            return n_step_returns(*arguments, 3).numpy()
        return np.concatenate([x.numpy() for x in returns.vtrace(*arguments, torch.from_numpy(log_rho))], -1)

    rows, real = [], []
    for kind, episode in zip(kinds, episodes, strict=True):
        behind = [np.full((1, 1), last, array.dtype) for last, array in zip((0, 0, 0, 7.0, 0), episode, strict=True)]
        rows += [episode, behind] if kind == "truncated" else [episode]
        real += [True] * len(episode[0]) + [False] * (kind == "truncated")
    together = compute(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))[real]
    apart = np.concatenate([compute(*episode) for episode in episodes])
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-12)


def test_results_are_float64_or_at_least_float32():
    for dtype, expected in [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.half, torch.float32),
    ]:
        x = torch.ones(3, 1, dtype=dtype)
        values = torch.ones(4, 1, dtype=dtype)
        results = (
            returns.gae(x, x, x, values),
            returns.lambda_returns(x, x, x, values),
            n_step_returns(x, x, x, values, 2),
            *returns.vtrace(x, x, x, values, x),
        )
        assert {result.dtype for result in results} == {expected}


def test_literal_numbers():
    """Two steps, gamma 1/2, lambda 1/2: delta = (1 + 1 - 1, 2 + 0 - 2) and A_0 = 1 + 0 / 4."""
    column = torch.tensor([[1.0], [2.0]])
    half, cut = torch.full((2, 1), 0.5), torch.tensor([[0.5], [0.0]])
    values = torch.tensor([[1.0], [2.0], [9.0]])
    assert returns.gae(column, cut, half, values).tolist() == [[1.0], [0.0]]
    assert returns.gae(column, half, cut, values).tolist() == [[1.0 + 0.25 * 4.5], [4.5]]


def test_termination_stops_the_bootstrap_and_truncation_only_the_trace():
    yes, no = torch.tensor([[True]]), torch.tensor([[False]])
    assert [x.item() for x in returns.discounts(yes, no, gamma=0.5, lam=0.25)] == [0.0, 0.0]
    assert [x.item() for x in returns.discounts(no, yes, gamma=0.5, lam=0.25)] == [0.5, 0.0]
    assert [x.item() for x in returns.discounts(no, no, gamma=0.5, lam=0.25)] == [0.5, 0.25]


def test_half_precision_is_computed_in_float32():
    r = torch.full((300, 1), 0.1, dtype=torch.bfloat16)
    ones = torch.ones(300, 1)
    result = returns.gae(r, ones, ones, torch.zeros(301, 1, dtype=torch.bfloat16))
    assert result.dtype == torch.float32
    assert result[0].item() == pytest.approx(300 * r[0].item(), rel=1e-5)


def test_no_gradient_flows_through_a_target():
    values = torch.zeros(3, 1, requires_grad=True)
    ones, log_rho = torch.ones(2, 1), torch.zeros(2, 1, requires_grad=True)
    assert not returns.lambda_returns(ones, ones, ones, values).requires_grad
    rewards = torch.ones(2, 1, requires_grad=True)
    assert not any(result.requires_grad for result in returns.n_steps(rewards, ones, ones, 2))
    assert not any(result.requires_grad for result in returns.vtrace(ones, ones, ones, values, log_rho))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("discount_t", [(4, 2), (4,), (4, 2), (5, 2)]),
        ("lambda_t", [(4, 2), (4, 2), (3, 2), (5, 2)]),
        ("values", [(4, 2), (4, 2), (4, 2), (4, 2)]),
        ("r_t", [(0, 2), (0, 2), (0, 2), (1, 2)]),
    ],
)
def test_wrong_shapes_are_named(name, shapes):
    arguments = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=name):
        returns.gae(*arguments)
    with pytest.raises(ValueError, match=name):
        returns.vtrace(*arguments, torch.zeros(shapes[0]))


def test_log_rho_of_another_shape_is_named():
    ones = torch.ones(3, 2)
    with pytest.raises(ValueError, match="log_rho"):
        returns.vtrace(ones, ones, ones, torch.ones(4, 2), torch.ones(3))


@pytest.mark.parametrize("seed", range(4))
def test_gae_of_packed_episodes_equals_gae_of_each_episode(seed):
    """The property that packing, masks and end flags must give together, if each episode fits in a column."""
    rng = np.random.default_rng(seed)
    value_of = rng.normal(size=(1000,)).astype(np.float32)
    packer, expected, batches, first = BatchPacker(batch_size=3, unroll_length=80), {}, [], 0
    for end in ("terminated", "truncated", "neither", "terminated", "truncated", "terminated", "neither") * 3:
        length = int(rng.integers(1, 18))
        obs = np.arange(first, first + length + 1, dtype=np.int64)
        reward = rng.normal(size=length).astype(np.float32)
        fragment = Fragment(
            obs=obs,
            action=obs[:-1],
            log_prob=np.zeros(length, np.float32),
            reward=reward,
            terminated=end == "terminated",
            truncated=end == "truncated",
            policy_version=np.zeros(length, np.int64),
        )
        ends = np.zeros((2, length, 1), bool)
        ends[0 if end == "terminated" else 1, -1] = True
        alone = paper_gae(reward[:, None].astype(float), ends[0], ends[1], value_of[obs][:, None].astype(float))
        expected.update(zip(obs[:-1].tolist(), alone[:, 0].tolist(), strict=True))
        batches += list(packer.add(fragment))
        first += length + 1
    batches.append(packer.flush())
    learned, exact = set(), 0
    for batch in batches:
        r, terminated, truncated = (batch[k][:, :-1].T for k in ("reward", "terminated", "truncated"))
        values = value_of[batch["obs"]].T
        got = torch_gae(r.astype(float), terminated, truncated, values.astype(float))
        for t, b in zip(*np.nonzero(batch["mask"][:, :-1].T), strict=True):
            step = int(batch["action"][b, t])
            learned.add(step)
            ends_here = (terminated | truncated)[t:, b].any()  # not the episode that the column's end truncates
            if ends_here:
                assert got[t, b] == pytest.approx(expected[step], abs=1e-6)
                exact += 1
    assert learned == set(expected)
    assert exact > 0.8 * len(expected)


def slow(decay, x):
    y = np.zeros_like(x)
    after = np.zeros_like(x[0])
    for t in reversed(range(len(x))):
        after = y[t] = x[t] + decay[t] * after
    return y


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (31, 2), (32, 2), (33, 2), (100, 3, 2), (128,), (64, 1025)])
def test_the_recurrence(shape):
    rng = np.random.default_rng(0)
    decay, x = rng.random(shape) * (rng.random(shape) < 0.9), rng.normal(size=shape)
    inputs = torch.from_numpy(decay), torch.from_numpy(x)
    copies = [tensor.clone() for tensor in inputs]
    np.testing.assert_allclose(returns.backward_recurrence(*inputs).numpy(), slow(decay, x), rtol=0, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("steps", range(1, 40))
def test_chunks_of_any_size_equal_rows(steps):
    rng = np.random.default_rng(steps)
    decay, x = torch.from_numpy(rng.random((steps, 2))), torch.from_numpy(rng.normal(size=(steps, 2)))
    expected = returns.rows(decay, x)
    for size in (2, 3, 5, steps + 2):
        torch.testing.assert_close(returns.chunks(decay, x, size), expected, rtol=0, atol=1e-12)


def test_a_decay_of_one_sums_and_a_decay_of_zero_copies():
    x = torch.arange(50, dtype=torch.float64).view(50, 1)
    assert returns.backward_recurrence(torch.ones_like(x), x)[0].item() == 49 * 50 / 2
    assert torch.equal(returns.backward_recurrence(torch.zeros_like(x), x), x)
