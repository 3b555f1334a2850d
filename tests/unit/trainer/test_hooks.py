"""The user's hooks: found and checked before anything starts, and called with the documented arguments."""

from __future__ import annotations

import random
import textwrap
import uuid

import numpy as np
import pytest
import torch

from brayx.actor.agent import record
from brayx.algorithms.build import build
from brayx.algorithms.forward import LearnerForward
from brayx.algorithms.mixed import MixedConfig
from brayx.errors import ConfigError, Diverged, ModelError
from brayx.metrics import Kind
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.trainer.hooks import Hooks, WithLoss, load_hooks
from brayx.trainer.prefetch import Prepare
from brayx.types import DEMONSTRATION
from tests.unit.algorithms.ppo_cases import Stepwise
from tests.unit.algorithms.tables import moved, sgd
from tests.unit.trainer.parts import batches, run
from tests.unit.trainer.test_ranks import ALGORITHMS, COLUMNS, model, with_extra_keys
from tests.unit.trainer.test_ranks import batch as columns_of


@pytest.fixture
def written(tmp_path):
    def write(text):
        name = f"hooks_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name, str(tmp_path)

    return write


def test_a_module_may_define_some_of_the_hooks(written):
    hooks = load_hooks(*written("def evaluate(model, step):\n    return {}\n"))
    assert (hooks.handle, hooks.loss) == (None, None)
    assert hooks.evaluate(None, 1) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has none of handle, loss, evaluate"),
        ("def handle():\n    pass", r"\.handle takes \(\), expected handle\(batch\)"),
        ("def loss(outputs):\n    pass", r"\.loss .*\(outputs\), .*\(outputs, obs\)"),
        ("def evaluate(model, step, more):\n    pass", r"expected evaluate\(model, step\)"),
        ("async def handle(batch):\n    pass", r"\.handle is .*handle\(batch\)"),
        ("handle = 3", r"\.handle is no plain function"),
    ],
)
def test_hooks_that_cannot_be_called_are_refused(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_hooks(*written(text))


def test_hooks_may_have_more_arguments_with_defaults(written):
    load_hooks(*written("def handle(batch, scale=2.0):\n    return batch\ndef loss(*args):\n    return 0\n"))


def test_handle_returns_the_batch_to_learn_from(tmp_path):
    def zero_rewards(batch):
        record("seen", 1, kind="sum", side="left")
        return {**batch, "reward": np.zeros_like(batch["reward"])}

    stream = list(batches(10))
    _, plain, *_ = run(tmp_path / "plain", stream=iter(stream), learning_rate=1e-2)
    for prefetch in (0, 2):
        hooks = Hooks(handle=zero_rewards)
        _, handled, numbers, *_ = run(
            tmp_path / str(prefetch), stream=iter(stream), learning_rate=1e-2, hooks=hooks, prefetch=prefetch
        )
        assert numbers.samples["seen.side:left"] == [1] * 10, "the prefetching thread also records"
        assert numbers.kinds["seen.side:left"] is Kind.SUM
        assert any(
            not np.array_equal(array, plain.published[-1][2][key]) for key, array in handled.published[-1][2].items()
        )
    assert all((batch["reward"] != 0).any() for batch in stream)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_term_is_minimised(tmp_path, accumulate):
    """Half the squared distance of each logit from 3; its gradient pulls the logits to 3 for any rewards."""

    def loss(outputs, obs):
        assert obs.shape[1:] == (3,)
        assert len(outputs["logits"]) == len(obs)
        return 50 * (outputs["logits"] - 3).square().mean()

    algorithm = {"accumulate": accumulate, "max_grad_norm": None}
    _, weights, *_ = run(
        tmp_path, count=40, learning_rate=2e-2, hooks=Hooks(loss=loss), algorithm=algorithm, num_steps=10**6
    )
    np.testing.assert_allclose(logits(weights.published[-1][2]), 3.0, atol=0.3)


POLICY = ("logits", "tanh_mean")


def term(outputs, obs):
    """A term for any policy: the distance of its outputs from 1."""
    return 0.3 * (next(outputs[name] for name in POLICY if name in outputs) - 1).square().mean()


def gradient(config, loss, *stream):
    """The change of each parameter by the last of these batches, under gradient descent with rate 1."""
    torch.manual_seed(0)
    module, forward_args = model(config)
    hooked = module if loss is None else WithLoss(module, Hooks(loss=loss))
    algorithm, prepare = build(config, hooked, sgd(module)), Prepare(forward_args, torch.device("cpu"))
    ready = [prepare(with_extra_keys(batch, config)).tensors for batch in stream]
    for tensors in ready[:-1]:
        algorithm.update(tensors, 0.0)
    torch.manual_seed(1)
    return module, moved(module, lambda: algorithm.update(ready[-1], 0.0))


@pytest.mark.parametrize("accumulate", [1, 3, 64])  # of 4 columns, of PPO's 32 steps
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_term_adds_its_gradient_for_every_algorithm(name, accumulate):
    config = ALGORITHMS[name].model_copy(update={"max_grad_norm": None, "accumulate": accumulate})
    batch = columns_of(5, COLUMNS)
    _, plain = gradient(config, None, batch)
    _, hooked = gradient(config, term, batch)
    torch.manual_seed(0)
    module, _ = model(config)
    seen = torch.from_numpy(batch["obs"] if name in ("impala", "bc") else batch["obs"][:, :-1]).flatten(0, 1)
    outputs = module({"obs": seen} if name == "mappo" else seen)
    term(outputs, seen).backward()
    assert any(p.grad.abs().max() > 1e-2 for p in module.parameters() if p.grad is not None)
    for key, p in module.named_parameters():
        added = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        np.testing.assert_allclose(hooked[key] - plain[key], added, rtol=0, atol=2e-6)


@pytest.mark.parametrize("fit_value", [0.0, 0.4])
@pytest.mark.parametrize("reinforcement", ["ppo", "impala"])
def test_a_loss_term_leaves_out_demonstrations_beside_play(reinforcement, fit_value):
    """Neither in the gradient that they are drawn for, nor in the next one."""
    twice = {"epochs": 2} if reinforcement == "ppo" else {}
    inner = ALGORITHMS[reinforcement].model_copy(update={"max_grad_norm": None, **twice})
    config = MixedConfig(reinforcement=inner, fit_value=fit_value)
    batches = [columns_of(seed, COLUMNS) for seed in range(4)]
    batches[0] |= {DEMONSTRATION: np.ones(batches[0]["mask"].shape, bool)}
    seen = []

    def looking(outputs, obs):
        seen.append(obs.clone())
        return term(outputs, obs)

    gradient(config, looking, *batches)
    cloned, *played = ([torch.from_numpy(batch["obs"])] for batch in batches)
    if reinforcement == "ppo":
        played = [[obs[:, :-1]] * 2 for (obs,) in played]
    expected = [obs for part in (cloned, *played) for obs in part]
    for rows, want in zip(seen, expected, strict=True):
        assert torch.equal(rows.sort(0).values, want.flatten(0, 1).sort(0).values)


def logits(weights):
    from brayx.nets.mlp import ActorCritic

    module = ActorCritic(3, 2, hidden=(16,))
    module.load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})
    with torch.no_grad():
        return module(torch.ones(1, 3))["logits"][0].numpy()


