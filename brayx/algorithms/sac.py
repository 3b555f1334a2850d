"""Soft actor-critic with twin critics and automatic temperatures. Torch only.

Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", https://arxiv.org/abs/1812.05905, for continuous
actions. Christodoulou 2019, "Soft actor-critic for discrete action settings", https://arxiv.org/abs/1910.07207, for
choices: the critics value every choice, and the value of a state is the expectation over them instead of a draw.
Several choices at once, and hybrid actions, are independent given the observation. Their critics take the numbers of
the action and give values by choice. An action's value is the mean of those of its choices, as in ML-Agents.

Takes one gradient step per batch. Each transition of the batch starts a return of ``n_step`` transitions, or fewer if
the episode or the column ends earlier. The return bootstraps at its end, unless the episode terminated there. With
``n_step`` above 1 the return is approximate: it includes the entropy of the bootstrap step but not of the steps
between, and it has no off-policy correction. Both errors are small for few steps. Columns may have a ``weight``
(Schaul et al. 2016, "Prioritized experience replay", section 3.4), which weights the critics' loss. Columns with an
``index`` get priorities: the mean absolute error of the critics.

The module returns ``logits``, ``tanh_mean`` with ``tanh_log_std``, or all three. Its submodule ``critic`` takes
observations and the actions' numbers ``[N, D]``; D is 0 if there are only choices. It returns ``[N, critics]``, or with
``logits`` ``[N, critics, choices of all heads]``, and runs only in learning (`brayx.nets.soft`). Targets use a slow
copy of the critics. `SAC.state_dict` saves it with the temperatures: one for each head, and one for the numbers. Only
``terminated`` stops the bootstrap.

Input: the learner batches of `brayx.replay.packing`, as tensors. Knows nothing of how they were sampled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
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
from brayx.nets.distributions import heads_of, sample

METRICS = ("loss", "critic_loss", "policy_loss", "entropy", "q", "td_error", "alpha", "grad_norm")
"""Metrics of `SAC.update`, besides ``learning_rate``. ``entropy`` is that of the choices, plus an estimate from the
drawn, squashed numbers; ``alpha`` is the mean of the temperatures."""

CRITIC = Critic(
    "(observation, action) -> [N, critics]; with choices (observation, numbers [N, D]) -> [N, critics, choices]",
    takes=("obs", "action"),
    rank=2,
)
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
    """Temperature: what a nat of entropy is worth; null: found so that the entropy stays at its target, for each
    discrete action and for the continuous one."""
    alpha_initial: Annotated[float, Field(gt=0)] = 1.0
    """Temperature at the start where it is found."""
    target_entropy: float | None = None
    """Entropy of the squashed actions that the temperature holds; null: minus the number of their dimensions."""
    target_entropy_scale: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the greatest entropy of a discrete action's allowed choices that its temperature holds."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients are scaled down to this norm; null: never."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate falls over the training."""

    policies: ClassVar[tuple[Policy, ...]] = ("categorical", "squashed", "squashed_hybrid")
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
        obs, action: observation, and action ``[N, H + D]``: first the choices, then the numbers.
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


class SoftPolicy(NamedTuple):
    """What a policy does for observations ``[N, ...]``: numbers that are drawn, and choices of which all count.

    Attributes:
        numbers: ``[N, D]``; D = 0: there are only choices.
        sizes: choices of each head; empty: there are only numbers.
        probs: ``[N, choices]``, the weights of the critics' values in the state's: the probabilities, divided by the
            number of heads; ``[N, 1]`` of ones if there are only numbers.
        entropy: ``[N, K]``, of each head, then of the numbers an estimate: minus their log-probability.
        target_entropy: ``[N, K]``.
        share: ``[K]``, weights of the entropies in the value of the state.
    """

    numbers: Tensor
    sizes: list[int]
    probs: Tensor
    entropy: Tensor
    target_entropy: Tensor
    share: Tensor


