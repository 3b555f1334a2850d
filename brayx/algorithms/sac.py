"""Soft actor-critic with twin critics and automatic temperature, for continuous actions. Torch only.

Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", https://arxiv.org/abs/1812.05905. Takes one
gradient step per batch. Each transition of the batch starts a return of ``n_step`` transitions, or fewer if the episode
or the column ends earlier. The return bootstraps at its end, unless the episode terminated there. With ``n_step`` above
1 the return is approximate: it includes the entropy of the bootstrap step but not of the steps between, and it has no
off-policy correction. Both errors are small for few steps. Columns may have a ``weight`` (Schaul et al. 2016,
"Prioritized experience replay", section 3.4), which weights the critics' loss. Columns with an ``index`` get
priorities: the mean absolute error of the critics.

The module returns ``tanh_mean`` and ``tanh_log_std``. Its submodule ``critic`` takes observations and actions, returns
``[N, number of critics]``, and runs only in learning (`brayx.nets.soft`). Targets use a slow copy of the critics, which
`SAC.state_dict` saves with the temperature. Only ``terminated`` stops the bootstrap.

Input: the learner batches of `brayx.replay.packing`, as tensors. Knows nothing of how they were sampled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import optree
import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms import columns, returns
from brayx.algorithms.adam import Adam
from brayx.algorithms.base import ALONE, Across, Algorithm, critic_of
from brayx.algorithms.config import Critic, Policy, Sampling
from brayx.algorithms.optimise import OptimiseConfig, Schedule
from brayx.nets.distributions import sample

METRICS = ("loss", "critic_loss", "policy_loss", "entropy", "q", "td_error", "alpha", "grad_norm")
"""Metrics of `SAC.update`, besides ``learning_rate``; ``entropy`` is estimated from the drawn, squashed actions."""

CRITIC = Critic("(observation, action) -> [N, critics]", takes=("obs", "action"), rank=2)
"""The submodule ``critic`` that SAC needs."""


class SACConfig(OptimiseConfig):
    """Options of SAC."""

    name: Literal["sac"] = "sac"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    n_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """Transitions in a return before it bootstraps, fewer at the end of a column; the buffer's columns must have as
    many. The return counts only rewards of the steps between, not their entropy."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Share of the critics that their slow copy takes over with each update."""
    alpha: Annotated[float, Field(ge=0)] | None = None
    """Temperature: what a nat of entropy is worth; null: found so that the entropy stays at its target."""
    alpha_initial: Annotated[float, Field(gt=0)] = 1.0
    """Temperature at the start where it is found."""
    target_entropy: float | None = None
    """Entropy of the squashed actions that the temperature holds; null: minus the number of their dimensions."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients are scaled down to this norm; null: never."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate falls over the training."""

    policies: ClassVar[tuple[Policy, ...]] = ("squashed",)
    outputs: ClassVar[tuple[str, ...]] = ()
    recurrent: ClassVar[bool] = False
    critic: ClassVar[Critic] = CRITIC
    needs_table: ClassVar[bool] = True
    weighs_columns: ClassVar[bool] = True
    sets_priorities: ClassVar[bool] = True

    @property
    def sampling(self) -> Sampling:
        """A table, and one gradient step on 256 transitions for each new transition."""
        return Sampling(unroll_length=self.n_step, batch_steps=256, sampler="uniform", updates_per_step=1.0)

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return SAC(module, optimizer, self, across)


class GradientInputs(NamedTuple):
    """Inputs of a gradient, ``[N, ...]`` each.

    Attributes:
        obs, action: observation and action.
        reward: discounted sum of the return's rewards.
        discount: factor of the bootstrap value.
        next_obs: the observation to bootstrap from.
        weight: weight of the step in means; on a single rank the weights add up to 1.
        importance: further weight of the step in the critics' loss.
        next_noise, noise: Gaussian noise that makes the actions at ``next_obs`` and ``obs``.
    """

    obs: Any
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Any
    weight: Tensor
    importance: Tensor
    next_noise: Tensor
    noise: Tensor


