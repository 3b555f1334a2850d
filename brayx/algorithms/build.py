"""Finds the algorithm that options name, brayx's or the user's own, and checks a job against its needs.

The class of an algorithm's options declares its needs (`AlgorithmConfig`); no algorithm is known by name here.
"""

from __future__ import annotations

import copyreg
import functools
import json
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import torch
from pydantic import PlainValidator, SerializeAsAny, ValidationInfo
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from brayx.algorithms import fast_mlp
from brayx.algorithms.base import ALONE, Across, Algorithm, critic_of
from brayx.algorithms.bc import BCConfig
from brayx.algorithms.columns import TURN
from brayx.algorithms.config import AlgorithmConfig, Policy
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.components import check_module, load_module
from brayx.errors import ConfigError, first_line
from brayx.types import DEMONSTRATION

OURS: tuple[AlgorithmConfig, ...] = (
    PPOConfig(),
    ImpalaConfig(),
    SACConfig(),
    BCConfig(),
    MixedConfig(),
    MAPPOConfig(),
)
"""Default options of each of brayx's algorithms. The first is the default algorithm."""

_OUTPUTS: Mapping[Policy, tuple[str, ...]] = {
    "categorical": ("logits",),
    "gaussian": ("mean", "log_std"),
    "squashed": ("tanh_mean", "tanh_log_std"),
    "hybrid": ("logits", "mean", "log_std"),
    "squashed_hybrid": ("logits", "tanh_mean", "tanh_log_std"),
}
_SPACES: Mapping[str, tuple[Policy, ...]] = {
    "discrete": ("categorical",),
    "multi_discrete": ("categorical",),
    "box": ("gaussian", "squashed"),
    "hybrid": ("hybrid", "squashed_hybrid"),
}
_LEAST_GRADIENTS = 50
"""Least gradient steps of a training, or one per `_MAX_STEPS` transitions if that is fewer. A training with fewer
learns next to nothing."""
_MAX_STEPS = 1_000


def config_class(options: Mapping[str, Any], folder: str = "") -> type[AlgorithmConfig]:
    """The class that validates ``options``: one of brayx's, by ``name``, or the user's own, by ``module``.

    A user's module defines one class derived from `AlgorithmConfig`.

    Args:
        options: options as in a YAML file, not yet validated.
        folder: searched first for the module.

    Raises:
        ConfigError: the algorithm or module does not exist, or the module does not define exactly one such class.
    """
    module = options.get("module")
    if module is None:
        name = options.get("name", OURS[0].name)
        for config in OURS:
            if config.name == name:
                return type(config)
        raise ConfigError(
            f"name is {name!r}, expected one of {', '.join(repr(config.name) for config in OURS)}, or a `module` of "
            "your own",
            key="algorithm",
        )
    if not isinstance(module, str):
        raise ConfigError(f"module is {module!r}, expected an import path such as my_algorithm", key="algorithm")
    loaded = load_module(module, folder)
    classes = [
        value
        for value in vars(loaded).values()
        if isinstance(value, type) and issubclass(value, AlgorithmConfig) and value.__module__ == loaded.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(config.__name__ for config in classes) or "none"
        raise ConfigError(
            f"module {module!r} ({loaded.__file__}) must define one class derived from "
            f"brayx.algorithms.config.AlgorithmConfig, the algorithm's options; it defines {names}",
            module=module,
        )
    (model,) = classes
    if model.build is AlgorithmConfig.build:
        raise ConfigError(
            f"module {module!r} ({loaded.__file__}): {model.__name__} needs a method build(self, module, optimizer, "
            "across) that gives the algorithm",
            module=module,
        )
    # Another process unpickles the options by module and folder, since the folder may not be on its path.
    copyreg.pickle(model, functools.partial(_reduced, module, folder))
    return model


def _reduced(module: str, folder: str, config: AlgorithmConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _restored, (module, folder, config.model_dump())


def _restored(module: str, folder: str, values: Mapping[str, Any]) -> AlgorithmConfig:
    return config_class({"module": module}, folder).model_validate(values)


def _validated(value: Any, info: ValidationInfo) -> AlgorithmConfig:
    if isinstance(value, AlgorithmConfig):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("algorithm", "is not a mapping of options, such as {name: ppo}")
    try:
        model = config_class(value, (info.context or {}).get("folder", ""))
    except ConfigError as error:
        raise PydanticCustomError("algorithm", "{message}", {"message": error.message}) from error
    if not model.model_fields["name"].default:
        value = {"name": value["module"], **value}
    if info.mode == "json":  # strict types, as for a job's other options
        return model.model_validate_json(json.dumps(value), strict=True)
    return model.model_validate(value)


AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmConfig], PlainValidator(_validated)]
"""Options of any algorithm, as a field of a pydantic model. A user's own module is searched first in the ``folder`` of
the validation context."""


