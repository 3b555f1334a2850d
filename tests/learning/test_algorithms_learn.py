"""Every algorithm on something it must learn, in this process: three seeds each, with the returns they saw.

References are those of other libraries with the same recipe; a bound leaves room for unlucky seeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.bc import BCConfig
from brayx.algorithms.build import build
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.torch import module_weights
from brayx.nets.policy import NetworkConfig
from brayx.rollout.collector import Collector
from brayx.rollout.envs import make_envs
from brayx.rollout.evaluate import evaluate
from brayx.rollout.multi import AgentsAsRows
from brayx.rollout.policy import Policy
from brayx.trainer.prefetch import Prepare
from brayx.types import DEMONSTRATION
from pipelines.rollouts import Result, observation_of, ready_made, train_local
from pipelines.training import Training
from tests.learning.rows import Rows, printed
from tests.learning.worlds import Locks, Offers, Rowers, blind_cartpole

pytestmark = pytest.mark.learning
SEEDS = pytest.mark.parametrize("seed", range(3))
CARTPOLE: dict[str, Any] = {
    "num_envs": 8,
    "unroll_length": 32,
    "learning_rate": 1e-3,
    "target_games": 20,
    "vectorization": "sync",
}
"""With PPO's defaults: 8 x 32 steps, one minibatch, 20 epochs, gamma .98, lambda .8, rate and clip falling to 0."""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    yield from printed(request)


def seen(rows: Rows, title: str, seed: int, result: Result) -> float:
    """The greedy policy's mean return, noted."""
    assert result.evaluation is not None
    rows.add(
        title,
        seed=seed,
        env_steps=f"{result.env_steps:,}",
        seconds=f"{result.seconds:.0f}",
        last_training_returns=f"{result.return_mean:.1f}",
        greedy_return=f"{result.evaluation.mean:.1f} ({len(result.evaluation.episodes)} episodes)",
    )
    return result.evaluation.mean


@SEEDS
def test_cartpole_ppo(rows: Rows, seed: int) -> None:
    """Reference: 475 near 25 k steps."""
    training = Training(total_steps=100_000, target_return=475, evaluation_episodes=50, seed=seed, **CARTPOLE)
    result = train_local("CartPole-v1", training=training)
    assert seen(rows, "PPO, CartPole-v1, until 475", seed, result) >= 475
    assert result.env_steps <= 80_000


@SEEDS
def test_cartpole_impala(rows: Rows, seed: int) -> None:
    """Reference: 450 within 2 M steps. Acts with weights that are one or two updates old."""
    result = train_local(
        "CartPole-v1",
        ImpalaConfig(max_grad_norm=40.0, value_coef=0.05, entropy_coef=0.0, learning_rate_schedule="constant"),
        Training(
            total_steps=2_000_000,
            num_envs=10,
            unroll_length=50,
            learning_rate=5e-4,
            normalise_obs=True,
            blocking=False,
            target_return=450,
            target_games=100,
            evaluation_episodes=50,
            seed=seed,
        ),
    )
    assert result.reason == "target_return"
    assert seen(rows, "IMPALA, CartPole-v1, until 450", seed, result) >= 450


@SEEDS
def test_pendulum_ppo(rows: Rows, seed: int) -> None:
    """Reference: -170 after 100 k steps; the deviation over episodes is 100."""
    result = train_local(
        "Pendulum-v1",
        PPOConfig(
            gamma=0.9, gae_lambda=0.95, epochs=10, minibatch_size=64, learning_rate_schedule="constant",
            clip_schedule="constant",
        ),
        Training(
            total_steps=100_000,
            num_envs=4,
            unroll_length=1024,
            learning_rate=1e-3,
            network=NetworkConfig(distribution="sde", log_std=0.0),
            sde_steps=4,
            evaluation_episodes=200,
            seed=seed,
        ),
    )  # fmt: skip
    assert seen(rows, "PPO with state-dependent exploration, Pendulum-v1, 100 k steps", seed, result) >= -190


@SEEDS
def test_pendulum_sac(rows: Rows, seed: int) -> None:
    """Reference: -157 after 20 k steps, with networks of 256; these have 64."""
    network = NetworkConfig(hidden=[64, 64], activation="relu")
    result = train_local(
        "Pendulum-v1",
        SACConfig(),
        Training(
            total_steps=20_000,
            num_envs=4,
            unroll_length=1,
            learning_rate=1e-3,
            network=network,
            sampler="uniform",
            batch_size=256,
            samples_per_insert=256.0,
            min_columns=500,
            evaluation_episodes=200,
            seed=seed,
        ),
    )
    assert seen(rows, "SAC, Pendulum-v1, 20 k steps", seed, result) >= -200


