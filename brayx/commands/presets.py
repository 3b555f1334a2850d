"""Defaults of `pipelines.ppo --preset tuned`, by environment.

Tuned on two cores for wall time: many environments and large minibatches. Knows nothing of the command line.
"""

from __future__ import annotations

from typing import Any

from brayx.errors import ConfigError

_ANNEALED = {"learning_rate_schedule": "linear", "clip_schedule": "linear"}

_ATARI: dict[str, Any] = {
    "num_workers": 2,
    "num_envs": 8,
    "unroll_length": 64,
    "learning_rate": 5e-4,
    "clip_param": 0.1,
    "epochs": 3,
    "minibatch_size": 256,
    "reward_clip": 1.0,
    "network.convolutions": "small",
    "network.hidden": [],
    "blocking": False,  # games step in their own threads during updates
    **_ANNEALED,
}

PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "num_workers": 4,
        "num_envs": 8,
        "unroll_length": 64,
        "num_steps": 200_000,
        "learning_rate": 3e-3,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "entropy_coef": 0.0,
        "epochs": 8,
        "minibatch_size": 1024,
        **_ANNEALED,
    },
    "Pendulum-v1": {
        "num_workers": 4,
        "num_envs": 4,
        "unroll_length": 128,
        "num_steps": 400_000,
        "learning_rate": 1e-3,
        "gamma": 0.95,
        "entropy_coef": 0.0,
        "epochs": 10,
        "minibatch_size": 512,
        "normalise_obs": True,
        "normalise_reward": True,
        **_ANNEALED,
    },
    "Atari games": _ATARI,
}
"""Presets by Gymnasium id; all Atari games share one."""


def preset_for(env: str) -> dict[str, Any]:
    """The preset of an environment.

    Raises:
        ConfigError: there are none.
    """
    if env in PRESETS:
        return PRESETS[env]
    from brayx.rollout.envs import is_atari

    if is_atari(env):
        return _ATARI
    raise ConfigError(f"no preset for {env!r}; there are presets for {', '.join(PRESETS)}", env=env)
