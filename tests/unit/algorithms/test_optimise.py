"""`brayx.algorithms.optimise`: schedules, clipping, micro-batches and half precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from brayx.algorithms.optimise import Optimise, OptimiseConfig, share


def make(lr=1.0, **options):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return net, Optimise(torch.optim.SGD(net.parameters(), lr=lr), OptimiseConfig(**options), net)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 0.5, 0, 0]),
        ({"final": 0.2}, [1, 0.6, 0.2, 0.2]),
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "cosine"}, [1, 0.5, 0, 0]),
        ({"schedule": "cosine", "warmup": 0.5}, [0, 1, 0, 0]),
        ({"schedule": "constant", "warmup": 0.75}, [0, 2 / 3, 1, 1]),
    ],
)
def test_schedules(options, expected):
    assert [share(progress, **options) for progress in (0, 0.5, 1, 7)] == pytest.approx(expected)


def test_cosine_is_slow_at_both_ends():
    assert share(0.25, schedule="cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_every_group_decays_from_its_initial_rate():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "lr": 0.1}])
    optimise = Optimise(optimizer, OptimiseConfig(learning_rate_final=0.5))
    assert optimise.begin(1.0) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    optimise.scale = 2.0
    assert optimise.begin(0.0) == 2.0


@pytest.mark.parametrize("limit", [0.5, None])
def test_gradients_are_clipped_to_the_norm(limit):
    net, optimise = make(max_grad_norm=limit)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    optimise.backward(100 * net(torch.ones(8, 4)).sum())
    norm = optimise.step().item()
    assert norm == pytest.approx(800 * math.sqrt(5), rel=1e-5)
    moved = (torch.cat([p.detach().flatten() for p in net.parameters()]) - before).norm().item()
    assert moved == pytest.approx(limit or norm, rel=1e-4)


def test_gradients_accumulate_until_the_step():
    whole, optimise_whole = make()
    parts, optimise_parts = make()
    x = torch.randn(8, 4)
    for _ in range(2):  # the second step starts from nothing again
        optimise_whole.backward(whole(x).square().sum())
        optimise_whole.step()
        for part in x.split(2):
            optimise_parts.backward(parts(part).square().sum())
        optimise_parts.step()
    torch.testing.assert_close(parts.weight, whole.weight)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_learns_what_full_precision_learns(precision, dtype):
    exact, optimise_exact = make(lr=0.1)
    half, optimise_half = make(lr=0.1, precision=precision)
    x = torch.randn(32, 4)
    for _ in range(5):
        optimise_exact.backward((exact(x) - 1).square().mean())
        optimise_exact.step()
        with optimise_half.autocast():
            y = half(x)
        assert y.dtype == dtype
        optimise_half.backward((y.float() - 1).square().mean())
        norm = optimise_half.step()
    assert norm < 100  # of the gradients, not of the scaled ones
    torch.testing.assert_close(half.weight, exact.weight, rtol=0.05, atol=0.02)


def test_an_overflow_in_fp16_changes_only_the_scale():
    net, optimise = make(precision="fp16")
    before = net.weight.detach().clone()
    scale = optimise.state_dict()["scaler"]["scale"]
    optimise.backward(net(torch.ones(1, 4)).sum() * float("inf"))
    optimise.step()
    assert torch.equal(net.weight, before)
    assert optimise.state_dict()["scaler"]["scale"] < scale


def test_state_is_restored():
    _, optimise = make(precision="fp16")
    optimise.scale = 0.25
    optimise.backward(torch.ones(1, requires_grad=True).sum() + optimise.parameters[0].sum() * float("inf"))
    optimise.step()
    _, other = make(precision="fp16")
    other.load_state_dict(optimise.state_dict())
    assert other.state_dict() == optimise.state_dict()
    assert other.begin(0.0) == 0.25
