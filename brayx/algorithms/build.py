"""The algorithm that a configuration names, and whether it fits what a model gives. Torch only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, get_args

import torch
from pydantic import BaseModel, Discriminator, Tag
from torch import Tensor, nn

from brayx.algorithms import mappo, sac
from brayx.algorithms.base import ALONE, Across, Algorithm
from brayx.algorithms.bc import BC, BCConfig
from brayx.algorithms.critic import critic_of
from brayx.algorithms.impala import Impala, ImpalaConfig
from brayx.algorithms.mappo import MAPPO, STATE, MAPPOConfig
from brayx.algorithms.mixed import Mixed, MixedConfig
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.algorithms.sac import SAC, SACConfig
from brayx.errors import ConfigError, first_line
from brayx.types import DEMONSTRATION


def _name(options: Any) -> Any:
    """Of options that name no algorithm, PPO's."""
    return options.get("name", "ppo") if isinstance(options, Mapping) else getattr(options, "name", None)


AlgorithmConfig = Annotated[
    Annotated[PPOConfig, Tag("ppo")]
    | Annotated[ImpalaConfig, Tag("impala")]
    | Annotated[SACConfig, Tag("sac")]
    | Annotated[BCConfig, Tag("bc")]
    | Annotated[MixedConfig, Tag("mixed")]
    | Annotated[MAPPOConfig, Tag("mappo")],
    Discriminator(_name),
]
"""Options of any algorithm; ``name`` says which, PPO if it is absent."""

_LEARNS = {
    "ppo": ("categorical", "gaussian", "squashed"),
    "impala": ("categorical", "gaussian", "squashed"),
    "sac": ("squashed",),
    "bc": ("categorical", "gaussian", "squashed"),
    "mixed": ("categorical", "gaussian", "squashed"),
    "mappo": ("categorical", "gaussian", "squashed"),
}
"""The policies that each algorithm learns."""
_NEEDS = {"ppo": ("value",), "impala": ("value",), "sac": (), "bc": (), "mixed": ("value",), "mappo": ()}
"""What a model must give beside its policy."""
_OF_ITS_OWN = ("ppo", "impala", "mixed", "mappo")
"""Those that learn from play whose log-probabilities are known; `mixed` beside demonstrations."""
_ASKS = {
    "bc": (
        DEMONSTRATION,
        "imitates what was recorded, and there is no such data, as a job's `source` or `demonstrations` have",
    ),
    "mixed": (
        DEMONSTRATION,
        "imitates demonstrations, and nothing marks any, as a job's `source` or `demonstrations` do",
    ),
    "mappo": (STATE, f"needs {STATE}, what the whole game is like, and observations have no leaf of that name"),
}
"""What batches must have for an algorithm, beside what any play gives."""
_PRIORITIES = ("impala", "sac")
"""Algorithms that set a sampled column's priority, and weigh the column by how often it comes."""
_UNWEIGHED = ("ppo", "mappo")
"""Algorithms that do neither. Cloning weighs columns, whose priorities may be pushed with them."""
_NEED_TABLE = ("sac",)
"""Algorithms that take one gradient step a batch, and so must learn from each transition many times."""
_LEAST_GRADIENTS = 50
"""A training needs as many gradient steps, or one for each `_MOST_STEPS` transitions where that is fewer: with less it
learns next to nothing."""
_MOST_STEPS = 1_000
_CRITICS = {"sac": sac.CRITIC, "mappo": mappo.CRITIC}
_OUTPUTS = {
    "categorical": ("logits",),
    "gaussian": ("mean", "log_std"),
    "squashed": ("tanh_mean", "tanh_log_std"),
}
_SPACES = {
    "discrete": ("categorical",),
    "multi_discrete": ("categorical",),
    "box": ("gaussian", "squashed"),
}


def build(
    config: AlgorithmConfig, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across = ALONE
) -> Algorithm:
    """The algorithm of ``config``.

    Args:
        config: its options.
        module: learns; wrapped for gradients that are means over the ranks when there are several.
        optimizer: over the module's parameters.
        across: the ranks that learn together.
    """
    if isinstance(config, ImpalaConfig):
        return Impala(module, optimizer, config, across)
    if isinstance(config, MixedConfig):
        return Mixed(module, optimizer, config, across)
    if isinstance(config, MAPPOConfig):
        return MAPPO(module, optimizer, config, across)
    if isinstance(config, BCConfig):
        return BC(module, optimizer, config, across)
    if isinstance(config, SACConfig):
        return SAC(module, optimizer, config, across)
    return PPO(module, optimizer, config, across)


