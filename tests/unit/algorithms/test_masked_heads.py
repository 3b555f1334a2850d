"""One of two heads is fully masked at times: with every algorithm it stays finite and has no gradient."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.algorithms.bc import BCConfig
from brayx.algorithms.build import build
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.ppo import PPOConfig
from tests.unit.algorithms.ppo_cases import make, make_batch
from tests.unit.algorithms.tables import moved, sgd


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(epochs=1, minibatch_size=10_000, max_grad_norm=None, entropy_coef=0.3),
        ImpalaConfig(max_grad_norm=None, entropy_coef=0.3),
        BCConfig(max_grad_norm=None),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize(("idle", "busy"), [(slice(0, 3), slice(3, 5)), (slice(3, 5), slice(0, 3))])
def test_a_fully_masked_head_beside_an_unmasked_one(config, idle, busy):
    batch, module = make_batch("masked"), make("masked").module
    batch["obs"]["action_mask"][:] = 1
    batch["obs"]["action_mask"][..., idle] = 0
    measured = {}
    gradient = moved(module, lambda: measured.update(build(config, module, sgd(module)).update(batch, 0.0)))
    assert np.isfinite(list(measured.values())).all()
    assert all(np.isfinite(change).all() for change in gradient.values())
    for name in ("head.logits.weight", "head.logits.bias"):
        assert not gradient[name][idle].any()
        assert np.abs(gradient[name][busy]).max() > 1e-4