def build(
    config: AlgorithmConfig, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across = ALONE
) -> Algorithm:
    """Makes the algorithm of ``config``, accelerated if the module allows it; arguments as for
    `AlgorithmConfig.build`."""
    algorithm = config.build(module, optimizer, across)
    fast_mlp.accelerate(algorithm)
    return algorithm


def failure(config: AlgorithmConfig, error: Exception) -> str:
    """Describes where and why a user's own algorithm raised, for messages."""
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({file}:{frames[-1].lineno})" if frames else ""
    return f"algorithm {config.name!r} raised {type(error).__name__}: {first_line(error)}{place}"


def measuring(config: AlgorithmConfig, module: nn.Module) -> Algorithm:
    """Makes the algorithm of ``config`` for measuring losses only: its updates change no parameter.

    Args:
        config: options of the algorithm.
        module: the unwrapped module; its gradients are overwritten.
    """
    return config.for_measuring().build(module, torch.optim.SGD(module.parameters(), lr=0.0), ALONE)


def _names(fits: Callable[[AlgorithmConfig], bool], kind: str | None = None) -> list[str]:
    """Names of brayx's algorithms that fit, and that can learn actions of this kind."""
    return [algorithm.name for algorithm in OURS if fits(algorithm) and (kind is None or _learns(algorithm, kind))]


def _learns(config: AlgorithmConfig, kind: str) -> bool:
    return bool(set(_SPACES[kind]) & set(config.policies))


def check_space(config: AlgorithmConfig, kind: str) -> None:
    """Refuses an action space that the algorithm does not support.

    Args:
        config: options of the algorithm.
        kind: ``discrete``, ``multi_discrete``, ``box`` or ``hybrid``, as `brayx.actions.ActionSpec` names spaces.

    Raises:
        ConfigError: names the algorithms that fit.
    """
    if not _learns(config, kind):
        fits = _names(lambda _: True, kind)
        raise ConfigError(
            f"algorithm {config.name!r} does not learn actions that are {kind}; these do: {', '.join(fits)}",
            key="algorithm",
            fits=fits,
        )


def check_fits(
    config: AlgorithmConfig,
    *,
    kind: str | None = None,
    unroll_length: int | None = None,
    gives: Collection[str] | None = None,
    sampler: str | None = None,
) -> None:
    """Refuses actions, data or a sampler that the algorithm does not support. Arguments that are None are not checked.

    Args:
        config: options of the algorithm.
        kind: kind of the action space, as for `check_space`.
        unroll_length: transitions of a column.
        gives: keys of the batches, with `DEMONSTRATION` if there are demonstrations.
        sampler: sampler of the buffers of play, by its name in `brayx.replay.config`.

    Raises:
        ConfigError: names what is missing, and the algorithms or options that fit.
    """
    if kind is not None:
        check_space(config, kind)
    n_step = getattr(config, "n_step", 1)
    if unroll_length is not None and n_step > unroll_length:
        raise ConfigError(
            f"algorithm {config.name!r} has n_step {n_step}, and columns have unroll_length {unroll_length}: expected "
            "an unroll_length of at least n_step",
            key="n_step",
        )
    play = config.play
    if sampler == "fifo" and play.needs_table:
        raise ConfigError(
            f"sampler is 'fifo', which gives each transition once, and {play.name!r} learns from each many times: "
            f"expected uniform or prioritised; without the option it is {play.sampling.sampler}",
            key="sampler",
        )
    if sampler == "prioritised" and not play.weighs_columns:
        fits = _names(lambda algorithm: algorithm.sets_priorities, kind)
        raise ConfigError(
            f"sampler is 'prioritised', and {play.name!r} neither gives priorities nor weighs columns by how often "
            f"they come; these do: {', '.join(fits)}",
            key="sampler",
            fits=fits,
        )
    if gives is None:
        return
    for key, why in config.data.items():
        if key not in gives:
            fits = _names(lambda algorithm: not algorithm.data, kind)
            raise ConfigError(
                f"algorithm {config.name!r} {why}; these learn without: {', '.join(fits)}", key="algorithm", fits=fits
            )
    if config.value_heads and "reward_heads" not in gives:
        raise ConfigError(
            f"algorithm {config.name!r} has reward_heads, and no data here has a reward of several parts: expected "
            "the extra reward_heads [T, K] of an agent's fragments or of a source, or reward_heads []",
            key="reward_heads",
        )


