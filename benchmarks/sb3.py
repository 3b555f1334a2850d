"""Stable-Baselines3's PPO beside brayx's: on CartPole-v1 for `benchmarks.train`, and on MountainCarContinuous-v0.

    python -m benchmarks.sb3 uniform --seeds 0 1 2      # a table of docs/learning.md

On MountainCarContinuous both learn by rl-zoo's recipe, with state-dependent exploration. ``uniform`` and ``orthogonal``
are the initialisations of brayx's layers; ``sb3`` is Stable-Baselines3, whose layers start uniform in this recipe. A
game that reaches the goal returns about 93, another one 0 or less, since effort costs. A run ends when the goal is
found, after 20 k steps at the latest.

``cartpole`` is the reference of `benchmarks.train`, in a process of its own whose start is timed like brayx's: so this
module imports neither torch nor brayx before it needs them. It prints one JSON document. brayx's side of that benchmark
plays `STAMPED`, which records the time of its first action.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

if TYPE_CHECKING:
    from brayx.local.train import LocalTrainResult

INSTALL = ".venv/bin/pip install --constraint requirements.lock '.[bench]'"
STAMPED = "benchmarks.sb3:CartPole-stamped"
FILE = "BRAYX_BENCH_FIRST_TICK"
"""Environment variable with the file that the time goes to, unless another game was first."""


class _Stamped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """After its first step the wrapper costs nothing: steps go to the game itself."""

    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileExistsError), open(os.environ[FILE], "x") as file:
            file.write(repr(time.time()))
        self.step = self.env.step  # type: ignore[method-assign]
        return self.env.step(action)


def _make(**options: Any) -> _Stamped:
    return _Stamped(CartPoleEnv(**options))


gymnasium.register(STAMPED.partition(":")[2], entry_point=_make, max_episode_steps=500)

NUM_ENVS = 8
CARTPOLE_UNROLL = 32


def cartpole(seed: int, steps: int) -> None:
    """Trains on CartPole-v1 with rl-zoo's hyperparameters; prints the course: time, env steps, games, mean return."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)

    points: list[tuple[float, int, int, float | None]] = []
    games = 0

    def on_step(variables: dict[str, Any], _: dict[str, Any]) -> bool:
        """After each rollout: time, env steps, games, mean return of the last 100 games."""
        nonlocal games
        games += sum("episode" in info for info in variables["infos"])
        if model.num_timesteps % (NUM_ENVS * CARTPOLE_UNROLL) == 0:
            returns = [info["r"] for info in model.ep_info_buffer or ()]
            points.append((time.time(), model.num_timesteps, games, sum(returns) / len(returns) if returns else None))
        return True

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=seed),
        n_steps=CARTPOLE_UNROLL,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=lambda remaining: 1e-3 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=seed,
        device="cpu",
    )
    model.learn(steps, callback=on_step)
    print(json.dumps({"points": points}))


ENV = "MountainCarContinuous-v0"
STEPS = 20_000
UNROLL_LENGTH = 8
LOG_STD = -3.29
FOUND = 60.0
"""A mean of the last hundred training games, or of all if there are fewer, that takes several which reach the goal."""
FEWEST_GAMES = 5
"""That the mean is of."""
SAME: dict[str, Any] = {"gamma": 0.9999, "gae_lambda": 0.9, "max_grad_norm": 5.0}
"""Options with the same name on both sides."""
_VALUE, _CLIP, _ENTROPY, _EPOCHS, _RATE = 0.19, 0.1, 0.00429, 10, 7.77e-5


class Row(NamedTuple):
    """The result of one run.

    Attributes:
        found: env steps at which the mean of its games first was `FOUND`; None: it never was.
        last_training_returns: mean of its last hundred games.
    """

    found: int | None
    last_training_returns: float

    def __str__(self) -> str:
        found = "never" if self.found is None else f"{self.found:,}"
        return f"{found} | {self.last_training_returns:.1f} |"


def train(seed: int, *, uniform_init: bool = True) -> LocalTrainResult:
    """One run of brayx: until the goal is found."""
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.train import train_local
    from brayx.local.training import Training
    from brayx.nets.policy import NetworkConfig

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
        target_return=FOUND,
        target_games=FEWEST_GAMES,
        seed=seed,
    )
    return train_local(ENV, algorithm, training)


def _brayx(seed: int, *, uniform_init: bool) -> Row:
    result = train(seed, uniform_init=uniform_init)
    found = [at.env_steps for at in result.curve if at.episodes >= FEWEST_GAMES and at.return_mean >= FOUND]
    if result.reason == "target_return":  # which ends it before the curve has that point
        found.append(result.env_steps)
    return Row(min(found, default=None), result.return_mean)


def _sb3(seed: int) -> Row:
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
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
        return not found

    model.learn(STEPS, callback=look)
    return Row(min(found, default=None), float(np.mean(returns[-100:])))


VARIANTS: dict[str, Callable[[int], Row]] = {
    "uniform": partial(_brayx, uniform_init=True),
    "orthogonal": partial(_brayx, uniform_init=False),
    "sb3": _sb3,
}


def main(argv: list[str] | None = None) -> int:
    """Prints each row when it is ready; returns 3, and says what to install, if Stable-Baselines3 is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", choices=[*VARIANTS, "cartpole"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100_000, help="of cartpole (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        if options.variants == ["cartpole"]:
            cartpole(options.seeds[0], options.steps)
            return 0
        print("| start | seed | found | last_training_returns |\n|---|---|---|---|")
        for variant in options.variants:
            for seed in options.seeds:
                print(f"| {variant} | {seed} | {VARIANTS[variant](seed)}", flush=True)
    except ImportError:
        print(f"Stable-Baselines3 is not installed: {INSTALL}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