def measuring(config: AlgorithmConfig, module: nn.Module) -> Algorithm:
    """The algorithm of ``config`` for its numbers alone: its updates change no parameter, and nothing is only kept.

    Args:
        config: its options.
        module: not wrapped; its gradients are changed.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    if isinstance(config, MixedConfig):
        return Mixed(
            module, optimizer, config.model_copy(update={"reinforcement": _once(config.reinforcement)}), keep=False
        )
    return build(_once(config), module, optimizer)


def check_space(config: AlgorithmConfig, kind: str) -> None:
    """Refuses an algorithm for an action space it cannot learn to act in.

    Args:
        config: its options.
        kind: ``discrete``, ``multi_discrete`` or ``box``, as `brayx.actions.ActionSpec` names spaces.

    Raises:
        ConfigError: names the algorithms that fit.
    """
    policies = _SPACES[kind]
    if not set(policies) & set(_LEARNS[config.name]):
        fits = [name for name, learns in _LEARNS.items() if set(policies) & set(learns)]
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
    """Refuses an algorithm for what it would act in and learn from, as far as that is known.

    Args:
        config: its options.
        kind: of the actions, as `check_space` has it; None: not known.
        unroll_length: transitions of a column; None: not known.
        gives: keys of the batches, `DEMONSTRATION` where there is something to imitate; None: not known.
        sampler: how a buffer of play is sampled, as `brayx.replay.config` names it; None: not known.

    Raises:
        ConfigError: names what is missing, and the algorithms or options that fit.
    """
    if kind is not None:
        check_space(config, kind)
    n_step = getattr(config, "n_step", 1)
    if unroll_length is not None and n_step > unroll_length:
        raise ConfigError(
            f"algorithm {config.name!r} has n_step {n_step}, and columns have unroll_length {unroll_length}: expected "
            "one of as many transitions at least",
            key="n_step",
        )
    plays = getattr(config, "reinforcement", config)
    if sampler == "fifo" and plays.name in _NEED_TABLE:
        raise ConfigError(
            f"sampler is 'fifo', which gives each transition once, and {plays.name!r} learns from each many times: "
            f"expected uniform or prioritised; without the option it is {plays.sampling.sampler}",
            key="sampler",
        )
    if sampler == "prioritised" and plays.name in _UNWEIGHED:
        fits = [name for name in _PRIORITIES if kind is None or set(_SPACES[kind]) & set(_LEARNS[name])]
        raise ConfigError(
            f"sampler is 'prioritised', and {plays.name!r} neither gives priorities nor weighs columns by how often "
            f"they come; these do: {', '.join(fits)}",
            key="sampler",
            fits=fits,
        )
    if gives is None:
        return
    asks = _ASKS.get(config.name)
    if asks is not None and asks[0] not in gives:
        fits = [
            name
            for name, learns in _LEARNS.items()
            if name not in _ASKS and (kind is None or set(_SPACES[kind]) & set(learns))
        ]
        raise ConfigError(
            f"algorithm {config.name!r} {asks[1]}; these learn without: {', '.join(fits)}", key="algorithm", fits=fits
        )
    if getattr(getattr(config, "reinforcement", config), "reward_heads", None) and "reward_heads" not in gives:
        raise ConfigError(
            f"algorithm {config.name!r} has reward_heads, and nothing here gives a reward of several parts: expected "
            "the extra reward_heads [T, K] of an agent's fragments or of a source, or reward_heads []",
            key="reward_heads",
        )


def check_enough(config: AlgorithmConfig, *, total_steps: int, batches: float, batch_steps: int, change: str) -> None:
    """Refuses a training with so few gradient steps that it would learn next to nothing.

    Args:
        config: options of the algorithm.
        total_steps: transitions in the training.
        batches: number of batches that these give.
        batch_steps: transitions in a batch.
        change: says which option to change to get more, for the message.

    Raises:
        ConfigError: says how many gradient steps there would be, and what to change.
    """
    gradients = batches * config.gradients(batch_steps)
    if gradients < min(_LEAST_GRADIENTS, total_steps / _MOST_STEPS):
        raise ConfigError(
            f"{total_steps:,} transitions come to {gradients:.0f} gradients of algorithm {config.name!r}, of "
            f"{batch_steps:,} transitions each: next to nothing would be learned; expected {change}",
            key="batch_size",
        )


def check_observed(config: AlgorithmConfig, obs: Collection[str]) -> None:
    """Refuses an algorithm that learns from the game's state too, for a model whose observation is a single array.

    Args:
        config: options of the algorithm.
        obs: keys of the model's inputs in a batch.

    Raises:
        ConfigError: says what the model is to take.
    """
    if config.name == "mappo" and "obs" in obs:
        raise ConfigError(
            f"algorithm 'mappo' learns from {STATE} as well, and the model takes an observation that is one array: "
            'expected one that takes a dict, {"obs": ...}',
            key="algorithm",
        )


def check_outputs(config: AlgorithmConfig, outputs: Collection[str], *, recurrent: bool = False) -> None:
    """Refuses a model without the outputs that the algorithm learns from.

    Args:
        config: options of the algorithm.
        outputs: names of the model's outputs.
        recurrent: the model has a memory.

    Raises:
        ConfigError: names what is missing, or the algorithms that fit.
    """
    given = {name.split("/")[0] for name in outputs}
    policy = next((kind for kind, names in _OUTPUTS.items() if given.issuperset(names)), None)
    if policy is None:
        raise ConfigError(
            f"the model's outputs are {sorted(given)}, and name no policy: expected "
            + ", or ".join(" and ".join(names) for names in _OUTPUTS.values()),
            key="algorithm",
        )
    if policy not in _LEARNS[config.name]:
        fits = [name for name, learns in _LEARNS.items() if policy in learns]
        expected = ", or ".join(" and ".join(_OUTPUTS[kind]) for kind in _LEARNS[config.name])
        raise ConfigError(
            f"algorithm {config.name!r} does not learn from {' and '.join(_OUTPUTS[policy])}: either the model gives "
            f"{expected}, or one of these learns: {', '.join(fits)}",
            key="algorithm",
            fits=fits,
        )
    if recurrent and config.name in ("sac", "mappo"):
        others = "ppo, impala, mixed and bc"
        raise ConfigError(
            f"algorithm {config.name!r} does not learn models with a memory; {others} do", key="algorithm"
        )
    missing = [name for name in _NEEDS[config.name] if name not in given]
    if missing:
        raise ConfigError(
            f"algorithm {config.name!r} needs an output {missing[0]!r}; the model's are {sorted(given)}",
            key="algorithm",
        )


def _once(config: Any) -> Any:
    return config.model_copy(update={"epochs": 1} if hasattr(config, "epochs") else {})


def check_critic(config: AlgorithmConfig, module: nn.Module, example: tuple[Any, ...] | None = None) -> None:
    """Refuses an algorithm for a model that lacks the part that only learning computes, or whose part gives another
    shape.

    Args:
        config: its options.
        module: of the model.
        example: what the part is called with, tensors ``[2, ...]``; None: not known.

    Raises:
        ConfigError: says what the part is called with, and what it gave.
    """
    shown = _CRITICS.get(config.name)
    if shown is None:
        return
    try:
        critic = critic_of(module, shown)
    except ValueError as error:
        raise ConfigError(f"algorithm {config.name!r} needs a critic: {error}", key="algorithm") from error
    if example is None:
        return
    try:
        with torch.inference_mode():
            value = critic(*example)
    except Exception as error:
        raise ConfigError(
            f"algorithm {config.name!r} calls the critic {shown}, which raised {type(error).__name__}: "
            f"{first_line(error)}",
            key="algorithm",
        ) from error
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.ndim != (2 if config.name == "sac" else 1) or len(value) != 2:
        raise ConfigError(
            f"algorithm {config.name!r} needs a critic {shown}; for N = 2 it gave {shape}", key="algorithm"
        )


def check_recorded(config: AlgorithmConfig, fields: Collection[str]) -> None:
    """Refuses an algorithm for recorded steps that it would take for the agent's own play.

    Args:
        config: its options.
        fields: what the record has of each step; `DEMONSTRATION` says that it is to be imitated.

    Raises:
        ConfigError: names what is missing, and what learns without it.
    """
    if config.name not in _OF_ITS_OWN or "log_prob" in fields:
        return
    mixed = config.name == "mixed"
    if mixed and DEMONSTRATION in fields:
        return
    others = ", ".join(name for name in _LEARNS if name not in _OF_ITS_OWN)
    raise ConfigError(
        f"has no log_prob, how likely each action was to whoever took it, which {config.name!r} learns from; "
        + ("what it is to imitate" if mixed else f"without it {others} learn, or mixed, which imitates what")
        + " is marked by `demonstration: true`",
        key="algorithm",
    )


def algorithm_options(name: str) -> type[BaseModel]:
    """The config model of an algorithm.

    Raises:
        ConfigError: there is none of that name.
    """
    for config in get_args(get_args(AlgorithmConfig)[0]):
        if get_args(config)[1].tag == name:
            model: type[BaseModel] = get_args(config)[0]
            return model
    raise ConfigError(f"algorithm is {name!r}, expected one of {', '.join(_LEARNS)}", key="algorithm")
