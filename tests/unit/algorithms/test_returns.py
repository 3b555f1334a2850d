"""`brayx.algorithms.returns` against slow NumPy written like the papers, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms import returns
from brayx.replay.packing import Packer
from brayx.types import Fragment

GAMMA, LAM = 0.97, 0.9


def paper_gae(r, terminated, truncated, values, gamma=GAMMA, lam=LAM):
    """Equation 16 as the sum it stands for: every advantage on its own, until its trajectory ends."""
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
    discount_t, lambda_t = returns.discounts(
        torch.from_numpy(terminated), torch.from_numpy(truncated), gamma=GAMMA, lam=LAM
    )
    # `discounts` gives the default dtype; the oracle wants every digit.
    discount_t, lambda_t = GAMMA * (discount_t > 0).double(), LAM * (lambda_t > 0).double()
    return function(torch.from_numpy(r), discount_t, lambda_t, torch.from_numpy(values)).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_papers_sum(seed):
    batch = random_batch(seed)
    np.testing.assert_allclose(torch_gae(*batch), paper_gae(*batch), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_return_is_the_books_recursion(seed):
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
    ones = torch.ones(2, 1)
    assert not returns.lambda_returns(ones, ones, ones, values).requires_grad


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
    with pytest.raises(ValueError, match=name):
        returns.gae(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("seed", range(4))
def test_gae_of_packed_episodes_equals_gae_of_each_episode(seed):
    """The property that packing, masks and end flags have to give together, columns long enough for every episode."""
    rng = np.random.default_rng(seed)
    value_of = rng.normal(size=(1000,)).astype(np.float32)
    packer, expected, batches, at = Packer(batch_size=3, unroll_length=80), {}, [], 0
    for end in ("terminated", "truncated", "neither", "terminated", "truncated", "terminated", "neither") * 3:
        length = int(rng.integers(1, 18))
        obs = np.arange(at, at + length + 1, dtype=np.int64)
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
        at += length + 1
    batches.append(packer.flush())
    learned, exact = set(), 0
    for batch in batches:
        r, terminated, truncated = (batch[k][:, :-1].T for k in ("reward", "terminated", "truncated"))
        values = value_of[batch["obs"]].T
        got = torch_gae(r.astype(float), terminated, truncated, values.astype(float))
        for t, b in zip(*np.nonzero(batch["mask"][:, :-1].T), strict=True):
            step = int(batch["action"][b, t])
            learned.add(step)
            ends_here = (terminated | truncated)[t:, b].any()  # not the episode that the column's end cuts
            if ends_here:
                assert got[t, b] == pytest.approx(expected[step], abs=1e-6)
                exact += 1
    assert learned == set(expected)
    assert exact > 0.8 * len(expected)
