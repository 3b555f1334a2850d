"""A learner's checks of its model before it starts, and its reports of failures; without Ray running."""

from __future__ import annotations

import textwrap
import uuid

import pytest
import torch
from ray.exceptions import RayTaskError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from brayx.actions import ActionSpec
from brayx.cluster.learner import LearnerSpec, failure, learned_model
from brayx.errors import BadWeights, ConfigError, ModelError, StartupError
from brayx.tracking import Trial
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import layout_of

MODEL = """
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 3)

        def forward(self, obs):
            x = self.net(obs["obs"] if isinstance(obs, dict) else obs)
            return {RETURNS}

    class Critic(torch.nn.Module):
        def forward(self, obs, action):
            return torch.cat([obs, action], -1)

    class Flat(Critic):
        def forward(self, obs, action):
            return obs.sum(-1)

    def build_model(name, config):
        BEGIN
        return Model(), (torch.zeros(1, 2),)
"""


@pytest.fixture
def spec(tmp_path):
    def make(returns, begin="pass", algorithm="ppo", hooks="", **options):
        module = f"model_{uuid.uuid4().hex}"
        text = textwrap.dedent(MODEL).replace("RETURNS", returns).replace("BEGIN", begin)
        (tmp_path / f"{module}.py").write_text(text)
        return LearnerSpec(
            config=TrainerConfig(
                model="model", buffers=["buffer"], algorithm={"name": algorithm, **options}, hooks=hooks or None
            ),
            model_name="model",
            model_module=module,
            model_folder=str(tmp_path),
            buffer="",
            weight_store="",
            hub="",
            trial=Trial("", "", "p", "t"),
        )

    return make


def learned_from(spec):
    return layout_of(spec.config, spec.model_name, spec.model_module, spec.model_folder, spec.model_config)


def layout(spec):
    return learned_from(spec)[0]


GOOD = '"logits": x, "value": x[:, 0]'


def test_a_good_model_is_built_without_side_effects(spec):
    torch.manual_seed(7)
    spec = spec(GOOD + ', "noise": torch.rand(len(obs))')
    module, (example,) = learned_model(spec)
    after = torch.rand(1)
    torch.manual_seed(7)
    torch.nn.Linear(2, 3)
    assert torch.equal(after, torch.rand(1)), "the check does not advance the random numbers"
    assert (module.training, example.shape) == (True, (1, 2))
    assert {path: (shape, dtype.name) for path, (shape, dtype) in layout(spec).obs.items()} == {
        "obs": ((2,), "float32")
    }


STATE = "forward = Model.forward; Model.forward = lambda self, state: forward(self, state)"
"""Renames the argument."""


def test_an_argument_named_state_is_a_normal_input(spec):
    layout, memory = learned_from(spec(GOOD, STATE))
    assert list(layout.obs) == ["obs"]
    assert memory == set()
    _, memory = learned_from(spec(GOOD + ', "state": obs', STATE + "; Model.is_recurrent = True"))
    assert memory == {"state"}


@pytest.mark.parametrize(
    ("returns", "begin", "message"),
    [
        (GOOD + ', "state": obs', STATE, "does not declare whether it is recurrent: expected is_recurrent = True"),
        (GOOD, STATE + "; Model.is_recurrent = True", r"expected an output 'state', got \['logits', 'value'\]"),
        (GOOD, "Model.is_recurrent = True", r"expected an argument 'state', got \['obs'\]"),
        (GOOD, "Model.is_recurrent = torch.nn.Identity()", r"is_recurrent is Identity\(\), expected True or False"),
    ],
)
def test_a_recurrent_state_other_than_declared_is_refused(spec, returns, begin, message):
    with pytest.raises(ModelError, match=message):
        learned_from(spec(returns, begin))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            '"value": x[:, 0], "policy": x',
            "model 'model': the model's outputs are ['policy', 'value'], none of which is a policy's: expected logits, "
            "or mean and log_std, or tanh_mean and tanh_log_std, or logits and mean and log_std, or logits and "
            "tanh_mean and tanh_log_std; it gave: policy [N, 3], value [N]",
        ),
        (
            '"logits": x',
            "model 'model': algorithm 'ppo' needs an output 'value'; the model's are ['logits']; "
            "it gave: logits [N, 3]",
        ),
        (
            '"tanh_mean": x, "tanh_log_std": x',
            "model 'model': algorithm 'ppo' needs an output 'value'; the model's are ['tanh_log_std', 'tanh_mean']; "
            "it gave: tanh_log_std [N, 3], tanh_mean [N, 3]",
        ),
        ('"logits": x, "value": x[:, :1]', "model 'model' gave value [N, 1], expected value [N]"),
        ('"logits": x[:, 0], "value": x[:, 0]', "model 'model' gave logits [N], expected logits [N, A]"),
    ],
)
def test_unusable_outputs_are_named(spec, returns, message):
    with pytest.raises(ModelError) as caught:
        learned_model(spec(returns))
    assert caught.value.message == message


@pytest.mark.parametrize(
    "returns",
    [
        '"logits": (x, x[:, :2]), "value": x[:, 0]',
        '"mean": x, "log_std": x, "value": x[:, 0]',
        '"logits": x, "mean": x, "log_std": x, "value": x[:, 0]',
        '"logits": x, "tanh_mean": x, "tanh_log_std": x, "value": x[:, 0]',
    ],
    ids=["several heads", "Gaussian", "hybrid", "squashed hybrid"],
)
def test_every_policy_that_the_algorithm_learns_is_accepted(spec, returns):
    learned_model(spec(returns))