def check_enough(config: AlgorithmConfig, *, num_steps: int, batches: float, batch_steps: int, change: str) -> None:
    """Refuses a training with too few gradient steps to learn anything.

    Args:
        config: options of the algorithm.
        num_steps: transitions in the training; 1 only registers what an interrupted one has learned.
        batches: number of batches made of these.
        batch_steps: transitions in a batch.
        change: options to change to get more gradient steps, for the message.

    Raises:
        ConfigError: names the number of gradient steps, and what to change.
    """
    gradients = batches * config.gradients(batch_steps)
    if num_steps > 1 and gradients < min(_LEAST_GRADIENTS, num_steps / _MAX_STEPS):
        raise ConfigError(
            f"{num_steps:,} transitions give {gradients:.0f} gradients of algorithm {config.name!r}, of "
            f"{batch_steps:,} transitions each: too few to learn anything; expected {change}",
            key="batch_size",
        )


def check_batch(config: AlgorithmConfig, batch: Collection[str]) -> None:
    """Refuses a batch of a turn-based game if the algorithm cannot tell other players' moves from the agent's.

    Args:
        config: options of the algorithm.
        batch: keys of the batch.

    Raises:
        ConfigError: names the algorithms that fit.
    """
    if TURN in batch and not config.play.turns:
        fits = _names(lambda algorithm: algorithm.turns)
        raise ConfigError(
            f"turn: algorithm {config.name!r} cannot distinguish other players' moves; these do: "
            f"{', '.join(fits)}, and 'mixed' with reinforcement by one of them",
            key="algorithm",
            fits=fits,
        )


def check_observed(config: AlgorithmConfig, obs: Collection[str]) -> None:
    """Refuses a model without the observation leaves that the algorithm needs.

    Args:
        config: options of the algorithm.
        obs: keys of the model's inputs in a batch; only ``obs`` if it takes a single array.

    Raises:
        ConfigError: names the input that the model must take.
    """
    leaf = next((key for key in config.data if key.startswith("obs/")), None)
    if leaf is not None and "obs" in obs:
        raise ConfigError(
            f"algorithm {config.name!r} learns from {leaf} as well, and the model takes an observation that is one "
            'array: expected one that takes a dict, {"obs": ...}',
            key="algorithm",
        )


def check_outputs(config: AlgorithmConfig, outputs: Collection[str], *, recurrent: bool = False) -> None:
    """Refuses a model without the outputs that the algorithm needs.

    Args:
        config: options of the algorithm.
        outputs: names of the model's outputs.
        recurrent: the model is recurrent.

    Raises:
        ConfigError: names what is missing, or the algorithms that fit.
    """
    names_of_outputs = {name.split("/")[0] for name in outputs}
    fitting = [kind for kind, names in _OUTPUTS.items() if names_of_outputs.issuperset(names)]
    # A hybrid policy has the outputs of two others.
    policy = max(fitting, key=lambda kind: len(_OUTPUTS[kind]), default=None)
    if policy is None:
        raise ConfigError(
            f"the model's outputs are {sorted(names_of_outputs)}, none of which is a policy's: expected "
            + ", or ".join(" and ".join(names) for names in _OUTPUTS.values()),
            key="algorithm",
        )
    if policy not in config.policies:
        fits = _names(lambda algorithm: policy in algorithm.policies)
        expected = ", or ".join(" and ".join(_OUTPUTS[kind]) for kind in config.policies)
        raise ConfigError(
            f"algorithm {config.name!r} does not learn from {' and '.join(_OUTPUTS[policy])}: either the model gives "
            f"{expected}, or one of these learns: {', '.join(fits)}",
            key="algorithm",
            fits=fits,
        )
    if recurrent and not config.recurrent:
        others = ", ".join(_names(lambda algorithm: algorithm.recurrent))
        raise ConfigError(
            f"algorithm {config.name!r} does not learn models with a memory; {others} do", key="algorithm"
        )
    missing = [name for name in config.outputs if name not in names_of_outputs]
    if missing:
        raise ConfigError(
            f"algorithm {config.name!r} needs an output {missing[0]!r}; the model's are {sorted(names_of_outputs)}",
            key="algorithm",
        )


