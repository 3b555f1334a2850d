"""Proximal policy optimisation: options, loss, metrics and update, for any distribution and network. Torch only.

Schulman et al. 2017, "Proximal policy optimization algorithms", https://arxiv.org/abs/1707.06347. Input: the learner
batches of `brayx.replay.packing`, as tensors. Knows nothing of where they come from, of publishing or of checkpoints.

For self-play, an optional magnet adds KL(learning policy || reference policy) to the loss: `brayx.algorithms.magnet`.

The module returns a policy's outputs (`brayx.nets.distributions`) and ``value`` ``[N]``, or ``[N, K]`` with reward
heads. A recurrent module is replayed over whole columns, see `brayx.algorithms.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import optree
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from brayx.algorithms import returns
from brayx.algorithms.base import ALONE, Across, Algorithm
from brayx.algorithms.config import Sampling
from brayx.algorithms.forward import Forward, Outputs, carries, state_of
from brayx.algorithms.magnet import Magnet, bare
from brayx.algorithms.moments import Moments
from brayx.algorithms.optimise import OptimiseConfig, Schedule, share
from brayx.nets.distributions import distribution_outputs, kl_divergence, log_prob_entropy

METRICS = (
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "explained_variance"
)  # fmt: skip
"""Metrics of `PPO.update`, besides ``learning_rate``, ``epochs`` and, with a magnet, `MAGNET_KL`."""
MAGNET_KL = "magnet_kl"
"""Metric: mean KL divergence from the learning policy to the magnet, in nats."""
_NEVER = 1e4
"""Old log-probability for masked steps: it makes their ratio 0."""
_TOO_FAR = 1.5
"""No further epoch starts once the KL exceeds its target by this factor."""
_STEER = 1.5
"""Factor that raises or lowers the learning rate when the KL is below half or above twice its target."""
_STEERED = (0.01, 10.0)
"""Bounds of the product of these factors."""
_FORWARD_ROWS = 2048
"""Row limit of a forward without gradient, unless a minibatch has more rows."""
_FORWARD_BYTES = 8 * 2**20
"""Limit on the observation bytes of such a forward on a CPU. Images become four times larger as floats, and repeated
allocation of more memory than that costs as much as the network itself."""


class RewardHead(BaseModel):
    """One of several rewards, each with a separate value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of the advantage trace."""
    weight: float = 1.0
    """Weight of this head's advantage in the policy's advantage."""


class PPOConfig(OptimiseConfig):
    """Options of PPO."""

    name: Literal["ppo"] = "ppo"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of the advantage trace."""
    clip_param: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios beyond 1 +- this gain nothing."""
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
    """Values that moved further than this from what they were count as if they had not; null: no such clipping."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL divergence between acting and learning policy that an update should have; null: none."""
    kl_reaction: Literal["stop", "learning_rate"] = "stop"
    """What the target does. ``stop``: no further epoch once one is beyond 1.5 times it. ``learning_rate``: that is
    multiplied by 1.5 after an update below half of it, and divided by 1.5 after one above twice of it."""
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


def kl_and_clipped(log_ratio: Tensor, weight: Tensor, clip_param: float) -> Tensor:
    """``[2]``: KL(acting || learning) by the k3 estimator (Schulman, http://joschu.net/blog/kl-approx.html) and the
    share of clipped ratios, as weighted sums."""
    ratio = log_ratio.exp()
    outside = (ratio < 1 - clip_param) | (ratio > 1 + clip_param)
    return torch.stack([torch.dot(weight, ratio - 1 - log_ratio), torch.dot(weight, outside.to(weight.dtype))])


