"""Turns a model's outputs into an action, its log-probability, and the environment's action.

NumPy only, for batches. `brayx.nets.distributions` is the torch counterpart for learning, and a test compares the two.
Sampling has three parts, so that a run of many steps does little work at each: `noise` for all steps beforehand,
`choose` at each step, `log_prob` for all steps afterwards; `sample` does all three. Outputs of a model for ``N``
observations:

    logits  [N, A], or a tuple of [N, A_h]   categorical, one head or several: action [N] or [N, H] int64
    mean, log_std  [N, D]                    Gaussian: action [N, D] float32
    ... with latent [N, L], sde_std [N, L, D]   noise that depends on the state: mean + latent @ (sde_std * noise)
    tanh_mean, tanh_log_std  [N, D]          Gaussian squashed into (-1, 1)
    logits with either Gaussian              hybrid, both at once: action [N, H + D] float32, heads first

`choose`, `log_prob` and `greedy` allow more leading axes, such as ``[T, N, ...]``. Knows nothing of engines, torch or
environments; Gymnasium's spaces are recognised by their attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from brayx.errors import ConfigError, ModelError
from brayx.spaces import outside

Outputs: TypeAlias = Mapping[str, Any]
"""A model's outputs, by name."""
Noise: TypeAlias = Any
"""Standard noise: an array, or a tuple of one for each head; for a hybrid policy the Gaussian's comes last."""

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LEAST = np.float32(1e-30)
"""Lower bound of an exponential draw, so that its logarithm is finite."""
_FORBIDDEN = -1e4
"""An action is masked if its logit is this far below the best one."""
MASKED = -3e4
"""Logit of a forbidden action: its probability is 0 in every precision, and all values stay finite."""
_COLDEST = 1e-12
"""Lower bound of a Gaussian's temperature, so that its logarithm is finite."""


def noise(outputs: Outputs, rng: np.random.Generator, steps: int | None = None) -> Noise:
    """Random noise for `choose`.

    Args:
        outputs: outputs of one step, ``[N, ...]``; only their shapes matter.
        rng: random generator.
        steps: number of steps, for noise ``[steps, N, ...]``; None: one step, ``[N, ...]``.

    Raises:
        ModelError: these are not a policy's outputs.
    """
    if (parts := _hybrid(outputs)) is not None:
        categorical, gaussian = (noise(part, rng, steps) for part in parts)
        return (*categorical, gaussian)
    lead = () if steps is None else (steps,)
    if "logits" in outputs:
        logits = outputs["logits"]
        if isinstance(logits, tuple | list):
            return tuple(_gumbel(rng, (*lead, *head.shape)) for head in logits)
        return _gumbel(rng, (*lead, *logits.shape))
    if "sde_std" in outputs:
        return rng.standard_normal((*lead, *np.shape(outputs["sde_std"])), np.float32)
    return rng.standard_normal((*lead, *_location(outputs).shape), np.float32)


def choose(outputs: Outputs, noise: Noise) -> np.ndarray:
    """The action for given noise; a category by the Gumbel-max trick.

    Args:
        outputs: ``[..., N, ...]``.
        noise: from `noise`, for outputs of these shapes.

    Raises:
        ModelError: these are not a policy's outputs.
    """
    if (parts := _hybrid(outputs)) is not None:
        return _joined(choose(parts[0], noise[:-1]), choose(parts[1], noise[-1]))
    if "logits" in outputs:
        logits = outputs["logits"]
        if isinstance(logits, tuple | list):
            if len(logits) == 1:
                only: np.ndarray = (logits[0] + noise[0]).argmax(-1)
                return only[..., np.newaxis]
            return np.stack([(head + g).argmax(-1) for head, g in zip(logits, noise, strict=True)], -1)
        chosen: np.ndarray = (logits + noise).argmax(-1)
        return chosen
    if "sde_std" in outputs:
        moved: np.ndarray = outputs["mean"] + np.einsum(
            "...l,...ld->...d", outputs["latent"], outputs["sde_std"] * noise
        )
        return moved
    name = "tanh_log_std" if "tanh_mean" in outputs else "log_std"
    drawn: np.ndarray = _location(outputs) + np.exp(outputs[name]) * noise
    return np.tanh(drawn) if "tanh_mean" in outputs else drawn


