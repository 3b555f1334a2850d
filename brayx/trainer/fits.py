"""Checks a model's outputs against what the algorithm needs, before training starts.

It runs the model once on its own example. Knows nothing of hosts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.build import build, check_critic, check_observed, check_outputs, failure
from brayx.algorithms.config import AlgorithmConfig
from brayx.engines.base import ModelSpec
from brayx.engines.torch import describe, example_leaves, limits_declared
from brayx.errors import ConfigError, ModelError
from brayx.model.build import build_model
from brayx.nets.recurrent import state_argument
from brayx.replay.packing import Layout
from brayx.trainer.config import TrainerConfig
from brayx.trainer.hooks import Hooks, load_hooks
from brayx.types import NestedArray, flatten


def built_to_learn(
    config: TrainerConfig, model: str, module: str, folder: str, job: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], ModelSpec]:
    """Calls the user's ``build_model``; returns the module, its example arguments, and its outputs for them.

    Args:
        config: options of the trainer.
        model: name of the component.
        module: import path of the module with ``build_model``.
        folder: folder that is searched first.
        job: the whole job as plain dicts.

    Raises:
        ConfigError: the module is missing or wrong.
        ModelError: it raised, lacks an output that the algorithm needs, or fails on its own example.
    """
    built, forward_args = build_model(folder, module, model, dict(job))
    described = check_model(config.algorithm, built, forward_args, name=model)
    return built, forward_args, described


def layout_of(
    config: TrainerConfig, model: str, module: str, folder: str, job: Mapping[str, Any]
) -> tuple[Layout, set[str]]:
    """The layout of a model's observations and actions, and the keys of its memory, ``state/...``, that batches must
    have; arguments and errors as `built_to_learn`."""
    built, forward_args, described = built_to_learn(config, model, module, folder, job)
    state_at = state_argument(built)  # a stored memory is a separate field of a batch
    hooks = load_hooks(config.hooks, folder) if config.hooks else Hooks()
    unconverted = hooks.handle is None  # a hook may convert actions and states
    layout = Layout.of_model(
        tuple(arg for index, arg in enumerate(forward_args) if index != state_at),
        actions_of(described) if unconverted else None,
        limits_declared(built) if unconverted else None,
    )
    return layout, set() if state_at is None or not unconverted else set(flatten(forward_args[state_at], "state"))


def check_model(
    algorithm: AlgorithmConfig,
    module: nn.Module,
    forward_args: tuple[NestedArray, ...],
    *,
    name: str = "model",
    state: np.ndarray | None = None,
) -> ModelSpec:
    """Refuses a model that an algorithm cannot learn, by its outputs for its example.

    Args:
        algorithm: options.
        module: not changed, nor are the random generators.
        forward_args: example arguments, batch axis first.
        name: name of the model, for messages.
        state: one state of the game, without batch axis, if the algorithm values states; None: not known.

    Returns:
        The model's inputs and outputs.

    Raises:
        ModelError: it fails on its example, or has other outputs; the message names the output and what was expected.
    """
    with torch.random.fork_rng(devices=[]):
        # A copy, since running may change it; in training mode, which may have more outputs than acting.
        tried = copy.deepcopy(module).cpu()
        described = describe(tried, forward_args)
        shapes = {leaf.path: ["N", *map(str, leaf.shape)] for leaf in described.outputs}
        shown = {path: f"{path} [{', '.join(shape)}]" for path, shape in shapes.items()}
        try:
            check_outputs(algorithm, shown, recurrent=described.state is not None)
        except ConfigError as error:
            gave = ", ".join(shown.values())
            raise ModelError(f"model {name!r}: {error.message}; it gave: {gave}", **error.details) from error
        # A value for each part of the reward.
        ranks = {"logits": ("[N, A]", 2), "value": ("[N, K]", 2) if algorithm.value_heads else ("[N]", 1)}
        for path, shape in shapes.items():
            expected, rank = ranks.get(path.split("/")[0], ("", len(shape)))
            if len(shape) != rank:
                raise ModelError(f"model {name!r} gave {shown[path]}, expected {path} {expected}", output=path)
        try:
            args = _critic_args(algorithm, described, forward_args, state)
            check_critic(algorithm, tried, args, sum(actions_of(described).sizes))
            check_observed(algorithm, _observed(module, forward_args))
        except ConfigError as error:
            raise ModelError(f"model {name!r}: {error.message}", **error.details) from error
        if algorithm.module is not None:
            try:
                build(algorithm, tried, torch.optim.SGD(tried.parameters(), lr=0.0))
            except Exception as error:
                raise ModelError(failure(algorithm, error)) from error
    return described


def actions_of(described: ModelSpec) -> ActionSpec:
    """The actions of a policy with these outputs, which `check_model` has accepted."""
    shapes = {leaf.path: leaf.shape for leaf in described.outputs}
    sizes = tuple(shape[-1] for path, shape in shapes.items() if path.split("/")[0] == "logits")
    for kind in ("", "tanh_"):
        if sizes and f"{kind}mean" in shapes and f"{kind}log_std" in shapes:
            return ActionSpec("hybrid", sizes, (len(sizes) + shapes[f"{kind}mean"][-1],))
    if "logits" in shapes:
        return ActionSpec("discrete", sizes, ())
    if sizes:
        return ActionSpec("multi_discrete", sizes, (len(sizes),))
    if "mean" in shapes:
        return ActionSpec("box", (), shapes["mean"])
    bound = np.ones(shapes["tanh_mean"], np.float32)
    return ActionSpec("box", (), bound.shape, -bound, bound)


def _observed(module: nn.Module, forward_args: tuple[NestedArray, ...]) -> set[str]:
    """Keys of a learner batch for the model's observation."""
    state_at = state_argument(module)
    return set(Layout.of_model(tuple(arg for index, arg in enumerate(forward_args) if index != state_at)).obs)


def _critic_args(
    algorithm: AlgorithmConfig, described: ModelSpec, forward_args: tuple[NestedArray, ...], state: np.ndarray | None
) -> tuple[Any, ...] | None:
    """Two examples of the critic's arguments; None: not known."""
    critic_args: list[Any] = []
    for argument in algorithm.critic.takes if algorithm.critic is not None else ():
        if argument == "obs":
            leaves = [torch.as_tensor(leaf) for leaf in example_leaves(forward_args, batch_size=2)]
            critic_args += described.input_tree.unflatten(leaves)
        elif argument == "action":
            actions = actions_of(described)
            critic_args.append(torch.zeros(2, math.prod(actions.shape) - len(actions.sizes)))
        elif state is None:
            return None
        else:
            critic_args.append(torch.from_numpy(np.stack([state, state])))
    return tuple(critic_args) if critic_args else None
