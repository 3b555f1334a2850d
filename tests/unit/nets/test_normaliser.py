"""`brayx.nets.normaliser`: moments of what was learned from, against NumPy's over all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.nets.encoders import Numbers
from brayx.nets.normaliser import CLIP, Normalised, follow, is_fresh
from brayx.nets.transformer import Entities


def vector(size: int = 3) -> Normalised:
    return Normalised(Numbers((size,)), (size,), "x")


def alone(x: torch.Tensor) -> torch.Tensor:
    return x


def batch(seed: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, [0.5, 2.0, 30.0], (4, 6, 3)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy((rng.random((4, 6)) < 0.7).astype(np.float32))


@pytest.mark.parametrize("shift", [0.0, -3.0, 1e5])
def test_the_moments_are_those_of_all_steps_that_count(shift: float) -> None:
    normalised, parts = vector(), [batch(seed, shift) for seed in range(3)]
    module = nn.Sequential(normalised)
    assert is_fresh(module)
    for x, mask in parts:
        follow(module, {"x": torch.where(mask.unsqueeze(-1) > 0, x, 1e6), "y": x}, mask, alone)
    assert not is_fresh(module)
    seen = np.concatenate([x.numpy()[mask.numpy() > 0] for x, mask in parts]).astype(np.float64)
    assert int(normalised.count) == len(seen)
    np.testing.assert_allclose(normalised.mean, seen.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(normalised.variance, seen.var(0), rtol=1e-3)
    x, _ = parts[0]
    expected = np.clip((x.double().numpy() - seen.mean(0)) / seen.std(0), -CLIP, CLIP)
    np.testing.assert_allclose(normalised(x), expected, atol=0.05 if shift > 1 else 1e-4)


def test_two_learners_find_the_moments_of_both_their_batches() -> None:
    (a, mask_a), (b, mask_b) = batch(0), batch(1, 5.0)
    together = vector()
    together.follow(torch.cat([a, b]), torch.cat([mask_a, mask_b]), alone)

    def sums_of(x: torch.Tensor, mask: torch.Tensor, others: list[torch.Tensor]) -> tuple[Normalised, list]:
        sent: list[torch.Tensor] = []

        def total(part: torch.Tensor) -> torch.Tensor:
            sent.append(part)
            return part + others[len(sent) - 1] if len(others) >= len(sent) else part

        ours = vector()
        ours.follow(x, mask, total)
        return ours, sent

    # The second sum needs the first one's result, so it takes two rounds to know what the other learner sends.
    theirs = sums_of(b, mask_b, [])[1][:1]
    ours = sums_of(a, mask_a, theirs)[1]
    theirs = sums_of(b, mask_b, ours[:1])[1]
    first, second = sums_of(a, mask_a, theirs)[0], sums_of(b, mask_b, ours)[0]
    for name in ("mean", "variance", "count"):
        torch.testing.assert_close(getattr(first, name), getattr(together, name))
        torch.testing.assert_close(getattr(second, name), getattr(together, name))


def test_columns_of_entities_are_normalised_over_those_that_are_present() -> None:
    torch.manual_seed(0)
    normalised = Normalised(Entities((4, 2), 8, 2, 1), (4, 2), "units", entities=True)
    x = torch.randn(5, 7, 4, 2) * torch.tensor([1.0, 100.0]) + 50
    x[:, :, 2:] = 0
    mask = torch.ones(5, 7)
    mask[:, -1] = 0
    follow(normalised, {"units": x}, mask, alone)
    present = x[:, :-1, :2].reshape(-1, 2)
    torch.testing.assert_close(normalised.mean, present.mean(0))
    torch.testing.assert_close(normalised.variance, present.var(0, correction=0))
    assert int(normalised.count) == len(present)
    fewer = Normalised(Entities((2, 2), 8, 2, 1), (2, 2), "units", entities=True)
    fewer.load_state_dict(normalised.state_dict())
    torch.testing.assert_close(normalised(x[0]), fewer(x[0, :, :2]), msg="absent rows change nothing")


def test_before_the_first_batch_and_without_steps_numbers_stay_as_they_are() -> None:
    normalised, x = vector(), torch.tensor([[0.5, -2.0, 1e9]])
    torch.testing.assert_close(normalised(x), torch.tensor([[0.5, -2.0, CLIP]]))
    normalised.follow(x, torch.zeros(1), alone)
    assert is_fresh(normalised)
    normalised.follow(x, torch.ones(1), alone)
    assert normalised(x).tolist() == [[0.0, 0.0, 0.0]]
    assert torch.isfinite(normalised(torch.full((1, 3), 3e38))).all()
    assert not is_fresh(nn.Linear(1, 1))
