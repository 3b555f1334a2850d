"""PPO with state-dependent exploration on MountainCarContinuous-v0, compared with Stable-Baselines3 by the same recipe.

    python -m benchmarks.mountain_car uniform --seeds 0 1 2      # a table of docs/learning.md
    python -m benchmarks.mountain_car orthogonal sb3 --seeds 0 1 2 --full

``uniform`` and ``orthogonal`` are the initialisations of brayx's layers; ``sb3`` is Stable-Baselines3, whose layers
start uniform in this recipe, rl-zoo's. A game that reaches the goal returns about 93, another one 0 or less, since
effort costs. A run ends when the goal is found; with ``--full`` it takes 20 k steps, a minute or two per seed, and is
evaluated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.sb3_cartpole import INSTALL
from brayx.algorithms.ppo import PPOConfig
from brayx.local.train import LocalTrainResult, train_local
from brayx.local.training import Training
from brayx.nets.policy import NetworkConfig

ENV = "MountainCarContinuous-v0"
STEPS = 20_000
UNROLL_LENGTH = 8
LOG_STD = -3.29
FOUND = 60.0
"""A mean of the last hundred training games, or of all if there are fewer, that takes several which reach the goal."""
FEWEST_GAMES = 5
"""That the mean is of."""
EVALUATED = 50
"""Episodes that a finished policy is measured by."""
SAME: dict[str, Any] = {"gamma": 0.9999, "gae_lambda": 0.9, "max_grad_norm": 5.0}
"""Options with the same name on both sides."""
_VALUE, _CLIP, _ENTROPY, _EPOCHS, _RATE = 0.19, 0.1, 0.00429, 10, 7.77e-5


@dataclass(frozen=True)
class Row:
    """The result of one run.

    Attributes:
        found: env steps at which the mean of its games first was `FOUND`; None: it never was.
        last_training_returns: mean of its last hundred games.
        greedy_return: mean of `EVALUATED` games in the end; None: of a run that was not full.
    """

    found: int | None
    last_training_returns: float
    greedy_return: float | None

    def __str__(self) -> str:
        found = "never" if self.found is None else f"{self.found:,}"
        greedy = "" if self.greedy_return is None else f" {self.greedy_return:.1f} |"
        return f"{found} | {self.last_training_returns:.1f} |{greedy}"


def train(seed: int, *, uniform_init: bool = True, full: bool = False) -> LocalTrainResult:
    """One run of brayx: until the goal is found, or to its end."""
    algorithm = PPOConfig(
        **SAME,
        value_coef=2 * _VALUE,  # of half the squared error; Stable-Baselines3's is of the whole
        clip_param=_CLIP,
        entropy_coef=_ENTROPY,
        epochs=_EPOCHS,
        minibatch_size=UNROLL_LENGTH,
        learning_rate_schedule="constant",
        clip_schedule="constant",
    )
    training = Training(
        num_steps=STEPS,
        num_envs=1,
        unroll_length=UNROLL_LENGTH,
        learning_rate=_RATE,
        normalise_obs=True,
        normalise_reward=True,
        network=NetworkConfig(distribution="sde", log_std=LOG_STD, uniform_init=uniform_init),
        sde_steps=UNROLL_LENGTH,
        target_return=None if full else FOUND,
        target_games=FEWEST_GAMES,
        evaluation_episodes=EVALUATED if full else 0,
        seed=seed,
    )
    return train_local(ENV, algorithm, training)


def _brayx(seed: int, full: bool, *, uniform_init: bool) -> Row:
    result = train(seed, uniform_init=uniform_init, full=full)
    found = [at.env_steps for at in result.curve if at.episodes >= FEWEST_GAMES and at.return_mean >= FOUND]
    if result.reason == "target_return":  # which ends it before the curve has that point
        found.append(result.env_steps)
    greedy = None if result.evaluation is None else result.evaluation.mean
    return Row(min(found, default=None), result.return_mean, greedy)


def _sb3(seed: int, full: bool) -> Row:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    envs = VecNormalize(make_vec_env(ENV, 1, seed=seed), gamma=SAME["gamma"])
    model = PPO(
        "MlpPolicy",
        envs,
        **SAME,
        vf_coef=_VALUE,
        clip_range=_CLIP,
        ent_coef=_ENTROPY,
        n_epochs=_EPOCHS,
        n_steps=UNROLL_LENGTH,
        batch_size=UNROLL_LENGTH,
        learning_rate=_RATE,
        use_sde=True,
        policy_kwargs={"log_std_init": LOG_STD, "ortho_init": False},
        seed=seed,
        device="cpu",
    )
    returns: list[float] = []
    found: list[int] = []

    def look(variables: dict[str, Any], _: dict[str, Any]) -> bool:
        if "episode" in variables["infos"][0]:
            returns.append(variables["infos"][0]["episode"]["r"])
            if len(returns) >= FEWEST_GAMES and np.mean(returns[-100:]) >= FOUND:
                found.append(model.num_timesteps)
        return full or not found

    model.learn(STEPS, callback=look)
    greedy = None
    if full:
        fresh = VecNormalize(make_vec_env(ENV, 1, seed=10_000 + seed), training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
        evaluated: Any = evaluate_policy(model, fresh, EVALUATED)  # untyped where the extra `bench` is not installed
        greedy = float(evaluated[0])
    return Row(min(found, default=None), float(np.mean(returns[-100:])), greedy)


VARIANTS: dict[str, Callable[[int, bool], Row]] = {
    "uniform": partial(_brayx, uniform_init=True),
    "orthogonal": partial(_brayx, uniform_init=False),
    "sb3": _sb3,
}


def main(argv: list[str] | None = None) -> int:
    """Prints each row when it is ready; returns 3, and says what to install, if Stable-Baselines3 is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mountain_car", description=main.__doc__)
    parser.add_argument("variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--full", action="store_true", help="all 20 k steps, then games without exploration")
    options = parser.parse_args(argv)
    columns = ["start", "seed", "found", "last_training_returns", *(["greedy_return"] if options.full else [])]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for variant in options.variants:
        for seed in options.seeds:
            try:
                print(f"| {variant} | {seed} | {VARIANTS[variant](seed, options.full)}", flush=True)
            except ImportError:
                print(f"Stable-Baselines3 is not installed: {INSTALL}", file=sys.stderr)
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
