"""Options by the names that Stable-Baselines3 and RLlib have for them, and the hint for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "activation_fn": ("network.activation", "activation"),
    "buffer_size": ("capacity",),
    "clip_range": ("clip_param",),
    "clip_range_vf": ("clip_value",),
    "ent_coef": ("entropy_coef", "alpha"),
    "entropy_coeff": ("entropy_coef",),
    "gradient_steps": ("samples_per_insert",),
    "grad_clip": ("max_grad_norm",),
    "lambda_": ("gae_lambda",),
    "learning_starts": ("min_columns",),
    "lr": ("learning_rate",),
    "n_envs": ("num_envs",),
    "n_epochs": ("epochs",),
    "n_steps": ("unroll_length",),
    "net_arch": ("network.hidden", "hidden"),
    "norm_obs": ("normalise_obs",),
    "norm_reward": ("normalise_reward",),
    "num_env_runners": ("num_workers",),
    "num_envs_per_env_runner": ("num_envs",),
    "num_epochs": ("epochs",),
    "ortho_init": ("network.uniform_init", "uniform_init"),
    "policy_kwargs": ("network",),
    "rollout_fragment_length": ("unroll_length",),
    "sde_sample_freq": ("sde_steps",),
    "target_kl": ("kl_target",),
    "total_timesteps": ("num_steps",),
    "train_batch_size_per_learner": ("batch_size",),
    "use_sde": ("network.distribution", "distribution"),
    "vf_coef": ("value_coef",),
    "vf_loss_coeff": ("value_coef",),
}
"""Names here by the name there, as in docs/from-sb3.md: the first that a component has."""


def hint(word: str, known: Collection[str]) -> str:
    """Words that name the known option meant by an unknown one: by `OTHER_NAMES`, or the nearest; empty: none."""
    meant = next((name for name in OTHER_NAMES.get(word, ()) if name in known), "")
    if not meant:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        return f"nearest is {near[0]!r}" if near else ""
    part, dot, option = meant.partition(".")
    return f'use {part}={{"{option}": …}}, or --set {meant}=…' if dot else f"use {meant!r}"
