"""Reinforcement learning with an imitation term in the loss, which decays over the training. Torch only.

Rajeswaran et al. 2018, "Learning complex dexterous manipulation with deep reinforcement learning and demonstrations",
section IV-B, https://arxiv.org/abs/1709.10087: adds the likelihood of demonstrated actions to the objective, with a
falling weight. Batches come from two kinds of buffers: a batch with the key ``demonstration`` (an extra of its
fragments, of any value) holds demonstrations, any other holds the agent's own play. The newest demonstrations are kept,
and each reinforcement gradient draws columns from them. Before the first batch of play, updates use demonstrations
only. These do not count as training: schedules start with the first play.

With ``fit_value`` the value is fitted to the demonstrations' returns whenever the policy imitates, as in Zhang and Ma
2018, "Pretraining deep actor-critic reinforcement learning algorithms with expert demonstrations",
https://arxiv.org/abs/1801.10459. Without it, the value is untrained in the states that the cloned policy visits. The
advantages of the first policy gradients are then wrong, and undo the cloning.

Input: the learner batches of `brayx.replay.packing`, as tensors. Knows nothing of where they come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import optree
import torch
from pydantic import Discriminator, Field, Tag, model_validator
from torch import Tensor, nn

from brayx.algorithms import columns, returns
from brayx.algorithms.base import ALONE, Across, Algorithm
from brayx.algorithms.bc import BC, BCConfig, clone_loss
from brayx.algorithms.config import AlgorithmConfig, Sampling
from brayx.algorithms.forward import LearnerForward
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.optimise import share, unhooked
from brayx.algorithms.ppo import PPOConfig
from brayx.errors import ConfigError
from brayx.nets.distributions import log_prob_entropy
from brayx.types import DEMONSTRATION

_KEYS = ("action", "mask", "reward", "terminated", "truncated")
_PATIENCE = 1000
"""Batches of play to wait for the first demonstrations when imitation comes first; then the training fails."""
_AT_ONCE = 100
"""Most imitation updates per batch; the training can be stopped only between batches."""


def _name(options: Any) -> Any:
    return options.get("name", "ppo") if isinstance(options, Mapping) else getattr(options, "name", None)


class MixedConfig(AlgorithmConfig):
    """Options of imitation and reinforcement in one run."""

    name: Literal["mixed"] = "mixed"
    reinforcement: Annotated[
        Annotated[PPOConfig, Tag("ppo")] | Annotated[ImpalaConfig, Tag("impala")], Discriminator(_name)
    ] = PPOConfig()
    """Options of the reinforcement."""
    imitation_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the imitation loss at the start of training."""
    imitation_final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of that weight left in the end; it falls linearly."""
    imitation_until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the training after which the weight falls no further."""
    imitation_updates: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Updates from demonstrations alone that come first; play until then is not learned from. 0: those that come before
    the first play, however many. Neither counts as training."""
    imitation_columns: Annotated[int, Field(ge=1)] = 8
    """Columns of demonstrations in each gradient of reinforcement."""
    demonstrations_kept: Annotated[int, Field(ge=1, le=4096)] = 32
    """Batches of demonstrations kept, the newest."""
    fit_value: Annotated[float, Field(ge=0)] = 0.0
    """Weight of half the squared error between the value and the demonstrations' returns, which need their rewards; it
    falls with the weight of imitation. 0: the value is not fitted to them."""

    @model_validator(mode="after")
    def _a_plain_value(self) -> Self:
        options = self.reinforcement
        if options.module is not None:
            raise ValueError("reinforcement is one of brayx's algorithms, without a module")
        for name in ("normalise_value", "reward_heads"):
            if self.fit_value and getattr(options, name, None):
                raise ValueError(f"fit_value fits a plain value: it goes with reinforcement without {name}, or is 0")
        return self

    needs_log_prob: ClassVar[bool] = True
    imitates: ClassVar[Literal["demonstrations"]] = "demonstrations"
    data: ClassVar[Mapping[str, str]] = {
        DEMONSTRATION: "imitates demonstrations, but no data is marked as such: expected a job's `source` with "
        "`demonstration: true`, or `demonstrations`"
    }
    # One rank: each rank gets its own batches, so one could store a demonstration, which needs no gradient, while the
    # others wait for its gradient.
    several_ranks: ClassVar[bool] = False
    inner: ClassVar[tuple[type[AlgorithmConfig], ...]] = (PPOConfig, ImpalaConfig)

    @property
    def gamma(self) -> float:
        """Discount of the reinforcement learning."""
        return self.reinforcement.gamma

    @property
    def play(self) -> AlgorithmConfig:
        """The options of the reinforcement learning."""
        return self.reinforcement

    @property
    def sampling(self) -> Sampling:
        """The sampling of the reinforcement learning."""
        return self.reinforcement.sampling

    @property
    def first_imitates(self) -> int:
        """``imitation_updates``."""
        return self.imitation_updates

    @property
    def learns_demonstrated_rewards(self) -> bool:
        """Whether the value is fitted to their returns."""
        return self.fit_value > 0

    def gradients(self, batch_steps: int) -> int:
        """The gradient steps of the reinforcement learning."""
        return self.reinforcement.gradients(batch_steps)

    def for_measuring(self) -> Self:
        """Keeps no demonstrations: each batch of them is used when it arrives."""
        return self.model_copy(update={"reinforcement": self.reinforcement.for_measuring(), "demonstrations_kept": 0})

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return Mixed(module, optimizer, self, across)


def fit_loss(value: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of half the squared errors; all arguments are ``[...]``, and ``weight`` 0 ignores a step."""
    return 0.5 * (weight * (value - target).square()).sum()