def soft_policy(outputs: Mapping[str, Any], noise: Tensor, config: SACConfig) -> SoftPolicy:
    """The policy's `SoftPolicy`; the last of the Gaussian ``noise`` ``[N, ...]`` draws the numbers."""
    log_probs = [returns.full_precision(head).log_softmax(-1) for head in heads_of(outputs)]
    probs = [head.exp() for head in log_probs]
    entropy = [-(p * log_p).sum(-1) for p, log_p in zip(probs, log_probs, strict=True)]
    # Forbidden choices have a probability of exactly 0.
    target = [config.target_entropy_scale * (p > 0).sum(-1).to(p.dtype).log() for p in probs]
    share = [1 / len(probs) for _ in probs]
    if "tanh_mean" in outputs:
        squashed = {name: outputs[name] for name in ("tanh_mean", "tanh_log_std")}
        size = squashed["tanh_mean"].shape[-1]
        numbers, log_prob = sample(squashed, noise[..., noise.shape[-1] - size :])
        entropy.append(-log_prob)
        target.append(torch.full_like(log_prob, -size if config.target_entropy is None else config.target_entropy))
        share.append(1.0)
    else:
        numbers = probs[0][:, :0]
    return SoftPolicy(
        numbers,
        [head.shape[-1] for head in probs],
        torch.cat(probs, -1) / len(probs) if probs else torch.ones_like(numbers[:, :1]),
        torch.stack(entropy, -1),
        torch.stack(target, -1),
        numbers.new_tensor(share),
    )


def soft_value(q: Tensor, of: SoftPolicy, alpha: Tensor) -> Tensor:
    """``E[min Q(s, a) - alpha log pi(a|s)]``, ``[N]``: equation 3, for choices Christodoulou's equation 10.

    Args:
        q: ``[N, critics, choices]`` for the drawn numbers; one choice if there are only numbers.
        of: what the policy does.
        alpha: the temperature, or ``[K]``, of each entropy.
    """
    return (of.probs * q.amin(1)).sum(-1) + (of.share * alpha * of.entropy).sum(-1)


