"""Training in process: it learns, both ways of taking turns, and every kind of environment and sampler runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, get_args

import gymnasium
import numpy as np
import optree
import pytest
import torch
from pydantic import ValidationError

from brayx.algorithms.bc import BCConfig
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.errors import ConfigError, ModelError
from brayx.local.train import _table, train_local
from brayx.local.training import Training
from brayx.nets.central import central_policy_for
from brayx.nets.policy import NetworkConfig
from brayx.replay.samplers import Importance
from brayx.rollout.policy import ActingEngine
from brayx.types import flatten
from tests.unit.local.games import QUICK, TABLE, Kept, Odd, Right, Shown, written
from tests.unit.replay.made import columns
from tests.unit.rollout.worlds import BoxCounting, Counting, MaskedCounting


@pytest.mark.parametrize("blocking", [True, False])
def test_it_learns_and_stops_at_the_target(blocking):
    config = PPOConfig(epochs=4, minibatch_size=128, gamma=0.9)
    result = train_local(
        Right,
        config,
        Training(
            num_steps=20_000, num_envs=16, unroll_length=32, learning_rate=1e-2, target_return=4.8,
            blocking=blocking, evaluation_episodes=10,
        ),
    )  # fmt: skip
    assert result.reason == "target_return"
    assert result.return_mean >= 4.8
    assert result.seconds_to_target == result.seconds
    assert result.evaluation.mean == 5.0
    assert len(result.evaluation.episodes) == 10
    steps = [point.env_steps for point in result.curve]
    assert steps == sorted(set(steps))
    assert steps[-1] == result.env_steps < 20_000
    assert result.curve[-1].return_mean == result.return_mean


def test_the_same_seed_is_the_same_training():
    def weights(seed):
        return train_local("CartPole-v1", training=Training(**QUICK, seed=seed)).module.state_dict()

    first, second, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("env", [BoxCounting, MaskedCounting, Right, "MountainCarContinuous-v0", "Acrobot-v1"])
def test_any_space_is_learned_from(env):
    result = train_local(env, PPOConfig(epochs=1), Training(**QUICK, normalise_reward=True))
    assert result.reason == "num_steps"
    assert 200 <= result.env_steps < 200 + 4 * 8
    assert all(torch.isfinite(parameter).all() for parameter in result.module.parameters())


class Picture(Right):
    """`Right`, which shows nothing but noise: bytes, their channels last, as most environments have them."""

    def __init__(self, size, channels):
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, channels), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset()
        return self.observation_space.sample(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.observation_space.sample(), *rest


@pytest.mark.parametrize("engine", get_args(ActingEngine))
@pytest.mark.parametrize(
    ("convolutions", "size", "channels"), [("small", 20, 3), ("nature", 36, 1), ("impala", 7, 3), ("impala", 64, 1)]
)
def test_images_are_learned_from_by_every_convolution_that_fits_and_every_engine(convolutions, size, channels, engine):
    training = Training(
        **{**QUICK, "num_steps": 32, "engine": engine},
        network=NetworkConfig(convolutions=convolutions, hidden=[]),
        evaluation_episodes=2,
    )
    result = train_local(lambda: Picture(size, channels), PPOConfig(epochs=1), training)
    assert result.updates > 0
    assert all(torch.isfinite(parameter).all() for parameter in result.module.parameters())


def test_an_image_that_is_too_small_is_refused_with_the_networks_that_fit():
    with pytest.raises(ConfigError, match=r"20 x 20 .*36 x 36; .*small, impala"):
        train_local(lambda: Picture(20, 3), training=Training(**QUICK))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("sampler", ["uniform", "prioritised"])
def test_a_table_is_sampled_as_often_as_configured(sampler, blocking):
    result = train_local(
        Counting,
        ImpalaConfig(),
        Training(
            **QUICK, sampler=sampler, batch_size=4, capacity=64, min_columns=8, samples_per_insert=3.0,
            blocking=blocking,
        ),
    )  # fmt: skip
    columns = -(-result.env_steps // 8)
    assert result.updates == pytest.approx((columns - 8) * 3 / 4, abs=8)


def test_importance_weights_grow_by_the_batches_and_go_on_in_a_resumed_training(tmp_path, monkeypatch):
    exponents, exponent = [], Importance.exponent

    def noted(self, before):
        exponents.append(exponent(self, before))
        return exponents[-1]

    monkeypatch.setattr(Importance, "exponent", noted)
    options = {"sampler": "prioritised", "batch_size": 4, "capacity": 64, "min_columns": 8, "samples_per_insert": 1.0}
    options |= QUICK | {"importance_exponent": 0.5, "importance_batches": 30}
    keeper = Kept(tmp_path)
    first = train_local(Counting, ImpalaConfig(), Training(**options), clerk=keeper)
    assert 0 < first.updates == len(exponents) < 30
    train_local(Counting, ImpalaConfig(), Training(**options | {"num_steps": 2000}), clerk=keeper)
    assert exponents == [0.5 + 0.5 * min(1.0, n / 30) for n in range(len(exponents))]
    assert exponents[-1] == 1


def test_columns_are_drawn_by_the_exponent_of_their_priorities():
    for exponent, shares in ((0.0, [0.5, 0.5]), (1.0, [0.25, 0.75]), (2.0, [0.1, 0.9])):
        training = Training(
            sampler="prioritised", batch_size=100, capacity=200, min_columns=1, priority_exponent=exponent
        )
        table = _table(training.of(ImpalaConfig()))
        table.insert({**columns(2).arrays, "priority": np.array([[1.0] * 5, [3.0] * 5])})
        drawn = table.sample()["index"] & 1
        assert np.bincount(drawn) == pytest.approx(100 * np.array(shares), abs=1)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_columns_of_all_environments_are_sampled_however_many_there_are(blocking):
    training = Training(
        num_envs=64, unroll_length=1, num_steps=640, sampler="uniform", min_columns=100, blocking=blocking,
        batch_size=256, samples_per_insert=32.0, engine="torch",
    )  # fmt: skip
    result = train_local("Pendulum-v1", ImpalaConfig(), training)
    assert result.updates == pytest.approx((640 - 100) * 32 / 256, abs=3)


def test_a_table_that_could_never_be_sampled_is_refused():
    with pytest.raises(ConfigError, match="never be sampled"):
        train_local(Counting, training=Training(**QUICK, sampler="uniform", capacity=4, min_columns=8))


def test_a_table_that_is_never_full_enough_to_be_sampled_is_refused():
    with pytest.raises(ConfigError, match=r"min_columns is 1000, .* 781 columns"):
        train_local(Counting, ImpalaConfig(), Training(sampler="uniform", unroll_length=128, vectorization="sync"))


def test_an_algorithm_has_its_own_default_batches():
    def settled(algorithm, **options):
        filled = Training(**options).of(algorithm)
        return filled.sampler, filled.unroll_length, filled.batch_size, filled.samples_per_insert

    assert settled(PPOConfig()) == ("fifo", 64, 32, 1)
    assert settled(MixedConfig()) == settled(MAPPOConfig()) == settled(PPOConfig())
    assert settled(ImpalaConfig(), sampler="prioritised") == ("prioritised", 20, 32, 8)
    assert settled(BCConfig())[:3] == ("fifo", 32, 32)
    assert settled(SACConfig()) == ("uniform", 1, 256, 256)
    assert settled(SACConfig(n_step=4)) == ("uniform", 4, 64, 256)
    assert settled(SACConfig(), batch_size=64) == ("uniform", 1, 64, 64), "still one gradient per transition"
    given = {"sampler": "prioritised", "unroll_length": 8, "batch_size": 16, "samples_per_insert": 2.0}
    assert settled(SACConfig(), **given) == tuple(given.values()), "what is given wins"


def test_sac_takes_a_gradient_for_each_transition_by_default():
    training = Training(num_steps=1_300, num_envs=4, network=NetworkConfig(hidden=[4]))
    result = train_local("Pendulum-v1", SACConfig(), training)
    assert result.updates == pytest.approx(1_300 - training.min_columns, abs=8)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (SACConfig(), {"sampler": "fifo"}, "sampler is 'fifo', .*'sac' learns .* expected uniform or prioritised"),
        (
            SACConfig(),
            {"unroll_length": 128, "batch_size": 256, "samples_per_insert": 32.0, "min_columns": 100},
            "20,000 transitions give 7 gradients of algorithm 'sac', of 32,768 transitions each.*samples_per_insert",
        ),
        (
            ImpalaConfig(),
            {"unroll_length": 128, "num_steps": 100_000},
            "100,000 transitions give 25 gradients of algorithm 'impala', of 4,096 .*num_envs or unroll_length",
        ),
        (PPOConfig(epochs=1, minibatch_size=10_000), {"num_envs": 128}, "20,000 transitions give 3 gradients"),
        (
            SACConfig(),
            {"num_steps": 1_000},
            "1,000 transitions give 0 .*; expected more num_steps, or a smaller ",
        ),
    ],
)
def test_a_training_that_would_learn_next_to_nothing_is_refused(algorithm, options, message):
    with pytest.raises(ConfigError, match=message):
        train_local("Pendulum-v1", algorithm, Training(**{"num_steps": 20_000, **options}))


def test_cloning_with_few_gradients_is_refused_by_the_size_of_its_data(tmp_path: Path):
    data = written(tmp_path / "expert.npz", 4000)  # 625 columns of 32
    training = Training(num_steps=100_000, batch_size=256)
    with pytest.raises(ConfigError, match=r"100,000 .* 13 gradients .*'bc', of 8,192"):
        train_local(Odd, BCConfig(), training, demonstrations=data)
    data = written(tmp_path / "few.npz")  # 7 columns: no batch has more
    assert train_local(Odd, BCConfig(), training, demonstrations=data).updates > 400


def test_priorities_that_the_algorithm_does_not_compute_are_refused():
    with pytest.raises(ConfigError, match=r"'ppo' .*priorities.*: impala, sac$"):
        train_local(Counting, training=Training(**QUICK, sampler="prioritised", min_columns=8, capacity=64))


@pytest.mark.parametrize(
    "option",
    [
        {"num_steps": 0},
        {"num_envs": 0},
        {"learning_rate": -1.0},
        {"sampler": "lifo"},
        {"priority_exponent": -1.0},
        {"importance_exponent": 1.5},
        {"importance_batches": 0},
        {"num_env": 4},
    ],
)
def test_an_invalid_option_is_refused_by_name(option):
    with pytest.raises(ValidationError, match=next(iter(option))):
        Training(**option)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, obs):
        y = self.layer(obs)
        return {"logits": y[..., :2], "value": y[..., 2]}


def test_a_custom_model_is_used():
    def model(obs, spec):
        assert (obs.shape, spec.sizes) == ((4,), (2,))
        return Small(), (np.zeros((1, 4), np.float32),)

    assert isinstance(train_local("CartPole-v1", training=Training(**QUICK), model=model).module, Small)


@pytest.mark.parametrize("engine", get_args(ActingEngine))
def test_an_argument_named_state_is_a_normal_input_in_learning(engine):
    class Bare(Small):
        def forward(self, state):
            return super().forward(state)

    training = Training(**{**QUICK, "engine": engine}, evaluation_episodes=2)
    result = train_local(
        "CartPole-v1", training=training, model=lambda obs, spec: (Bare(), (np.zeros((1, 4), np.float32),))
    )
    assert result.updates > 0


class Columns(Small):
    """Gives a value as a column."""

    def forward(self, obs):
        return {**super().forward(obs), "value": self.layer(obs)[..., 2:]}


class Whole(gymnasium.Env):
    """A game that shows its state beside what an agent sees."""

    observation_space = gymnasium.spaces.Dict(
        obs=gymnasium.spaces.Box(-1, 1, (2,)), state=gymnasium.spaces.Box(-1, 1, (5,))
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def test_a_custom_model_of_another_output_shape_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match=r"\[N, 1\], expected value \[N\]"):
        train_local(
            "CartPole-v1",
            training=Training(**QUICK),
            model=lambda obs, spec: (Columns(), (np.zeros((1, 4), np.float32),)),
        )

    def central(critic):
        module, example = central_policy_for(
            {"obs": np.zeros(2, np.float32), "state": np.zeros(5, np.float32)}, num_actions=3
        )
        module.critic = critic or module.critic
        return lambda obs, spec: (module, example)

    with pytest.raises(ModelError, match=r"critic .*values \[N\]; .*gave \[2, 1\]"):
        train_local(Whole, MAPPOConfig(), Training(**QUICK), model=central(torch.nn.Linear(5, 1)))
    with pytest.raises(ModelError, match=r"critic .* raised RuntimeError"):
        train_local(Whole, MAPPOConfig(), Training(**QUICK), model=central(torch.nn.Linear(4, 1)))
    assert train_local(Whole, MAPPOConfig(epochs=1), Training(**QUICK), model=central(None)).updates > 0


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_sac_learns_networks_of_its_own(env: str) -> None:
    training = Training(
        num_steps=64, num_envs=4, unroll_length=1, sampler="uniform", batch_size=8, samples_per_insert=8.0,
        min_columns=16, network=NetworkConfig(hidden=[8]),
    )  # fmt: skip
    result = train_local(env, SACConfig(), training)
    assert result.updates > 0
    assert result.module.get_submodule("critic") is not None


class Numbered(Whole):
    """The same with discrete observations that do not start at 0."""

    observation_space = gymnasium.spaces.Dict(
        obs=gymnasium.spaces.Dict(kind=gymnasium.spaces.Discrete(5, start=3)),
        state=gymnasium.spaces.Discrete(7, start=-9),
    )


class Turning(Numbered):
    observation_space = gymnasium.spaces.Discrete(6, start=100)
    action_space = gymnasium.spaces.Box(-1, 1, (2,))


class Nested(Whole):
    observation_space = gymnasium.spaces.Dict(
        me=gymnasium.spaces.Dict(
            place=gymnasium.spaces.Box(-1, 1, (2,)),
            hand=gymnasium.spaces.Dict(card=gymnasium.spaces.Discrete(3, start=5)),
        ),
        many=gymnasium.spaces.MultiDiscrete([2, 3], start=[0, 1000]),
    )


def test_the_networks_of_sac_and_mappo_see_whole_numbers_one_hot_too() -> None:
    module = train_local(Numbered, MAPPOConfig(epochs=1), Training(**QUICK)).module
    assert module.encoder({"kind": torch.arange(3, 8)}).tolist() == np.eye(5).tolist()
    assert module.critic.encoder(torch.arange(-9, -2)).tolist() == np.eye(7).tolist()
    quick = Training(**{**QUICK, "num_steps": 40, "min_columns": 2, "batch_size": 2})
    module = train_local(Turning, SACConfig(), quick).module
    for encoder in (module.encoder, module.critic.encoder):
        assert encoder(torch.arange(100, 106)).tolist() == np.eye(6).tolist()


@pytest.mark.parametrize("network", [NetworkConfig(), NetworkConfig(lstm=4), NetworkConfig(entities=["me/hand/x"])])
def test_a_dict_in_a_dict_is_seen_by_the_network(network) -> None:
    train = functools.partial(train_local, Nested, PPOConfig(epochs=1), Training(**QUICK, network=network))
    if network.entities:
        with pytest.raises(ConfigError, match=r"entities .*'me/hand/x'.*'me/hand/card'"):
            train()
        return
    module, (example, *_) = (result := train()).module, result.forward_args
    assert {leaf: value.tolist() for leaf, value in flatten(example).items()} == {
        "many": [[0, 1000]] * 2, "me/hand/card": [5, 5], "me/place": [[0, 0]] * 2,
    }  # fmt: skip
    seen = {"many": [[1, 1002]], "me": {"place": [[0.25, 0.5]], "hand": {"card": [6]}}}
    tensors = optree.tree_map(lambda leaf: torch.tensor(leaf), seen, is_leaf=lambda leaf: isinstance(leaf, list))
    assert module.encoder(tensors).tolist() == [[0.25, 0.5, 0, 1, 0, 1, 2]]


class Lazy(torch.nn.Module):
    """A policy whose layers get their sizes at the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(4)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(obs)
        return {"logits": y[..., :2], "value": y[..., 3]}


