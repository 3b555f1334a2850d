"""Proximal policy optimisation: options, loss, metrics and update, for any distribution and network. Torch only.

Schulman et al. 2017, "Proximal policy optimization algorithms", https://arxiv.org/abs/1707.06347. Input: the learner
batches of `brayx.replay.packing`, as tensors. Knows nothing of where they come from, of publishing or of checkpoints.
For self-play, an optional magnet adds KL(learning policy || reference policy) to the loss: `brayx.algorithms.magnet`.

Games play on during an update, so the next batch was acted by a policy that is an update or two older. Ratios to that
policy would begin outside the clip range. So they are to the policy before the update: the decoupled objective of
Hilton et al. 2021, "Batch size-invariance for policy optimization", https://arxiv.org/abs/2110.00641.

The module returns a policy's outputs (`brayx.nets.distributions`) and ``value`` ``[N]``, or ``[N, K]`` with reward
heads. A recurrent module is replayed over whole columns, see `brayx.algorithms.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import optree
import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms import columns, returns
from brayx.algorithms.base import ALONE, Across, Algorithm
from brayx.algorithms.config import RewardHead, Sampling
from brayx.algorithms.forward import LearnerForward, Outputs
from brayx.algorithms.magnet import Magnet, bare
from brayx.algorithms.moments import TensorMoments
from brayx.algorithms.optimise import OptimiseConfig, Schedule, share
from brayx.nets.distributions import distribution_outputs, kl_divergence, log_prob_entropy

METRICS = (
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "explained_variance"
)  # fmt: skip
"""Metrics of `PPO.update`, besides ``learning_rate``, ``epochs`` and, with a magnet, `MAGNET_KL`."""
MAGNET_KL = "magnet_kl"
"""Metric: mean KL divergence from the learning policy to the magnet, in nats."""
_TOO_FAR = 1.5
"""No further epoch starts once the KL exceeds its target by this factor."""
_STEER = 1.5
"""Factor that raises or lowers the learning rate when the KL is below half or above twice its target."""
_STEERED = (0.01, 10.0)
"""Bounds of the product of these factors."""


class PPOConfig(OptimiseConfig):
    """Options of PPO."""

    name: Literal["ppo"] = "ppo"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of the advantage trace."""
    clip_param: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """PPO's clip range: ratios outside 1 +- this get no further reward."""
    decoupled: bool = True
    """Ratios are to the policy before the update, and each advantage counts by the ratio of that policy to the acting
    one, at most 1. false: ratios are to the acting policy. Without lag both are the same."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy bonus."""
    magnet_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(policy || magnet), the divergence from a reference policy; stops cycles in self-play. 0: none."""
    magnet: Literal["fixed", "average"] = "average"
    """Weights of the magnet. ``fixed``: those before the first update from play. ``average``: an exponential moving
    average of the policy's."""
    magnet_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Share of itself that an average magnet keeps at each update."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 10
    """Passes over a learner batch."""
    minibatch_size: Annotated[int, Field(ge=1)] = 512
    """Steps of one gradient, masked ones included, so that every rank takes equally many gradients."""
    normalise_advantage: bool = True
    """Shift and scale the advantages of a minibatch to mean 0 and deviation 1."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate falls over the training."""
    clip_schedule: Schedule = "constant"
    """How ``clip_param`` falls over the training."""
    clip_final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of ``clip_param`` left at the end of training, unless it is constant."""
    clip_value: Annotated[float, Field(gt=0)] | None = None
    """The value loss clips each new prediction to within this distance of the old one; null: no clipping."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL divergence that an update should have, from the policy that its ratios are to; null: none."""
    kl_reaction: Literal["stop", "learning_rate"] = "stop"
    """``stop``: no further epoch starts once the KL exceeds 1.5 times the target. ``learning_rate``: multiplies it by
    1.5 after an update whose KL is below half the target, and divides it by 1.5 after one above twice the target."""
    normalise_value: bool = False
    """The network's values are in units of the running deviation of the returns. Unlike PopArt, this does not rescale
    the last layer when the deviation changes: values are off at first, and while returns grow fast."""
    reward_heads: Annotated[list[RewardHead], Field(max_length=64)] = []
    """Of a reward of several parts (``reward_heads`` ``[..., K]`` in a batch), in their order; empty: ``reward``
    with ``gamma`` and ``gae_lambda``."""

    needs_log_prob: ClassVar[bool] = True

    @property
    def sampling(self) -> Sampling:
        """Learns from each whole run once. From a table, each transition is sampled once on average."""
        return Sampling(unroll_length=64, batch_steps=2048, updates_per_step=1 / 2048)

    def gradients(self, batch_steps: int) -> int:
        """Gradient steps taken on a batch of ``batch_steps`` transitions."""
        return self.epochs * max(1, round(batch_steps / self.minibatch_size))

    def for_measuring(self) -> Self:
        """One epoch."""
        return self.model_copy(update={"epochs": 1})

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return PPO(module, optimizer, self, across)


