"""The reference of `benchmarks/train.py`: Stable-Baselines3's PPO on CartPole-v1 with rl-zoo's hyperparameters.

A separate process, so that its start is timed like brayx's. Prints one JSON document. Knows nothing of brayx.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

NUM_ENVS = 8
UNROLL_LENGTH = 32
INSTALL = ".venv/bin/pip install --constraint requirements.lock '.[bench]'"


def _linear(initial: float) -> Callable[[float], float]:
    return lambda remaining: remaining * initial


def main(argv: list[str] | None = None) -> int:
    """Trains once; exit code 3 with a line that says what to install when Stable-Baselines3 is missing."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(argv)
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError:
        print(f"Stable-Baselines3 is not installed: {INSTALL}", file=sys.stderr)
        return 3
    import torch

    torch.set_num_threads(options.threads)

    points: list[tuple[float, int, int, float | None]] = []
    games = 0

    def on_step(variables: dict[str, Any], _: dict[str, Any]) -> bool:
        """After each rollout: time, env steps, games, mean return of the last 100 games."""
        nonlocal games
        games += sum("episode" in info for info in variables["infos"])
        if model.num_timesteps % (NUM_ENVS * UNROLL_LENGTH) == 0:
            returns = [info["r"] for info in model.ep_info_buffer or ()]
            points.append((time.time(), model.num_timesteps, games, sum(returns) / len(returns) if returns else None))
        return True

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=options.seed),
        n_steps=UNROLL_LENGTH,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=_linear(1e-3),
        clip_range=_linear(0.2),
        seed=options.seed,
        device="cpu",
    )
    model.learn(options.steps, callback=on_step)
    print(json.dumps({"points": points}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