@pytest.mark.parametrize(
    ("returns", "acts"),
    [
        ('"logits": x, "value": x[:, 0]', ActionSpec("discrete", (3,), ())),
        ('"logits": (x, x[:, :2]), "value": x[:, 0]', ActionSpec("multi_discrete", (3, 2), (2,))),
        ('"mean": x, "log_std": x, "value": x[:, 0]', ActionSpec("box", (), (3,))),
        ('"tanh_mean": x, "tanh_log_std": x, "value": x[:, 0]', ActionSpec("box", (), (3,))),
        ('"logits": x, "mean": x, "log_std": x, "value": x[:, 0]', ActionSpec("hybrid", (3,), (4,))),
        (
            '"logits": (x, x[:, :2]), "mean": x[:, :1], "log_std": x[:, :1], "value": x[:, 0]',
            ActionSpec("hybrid", (3, 2), (3,)),
        ),
        (
            '"logits": x, "tanh_mean": x[:, :1], "tanh_log_std": x[:, :1], "value": x[:, 0]',
            ActionSpec("hybrid", (3,), (2,)),
        ),
    ],
)
def test_the_actions_of_a_model_are_known_in_advance(spec, returns, acts):
    described = layout(spec(returns)).acts
    assert described == acts
    assert (described.low is None) == ("tanh" not in returns or "logits" in returns)


def test_with_a_handle_hook_the_models_actions_are_unknown(spec, tmp_path):
    hooks = f"hooks_{uuid.uuid4().hex}"
    (tmp_path / f"{hooks}.py").write_text("def handle(batch):\n    return batch\n")
    assert layout(spec(GOOD, hooks=hooks)).acts is None


@pytest.mark.parametrize(
    ("algorithm", "returns", "called", "args"),
    [
        (
            "sac",
            '"tanh_mean": x, "tanh_log_std": x',
            r"\(observation, action\) -> \[N, critics\]",
            "torch.zeros(1, 2)",
        ),
        ("mappo", '"logits": x', r"states \[N, \.\.\.\] -> values \[N\]", '{"obs": torch.zeros(1, 2)}'),
    ],
)
def test_a_missing_critic_is_refused_before_anything_starts(spec, algorithm, returns, called, args):
    with pytest.raises(ModelError, match=f"'model': .*'{algorithm}' .*critic.*{called}"):
        learned_model(spec(returns, algorithm=algorithm))
    with_one = f"made = Model(); made.critic = Critic(); return made, ({args},)"
    learned_model(spec(returns, begin=with_one, algorithm=algorithm))


def test_a_critic_with_a_wrong_shape_is_refused_before_anything_starts(spec):
    for gives, message in [
        ("Flat()", r"needs a critic \(observation, action\) -> .*; for N = 2 it gave \[2\]"),
        ("torch.nn.Linear(2, 1)", "calls the critic .*, which raised TypeError"),
    ]:
        begin = f"made = Model(); made.critic = {gives}; return made, (torch.zeros(1, 2),)"
        with pytest.raises(ModelError, match=f"'model': .*'sac' {message}"):
            learned_model(spec('"tanh_mean": x, "tanh_log_std": x', begin=begin, algorithm="sac"))


def test_a_value_per_reward_head_may_be_learned_beside_imitation(spec):
    heads = {"reinforcement": {"name": "ppo", "reward_heads": [{}, {}]}}
    learned_model(spec('"logits": x, "value": x[:, :2]', algorithm="mixed", **heads))
    with pytest.raises(ModelError, match=r"\[N\], expected value \[N, K\]"):
        learned_model(spec(GOOD, algorithm="mixed", **heads))


def test_an_observation_without_room_for_a_state_is_refused_before_anything_starts(spec):
    begin = "made = Model(); made.critic = torch.nn.Linear(2, 1); return made, (torch.zeros(1, 2),)"
    with pytest.raises(ModelError, match=r"'model': .*'mappo' .*obs/state.* dict"):
        learned_model(spec('"logits": x', begin=begin, algorithm="mappo"))


def test_an_error_of_the_users_function_is_one_line(spec):
    with pytest.raises(ModelError, match=r"'model': build_model.*KeyError: 'hidden'"):
        learned_model(spec(GOOD, begin='config["hidden"]'))


def test_a_typed_error_inside_rays_is_found_and_its_message_is_one_line():
    task = RayTaskError("learn", "Traceback\n  many\n  lines", BadWeights("weights: 'w' holds 3 NaN", leaf="w"))
    group = WorkerGroupError("[Rank 0]\nTraceback\nmuch", {0: ConnectionError("peer closed"), 1: task})
    reported = failure(group)
    assert isinstance(reported, BadWeights)
    assert reported.message == "the learner failed: weights: 'w' holds 3 NaN"
    assert reported.details == {"leaf": "w"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerGroupError("[Rank 0]\nmuch", {0: IndexError("out of range\nmore")}), "IndexError: out of range"),
        (ControllerError(TimeoutError("\nranks did not start\nmore")), "TimeoutError: ranks did not start"),
        (ValueError(), "ValueError: without a message"),
    ],
)
def test_an_untyped_failure_is_reported_by_its_innermost_error(error, message):
    reported = failure(error)
    assert isinstance(reported, StartupError)
    assert reported.message == f"the learner failed: {message}"


def test_a_typed_error_keeps_its_class():
    assert isinstance(failure(ConfigError("no")), ConfigError)