class Loss(NamedTuple):
    """The loss of one micro-batch.

    Attributes:
        total: scalar to differentiate.
        parts: ``[3]`` policy loss, value loss and entropy, detached; ``[4]`` with a magnet, the KL to it last.
        log_ratio: ``[N]`` log-ratio of the learning to the acting policy, detached.
    """

    total: Tensor
    parts: Tensor
    log_ratio: Tensor


def ppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    weighted_advantage: Tensor,
    target: Tensor,
    weight: Tensor,
    *,
    clip_param: float,
    value_coef: float,
    entropy_coef: float,
    old_value: Tensor | None = None,
    clip_value: float | None = None,
    magnet_kl: Tensor | None = None,
    magnet_coef: float = 0.0,
) -> Loss:
    """The clipped surrogate of equation 7 with value loss and entropy bonus (equation 9), as weighted sums. The magnet
    adds the KL term of magnetic mirror descent.

    Args:
        log_prob: ``[N]`` log-probability of the actions under the learning policy.
        old_log_prob: ``[N]`` log-probability of the actions when they were taken.
        entropy: ``[N]`` entropy of the learning policy.
        value: ``[N]`` or ``[N, K]`` predictions; the losses of the heads are summed.
        weighted_advantage: ``[N]``, the advantage times ``weight``.
        target: value targets, of the shape of ``value``.
        weight: ``[N]``, at least 0; with ``mask / mask.sum()`` the sums are means.
        clip_param: epsilon of the ratio clipping.
        value_coef: weight of half the squared value error.
        entropy_coef: weight of the entropy bonus.
        old_value: values before the update; needed for ``clip_value``.
        clip_value: uses the larger of two value errors: that of ``value``, and that of ``value`` clipped to within
            this distance of ``old_value``; None: no value clipping.
        magnet_kl: ``[N]`` KL divergence from the learning policy to the magnet; None: no magnet.
        magnet_coef: weight of that divergence.

    Raises:
        ValueError: ``value`` and ``target`` differ in shape; broadcasting would compare each with all.
    """
    if value.shape != target.shape:
        raise ValueError(f"value: expected the shape of its targets, {tuple(target.shape)}, got {tuple(value.shape)}")
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_param, 1 + clip_param)
    surrogate = torch.minimum(ratio * weighted_advantage, clipped * weighted_advantage)
    error = (value - target).square()
    if clip_value is not None:
        assert old_value is not None
        near = old_value + (value - old_value).clamp(-clip_value, clip_value)
        error = torch.maximum(error, (near - target).square())
    policy_loss = -surrogate.sum()
    value_loss = 0.5 * torch.dot(weight, error if error.ndim == 1 else error.sum(-1))
    mean_entropy = torch.dot(weight, entropy)
    total = policy_loss + value_coef * value_loss
    if entropy_coef:
        total = total - entropy_coef * mean_entropy
    parts = [policy_loss, value_loss, mean_entropy]
    if magnet_kl is not None:
        parts.append(torch.dot(weight, magnet_kl))
        total = total + magnet_coef * parts[-1]
    return Loss(total, torch.stack([part.detach() for part in parts]), log_ratio.detach())


class ClosedForm(Protocol):
    """Computes the gradient of `ppo_loss` without autograd, for a module with a known derivative."""

    def gradient(self, steps: Mapping[str, Any], clip_param: float) -> tuple[Tensor, Tensor]:
        """Overwrites ``.grad`` of every parameter and returns `Loss.parts` and `Loss.log_ratio`; does not clip values.

        ``steps`` is what `PPO` prepares, ``[N, ...]``: observations, actions, weights and so on.
        """
        ...