def check_critic(
    config: AlgorithmConfig, module: nn.Module, example: tuple[Any, ...] | None = None, choices: int = 0
) -> None:
    """Refuses a model without the critic that the algorithm needs, or with a critic that returns a wrong shape.

    Args:
        config: options of the algorithm.
        module: the model's module.
        example: arguments of the critic, tensors ``[2, ...]``; None: the shape is not checked.
        choices: number of choices of all discrete actions.

    Raises:
        ConfigError: names the critic's arguments and what it returned.
    """
    needs = config.critic
    if needs is None:
        return
    try:
        critic = critic_of(module, needs.shown)
    except ValueError as error:
        raise ConfigError(f"algorithm {config.name!r} needs a critic: {error}", key="algorithm") from error
    if example is None:
        return
    try:
        with torch.inference_mode():
            value = critic(*example)
    except Exception as error:
        raise ConfigError(
            f"algorithm {config.name!r} calls the critic {needs.shown}, which raised {type(error).__name__}: "
            f"{first_line(error)}",
            key="algorithm",
        ) from error
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    by_choice = choices > 0 and "action" in needs.takes
    rank = needs.rank + by_choice
    if (
        not isinstance(value, Tensor)
        or value.ndim != rank
        or len(value) != 2
        or (by_choice and value.shape[-1] != choices)
    ):
        raise ConfigError(
            f"algorithm {config.name!r} needs a critic {needs.shown}; for N = 2 it gave {shape}", key="algorithm"
        )


def check_recorded(config: AlgorithmConfig, fields: Collection[str]) -> None:
    """Refuses recorded steps without ``log_prob`` for an algorithm that would use them as the agent's own play.

    Args:
        config: options of the algorithm.
        fields: fields of each recorded step; with `DEMONSTRATION` it is a step to imitate.

    Raises:
        ConfigError: names the missing field, and the algorithms that do not need it.
    """
    if not config.needs_log_prob or "log_prob" in fields:
        return
    imitates = config.imitates == "demonstrations"
    if imitates and DEMONSTRATION in fields:
        return
    others = ", ".join(_names(lambda algorithm: not algorithm.needs_log_prob))
    mixed = ", ".join(_names(lambda algorithm: algorithm.imitates == "demonstrations"))
    without = (
        "steps to imitate are" if imitates else f"without it {others} learn, or {mixed}, whose steps to imitate are"
    )
    raise ConfigError(
        f"has no log_prob, how likely each action was when it was taken, which {config.name!r} learns from; {without} "
        "marked by `demonstration: true`",
        key="algorithm",
    )


def algorithm_options(name: str, folder: str = "") -> type[AlgorithmConfig]:
    """The options class of one of brayx's algorithms, or of the user's own by the name of its module.

    Args:
        name: name of the algorithm or module.
        folder: searched first for the module.

    Raises:
        ConfigError: no algorithm has that name; also as for `config_class`.
    """
    if all(config.name != name for config in OURS):
        try:
            check_module(name, folder)
        except ConfigError as error:
            expected = ", ".join(config.name for config in OURS)
            raise ConfigError(
                f"algorithm is {name!r}, expected one of {expected}, or a module of your own: {error.message}",
                key="algorithm",
            ) from None
        return config_class({"module": name}, folder)
    return config_class({"name": name})