def test_a_model_with_lazy_layers_learns() -> None:
    made = Lazy(), (torch.zeros(2, 4),)
    train_local("CartPole-v1", PPOConfig(epochs=1), Training(**QUICK), model=lambda obs, spec: made)
    assert made[0].layer.weight.shape == (4, 4)


@pytest.mark.parametrize(("env", "algorithm"), [(Turning, SACConfig()), (Whole, MAPPOConfig())])
def test_an_option_of_the_network_that_an_algorithm_has_no_use_for_is_refused(env, algorithm) -> None:
    with pytest.raises(ConfigError, match=r"network\.lstm is 8: .* has no memory"):
        train_local(env, algorithm, Training(**QUICK, network=NetworkConfig(lstm=8)))


@pytest.mark.parametrize("algorithm", [PPOConfig(), ImpalaConfig()])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": NetworkConfig(entities=["nope"])}, r"network\.entities has 'nope'"),
        ({"network": NetworkConfig(distribution="sde"), "sde_steps": 4}, r"network\.distribution is sde"),
        ({"sde_steps": 4}, "sde_steps is 4, .*whose distribution is sde"),
    ],
)
def test_an_option_without_effect_is_refused(algorithm, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        train_local("CartPole-v1", algorithm, Training(**QUICK, **options))


@pytest.mark.parametrize(
    ("env", "algorithm", "message"),
    [
        ("CartPole-v1", BCConfig(), "'bc' imitates recorded steps"),
        ("CartPole-v1", MixedConfig(), "no data is marked as such"),
        ("CartPole-v1", MAPPOConfig(), "needs obs/state"),
        ("Pendulum-v1", SACConfig(n_step=9), "n_step 9, and columns have unroll_length 8"),
    ],
)
def test_what_cannot_learn_from_its_own_play_is_refused(env, algorithm, message) -> None:
    with pytest.raises(ConfigError, match=message):
        train_local(env, algorithm, Training(**QUICK))


def test_recorded_episodes_are_cloned_and_no_environment_is_stepped_for_it(tmp_path: Path) -> None:
    Odd.stepped, seen = 0, []
    result = train_local(
        Odd,
        BCConfig(),
        Training(num_steps=20_000, unroll_length=8, batch_size=16, learning_rate=1e-2, evaluation_episodes=10),
        demonstrations=written(tmp_path / "expert.npz"),
        on_update=lambda updates, steps, numbers: seen.append((updates, steps, Odd.stepped, dict(numbers))),
    )
    updates, steps, stepped, numbers = seen[-1]
    assert stepped == 0
    assert (result.reason, result.updates, result.env_steps) == ("num_steps", updates, steps)
    assert 20_000 <= steps < 20_000 + 16 * 8
    assert numbers["loss"] < 0.05
    assert result.evaluation.mean == 5.0


def test_the_learning_rate_of_a_clone_falls_to_the_end_of_its_training(tmp_path: Path) -> None:
    rates: list[float] = []
    train_local(
        Odd,
        BCConfig(),
        Training(num_steps=1_000, unroll_length=10, batch_size=10, learning_rate=1e-2, num_envs=64),
        demonstrations=written(tmp_path / "expert.npz"),
        on_update=lambda updates, steps, numbers: rates.append(numbers["learning_rate"]),
    )
    np.testing.assert_allclose(rates, np.linspace(1e-2, 1e-3, 10))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        (Odd, PPOConfig(learning_rate_schedule="linear", learning_rate_final=0.1, epochs=1), {}),
        (Odd, ImpalaConfig(learning_rate_final=0.1), {}),
        (Odd, ImpalaConfig(learning_rate_final=0.1), TABLE),
        (
            Odd,
            MixedConfig(reinforcement=PPOConfig(learning_rate_schedule="linear", learning_rate_final=0.1, epochs=1)),
            {},
        ),
        ("Pendulum-v1", SACConfig(learning_rate_schedule="linear", learning_rate_final=0.1), TABLE),
        (Whole, MAPPOConfig(learning_rate_schedule="linear", learning_rate_final=0.1, epochs=1), {}),
    ],
    ids=["ppo", "impala", "impala sampled", "mixed", "sac", "mappo"],
)
def test_the_learning_rate_falls_to_its_end_over_the_env_steps(env, algorithm, options, blocking, tmp_path: Path):
    """Each run is learned from at the rate of when it began, so what is left to fall in the end is the last run's."""
    rates: dict[int, float] = {}
    result = train_local(
        env,
        algorithm,
        Training(num_steps=640, num_envs=2, unroll_length=8, learning_rate=1e-2, blocking=blocking, **options),
        demonstrations=written(tmp_path / "expert.npz") if algorithm.name == "mixed" else None,
        on_update=lambda runs, steps, numbers: rates.setdefault(steps, numbers.get("learning_rate")),
    )
    assert result.reason == "num_steps"
    began, ended = list(rates)[-21:-1], list(rates)[-20:]
    assert 640 - 16 <= began[-1] < 640 <= ended[-1]
    expected = [1e-2 * (1 - 0.9 * steps / 640) for steps in began]
    np.testing.assert_allclose([rates[steps] for steps in ended], expected)