def test_evaluate_measures_without_side_effects(tmp_path):
    seen = []

    def evaluate(model, step):
        seen.append((model.training, torch.is_grad_enabled(), step))
        torch.rand(3), np.random.random(), random.random()
        return {"norm": torch.rand(()), "step": step}

    np.random.seed(0), random.seed(0)
    drawn = np.random.random(), random.random()
    np.random.seed(0), random.seed(0)
    _, plain, *_ = run(tmp_path / "plain", count=6)
    _, weights, numbers, *_ = run(tmp_path / "hooked", count=6, eval_interval=2, hooks=Hooks(evaluate=evaluate))
    assert seen == [(False, False, 32), (False, False, 96), (False, False, 160)]
    assert numbers.samples["eval/step"] == [32, 96, 160]
    assert len(numbers.samples["evaluate_seconds"]) == 3
    for key, array in plain.published[-1][2].items():
        np.testing.assert_array_equal(weights.published[-1][2][key], array)
    assert (np.random.random(), random.random()) == drawn


def raising(*_):
    raise KeyError("reward\nand more")


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (Hooks(handle=raising, name="mine"), "mine.handle raised KeyError"),
        (Hooks(handle=lambda batch: None, name="mine"), "mine.handle gave NoneType"),
        (Hooks(loss=raising, name="mine"), "mine.loss raised KeyError"),
        (
            Hooks(loss=lambda outputs, obs: outputs["logits"], name="mine"),
            r"mine.loss gave \[16, 2\]",
        ),
        (Hooks(loss=lambda outputs, obs: 1.0, name="mine"), "mine.loss gave float"),
        (Hooks(evaluate=raising, name="mine"), "mine.evaluate raised KeyError"),
        (
            Hooks(evaluate=lambda model, step: {"x": "y"}, name="mine"),
            "mine.evaluate gave {'x': 'y'}",
        ),
    ],
)
def test_a_failing_hook_is_named(tmp_path, hooks, message):
    with pytest.raises(ModelError, match=message):
        run(tmp_path, count=2, eval_interval=1, hooks=hooks)


def test_a_nan_loss_term_is_divergence(tmp_path):
    with pytest.raises(Diverged, match="not finite either: 8 weights"):
        run(tmp_path, count=3, hooks=Hooks(loss=lambda outputs, obs: outputs["logits"].sum() * float("nan")))


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_loss_term_keeps_a_recurrent_model_recurrent(stepwise):
    """Outputs of sequences, and their gradients, equal those of the module without the hook."""
    torch.manual_seed(0)
    module, (_, state) = policy_for(np.zeros(3, np.float32), num_actions=2, network=NetworkConfig(hidden=[8], lstm=4))
    module = Stepwise(module) if stepwise else module
    seen = []
    hooks = Hooks(loss=lambda outputs, obs: seen.append(obs) or outputs["logits"].square().mean())
    hooked = WithLoss(module, hooks)
    plain, forward = LearnerForward(module), LearnerForward(hooked)
    assert forward.recurrent
    steps, columns = 5, 2
    obs = torch.randn(steps, columns, 3)
    stored = {key: torch.randn(steps, columns, *leaf.shape[1:]) for key, leaf in state.items()}
    carry = torch.tensor([[False, False], [True, True], [True, False], [True, True], [False, True]])
    want, got = plain(obs, stored, carry), forward(obs, stored, carry)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)
    grads = []
    for outputs in (want, got):
        module.zero_grad()
        outputs["logits"].square().sum().backward(retain_graph=True)
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    term = hooked.extra_loss()
    assert len(seen) == (steps if stepwise else 1), "one term per call: for a step, or for the whole sequence"
    assert term.requires_grad
    assert hooked.extra_loss() is None