def value_of_choices(q: Tensor, choices: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mean of the critics' values of the heads' choices ``[N, H]``, ``[N, critics]``; ``q`` as for `soft_value`."""
    if not sizes:
        return q[..., 0]
    first = torch.tensor([0, *sizes[:-1]], device=q.device).cumsum(0)
    index = (choices.long() + first).unsqueeze(1).expand(-1, q.shape[1], -1)
    return q.gather(-1, index).mean(-1)


def critic_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Equation 5 summed over critics: half the squared Bellman errors.

    Args:
        q: ``[N, critics]``.
        target: ``[N]``, the target in equation 5, without gradient.
        weight: ``[N]``.
    """
    return 0.5 * (weight.unsqueeze(-1) * (q - target.unsqueeze(-1)).square()).sum()


class SAC(Algorithm):
    """Updates a module from learner batches; arguments as for `Algorithm`.

    The optimiser includes the critics' parameters. The temperatures use the optimiser's first learning rate. Until the
    first update there is one temperature, as only the module's outputs tell how many it needs.

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

        Columns need at least ``n_step`` transitions, and numbers within (-1, 1).
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
        measured, gaps, errors = [], [], []
        for index, piece in enumerate(pieces):
            with self.optimise.shared(last=index == len(pieces) - 1):
                loss, numbers, gap, error = self._loss(self._steps(piece, count), alpha)
                self.optimise.backward(loss, len(piece["mask"]) / len(batch["mask"]))
            measured.append(numbers)
            gaps.append(gap)
            errors.append(error)
        norm = self.optimise.step()
        total = torch.stack(measured).sum(0)
        if self.config.alpha is None:
            self._warm(torch.stack(gaps).sum(0))
        self._follow()
        self.priorities = None
        if "index" in batch:
            error = torch.cat(errors).view(learned.shape) * learned
            self.priorities = error.sum(1) / learned.sum(1).clamp(min=1)
        means = torch.cat([total, alpha.mean().reshape(1), norm.reshape(1)]).tolist()
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
            action=returns.full_precision(batch["action"])[:, :steps].reshape(size * steps, -1),
            reward=targets.reward.T.flatten(),
            discount=targets.discount.T.flatten(),
            next_obs=optree.tree_map(lambda x: x[column, end].flatten(0, 1), batch["obs"]),
            weight=mask.flatten() * (self.across.size / count.clamp(min=1)),
            importance=importance.flatten(),
            next_noise=batch["noise"][:, :, 0].flatten(0, 1),
            noise=batch["noise"][:, :, 1].flatten(0, 1),
        )

    def _loss(self, step: GradientInputs, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss, the sums of the metrics ``[6]`` and of the entropies above their targets ``[K]``, and every step's
        error."""
        with self.optimise.autocast():
            with torch.no_grad():
                later = soft_policy(_call(self.module, step.next_obs), step.next_noise, self.config)
                next_q = _values(self._slow, step.next_obs, later.numbers, later.sizes)
            now = soft_policy(_call(self.module, step.obs), step.noise, self.config)
            choices, numbers = step.action.tensor_split([len(now.sizes)], -1)
            q = _values(self._critic, step.obs, numbers, now.sizes)
            self._critic.requires_grad_(False)  # the policy's loss must not train the critics
            is_drawn = now.numbers.shape[-1] > 0  # else the critics would compute the same again
            q_of_policy = _values(self._critic, step.obs, now.numbers, now.sizes) if is_drawn else q.detach()
            self._critic.requires_grad_(True)
        target = step.reward + step.discount * soft_value(next_q, later, alpha)
        q = value_of_choices(q, choices, now.sizes)
        of_critic = critic_loss(q, target, step.weight * step.importance)
        of_policy = -(step.weight * soft_value(q_of_policy, now, alpha)).sum()
        loss = of_critic + of_policy
        with torch.no_grad():
            error = (q - target.unsqueeze(-1)).abs().mean(-1)
            seen = [(step.weight * x).sum() for x in (now.entropy.sum(-1), q.mean(-1), error)]
            metrics = torch.stack([loss, of_critic, of_policy, *seen])
            gap = (step.weight.unsqueeze(-1) * (now.entropy - now.target_entropy)).sum(0)
        return loss, metrics, gap, error

    @torch.no_grad()
    def _warm(self, gap: Tensor) -> None:
        """Takes a gradient step on the logarithms of the temperatures (section 5).

        Args:
            gap: ``[K]``, mean entropies less their targets.
        """
        gradient = (self.across.sum(gap) / self.across.size).to(self._log_alpha.dtype)
        if gradient.numel() > self._log_alpha.numel():
            self._log_alpha.data = self._log_alpha.repeat(len(gradient))
        self._log_alpha.grad = gradient.view_as(self._log_alpha)
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
        """The slow critics, the temperatures and the gradient step's scales."""
        return {
            "slow": self._slow.state_dict(),
            "log_alpha": self._log_alpha.detach().clone(),
            "alpha_optimizer": self._alpha_optimizer.state_dict(),
            "optimise": self.optimise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; temperatures are restored only if they are learned, not an option."""
        self._slow.load_state_dict(state["slow"])
        can_be_learned = torch.isfinite(state["log_alpha"]).all()  # a temperature of 0 cannot
        if self.config.alpha is None and can_be_learned:
            self._log_alpha.data = state["log_alpha"].to(self._log_alpha, copy=True)
        self._alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        self.optimise.load_state_dict(state["optimise"])


def _values(critic: nn.Module, obs: Any, numbers: Tensor, sizes: Sequence[int]) -> Tensor:
    """The critics' values ``[N, critics, choices]``; with one choice if there are only numbers.

    Raises:
        ValueError: the critic gave another shape.
    """
    q = returns.full_precision(_call(critic, obs, numbers))
    by_choice = q if sizes else q.unsqueeze(-1)
    if by_choice.ndim != 3 or by_choice.shape[::2] != (len(numbers), sum(sizes) or 1):  # broadcasting would hide it
        expected = f"[{len(numbers)}, critics{f', {sum(sizes)}' if sizes else ''}]"
        raise ValueError(f"critic: expected {expected}, got shape {tuple(q.shape)}")
    return by_choice


def _call(module: nn.Module, obs: Any, *more: Tensor) -> Any:
    return module(*obs, *more) if isinstance(obs, tuple) else module(obs, *more)
