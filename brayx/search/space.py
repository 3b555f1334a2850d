"""The space of a search: options and domains, parsed from text and checked before the search starts.

    learning_rate=loguniform(1e-4, 1e-2)    clip_param=choice(0.1, 0.2)    epochs=randint(2, 10)    gamma=0.99

A name is an option of `brayx.local.training.Training` (``num_envs``), of the algorithm (``clip_param``) or of the
ready-made network (``network.hidden``). Knows nothing of Ray.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from brayx.algorithms.build import algorithm_options
from brayx.algorithms.config import AlgorithmConfig
from brayx.errors import ConfigError
from brayx.local.training import Training, with_options

_CLONING = {"evaluation_episodes": 20}
"""Evaluation games that compare trials of cloning, which plays none while it learns."""
_NOT_SEARCHED = frozenset({"network", "num_steps", "seed", "target_return", "checkpoint_interval"})


@dataclass(frozen=True)
class Domain:
    """The domain of one option's values.

    Attributes:
        kind: ``choice``, ``uniform``, ``loguniform``, or ``randint``.
        arguments: the choices; or the least and the largest value (included, for whole numbers).
    """

    kind: str
    arguments: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.kind not in _DRAW:
            raise ConfigError(f"{self.kind!r} is not a domain; there are {', '.join(_DRAW)}", key="search")
        if not self.arguments:
            raise ConfigError(f"{self} is empty", key="search")
        if self.kind == "choice":
            return
        if len(self.arguments) != 2 or not all(type(bound) in (int, float) for bound in self.arguments):
            raise ConfigError(f"{self}: expected the least and the largest value", key="search")
        low, high = self.arguments
        if not low < high or (self.kind == "loguniform" and low <= 0):
            positive = "0 < " if self.kind == "loguniform" else ""
            raise ConfigError(f"{self}: expected {positive}least < largest", key="search")
        if self.kind == "randint" and not all(isinstance(bound, int) for bound in self.arguments):
            raise ConfigError(f"{self}: expected whole numbers", key="search")

    def draw(self, rng: random.Random) -> Any:
        """Draws a value."""
        return _DRAW[self.kind](rng, *self.arguments)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values to check in place of all: every choice, or both ends. For ``uniform`` also one value in between, since
        the ends may be whole numbers, and a drawn value is not."""
        if self.kind not in ("uniform", "loguniform"):
            return self.arguments
        low, high = self.arguments
        within = (high / low) ** (1 / math.pi) * low if self.kind == "loguniform" else low + (high - low) / math.pi
        return (low, high, within)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.arguments))})"


_DRAW: dict[str, Callable[..., Any]] = {
    "choice": lambda rng, *choices: rng.choice(choices),
    "uniform": lambda rng, low, high: rng.uniform(low, high),
    "loguniform": lambda rng, low, high: math.exp(rng.uniform(math.log(low), math.log(high))),
    "randint": lambda rng, low, high: rng.randint(low, high),
}

Space: TypeAlias = Mapping[str, Domain | Any]
"""The domain of each option, or one value for all trials."""


def parse(lines: Sequence[str]) -> dict[str, Domain | Any]:
    """A space from lines such as ``learning_rate=loguniform(1e-4, 1e-2)``.

    Raises:
        ConfigError: a line cannot be parsed; the message quotes it.
    """
    space: dict[str, Domain | Any] = {}
    for line in lines:
        name, equals, text = line.partition("=")
        try:
            tree = ast.parse(text.strip(), mode="eval").body if equals else None
            if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
                value: Any = Domain(tree.func.id, tuple(ast.literal_eval(argument) for argument in tree.args))
            elif tree is not None:
                value = ast.literal_eval(tree)
            else:
                raise ValueError
        except (SyntaxError, ValueError):
            domains = ", ".join(f"{kind}(...)" for kind in _DRAW)
            raise ConfigError(f"{line!r}: expected OPTION={domains} or a value", key="search") from None
        if name.strip() in space:
            raise ConfigError(f"{name.strip()} is given twice", key="search")
        space[name.strip()] = value
    return space


def arguments(algorithm: str, values: Mapping[str, Any]) -> tuple[AlgorithmConfig, Training]:
    """Arguments for `brayx.local.train.train_local`, from options by name.

    Options that are not given get values that suit the algorithm, and for cloning an evaluation after training.

    Args:
        algorithm: its name, such as ``ppo``, or the module of the user's own, in the current folder.
        values: values of the options.

    Raises:
        ConfigError: as `brayx.local.training.with_options`.
    """
    config, training = with_options(algorithm_options(algorithm, os.getcwd()), values, fixed=_NOT_SEARCHED)
    cloning = config.imitates == "everything" and "evaluation_episodes" not in values
    return config, training.model_copy(update=_CLONING) if cloning else training


def check(
    algorithm: str, space: Space, fits: Callable[[AlgorithmConfig, Training], None] = lambda algorithm, training: None
) -> None:
    """Checks that every draw can be trained: all combinations of every choice, and of both ends of every range and a
    number in between.

    Args:
        algorithm: its name.
        space: the space of the search.
        fits: raises if the options of a draw do not fit each other.

    Raises:
        ConfigError: as `arguments` and ``fits``; or no option is searched.
    """
    if not any(isinstance(value, Domain) for value in space.values()):
        raise ConfigError("no option is searched: give one a domain, such as learning_rate=loguniform(1e-4, 1e-2)")
    fixed = {name: value for name, value in space.items() if not isinstance(value, Domain)}
    arguments(algorithm, fixed)
    extremes = {name: domain.extremes for name, domain in space.items() if isinstance(domain, Domain)}
    draw = {**fixed, **{name: values[0] for name, values in extremes.items()}}
    for first, second in itertools.combinations_with_replacement(extremes, 2):
        for first_value, second_value in itertools.product(extremes[first], extremes[second]):
            fits(*arguments(algorithm, {**draw, first: first_value, second: second_value}))