@dataclass
class _Done:
    """Results of an update's gradient steps so far: `Loss.parts`, ``[N]`` log-ratios and ``[N]`` weights of each
    micro-batch, and the gradient norm of each step."""

    losses: list[Tensor] = field(default_factory=list)
    log_ratios: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


class PPO(Algorithm):
    """Updates a module from learner batches. Arguments as for `Algorithm`.

    Several ranks, each with its own batch, take the same gradient steps as one rank with all batches. Micro-batches
    (``accumulate``) take the same step as the whole minibatch.

    Attributes:
        closed_form: computes the gradient of a minibatch; None: autograd does.
    """

    config: PPOConfig
    closed_form: ClosedForm | None = None

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, config: PPOConfig, across: Across = ALONE
    ) -> None:
        super().__init__(module, optimizer, config, across)
        self._moments = TensorMoments(len(config.reward_heads)) if config.normalise_value else None
        self._magnet: Magnet | None = None

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch in up to ``epochs`` passes of minibatches. Arguments and errors as for
        `Algorithm.update`.

        Returns:
            Means over the minibatches, by the names in `METRICS`, and `MAGNET_KL` with a magnet; ``learning_rate``;
            the number of ``epochs`` done.
        """
        config = self.config
        columns.check(batch)
        if config.magnet_coef and self._magnet is None:
            self._magnet = self._new_magnet()
        learning_rate = self.optimise.begin(progress)
        left = share(progress, schedule=config.clip_schedule, final=config.clip_final)
        clip_param = max(config.clip_param * left, 1e-6)
        steps, explained = self._prepare(batch)
        mask = steps["mask"]
        self.advantages = (steps["advantage"], mask)
        units = mask.shape[-1]
        count = min(max(1, round(mask.numel() / config.minibatch_size)), units)
        # A single minibatch is the whole batch: it needs no shuffling, and its weights never change.
        shuffled = self._weighted(steps, 1) if count == 1 else steps
        done, epochs = _Done(), 0
        while epochs < config.epochs and not self._too_far(done, epochs, count, clip_param):
            epochs += 1
            if count > 1:
                # Draw on the CPU: checkpoints save that generator, and every device gets the same minibatches.
                order = torch.randperm(units).to(mask.device)
                shuffled = self._weighted(columns.select(steps, order, self._axis), count)
            for minibatch in columns.parts(shuffled, count, self._axis):
                self._gradient_step(minibatch, clip_param, done)
        measured = self._measured(done, clip_param, explained)
        if config.kl_target is not None and config.kl_reaction == "learning_rate":
            self._steer(measured["approx_kl"] / config.kl_target)
        if self._magnet is not None:
            self._magnet.follow()
        return {**measured, "learning_rate": learning_rate, "epochs": epochs}

    @property
    def _axis(self) -> int:
        """The axis of the units, which minibatches shuffle: steps, or whole columns ``[T, B, ...]`` if recurrent."""
        return 1 if self.forward.recurrent else 0

    @torch.no_grad()
    def _prepare(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Prepares the transitions of a batch with the current module.

        Returns:
            Arrays ``[T * B, ...]``, or ``[T, B, ...]`` for a recurrent module: ``obs``, ``action``, ``log_prob`` (of
            the policy that ratios are to), ``mask``, ``advantage``, ``target``, ``value`` and, or None, ``trust``
            (factor of the advantage), ``state``, ``carry`` and ``magnet`` (its policy outputs). With reward heads,
            ``target`` and ``value`` have an axis for them. And the explained variance, over all ranks.
        """
        heads = self.config.reward_heads
        action, mask, terminated, truncated, old_log_prob, reward = (
            columns.transitions(batch, key)
            for key in ("action", "mask", "terminated", "truncated", "log_prob", "reward_heads" if heads else "reward")
        )
        if heads and reward.shape[2:] != (len(heads),):
            raise ValueError(f"reward_heads: expected [..., {len(heads)}], got shape {tuple(reward.shape)}")
        args: Any = columns.inputs(self.forward, batch)
        policy, value = self._outputs(self.forward, lambda x: (distribution_outputs(x), x["value"]), args)
        every_step = torch.Size((len(mask) + 1, *reward.shape[1:]))
        expected = every_step if self._axis else (every_step[:2].numel(), *every_step[2:])
        if value.shape != expected:
            raise ValueError(f"value: expected one for each reward, {tuple(expected)}, got {tuple(value.shape)}")
        value = value.reshape(every_step)
        returned = value if self._moments is None else self._moments.back(value)
        gamma: float | Tensor = self.config.gamma
        lam: float | Tensor = self.config.gae_lambda
        if heads:
            gamma, lam, head_weight = (
                value.new_tensor([getattr(head, name) for head in heads]) for name in ("gamma", "gae_lambda", "weight")
            )
            terminated, truncated = (x.unsqueeze(-1).expand(reward.shape) for x in (terminated, truncated))
        ends = returns.discounts(terminated, truncated, gamma=gamma, lam=lam, dtype=value.dtype)
        advantage = returns.gae(reward, *ends, returned)
        target = returned[:-1] + advantage
        value_sum, target_sum = (x.sum(-1) if heads else x for x in (returned[:-1], target))
        explained = columns.explained_variance(self.across.sum(columns.moments(value_sum, target_sum, mask)))
        if self._moments is not None:
            self._moments.add(target, mask, self.across)
            target = self._moments.scaled(target)
        advantage = (advantage * head_weight).sum(-1) if heads else advantage
        log_prob, trust = old_log_prob, None
        if self.config.decoupled:
            policy = columns.flat(policy) if self._axis else policy
            acted: Any = optree.tree_map(lambda x: x[: mask.numel()], policy)
            log_prob = log_prob_entropy(acted, action.flatten(0, 1))[0].reshape(mask.shape)
            # At most 1, as in V-trace: an action that was unlikely would outweigh all others.
            trust = torch.where(mask > 0, log_prob - old_log_prob, 0.0).clamp(max=0.0).exp()
        steps: dict[str, Any] = {
            "action": action,
            "log_prob": torch.where(mask > 0, log_prob, 1e4),  # so the ratio of a masked step is 0
            "trust": trust,
            "mask": mask,
            "advantage": advantage,
            "target": target,
            "value": value[:-1],
        }
        steps = steps if self._axis else columns.flat(steps)
        obs, state, carry = args = optree.tree_map(lambda x: x[: len(steps["mask"])], args)
        magnet = self._magnet and self._outputs(self._magnet.forward, distribution_outputs, args)
        return {**steps, "obs": obs, "state": state, "carry": carry, "magnet": magnet}, explained

    def _outputs(self, forward: LearnerForward, select: Callable[[Outputs], Any], args: columns.Inputs) -> Any:
        with self.optimise.autocast():
            return columns.in_pieces(forward, args, select, self.config.minibatch_size)

    def _weighted(self, steps: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Adds ``weight`` and ``weighted_advantage``, those of each step in its minibatch, for ``count`` minibatches.

        Weights are shares of the minibatch over all ranks, times the number of ranks, because gradients are averaged
        over ranks.
        """
        mask, advantage = steps["mask"], steps["advantage"]
        lengths = torch.tensor(columns.sizes(mask.shape[-1], count))
        minibatch = torch.repeat_interleave(torch.arange(count), lengths).to(mask.device)

        def added(x: Tensor) -> Tensor:
            x = x.sum(0) if x.ndim == 2 else x
            return self.across.sum(x.new_zeros(count).index_add_(0, minibatch, x))

        number = added(mask)
        weight = mask / number.clamp(min=1)[minibatch]
        if self.config.normalise_advantage:
            centred = advantage - added(weight * advantage)[minibatch]
            deviation = added(weight * centred.square()).sqrt()
            # A minibatch of fewer than two steps has no deviation: keep its advantages.
            advantage = torch.where((number > 1)[minibatch], centred / (deviation[minibatch] + 1e-8), advantage)
        weight = weight * self.across.size
        if steps["trust"] is not None:
            advantage = advantage * steps["trust"]
        return {**steps, "weight": weight, "weighted_advantage": weight * advantage}

    def _gradient_step(self, minibatch: Mapping[str, Any], clip_param: float, done: _Done) -> None:
        """Takes one gradient step on a minibatch, in parts if the options accumulate gradients."""
        micro_batches = columns.parts(minibatch, self.config.accumulate, self._axis)
        for index, steps in enumerate(micro_batches):
            if self.closed_form is not None:
                parts, log_ratio = self.closed_form.gradient(steps, clip_param)
            else:
                with self.optimise.shared(last=index == len(micro_batches) - 1):
                    total, parts, log_ratio = self._loss(steps, clip_param)
                    self.optimise.backward(total, steps["mask"].shape[-1] / minibatch["mask"].shape[-1])
            done.losses.append(parts)
            done.log_ratios.append(log_ratio)
            done.weights.append(steps["weight"].flatten())
        done.norms.append(self.optimise.step())

    def _loss(self, steps: Mapping[str, Any], clip_param: float) -> Loss:
        """The loss of one micro-batch."""
        config = self.config
        with self.optimise.autocast():
            outputs = self.forward(steps["obs"], steps["state"], steps["carry"])
        if self.forward.recurrent:  # outputs are flat, see `LearnerForward`
            steps = columns.flat({key: x for key, x in steps.items() if key not in ("obs", "state")})
        log_prob, entropy = log_prob_entropy(outputs, steps["action"])
        return ppo_loss(
            log_prob,
            steps["log_prob"],
            entropy,
            returns.full_precision(outputs["value"]),
            steps["weighted_advantage"],
            steps["target"],
            steps["weight"],
            clip_param=clip_param,
            value_coef=config.value_coef,
            entropy_coef=config.entropy_coef,
            old_value=steps["value"],
            clip_value=config.clip_value,
            magnet_kl=None if steps["magnet"] is None else kl_divergence(outputs, steps["magnet"]),
            magnet_coef=config.magnet_coef,
        )

    def _new_magnet(self) -> Magnet:
        return Magnet(self._bare(), self.config.magnet_decay if self.config.magnet == "average" else None)

    def _bare(self) -> nn.Module:
        """The module that `forward` calls, without wrappers."""
        return bare(self.module)

    def _kl(self, done: _Done, clip_param: float, last: int = 0) -> Tensor:
        """``[2]``: KL from the policy that ratios are to, by the k3 estimator
        (Schulman, http://joschu.net/blog/kl-approx.html), and the share of clipped ratios; means over all ranks and
        over the ``last`` minibatches (0: all)."""
        parts = last * len(done.weights) // max(len(done.norms), 1)
        log_ratio, weight = torch.cat(done.log_ratios[-parts:]), torch.cat(done.weights[-parts:])
        ratio = log_ratio.exp()
        clipped = ((ratio < 1 - clip_param) | (ratio > 1 + clip_param)).to(weight.dtype)
        sums = torch.stack([torch.dot(weight, x) for x in (ratio - 1 - log_ratio, clipped)])
        return self.across.sum(sums) / ((last or len(done.norms)) * self.across.size)

    def _too_far(self, done: _Done, epochs: int, count: int, clip_param: float) -> bool:
        """Whether the last epoch exceeded the KL target. Without a target it does not wait for the device."""
        target = self.config.kl_target
        if target is None or self.config.kl_reaction != "stop" or not epochs:
            return False
        return self._kl(done, clip_param, last=count)[0].item() > _TOO_FAR * target

    def _measured(self, done: _Done, clip_param: float, explained: Tensor) -> dict[str, float]:
        config = self.config
        parts = self.across.sum(torch.stack(done.losses).sum(0)) / (len(done.norms) * self.across.size)
        policy_loss, value_loss, entropy, *magnet_kl = parts
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        loss = loss + sum(config.magnet_coef * divergence for divergence in magnet_kl)
        norm = torch.stack(done.norms).mean()
        numbers = [loss, policy_loss, value_loss, entropy, *self._kl(done, clip_param), norm, explained, *magnet_kl]
        names = METRICS if self._magnet is None else (*METRICS, MAGNET_KL)
        return dict(zip(names, torch.stack(numbers).tolist(), strict=True))

    def _steer(self, share_of_target: float) -> None:
        factor = _STEER if share_of_target < 0.5 else 1 / _STEER if share_of_target > 2 else 1.0
        self.optimise.scale = min(max(self.optimise.scale * factor, _STEERED[0]), _STEERED[1])

    def state_dict(self) -> dict[str, Any]:
        """The gradient step's scales, the moments of the returns and the magnet."""
        parts = {"optimise": self.optimise, "moments": self._moments, "magnet": self._magnet}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. If it has no magnet, the next update makes one."""
        self.optimise.load_state_dict(state["optimise"])
        if self._moments is not None and "moments" in state:
            self._moments.load_state_dict(state["moments"])
        self._magnet = None
        if self.config.magnet_coef and "magnet" in state:
            self._magnet = self._new_magnet()
            self._magnet.load_state_dict(state["magnet"])