def test_without_a_number_of_updates_demonstrations_are_gone_through_once_first(tmp_path: Path) -> None:
    runs: list[int] = []
    training = Training(**{**QUICK, "batch_size": 4})
    data = written(tmp_path / "expert.npz")  # 200 steps, which are 25 columns: 7 batches
    result = train_local(
        Odd, MixedConfig(), training, demonstrations=data, on_update=lambda run, steps, numbers: runs.append(run)
    )
    assert (result.reason, result.updates) == ("num_steps", 7 + runs[-1])
    assert result.env_steps >= 200


def test_a_model_with_a_memory_clones_what_has_its_state_beside_each_step(tmp_path: Path) -> None:
    training = Training(**QUICK, network=NetworkConfig(hidden=[8], lstm=4))
    state = {name: np.zeros((200, 4), np.float32) for name in ("state/c", "state/h")}
    result = train_local(Odd, BCConfig(), training, demonstrations=written(tmp_path / "expert.npz", **state))
    assert result.updates > 0
    half = written(tmp_path / "half.npz", **{"state/c": state["state/c"]})
    with pytest.raises(ConfigError, match="no 'state/h', which the model takes"):
        train_local(Odd, BCConfig(), training, demonstrations=half)


class Recalled(gymnasium.Env):
    """Shows which action is right in the first step of an episode only, of three to six."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right, self._left = int(self.np_random.integers(2)), int(self.np_random.integers(3, 7))
        return np.array([2 * self.right - 1, 0], np.float32), {}

    def step(self, action):
        self._left -= 1
        return np.array([0, 1], np.float32), float(action == self.right), self._left == 0, False, {}


def test_a_memory_is_cloned_from_recordings_that_know_nothing_of_it(tmp_path: Path) -> None:
    """Without one the right action is known in the first step alone."""
    env, steps = Recalled(), []
    for game in range(60):
        (obs, _), over = env.reset(seed=game), False
        while not over:
            after, reward, over, *_ = env.step(env.right)
            steps.append((obs, env.right, reward, over))
            obs = after
    data = tmp_path / "human.npz"
    names = ("obs", "action", "reward", "terminated")
    np.savez(data, **{name: np.array(rows) for name, rows in zip(names, zip(*steps, strict=True), strict=True)})
    training = Training(
        num_steps=15_000, unroll_length=8, batch_size=16, learning_rate=1e-2, evaluation_episodes=40,
        network=NetworkConfig(hidden=[16], lstm=16),
    )  # fmt: skip
    result = train_local(Recalled, BCConfig(), training, demonstrations=data)
    assert all(episode.ret == episode.length for episode in result.evaluation.episodes)
    other = training.model_copy(update={"network": NetworkConfig(hidden=[16])})
    without = train_local(Recalled, BCConfig(), other, demonstrations=data)
    assert sum(episode.ret == episode.length for episode in without.evaluation.episodes) < 30


@pytest.mark.parametrize(
    ("algorithm", "options", "other", "message"),
    [
        (PPOConfig(), {}, {}, "'ppo' does not imitate.* bc, mixed"),
        (BCConfig(), {"normalise_obs": True}, {}, "normalise_obs is True, and the observations of demonstrations stay"),
        (MixedConfig(fit_value=0.5), {"reward_clip": 1.0}, {}, "reward_clip is 1.0, and the rewards of demonstrations"),
        (BCConfig(), {}, {"obs": np.zeros((200, 3))}, "obs: expected shape .* fits: "),
        (BCConfig(), {}, {"action": np.full(200, 2)}, "action: "),
        (BCConfig(), {}, {"reward": np.where(np.arange(200) == 7, np.nan, 1.0)}, "episode 1 .*reward: holds NaN"),
    ],
)
def test_demonstrations_that_do_not_fit_are_refused_before_anything_starts(
    algorithm, options, other, message, tmp_path: Path
) -> None:
    Odd.stepped = 0
    data = written(tmp_path / "expert.npz", **other)
    with pytest.raises(ConfigError, match=message):
        train_local(Odd, algorithm, Training(**QUICK, **options), demonstrations=data)
    with pytest.raises(ConfigError, match="there is no such file"):
        train_local(Odd, BCConfig(), Training(**QUICK), demonstrations=tmp_path / "none.npz")
    assert Odd.stepped == 0


_BOX = gymnasium.spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gymnasium.spaces.Tuple((_BOX, _BOX)), r"observation space is Tuple\(.*Expected a Dict instead of the Tuple"),
        (gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple((_BOX, _BOX))), "Expected a Dict instead of the Tuple"),
        (gymnasium.spaces.Text(5), r"observation space is Text\(.*, which has no single shape: expected Box"),
        (gymnasium.spaces.Sequence(_BOX), r"observation space is Sequence\(.*, which has no single shape"),
    ],
)
def test_observations_without_a_ready_made_network_are_refused(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_local(lambda: Shown(space), training=Training(**QUICK))


def test_a_custom_model_gets_the_parts_of_a_tuple() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)
            self.log_std = torch.nn.Parameter(torch.zeros(2))

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.layer(torch.cat([left, right], -1))
            return {"mean": y[..., :2], "log_std": self.log_std.expand_as(y[..., :2]), "value": y[..., 2]}

    zeros = np.zeros((2, 3), np.float32)
    result = train_local(
        lambda: Shown(gymnasium.spaces.Tuple((_BOX, _BOX))),
        PPOConfig(epochs=1),
        Training(**QUICK),
        model=lambda obs, spec: (Both(), (zeros, zeros)),
    )
    assert result.updates > 0