def log_prob(outputs: Outputs, action: np.ndarray) -> np.ndarray:
    """Joint log-probability (density) of actions, float32 ``[..., N]``.

    Args:
        outputs: ``[..., N, ...]``.
        action: from `choose`.

    Raises:
        ModelError: these are not a policy's outputs.
    """
    if (parts := _hybrid(outputs)) is not None:
        heads = len(parts[0]["logits"])
        both: np.ndarray = log_prob(parts[0], action[..., :heads]) + log_prob(parts[1], action[..., heads:])
        return both
    if "logits" in outputs:
        logits = outputs["logits"]
        if isinstance(logits, tuple | list):
            by_head = [_log_softmax_at(head, action[..., index]) for index, head in enumerate(logits)]
            return by_head[0] if len(by_head) == 1 else np.stack(by_head).sum(0)
        return _log_softmax_at(logits, action)
    if "tanh_mean" in outputs:
        mean, log_std = outputs["tanh_mean"], outputs["tanh_log_std"]
        # Where float32 rounds to +-1 the inverse is infinite; use the nearest number inside.
        inside = np.clip(action, -1 + 2**-24, 1 - 2**-24)
        before = np.arctanh(inside.astype(np.float64))
        # log(1 - tanh(u)^2) without cancellation, Haarnoja et al. 2018, appendix C.
        squashed = 2 * (math.log(2) - before - np.logaddexp(0, -2 * before))
        density: np.ndarray = _gaussian(mean, log_std, before) - squashed.sum(-1)
        return density.astype(np.float32)
    return _gaussian(_location(outputs), outputs["log_std"], action).astype(np.float32)


