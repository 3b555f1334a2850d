"""Half precision is limited to the network: losses stay float32, and learning is as good."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch

from brayx.algorithms import bc, impala, ppo, returns, sac
from brayx.algorithms.adam import Adam
from brayx.algorithms.bc import BCConfig
from brayx.algorithms.build import build
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.nets.mlp import ActorCritic
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import SoftActorCritic

COLUMNS, STEPS, UPDATES = 16, 8, 30
ALGORITHMS = {
    "ppo": PPOConfig(gamma=0.9, epochs=2, minibatch_size=64),
    "impala": ImpalaConfig(gamma=0.9),
    "bc": BCConfig(),
    "sac": SACConfig(gamma=0.9, n_step=2, alpha=0.01, tau=0.1),
}
WATCHED = {
    returns: ("gae", "vtrace", "n_steps"),
    ppo: ("ppo_loss",),
    impala: ("impala_loss",),
    bc: ("clone_loss",),
    sac: ("soft_value", "value_of_choices", "critic_loss"),
}
COMPUTES = {
    "ppo": {"gae", "ppo_loss"},
    "impala": {"vtrace", "impala_loss"},
    "bc": {"clone_loss"},
    "sac": {"n_steps", "soft_value", "value_of_choices", "critic_loss"},
}


def made_batch(seed, soft):
    """A batch of a game in which the second action, or one near 0.5, is good; demonstrations mostly take it."""
    rng = np.random.default_rng(seed)
    shape = (COLUMNS, STEPS + 1)
    action = rng.uniform(-0.99, 0.99, (*shape, 1)) if soft else (rng.random(shape) < 0.75).astype(np.int64)
    reward = -np.square(action[..., 0] - 0.5) if soft else action + 1 / 512  # which bf16 cannot tell from 1
    batch = {
        "obs": rng.normal(size=(*shape, 3)),
        "action": action,
        "log_prob": np.log(np.where(action > 0, 0.75, 0.25)) if not soft else np.zeros(shape),
        "reward": reward,
        "terminated": rng.random(shape) < 0.1,
        "truncated": np.zeros(shape, bool),
        "mask": np.repeat(np.arange(STEPS + 1)[None] < STEPS, COLUMNS, 0).astype(float),
    }
    tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
    return {key: x.float() if x.dtype == torch.float64 else x for key, x in tensors.items()}


def learned(name, precision):
    """The policy's quality before and after, its module, and the dtypes of its layers' outputs."""
    torch.manual_seed(0)
    soft = name == "sac"
    module = SoftActorCritic(np.zeros(3, np.float32), 1, NetworkConfig(hidden=[32])) if soft else ActorCritic(3, 2)
    optimizer = Adam(module.parameters(), lr=1e-2, eps=1e-5, fused=True)
    config = ALGORITHMS[name].model_copy(update={"precision": precision, "learning_rate_schedule": "constant"})
    algorithm = build(config, module, optimizer)
    shown, dtypes = torch.randn(64, 3), set()

    def good():
        with torch.no_grad():
            outputs = module(shown)
        if soft:
            return -(outputs["tanh_mean"].tanh() - 0.5).abs().mean().item()
        return outputs["logits"].softmax(-1)[:, 1].mean().item()

    before = good()
    hooks = [
        layer.register_forward_hook(lambda _, __, y: dtypes.add(y.dtype))
        for layer in module.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    for update in range(UPDATES):
        measured = algorithm.update(made_batch(update, soft), 0.0)
        assert all(np.isfinite(number) for number in measured.values())
    for hook in hooks:
        hook.remove()
    tensors = [*module.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    assert {x.dtype for x in tensors} == {torch.float32}, "weights and moments of the gradient"
    return before, good(), dtypes


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bf16_keeps_returns_advantages_and_losses_in_float32_and_learns_as_well(name, monkeypatch):
    seen = {}

    def watched(function):
        def call(*args, **options):
            result = function(*args, **options)
            leaves = optree.tree_leaves((args, options, result))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
            seen.setdefault(function.__name__, set()).update(x.dtype for x in tensors)
            return result

        return call

    for module, functions in WATCHED.items():
        for function in functions:
            monkeypatch.setattr(module, function, watched(getattr(module, function)))
    before, after, dtypes = learned(name, "bf16")
    assert dtypes == {torch.bfloat16}, "or this tests nothing"
    assert seen == {function: {torch.float32} for function in COMPUTES[name]}
    _, exact, dtypes = learned(name, "fp32")
    assert torch.bfloat16 not in dtypes
    assert after > before + 0.1
    assert after == pytest.approx(exact, abs=0.05)