class Mixed(Algorithm):
    """Updates a module from learner batches of play and of demonstrations.

    Args:
        module: as for PPO or IMPALA.
        optimizer: over the module's parameters; schedules start from its learning rates at construction.
        config: options.
        across: the ranks that learn together. The imitation loss is a mean over each rank's own columns.
    """

    config: MixedConfig

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: MixedConfig,
        across: Across = ALONE,
    ) -> None:
        self.module = module
        self.config = config
        options = config.reinforcement
        self._inner = options.build(module, optimizer, across)
        alike = {name: getattr(options, name) for name in type(options).model_fields if name in BCConfig.model_fields}
        self._clone = BC(module, optimizer, BCConfig(**{**alike, "name": "bc"}), across)
        # Unhooked: the user's term is of the steps of a gradient, and must not see these forwards with the next one.
        self.forward = LearnerForward(unhooked(module))
        self._inner.optimise.terms.append(self._term)
        if config.fit_value:
            self._clone.optimise.terms.append(self._also_value)
        self._demonstrations: deque[dict[str, Any]] = deque(maxlen=config.demonstrations_kept)
        self._coef = config.imitation_coef
        self._cloned: Mapping[str, Any] = {}
        self._losses: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._keep = config.demonstrations_kept > 0
        self._played = False
        self._left = config.imitation_updates
        self._waited = 0

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch of play, or of demonstrations until the first play; later demonstrations are only kept.

        Updates do not count as training before the first play, nor during the first ``imitation_updates``. In that
        phase each batch of play triggers updates from kept demonstrations instead.

        Args:
            batch: as for `brayx.algorithms.base.Algorithm.update`. Not modified.
            progress: progress of the training, 0 to 1; the learning rate and the imitation weight fall with it.

        Returns:
            For play: the metrics of the reinforcement learning, ``imitation_loss`` (unweighted) and ``imitation_coef``.
            For an update from demonstrations: the metrics of cloning as ``imitation_...``. If the value is fitted, also
            ``imitation_value_loss`` (unweighted).
        """
        config = self.config
        self._coef = config.imitation_coef * share(progress / config.imitation_until, final=config.imitation_final)
        self.priorities = None
        first = self._keep and self._left > 0
        self.counts = not first and (self._played or DEMONSTRATION not in batch)
        self.learned = not (DEMONSTRATION in batch and self._played and self._keep and not first)
        if DEMONSTRATION in batch:
            columns.check(batch)
            if self._keep:
                stored = {key: batch[key] for key in _KEYS}
                if columns.TURN in batch:
                    stored[columns.TURN] = batch[columns.TURN]
                state = {key: value for key, value in batch.items() if key.split("/")[0] in ("obs", "state")}
                self._demonstrations.append({**stored, **state, "obs": batch["obs"]})
            if not self.learned:
                return {"imitation_coef": self._coef}
            return self._imitate_first(progress) if first and self._played else self._imitate(batch, progress)
        self._played = True
        if first:
            return self._imitate_first(progress)
        self._losses.clear()
        self._errors.clear()
        measured = self._inner.update(batch, progress)
        self.priorities, self.advantages = self._inner.priorities, self._inner.advantages
        if self._losses:
            measured["imitation_loss"] = float(torch.stack(self._losses).mean())
        return {**measured, **self._fitted(), "imitation_coef": self._coef}

    def _imitate_first(self, progress: float) -> dict[str, float]:
        """Takes imitation updates, in the phase of ``imitation_updates``; the batch of play itself is not used."""
        if not self._demonstrations:
            self.learned = False
            self._waited += 1
            if self._waited > _PATIENCE:
                raise ConfigError(
                    f"imitation_updates is {self.config.imitation_updates}, but no demonstration came with "
                    f"{self._waited} batches of play",
                    key="imitation_updates",
                )
            return {"imitation_coef": self._coef}
        measured: dict[str, float] = {}
        for _ in range(min(self._left, _AT_ONCE)):
            measured = self._imitate(self._any_kept(), progress)
        return measured

    def _imitate(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Takes one update from demonstrations only."""
        self._errors.clear()
        self._cloned = batch
        cloned = self._clone.update(batch, progress)
        self._cloned = {}
        self._left = max(self._left - 1, 0)
        return {f"imitation_{name}": value for name, value in cloned.items()} | self._fitted()

    def _fitted(self) -> dict[str, float]:
        return {"imitation_value_loss": float(torch.stack(self._errors).mean())} if self._errors else {}

    def _term(self) -> Tensor | None:
        """The imitation term of a gradient's loss."""
        if not self._demonstrations or self._coef == 0:
            return None
        batch = self._drawn()
        outputs = columns.forward(self.forward, batch)
        log_prob, _ = log_prob_entropy(columns.before_last(outputs), columns.transitions(batch, "action"))
        loss = clone_loss(log_prob, _weight(batch, own_moves=True))
        self._losses.append(loss.detach())
        if self.config.fit_value:
            loss = loss + self._value_loss(batch, outputs, _weight(batch))
        return self._coef * loss

    def _also_value(self) -> Tensor:
        """The value's term in the loss of an update from demonstrations only."""
        return self._value_loss(self._cloned, columns.forward(self.forward, self._cloned), _weight(self._cloned))

    def _value_loss(self, batch: Mapping[str, Any], outputs: Mapping[str, Any], weight: Tensor) -> Tensor:
        """The value loss times ``fit_value``. Targets sum the rewards to the end of a column and bootstrap there."""
        terminated, truncated = columns.transitions(batch, "terminated"), columns.transitions(batch, "truncated")
        values = returns.full_precision(outputs["value"])
        ends = returns.discounts(terminated, truncated, gamma=self.config.gamma, lam=1.0, dtype=values.dtype)
        target = returns.lambda_returns(columns.transitions(batch, "reward"), *ends, values)
        loss = fit_loss(values[:-1], target, weight)
        self._errors.append(loss.detach())
        return self.config.fit_value * loss

    def _drawn(self) -> dict[str, Any]:
        """Random columns of a random kept batch, drawn with the CPU's generator."""
        batch = self._any_kept()
        size = len(batch["mask"])
        drawn = torch.randperm(size)[: self.config.imitation_columns].to(batch["mask"].device)
        return {key: optree.tree_map(lambda x: x[drawn], value) for key, value in batch.items()}

    def _any_kept(self) -> dict[str, Any]:
        return self._demonstrations[int(torch.randint(len(self._demonstrations), ()))]

    def state_dict(self) -> dict[str, Any]:
        """The state of the reinforcement learning; demonstrations are not saved, since buffers send them again."""
        return {"inner": self._inner.state_dict(), "played": self._played, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self._inner.load_state_dict(state["inner"])
        self._played = bool(state["played"])
        self._left = int(state.get("left", 0))


def _weight(batch: Mapping[str, Any], *, own_moves: bool = False) -> Tensor:
    """Equal weights ``[T, B]`` of all transitions, or of the agent's own moves only; they add up to 1."""
    mask = columns.transitions({"mask": columns.own_moves(batch)} if own_moves else batch, "mask")
    return mask / mask.sum().clamp(min=1)