def critic_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Equation 5 summed over critics: half the squared Bellman errors.

    Args:
        q: ``[N, critics]``.
        target: ``[N]``, the target in equation 5, without gradient.
        weight: ``[N]``.
    """
    return 0.5 * (weight.unsqueeze(-1) * (q - target.unsqueeze(-1)).square()).sum()


def soft_target(reward: Tensor, discount: Tensor, next_q: Tensor, next_log_prob: Tensor, alpha: Tensor) -> Tensor:
    """``r + gamma (min Q(s', a') - alpha log pi(a'|s'))``, ``[N]``; ``next_q`` is ``[N, critics]``."""
    return reward + discount * (next_q.amin(-1) - alpha * next_log_prob)


def policy_loss(q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor) -> Tensor:
    """Equation 9 with the minimum of the critics ``[N, critics]``: the mean of ``alpha log pi - Q``."""
    return (weight * (alpha * log_prob - q.amin(-1))).sum()


class SAC(Algorithm):
    """Updates a module from learner batches; arguments as for `Algorithm`.

    The optimiser includes the critics' parameters. The temperature uses the optimiser's first learning rate.

    Raises:
        ValueError: the module has no critic.
    """

    config: SACConfig

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, config: SACConfig, across: Across = ALONE
    ) -> None:
        super().__init__(module, optimizer, config, across)
        self._critic = critic = critic_of(module, CRITIC.shown)
        self._slow = copy.deepcopy(critic).requires_grad_(False)
        first = self.optimise.parameters[0]
        alpha = config.alpha_initial if config.alpha is None else config.alpha
        self._log_alpha = torch.full(
            (), math.log(alpha) if alpha else -math.inf, dtype=first.dtype, device=first.device
        )
        self._alpha_optimizer = Adam([self._log_alpha], lr=optimizer.param_groups[0]["lr"])

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Takes one gradient step on a batch, as `Algorithm.update`; returns `METRICS` and ``learning_rate``.

        Columns need at least ``n_step`` transitions, and actions within (-1, 1).
        """
        columns.check(batch, steps=self.config.n_step)
        learning_rate = self.optimise.begin(progress)
        learned = batch["mask"][:, :-1]
        count = self.across.sum(learned.sum())
        alpha = self._log_alpha.exp()
        # Draw for the whole batch, so that micro-batches do not change the result, and on the CPU, because checkpoints
        # save that generator.
        action = returns.full_precision(batch["action"][:, :-1])
        noise = torch.randn(*learned.shape, 2, *action.shape[2:], dtype=action.dtype).to(action.device)
        pieces = columns.parts({**batch, "noise": noise}, self.config.accumulate)
        measured, errors = [], []
        for index, piece in enumerate(pieces):
            with self.optimise.shared(last=index == len(pieces) - 1):
                loss, numbers, error = self._loss(self._steps(piece, count), alpha)
                self.optimise.backward(loss, len(piece["mask"]) / len(batch["mask"]))
            measured.append(numbers)
            errors.append(error)
        norm = self.optimise.step()
        total = torch.stack(measured).sum(0)
        if self.config.alpha is None:
            self._warm(total[3], count, batch["action"].shape[-1])
        self._follow()
        self.priorities = None
        if "index" in batch:
            error = torch.cat(errors).view(learned.shape) * learned
            self.priorities = error.sum(1) / learned.sum(1).clamp(min=1)
        means = torch.cat([total, alpha.reshape(1), norm.reshape(1)]).tolist()
        return {**dict(zip(METRICS, means, strict=True)), "learning_rate": learning_rate}

    @torch.no_grad()
    def _steps(self, batch: Mapping[str, Any], count: Tensor) -> GradientInputs:
        """The steps of a batch, column by column."""
        reward, terminated, truncated = (
            columns.transitions(batch, key) for key in ("reward", "terminated", "truncated")
        )
        discount_t, lambda_t = returns.discounts(
            terminated, truncated, gamma=self.config.gamma, lam=1.0, dtype=returns.full_precision(reward).dtype
        )
        targets = returns.n_steps(reward, discount_t, lambda_t, self.config.n_step)
        mask = batch["mask"][:, :-1]
        size, steps = mask.shape
        end = targets.at.T
        column = torch.arange(size, device=end.device).unsqueeze(-1)
        importance = columns.column_weight(batch).unsqueeze(-1).expand(size, steps)
        return GradientInputs(
            obs=optree.tree_map(lambda x: x[:, :steps].flatten(0, 1), batch["obs"]),
            action=returns.full_precision(batch["action"])[:, :steps].flatten(0, 1),
            reward=targets.reward.T.flatten(),
            discount=targets.discount.T.flatten(),
            next_obs=optree.tree_map(lambda x: x[column, end].flatten(0, 1), batch["obs"]),
            weight=mask.flatten() * (self.across.size / count.clamp(min=1)),
            importance=importance.flatten(),
            next_noise=batch["noise"][:, :, 0].flatten(0, 1),
            noise=batch["noise"][:, :, 1].flatten(0, 1),
        )

    def _loss(self, step: GradientInputs, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the sums of the metrics ``[6]``, and every step's error."""
        with self.optimise.autocast():
            with torch.no_grad():
                next_action, next_log_prob = sample(_call(self.module, step.next_obs), step.next_noise)
                next_q = returns.full_precision(_call(self._slow, step.next_obs, next_action))
            outputs = _call(self.module, step.obs)
            q = returns.full_precision(_call(self._critic, step.obs, step.action))
            action, log_prob = sample(outputs, step.noise)
            self._critic.requires_grad_(False)  # the policy's loss must not train the critics
            q_of_policy = returns.full_precision(_call(self._critic, step.obs, action))
            self._critic.requires_grad_(True)
        if q.ndim != 2 or len(q) != len(step.reward):  # broadcasting would compare each with all
            raise ValueError(f"critic: expected [{len(step.reward)}, critics], got shape {tuple(q.shape)}")
        target = soft_target(step.reward, step.discount, next_q, next_log_prob, alpha)
        of_critic = critic_loss(q, target, step.weight * step.importance)
        of_policy = policy_loss(q_of_policy, log_prob, alpha, step.weight)
        loss = of_critic + of_policy
        with torch.no_grad():
            error = (q - target.unsqueeze(-1)).abs().mean(-1)
            seen = [(step.weight * x).sum() for x in (-log_prob, q.mean(-1), error)]
            numbers = torch.stack([loss, of_critic, of_policy, *seen])
        return loss, numbers, error

    @torch.no_grad()
    def _warm(self, entropy: Tensor, count: Tensor, action_size: int) -> None:
        """Takes a gradient step on the logarithm of the temperature (section 5)."""
        target = self.config.target_entropy
        mean = self.across.sum(entropy) / self.across.size
        gradient = mean - (-action_size if target is None else target)
        self._log_alpha.grad = torch.where(count > 0, gradient, torch.zeros_like(gradient)).to(self._log_alpha.dtype)
        for group in self._alpha_optimizer.param_groups:
            group["lr"] = self.optimise.optimizer.param_groups[0]["lr"]
        self._alpha_optimizer.step()

    @torch.no_grad()
    def _follow(self) -> None:
        """Moves the slow critics by ``tau``; buffers, such as a normalisation's moments, are copied."""
        torch._foreach_lerp_(list(self._slow.parameters()), list(self._critic.parameters()), self.config.tau)
        for slow, fast in zip(self._slow.buffers(), self._critic.buffers(), strict=True):
            slow.copy_(fast)

    def state_dict(self) -> dict[str, Any]:
        """The slow critics, the temperature and the gradient step's scales."""
        return {
            "slow": self._slow.state_dict(),
            "log_alpha": self._log_alpha.detach().clone(),
            "alpha_optimizer": self._alpha_optimizer.state_dict(),
            "optimise": self.optimise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; a temperature is restored only if it is learned, not an option."""
        self._slow.load_state_dict(state["slow"])
        if self.config.alpha is None and torch.isfinite(state["log_alpha"]):  # a temperature of 0 cannot be learned
            with torch.no_grad():
                self._log_alpha.copy_(state["log_alpha"])
        self._alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        self.optimise.load_state_dict(state["optimise"])


def _call(module: nn.Module, obs: Any, *more: Tensor) -> Any:
    return module(*obs, *more) if isinstance(obs, tuple) else module(obs, *more)