def sample(outputs: Outputs, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A random action for each observation, ``[N, ...]``, and its log-probability ``[N]``.

    Raises:
        ModelError: these are not a policy's outputs.
    """
    if (parts := _hybrid(outputs)) is not None:
        (categories, of_heads), (values, of_values) = (sample(part, rng) for part in parts)
        return _joined(categories, values), of_heads + of_values
    action = choose(outputs, noise(outputs, rng))
    return action, log_prob(outputs, action)


def greedy(outputs: Outputs) -> np.ndarray:
    """The most likely action for each observation, the first of equals; for a squashed Gaussian the squashed mean.

    Raises:
        ModelError: these are not a policy's outputs.
    """
    if (parts := _hybrid(outputs)) is not None:
        return _joined(*map(greedy, parts))
    if "logits" in outputs:
        logits = outputs["logits"]
        if isinstance(logits, tuple | list):
            return np.stack([head.argmax(-1) for head in logits], -1)
        best: np.ndarray = logits.argmax(-1)
        return best
    location: np.ndarray = _location(outputs)
    return np.tanh(location) if "tanh_mean" in outputs else location.copy()


def kl_divergence(outputs: Outputs, reference: Outputs) -> np.ndarray:
    """KL(outputs || reference), float64 ``[..., N]``, in nats and exact; summed over heads or dimensions.

    The divergence of squashed Gaussians is that of the Gaussians inside, and of noise that depends on the state that of
    the marginals. It is finite also if the reference forbids an action: its log-probability is `MASKED` then.

    Args:
        outputs, reference: outputs of two models for the same observations, ``[..., N, ...]``.

    Raises:
        ModelError: these are not a policy's outputs, or the two are for different actions.
    """
    parts, others = _hybrid(outputs), _hybrid(reference)
    if parts is not None and others is not None:
        both: np.ndarray = kl_divergence(parts[0], others[0]) + kl_divergence(parts[1], others[1])
        return both
    if parts is not None or others is not None:
        raise _other_actions(outputs, reference)
    if "logits" in outputs and "logits" in reference:
        ours, theirs = _heads(outputs["logits"]), _heads(reference["logits"])
        if len(ours) == len(theirs):
            pairs = zip(ours, theirs, strict=True)
            joint: np.ndarray = np.stack([_categorical_kl(*pair) for pair in pairs]).sum(0)
            return joint
    for mean, log_std in (("mean", "log_std"), ("tanh_mean", "tanh_log_std")):
        if mean in outputs and mean in reference:
            means = [np.asarray(policy[mean], np.float64) for policy in (outputs, reference)]
            log_stds = [np.asarray(policy[log_std], np.float64) for policy in (outputs, reference)]
            if means[0].shape != means[1].shape:
                break
            spread = log_stds[0] - log_stds[1]
            distance = (means[0] - means[1]) * np.exp(-log_stds[1])
            # Rounding may end below 0.
            divergence: np.ndarray = np.maximum(0.5 * (np.exp(2 * spread) + distance**2 - 1) - spread, 0.0).sum(-1)
            return divergence
    raise _other_actions(outputs, reference)


def _hybrid(outputs: Outputs) -> tuple[Outputs, Outputs] | None:
    """Outputs of the heads (a tuple of logits) and of the Gaussian of a hybrid policy; None for another policy."""
    if "logits" not in outputs or not ("tanh_mean" in outputs or ("mean" in outputs and "log_std" in outputs)):
        return None
    gaussian = {name: output for name, output in outputs.items() if name != "logits"}
    return {"logits": tuple(_heads(outputs["logits"]))}, gaussian


def _joined(categories: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A hybrid policy's action ``[..., H + D]``; float32 holds categories below 2 ** 24 exactly."""
    return np.concatenate([categories, values], -1, dtype=np.float32)


def _heads(logits: Any) -> Sequence[np.ndarray]:
    return logits if isinstance(logits, tuple | list) else (logits,)


def _categorical_kl(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    if np.shape(logits) != np.shape(reference):
        raise _other_actions({"logits": logits}, {"logits": reference})
    ours, theirs = (np.maximum(_log_softmax(head), MASKED) for head in (logits, reference))
    divergence: np.ndarray = np.maximum((np.exp(ours) * (ours - theirs)).sum(-1), 0.0)  # rounding may end below 0
    return divergence


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    log_probs: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probs


def _other_actions(outputs: Outputs, reference: Outputs) -> ModelError:
    def policy(outputs: Outputs) -> str:
        count = 1 if _hybrid(outputs) is None else 2
        names = [name for name in ("logits", "mean", "tanh_mean") if name in outputs][:count]
        shapes = {name: ", ".join(str(list(np.shape(head)[-1:])) for head in _heads(outputs[name])) for name in names}
        return " and ".join(f"{name} {shape}" for name, shape in shapes.items()) or f"only {sorted(outputs)}"

    return ModelError(f"the two policies act differently: one has {policy(outputs)}, the other {policy(reference)}")


def tempered(outputs: Outputs, temperature: float) -> dict[str, Any]:
    """Applies a temperature to a policy: raises probabilities to the power ``1 / temperature`` and normalises them.

    Masked actions, whose logit is far below the best one's, stay masked. A squashed Gaussian is tempered before the
    tanh. Outputs that do not belong to the policy, such as ``value``, are unchanged.

    Args:
        outputs: with any leading axes, or none.
        temperature: 1 changes nothing; above 1 the policy gets closer to uniform; below 1 the best action gets more
            likely; at 0 it is the only one.

    Raises:
        ModelError: these are not a policy's outputs, or the policy has state-dependent noise.
    """
    if (parts := _hybrid(outputs)) is not None:
        return {**tempered(parts[1], temperature), **tempered({"logits": outputs["logits"]}, temperature)}
    if "logits" in outputs:
        logits = outputs["logits"]
        if isinstance(logits, tuple | list):
            return {**outputs, "logits": tuple(_tempered(head, temperature) for head in logits)}
        return {**outputs, "logits": _tempered(logits, temperature)}
    if "sde_std" in outputs:
        raise ModelError("noise that depends on the state has no temperature")
    _location(outputs)
    name = "tanh_log_std" if "tanh_mean" in outputs else "log_std"
    wider = 0.5 * math.log(max(temperature, _COLDEST))
    return {**outputs, name: np.asarray(outputs[name]) + np.float32(wider)}


def _tempered(logits: Any, temperature: float) -> np.ndarray:
    logits = np.asarray(logits)
    below = logits - logits.max(-1, keepdims=True)
    out = below < (0.0 if temperature == 0.0 else _FORBIDDEN)
    return np.where(out, np.asarray(MASKED, logits.dtype), below / np.asarray(temperature or 1.0, logits.dtype))


def _gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_exponential(shape, np.float32)
    # Always finite: infinite noise would let a masked action win, whose logit is a large negative number.
    np.maximum(drawn, _LEAST, out=drawn)
    np.log(drawn, out=drawn)
    return np.negative(drawn, out=drawn)


def _location(outputs: Outputs) -> np.ndarray:
    for name in ("mean", "tanh_mean"):
        if name in outputs:
            location: np.ndarray = outputs[name]
            return location
    raise ModelError(
        f"a policy's outputs have logits, mean with log_std, or tanh_mean with tanh_log_std; got {sorted(outputs)}"
    )


def _log_softmax_at(logits: np.ndarray, action: np.ndarray) -> np.ndarray:
    # Categories first: there are few of them, and NumPy reduces a short last axis row by row.
    shifted = np.ascontiguousarray(logits.T if logits.ndim == 2 else np.moveaxis(logits, -1, 0))
    # The methods `max` and `sum` take twice the time for few numbers.
    shifted = shifted - np.maximum.reduce(shifted)
    # A third of the time of take_along_axis.
    flat = action.ravel().astype(np.intp) * action.size + np.arange(action.size)
    chosen = shifted.reshape(-1)[flat].reshape(action.shape)
    log_probs: np.ndarray = chosen - np.log(np.add.reduce(np.exp(shifted)))
    return log_probs.astype(np.float32, copy=False)


def _gaussian(mean: np.ndarray, log_std: np.ndarray, x: np.ndarray) -> np.ndarray:
    standard = (x - mean) * np.exp(-log_std)
    density: np.ndarray = -np.add.reduce(0.5 * standard * standard + log_std + _HALF_LOG_TAU, -1)
    return density


@dataclass(frozen=True)
class ActionSpec:
    """The shape of a policy's actions, and their conversion to an environment's actions and back.

    Attributes:
        kind: kind of policy that fits; no environment's space is ``hybrid``.
        sizes: categories of each head; empty for a Box.
        shape: shape of one action of the policy: ``()``, ``(H,)``, ``(D,)``, or ``(H + D,)`` if hybrid.
        low, high: bounds of a Box, ``[D]`` float64, flat; None for other spaces.
        start: added to a category, ``[H]``; None: nothing.
        env_shape, env_dtype: shape and dtype of one action of the environment.
        scale: map the policy's -1 to 1 onto the bounds of a Box, if these are finite.
    """

    kind: Literal["discrete", "multi_discrete", "box", "hybrid"]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    low: np.ndarray | None = field(default=None, compare=False)
    high: np.ndarray | None = field(default=None, compare=False)
    start: np.ndarray | None = field(default=None, compare=False)
    env_shape: tuple[int, ...] = ()
    env_dtype: np.dtype[Any] = field(default=np.dtype(np.int64))
    scale: bool = False

    @staticmethod
    def of(space: Any, *, scale: bool = False) -> ActionSpec:
        """The spec of one environment's action space: Gymnasium's Discrete, MultiDiscrete, MultiBinary or Box.

        Raises:
            ConfigError: another space.
        """
        shape, dtype = tuple(getattr(space, "shape", None) or ()), np.dtype(getattr(space, "dtype", None) or np.int64)
        if hasattr(space, "low") and hasattr(space, "high") and dtype.kind == "f":
            low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
            return ActionSpec("box", (), low.shape, low, high, None, shape, dtype, scale)
        if hasattr(space, "nvec"):
            sizes = np.asarray(space.nvec).reshape(-1)
            start = _offset(getattr(space, "start", None))
            return ActionSpec("multi_discrete", tuple(map(int, sizes)), (len(sizes),), None, None, start, shape, dtype)
        if hasattr(space, "n") and shape:
            count = math.prod(shape)
            return ActionSpec("multi_discrete", (2,) * count, (count,), None, None, None, shape, dtype)
        if hasattr(space, "n"):
            start = _offset(getattr(space, "start", None))
            return ActionSpec("discrete", (int(space.n),), (), None, None, start, (), dtype)
        raise ConfigError(
            f"action space is {space}, expected Discrete, MultiDiscrete, MultiBinary or a Box of floats",
            action_space=str(space),
        )

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Converts a policy's actions to valid actions of the environment, of its dtype.

        Clips values to the bounds of a Box. The learner uses the policy's action before clipping, because only that
        has a density.

        Args:
            action: the policy's, ``[N, *shape]``; not modified.

        Returns:
            ``[N, *env_shape]``.
        """
        if self.kind == "box":
            assert self.low is not None
            assert self.high is not None
            if self._mapped is not None:
                low, half = self._mapped
                action = low + (action + 1) * half
            # In float64, because float32 may not represent the bounds.
            action = np.minimum(np.maximum(action, self.low), self.high)
        elif self.start is not None:
            action = action + (self.start if self.shape else self.start[0])
        return action.reshape(len(action), *self.env_shape).astype(self.env_dtype, copy=False)

    def to_policy(self, action: np.ndarray) -> np.ndarray:
        """Converts the environment's recorded actions to the policy's; the inverse of `to_env`.

        Args:
            action: the environment's, ``[N, *env_shape]``; not modified.

        Returns:
            ``[N, *shape]``, float32 for a Box.

        Raises:
            ConfigError: an action has another shape, or is outside the space.
        """
        if action.shape[1:] != self.env_shape:
            raise ConfigError(
                f"action: expected the environment's shape {list(self.env_shape)} a step, got {list(action.shape[1:])}",
                key="action",
            )
        flat = action.reshape(len(action), *self.shape)
        if self.kind != "box":
            start = np.zeros(len(self.sizes), np.int64) if self.start is None else self.start
            first = start if self.shape else start[0]
            self._check_inside(flat, first, first + (np.asarray(self.sizes) if self.shape else self.sizes[0]) - 1)
            counted: np.ndarray = flat - first
            return counted
        if self._mapped is None:
            return flat.astype(np.float32, copy=False)
        assert self.low is not None
        assert self.high is not None
        # In float32, because a recorded action may be a bound rounded to float32.
        self._check_inside(flat.astype(np.float32), self.low.astype(np.float32), self.high.astype(np.float32))
        low, half = self._mapped
        scaled: np.ndarray = np.clip((flat - low) / np.where(half > 0, half, 1) - 1, -1, 1)
        return scaled.astype(np.float32)

    def __str__(self) -> str:
        if self.kind == "box":
            assert self.low is not None
            assert self.high is not None
            return f"Box {list(self.env_shape)} from {_shortly(self.low)} to {_shortly(self.high)}"
        start = np.zeros(len(self.sizes), np.int64) if self.start is None else self.start
        return f"{self.kind} of {_shortly(np.asarray(self.sizes))} from {_shortly(start)}"

    def is_same(self, other: ActionSpec) -> bool:
        """Whether an environment's action means the same in both spaces; bounds are compared as float32."""
        if (self.kind, self.sizes, self.env_shape) != (other.kind, other.sizes, other.env_shape):
            return False
        pairs = ((self.low, other.low), (self.high, other.high), (self.start, other.start))
        return all(
            (ours is None) == (theirs is None)
            and (ours is None or theirs is None or np.array_equal(ours.astype("f"), theirs.astype("f")))
            for ours, theirs in pairs
        )

    @property
    def converts(self) -> bool:
        """Whether the policy's actions have other values than the environment's."""
        mapped = self._mapped is not None and not (np.all(self.low == -1) and np.all(self.high == 1))
        return mapped or self.start is not None

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the largest of the policy's values that are bounded: of each head's category, or of a Box."""
        if self.sizes:  # a hybrid action's other values, which come last, have no bounds
            return np.zeros(len(self.sizes)), np.subtract(self.sizes, 1.0)
        return None if self.low is None or self.high is None else (self.low, self.high)

    @cached_property
    def bounded(self) -> bool:
        """Whether this is a Box with all bounds finite."""
        if self.low is None or self.high is None:
            return False
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    @cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The lower bound and half the width of the Box onto which -1 to 1 is mapped; None without scaling."""
        if not (self.scale and self.bounded):
            return None
        assert self.low is not None
        assert self.high is not None
        return self.low, 0.5 * self.high - 0.5 * self.low

    def _check_inside(self, action: np.ndarray, low: Any, high: Any) -> None:
        """Raises `ConfigError` if an action is out of bounds."""
        if wrong := outside(action, low, high):
            raise ConfigError(f"action: {wrong}, the environment's range", key="action")


def _shortly(values: np.ndarray) -> str:
    """The values as text: one number if they are all equal."""
    distinct = np.unique(values)
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"[{', '.join(f'{value:g}' for value in values)}]"


def _offset(start: Any) -> np.ndarray | None:
    """The first category of each head; None if all are 0."""
    offset = np.atleast_1d(np.asarray(0 if start is None else start, np.int64)).reshape(-1)
    return offset if offset.any() else None