class ClosedForm(Protocol):
    """Computes the gradient of `ppo_loss` without autograd, for a module with a known derivative."""

    def gradient(
        self,
        obs: Any,
        action: Tensor,
        old_log_prob: Tensor,
        weighted_advantage: Tensor,
        target: Tensor,
        weight: Tensor,
        clip_param: float,
        magnet: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Overwrites ``.grad`` of every parameter and returns `Loss.parts` and `Loss.log_ratio`. Arguments as for
        `ppo_loss`, without value clipping; ``magnet``: the magnet's policy outputs."""
        ...


class _Data(NamedTuple):
    """The steps of a batch. Minibatches shuffle *units*: single steps, or whole columns for a recurrent module.

    Every array is ``[units, ...]``, or ``[T, units, ...]`` for a recurrent module.

    Attributes:
        obs, action: observations and actions.
        state, carry: stored recurrent state, and the steps that continue it (`brayx.algorithms.forward`); None for
            other modules.
        log_prob: log-probability of the action when it was taken.
        mask: 1 for steps to learn from.
        advantage, target, value: ``[units]``; with reward heads, targets and old values are ``[units, K]``.
        weight, weighted_advantage: weight of each step in its minibatch, and that times the advantage.
        magnet: the magnet's policy outputs; None without a magnet.
    """

    obs: Any
    action: Tensor
    state: Any
    carry: Tensor | None
    log_prob: Tensor
    mask: Tensor
    advantage: Tensor
    target: Tensor
    value: Tensor
    weight: Tensor
    weighted_advantage: Tensor
    magnet: Any

    @property
    def axis(self) -> int:
        """The axis of the units."""
        return self.mask.ndim - 1

    def at(self, index: Tensor) -> _Data:
        """The units at ``index``."""
        return cast(_Data, _each(partial(torch.index_select, dim=self.axis, index=index), self))

    def parts(self, count: int) -> Iterator[_Data]:
        """Splits the units into ``count`` consecutive parts, without copying."""
        sizes = _sizes(self.mask.shape[self.axis], count)
        nest: Any = self
        leaves, tree = optree.tree_flatten(nest)
        for pieces in zip(*(leaf.split(sizes, self.axis) for leaf in leaves), strict=True):
            yield cast(_Data, optree.tree_unflatten(tree, pieces))


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
        self._moments = Moments(len(config.reward_heads)) if config.normalise_value else None
        self._magnet: Magnet | None = None

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch in up to ``epochs`` passes of minibatches. Arguments and errors as for
        `Algorithm.update`.

        Returns:
            Means over the minibatches, by the names in `METRICS`, and `MAGNET_KL` with a magnet; ``learning_rate``;
            the number of ``epochs`` done.
        """
        config = self.config
        if config.magnet_coef and self._magnet is None:
            self._magnet = self._new_magnet()
        learning_rate = self.optimise.begin(progress)
        left = share(progress, schedule=config.clip_schedule, final=config.clip_final)
        clip_param = max(config.clip_param * left, 1e-6)
        data, explained = self._prepare(batch)
        self.advantages = (data.advantage, data.mask)
        units = data.mask.shape[data.axis]
        count = min(max(1, round(data.mask.numel() / config.minibatch_size)), units)
        # A single minibatch is the whole batch: it needs no shuffling, and its weights never change.
        shuffled = self._weighted(data, 1) if count == 1 else data
        done, epochs = _Done(), 0
        while epochs < config.epochs and not self._too_far(done, epochs, count, clip_param):
            epochs += 1
            if count > 1:
                # Draw on the CPU: checkpoints save that generator, and every device gets the same minibatches.
                shuffled = self._weighted(data.at(torch.randperm(units).to(data.mask.device)), count)
            for minibatch in shuffled.parts(count):
                self._gradient_step(minibatch, clip_param, done)
        measured = self._measured(done, clip_param, explained)
        if config.kl_target is not None and config.kl_reaction == "learning_rate":
            self._steer(measured["approx_kl"] / config.kl_target)
        if self._magnet is not None:
            self._magnet.follow()
        return {**measured, "learning_rate": learning_rate, "epochs": epochs}

    def _gradient_step(self, data: _Data, clip_param: float, done: _Done) -> None:
        """Takes one gradient step on a minibatch, in parts if the options accumulate gradients."""
        units = data.mask.shape[data.axis]
        count = min(self.config.accumulate, units)
        for index, part in enumerate(data.parts(count) if count > 1 else [data]):
            if self.closed_form is not None:
                parts, log_ratio = self.closed_form.gradient(
                    part.obs,
                    part.action,
                    part.log_prob,
                    part.weighted_advantage,
                    part.target,
                    part.weight,
                    clip_param,
                    part.magnet,
                )
            else:
                with self.optimise.shared(last=index == count - 1):
                    total, parts, log_ratio = self._loss(part, clip_param)
                    self.optimise.backward(total, part.mask.shape[part.axis] / units)
            done.losses.append(parts)
            done.log_ratios.append(log_ratio)
            done.weights.append(part.weight.flatten())
        done.norms.append(self.optimise.step())

    def _loss(self, data: _Data, clip_param: float) -> Loss:
        """The loss of one micro-batch."""
        config = self.config
        with self.optimise.autocast():
            outputs = self.forward(data.obs, data.state, data.carry)
        if data.carry is not None:
            data = cast(_Data, _each(lambda x: x.flatten(0, 1), data._replace(obs=None, state=None)))
        log_prob, entropy = log_prob_entropy(outputs, data.action)
        return ppo_loss(
            log_prob,
            data.log_prob,
            entropy,
            returns.full_precision(outputs["value"]),
            data.weighted_advantage,
            data.target,
            data.weight,
            clip_param=clip_param,
            value_coef=config.value_coef,
            entropy_coef=config.entropy_coef,
            old_value=data.value,
            clip_value=config.clip_value,
            magnet_kl=None if data.magnet is None else kl_divergence(outputs, data.magnet),
            magnet_coef=config.magnet_coef,
        )

    def reset_magnet(self) -> None:
        """Drops the magnet; the next update makes a new one of the weights at that time."""
        self._magnet = None

    def _new_magnet(self) -> Magnet:
        decay = self.config.magnet_decay if self.config.magnet == "average" else None
        return Magnet(self._bare(), decay)

    def _bare(self) -> nn.Module:
        """The module that `forward` calls, without wrappers."""
        return bare(self.module)

    def _weighted(self, data: _Data, count: int) -> _Data:
        """Adds the weight and weighted advantage of each step in its minibatch, for ``count`` minibatches.

        Weights are shares of the minibatch over all ranks, times the number of ranks, because gradients are averaged
        over ranks.
        """
        mask, advantage = data.mask, data.advantage
        units = mask.shape[-1]
        of_unit = torch.repeat_interleave(torch.arange(count), torch.tensor(_sizes(units, count))).to(mask.device)

        def added(x: Tensor) -> Tensor:
            x = x.sum(0) if x.ndim == 2 else x
            return self.across.sum(x.new_zeros(count).index_add_(0, of_unit, x))

        number = added(mask)
        weight = mask / number.clamp(min=1)[of_unit]
        if self.config.normalise_advantage:
            centred = advantage - added(weight * advantage)[of_unit]
            deviation = added(weight * centred.square()).sqrt()
            # A minibatch of fewer than two steps has no deviation: keep its advantages.
            advantage = torch.where((number > 1)[of_unit], centred / (deviation[of_unit] + 1e-8), advantage)
        weight = weight * self.across.size
        return data._replace(weight=weight, weighted_advantage=weight * advantage)

    @torch.no_grad()
    def _prepare(self, batch: Mapping[str, Any]) -> tuple[_Data, Tensor]:
        """Returns time-major data with values and advantages of the current module, and the explained variance."""
        mask = batch["mask"]
        if mask.ndim != 2 or mask.shape[1] < 2:
            raise ValueError(f"mask: expected [B, T + 1] with T >= 1, got shape {tuple(mask.shape)}")
        heads = self.config.reward_heads
        obs, action = _transposed(batch["obs"]), batch["action"].transpose(0, 1)
        mask, terminated, truncated, old_log_prob, reward = (
            batch[key].transpose(0, 1)
            for key in ("mask", "terminated", "truncated", "log_prob", "reward_heads" if heads else "reward")
        )
        if heads and reward.shape[2:] != (len(heads),):
            raise ValueError(f"reward_heads: expected [..., {len(heads)}], got shape {tuple(reward.shape)}")
        state: Any = None
        carry: Tensor | None = None
        if self.forward.recurrent:
            state = _transposed(state_of(batch))
            carry = carries(mask, terminated, truncated)
        else:
            obs = _each(lambda x: x.flatten(0, 1), obs)
        value = self._outputs(self.forward, lambda outputs: outputs["value"], obs, state, carry)
        expected = reward.shape if carry is not None else reward.flatten(0, 1).shape
        if value.shape != expected:
            raise ValueError(f"value: expected one for each reward, {tuple(expected)}, got {tuple(value.shape)}")
        value = value.reshape(reward.shape)
        returned = value if self._moments is None else self._moments.back(value)
        advantage = self._advantage(reward[:-1], terminated[:-1], truncated[:-1], returned)
        target = returned[:-1] + advantage
        learn = mask[:-1]
        explained = self._explained_variance(returned[:-1], target, learn)
        if self._moments is not None:
            self._moments.add(target, learn, self.across)
            target = self._moments.scaled(target)
        if heads:
            advantage = (advantage * advantage.new_tensor([head.weight for head in heads])).sum(-1)
        happened = torch.where(learn > 0, old_log_prob[:-1], _NEVER)
        steps = (action[:-1], happened, learn, advantage, target, value[:-1])
        if carry is None:
            obs = _each(lambda x: x[: learn.numel()], obs)
            steps = _each(lambda x: x.flatten(0, 1), steps)
        else:
            obs, state, carry = _each(lambda x: x[:-1], (obs, state, carry))
        action, *numbers = steps
        log_prob, learn, advantage, target, value = numbers
        magnet: Any = None
        if self._magnet is not None:
            magnet = self._outputs(self._magnet.forward, distribution_outputs, obs, state, carry)
        data = _Data(obs, action, state, carry, log_prob, learn, advantage, target, value, learn, advantage, magnet)
        return data, explained

    def _outputs(
        self, forward: Forward, take: Callable[[Outputs], Any], obs: Any, state: Any, carry: Tensor | None
    ) -> Any:
        """What ``take`` selects of each step, ``[T * B, ...]`` or, if recurrent, ``[T, B, ...]``; in bounded pieces."""
        leaves = optree.tree_leaves(obs)
        axis = 0 if carry is None else 1
        units = leaves[0].shape[axis]
        rows = leaves[0].shape[0] if carry is None else carry.numel()
        most = max(self.config.minibatch_size, _FORWARD_ROWS)
        if leaves[0].device.type == "cpu":
            most = min(most, max(1, rows * _FORWARD_BYTES // max(1, sum(leaf.nbytes for leaf in leaves))))
        pieces = min(-(-rows // most), units)
        found, start = [], 0
        for length in _sizes(units, pieces):
            cut = _each(partial(torch.narrow, dim=axis, start=start, length=length), (obs, state, carry))
            start += length
            with self.optimise.autocast():
                taken = _each(returns.full_precision, take(forward(*cut)))
            found.append(taken if carry is None else _each(partial(_unflatten, sizes=(len(carry), length)), taken))
        return optree.tree_map(lambda *pieces: torch.cat(pieces, axis), *found)

    def _advantage(self, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor) -> Tensor:
        """Advantages ``[T, B]``, or ``[T, B, K]`` with reward heads."""
        heads = self.config.reward_heads
        if not heads:
            discount_t, lambda_t = returns.discounts(
                terminated, truncated, gamma=self.config.gamma, lam=self.config.gae_lambda, dtype=value.dtype
            )
            return returns.gae(reward, discount_t, lambda_t, value)
        each = [
            returns.gae(
                reward[..., k],
                *returns.discounts(terminated, truncated, gamma=head.gamma, lam=head.gae_lambda, dtype=value.dtype),
                value[..., k],
            )
            for k, head in enumerate(heads)
        ]
        return torch.stack(each, -1)

    def _kl(self, done: _Done, clip_param: float, last: int = 0) -> Tensor:
        """``[2]``: KL and clipped share, means over all ranks and over the ``last`` minibatches (0: all)."""
        parts = last * len(done.weights) // max(len(done.norms), 1)
        log_ratio, weight = torch.cat(done.log_ratios[-parts:]), torch.cat(done.weights[-parts:])
        minibatches = last or len(done.norms)
        return self.across.sum(kl_and_clipped(log_ratio, weight, clip_param)) / (minibatches * self.across.size)

    def _too_far(self, done: _Done, epochs: int, count: int, clip_param: float) -> bool:
        """Whether the last epoch exceeded the KL target. Without a target it does not wait for the device."""
        target = self.config.kl_target
        if target is None or self.config.kl_reaction != "stop" or not epochs:
            return False
        return self._kl(done, clip_param, last=count)[0].item() > _TOO_FAR * target

    def _measured(self, done: _Done, clip_param: float, explained: Tensor) -> dict[str, float]:
        config = self.config
        parts = self.across.sum(torch.stack(done.losses).sum(0)) / (len(done.norms) * self.across.size)
        parts, magnet_kl = parts[:3], parts[3:]
        total = parts[0] + config.value_coef * parts[1] - config.entropy_coef * parts[2]
        total = total + config.magnet_coef * magnet_kl.sum()
        norm = torch.stack(done.norms).mean()
        kl = self._kl(done, clip_param)
        every = torch.cat([total.reshape(1), parts, kl, norm.reshape(1), explained.reshape(1), magnet_kl])
        names = METRICS if self._magnet is None else (*METRICS, MAGNET_KL)
        return dict(zip(names, every.tolist(), strict=True))

    def _steer(self, share_of_target: float) -> None:
        factor = _STEER if share_of_target < 0.5 else 1 / _STEER if share_of_target > 2 else 1.0
        self.optimise.scale = min(max(self.optimise.scale * factor, _STEERED[0]), _STEERED[1])

    def _explained_variance(self, value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """Explained variance of the values over all ranks, with heads summed."""
        if value.ndim == 3:
            value, target = value.sum(-1), target.sum(-1)
        error = target - value
        sums = [mask, mask * target, mask * target.square(), mask * error, mask * error.square()]
        count, one, two, error_one, error_two = self.across.sum(torch.stack([x.sum() for x in sums])).unbind()
        count = count.clamp(min=1)
        return 1 - (error_two - error_one.square() / count) / (two - one.square() / count).clamp(min=1e-8)

    def state_dict(self) -> dict[str, Any]:
        """The gradient step's scales, the moments of the returns and the magnet."""
        moments = {} if self._moments is None else {"moments": self._moments.state_dict()}
        magnet = {} if self._magnet is None else {"magnet": self._magnet.state_dict()}
        return {"optimise": self.optimise.state_dict(), **moments, **magnet}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. If it has no magnet, the next update makes one."""
        self.optimise.load_state_dict(state["optimise"])
        if self._moments is not None and "moments" in state:
            self._moments.load_state_dict(state["moments"])
        self.reset_magnet()
        if self.config.magnet_coef and "magnet" in state:
            self._magnet = self._new_magnet()
            self._magnet.load_state_dict(state["magnet"])


def _sizes(units: int, count: int) -> list[int]:
    """Sizes of ``count`` parts of ``units``, which differ by at most 1."""
    size, more = divmod(units, count)
    return [size + 1] * more + [size] * (count - more)


def _unflatten(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    return x.reshape(*sizes, *x.shape[1:])


def _each(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    return optree.tree_map(function, nest)


def _transposed(nest: Any) -> Any:
    return _each(lambda x: x.transpose(0, 1), nest)