@SEEDS
def test_only_a_memory_solves_cartpole_without_velocities(rows: Rows, seed: int) -> None:
    """Positions are small and move little in a step, so they are normalised; a run is long enough to see them move."""
    config = PPOConfig(epochs=10, minibatch_size=256, gamma=0.99, gae_lambda=0.95, normalise_value=True)
    options: dict[str, Any] = {
        "num_envs": 16, "unroll_length": 64, "learning_rate": 1e-3, "normalise_obs": True, "evaluation_episodes": 50,
        "seed": seed,
    }  # fmt: skip
    memory = NetworkConfig(hidden=[64], lstm=64)
    remembering = Training(total_steps=200_000, target_return=470, network=memory, **options)
    result = train_local(blind_cartpole, config, remembering)
    title = "PPO, CartPole-v1 without velocities"
    assert seen(rows, f"{title}, LSTM, until 470", seed, result) >= 450
    without = train_local(blind_cartpole, config, Training(total_steps=100_000, **options))
    assert seen(rows, f"{title}, no memory", seed, without) < 200


@SEEDS
def test_several_actions_at_once(rows: Rows, seed: int) -> None:
    training = Training(total_steps=30_000, evaluation_episodes=50, seed=seed, **CARTPOLE)
    result = train_local(Locks, training=training)
    assert seen(rows, "PPO, three dials (MultiDiscrete), best 40", seed, result) >= 0.95 * Locks.BEST


@SEEDS
def test_masked_actions(rows: Rows, seed: int) -> None:
    training = Training(total_steps=40_000, evaluation_episodes=50, seed=seed, **CARTPOLE)
    result = train_local(Offers, PPOConfig(gamma=0.5), training)
    # An offer that may not be taken ends the game at -20: a single one would show.
    assert seen(rows, "PPO, masked offers, best 20", seed, result) >= 0.9 * Offers.BEST


