"""Options of an algorithm, and its needs of model, data and sampler. Knows no algorithm, and imports no torch.

An algorithm is one file: its options (a class derived from `AlgorithmConfig`), its loss, its metrics and its update
(`brayx.algorithms.base.Algorithm`). Its needs are class attributes of its options, so that a job can be checked before
anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch
    from torch import nn

    from brayx.algorithms.base import Across, Algorithm

Policy = Literal["categorical", "gaussian", "squashed", "hybrid", "squashed_hybrid"]
"""A distribution over actions, see `brayx.nets.distributions`."""


@dataclass(frozen=True)
class Sampling:
    """An algorithm's default source and size of batches; the options of a training override them.

    Attributes:
        unroll_length: transitions in a column.
        batch_steps: transitions in a batch.
        sampler: ``fifo``: each run is learned from once, in order. Otherwise batches are sampled from a table.
        updates_per_step: batches sampled from a table for each transition added to it.
    """

    unroll_length: int
    batch_steps: int
    sampler: Literal["fifo", "uniform", "prioritised"] = "fifo"
    updates_per_step: float = 0.0

    def batch_size(self, unroll_length: int) -> int:
        """Columns in a batch."""
        return max(1, self.batch_steps // unroll_length)

    def samples_per_insert(self, unroll_length: int, batch_size: int) -> float:
        """Average number of times that a column of a table is sampled."""
        return self.updates_per_step * unroll_length * batch_size


@dataclass(frozen=True)
class Critic:
    """A module's submodule ``critic``, which only learning calls.

    Attributes:
        shown: arguments and result of the critic, for messages.
        takes: arguments of the critic: ``obs`` (a tuple is several), ``action`` (its numbers, ``[N, D]``) and ``state``
            (the game's).
        rank: axes of its result; one more, for the choices, if it takes actions and these are discrete or hybrid.
    """

    shown: str
    takes: tuple[Literal["obs", "action", "state"], ...]
    rank: int


class RewardHead(BaseModel):
    """One of several rewards, each with a separate value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of the advantage trace."""
    weight: float = 1.0
    """Weight of this head's advantage in the policy's advantage."""


class AlgorithmConfig(BaseModel):
    """Options of an algorithm. A subclass adds options as fields, and overrides its needs.

    An option named ``gamma``, ``n_step`` or ``reward_heads`` means the same in every algorithm.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = ""
    """Name of the algorithm; empty: its module's."""
    module: str | None = None
    """Import path of the module that defines the algorithm, searched in the YAML file's folder first; null: brayx."""

    policies: ClassVar[tuple[Policy, ...]] = get_args(Policy)
    """Policies that it can train."""
    outputs: ClassVar[tuple[str, ...]] = ("value",)
    """Outputs that a model must return besides its policy's."""
    recurrent: ClassVar[bool] = True
    """Can train recurrent models."""
    critic: ClassVar[Critic | None] = None
    """The submodule ``critic`` that a model must have."""
    needs_log_prob: ClassVar[bool] = False
    """Learns only from the agent's own play, which records a ``log_prob`` of each action."""
    imitates: ClassVar[Literal["nothing", "demonstrations", "everything"]] = "nothing"
    """Steps whose actions it imitates: none, those marked as demonstrations, or all."""
    data: ClassVar[Mapping[str, str]] = {}
    """Extra keys that batches must have, each with the reason, which completes the message ``algorithm 'x' ...``."""
    turns: ClassVar[bool] = False
    """Distinguishes other players' moves (``turn``) from the agent's own."""
    needs_table: ClassVar[bool] = False
    """Learns from each transition many times, so it cannot use a ``fifo`` buffer."""
    weighs_columns: ClassVar[bool] = False
    """Applies each column's ``weight``, which a prioritised sampler sets."""
    sets_priorities: ClassVar[bool] = False
    """Returns a new priority for each column of a batch with an ``index``."""
    several_ranks: ClassVar[bool] = True
    """Can learn in several ranks."""
    inner: ClassVar[tuple[type[AlgorithmConfig], ...]] = ()
    """Algorithms allowed as its option ``reinforcement``, which then takes the gradient steps."""

    @property
    def sampling(self) -> Sampling:
        """Its default source and size of batches."""
        return Sampling(unroll_length=64, batch_steps=2048)

    @property
    def play(self) -> AlgorithmConfig:
        """The options for learning from play: these, or those of the algorithm inside it."""
        return self

    @property
    def discount(self) -> float:
        """Discount per transition; a default for an algorithm without one."""
        return float(getattr(self, "gamma", 0.99))

    @property
    def value_heads(self) -> int:
        """Number of value heads that the model must return, one per part of the reward; 0: one value, without an
        axis."""
        return len(getattr(self.play, "reward_heads", ()))

    @property
    def first_imitates(self) -> int:
        """Number of updates from demonstrations only, before the first update from play."""
        return 0

    @property
    def learns_demonstrated_rewards(self) -> bool:
        """Whether it learns from the rewards of demonstrations, not only from their actions."""
        return False

    def gradients(self, batch_steps: int) -> int:
        """Gradient steps taken on a batch of ``batch_steps`` transitions."""
        return 1

    def for_measuring(self) -> Self:
        """These options for measuring losses only: one pass over each batch, and no batch is kept."""
        return self

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """Makes the algorithm.

        Args:
            module: the module to train; with several ranks wrapped so that gradients are averaged over them.
            optimizer: over the module's parameters.
            across: the ranks that learn together.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method build(module, optimizer, across)")