def play(module: nn.Module, example: Any, columns: int, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Recorded play of a policy, as columns of 32 steps, and its games' mean return; it draws its actions, as it does
    in training."""
    envs = make_envs("CartPole-v1", 8, vectorization="sync")
    collector = Collector(envs, Policy(module, example), 32, seed=seed)
    runs = [collector.collect().arrays for _ in range(columns // 8)]
    games = [game.ret for game in collector.episodes()]
    collector.close()
    envs.close()
    return {key: np.concatenate([run[key] for run in runs]) for key in runs[0]}, float(np.mean(games))


class Learner:
    """A fresh policy for CartPole and an algorithm, in a loop of its own: nothing but the two is measured."""

    def __init__(self, config: Any, seed: int, learning_rate: float, num_envs: int = 8) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.envs = make_envs("CartPole-v1", num_envs, vectorization="sync")
        spec = ActionSpec.of(self.envs.single_action_space)
        self.module, self.example = ready_made(None, self.envs)(observation_of(self.envs), spec)
        optimizer = torch.optim.Adam(self.module.parameters(), lr=learning_rate, eps=1e-5, fused=True)
        self.algorithm = build(config, self.module, optimizer)
        self._prepare = Prepare(self.example, torch.device("cpu"))

    def update(self, batch: dict[str, np.ndarray], progress: float) -> dict[str, float]:
        return self.algorithm.update(self._prepare(batch).tensors, progress)

    def plays(self, unroll_length: int, total_steps: int, seed: int) -> Iterator[tuple[int, list[float]]]:
        """Plays and learns from it; after each update, the env steps so far and the returns of the games that ended."""
        collector = Collector(self.envs, Policy(self.module, self.example), unroll_length, seed=seed)
        steps = version = 0
        while steps < total_steps:
            version += 1
            collector.load(module_weights(self.module), version)
            batch = dict(collector.collect().arrays)
            steps += int(batch["mask"].sum())
            self.update(batch, steps / total_steps)
            yield steps, [game.ret for game in collector.episodes()]

    def greedy(self, seed: int) -> float:
        return evaluate(self.envs, Policy(self.module, self.example), 50, seed=seed).mean


@SEEDS
def test_a_clone_plays_like_the_expert(rows: Rows, seed: int) -> None:
    training = Training(total_steps=120_000, target_return=490, evaluation_episodes=50, seed=seed, **CARTPOLE)
    expert = train_local("CartPole-v1", training=training)
    recorded, _ = play(expert.module, expert.forward_args, 256, seed)
    clone = Learner(BCConfig(holdout=0.1), seed, learning_rate=1e-3)
    rng = np.random.default_rng(seed)
    measured: dict[str, float] = {}
    for update in range(1500):
        at = rng.permutation(256)[:32]
        measured = clone.update({key: array[at] for key, array in recorded.items()}, update / 1500)
    greedy = clone.greedy(seed)
    assert expert.evaluation is not None
    rows.add(
        "Cloning a CartPole expert from 8 k recorded steps",
        seed=seed,
        expert=f"{expert.evaluation.mean:.1f}",
        holdout_accuracy=f"{measured['holdout_accuracy']:.3f}",
        clone=f"{greedy:.1f} (50 episodes)",
    )
    assert greedy >= 475


def mediocre(seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Recorded play, 8 k steps of it, of a policy that is half trained: its games come to 150 to 250 on average."""
    learner = Learner(PPOConfig(), 100 + seed, learning_rate=1e-3)
    for update, _ in enumerate(learner.plays(32, 100_000, 100 + seed), 1):
        if update >= 16 and update % 4 == 0:
            recorded, mean = play(learner.module, learner.example, 256, seed)
            if 150 <= mean <= 250:
                return recorded, mean
    raise AssertionError("the expert was never mediocre")


def steps_to_475(learner: Learner, seed: int) -> int:
    """Env steps until the last 20 games come to 475; 500,000 if they never do."""
    games: deque[float] = deque(maxlen=20)
    for steps, ended in learner.plays(128, 500_000, seed):
        games += ended
        if len(games) == 20 and np.mean(games) >= 475:
            return steps
    return 500_000


def both_ways(seed: int) -> tuple[float, float, int, int]:
    """The second CartPole reference (4 x 128 steps, few epochs) after the imitation of a mediocre expert, and alone.

    Returns:
        Mean return of the expert, greedy return after imitation, and env steps to 475 of the two.
    """
    reinforcement = PPOConfig(
        epochs=4, minibatch_size=128, entropy_coef=0.01, gamma=0.99, gae_lambda=0.95, clip_schedule="constant"
    )
    recorded, expert = mediocre(seed)
    config = MixedConfig(reinforcement=reinforcement, imitation_coef=0.02, imitation_until=0.02, fit_value=0.5)
    mixed = Learner(config, seed, learning_rate=2.5e-4, num_envs=4)
    rng = np.random.default_rng(seed)
    for _ in range(3000):
        at = rng.permutation(256)[:32]
        demonstrated = {key: array[at] for key, array in recorded.items()}
        mixed.update({**demonstrated, DEMONSTRATION: np.ones((32, 33), np.float32)}, 0.0)
    greedy = mixed.greedy(seed)
    alone = Learner(reinforcement, seed, learning_rate=2.5e-4, num_envs=4)
    return expert, greedy, steps_to_475(mixed, seed), steps_to_475(alone, seed)


def test_imitation_of_a_mediocre_expert_saves_steps(rows: Rows) -> None:
    """A run to 475 takes anything between 20 and 400 k steps, so pairs are counted, and medians are compared. Eight
    of ten or more would come by chance once in eighteen times; `docs/learning.md` has more seeds. The mixed options
    were chosen on the seeds 0 to 2."""
    pairs = []
    for seed in range(40, 50):
        expert, greedy, both, alone = both_ways(seed)
        pairs.append((both, alone))
        rows.add(
            "CartPole-v1 until 475: PPO after a mediocre expert's play, and PPO alone",
            seed=seed,
            expert=f"{expert:.0f}",
            greedy_after_imitation=f"{greedy:.0f}",
            env_steps=f"{both:,}",
            env_steps_alone=f"{alone:,}",
        )
    assert sum(both < alone for both, alone in pairs) >= 8
    assert np.median([both for both, _ in pairs]) < np.median([alone for _, alone in pairs])


def test_a_value_of_the_whole_game_sees_what_was_luck(rows: Rows) -> None:
    """MAPPO against PPO of the same policy whose value sees what its agent sees.

    A rower who has not learned one of the calls costs 2.5, so single seeds tie: what is tested is the mean of ten. The
    game was made on the seeds 0 to 2.
    """
    network = NetworkConfig(hidden=[32])
    options: dict[str, Any] = {
        "epochs": 4,
        "minibatch_size": 480,
        "gamma": 0.95,
        "gae_lambda": 0.95,
        "clip_final": 0.5,
        "normalise_value": True,
    }

    def score(config: Any, state: bool, seed: int) -> float:
        training = Training(
            total_steps=20_000, num_envs=48, unroll_length=40, learning_rate=3e-3, seed=seed, network=network
        )
        result = train_local(lambda: AgentsAsRows(Rowers, 16, state=state), config, training)
        calm = AgentsAsRows(lambda: Rowers(current=0.0), 16, state=state)
        return evaluate(calm, Policy(result.module, result.forward_args), 192, seed=seed).mean

    more = []
    for seed in range(20, 30):
        central, independent = score(MAPPOConfig(**options), True, seed), score(PPOConfig(**options), False, seed)
        more.append(central - independent)
        rows.add(
            "Three rowers (best 10), 20 k agent steps, greedy score without the current",
            seed=seed,
            mappo=f"{central:.2f}",
            independent_ppo=f"{independent:.2f}",
        )
    assert np.mean(more) > 2 * np.std(more, ddof=1) / np.sqrt(len(more))
