"""Action distributions from a model's outputs. Torch only; `brayx.actions` is the NumPy counterpart for acting.

The names of the outputs determine the distribution (``N`` is the batch):

    ``logits`` ``[N, A]``                     categorical; action ``[N]`` int64
    ``logits`` tuple of ``[N, A_h]``          one head each; action ``[N, H]`` int64, log-prob summed over heads
    ``mean``, ``log_std`` ``[N, D]``          Gaussian; action ``[N, D]``. With state-dependent exploration this is the
                                              marginal, and there are also ``latent`` and ``sde_std``
    ``tanh_mean``, ``tanh_log_std`` ``[N, D]``  tanh of a Gaussian; action ``[N, D]`` in (-1, 1)
    ``logits`` with either of the last two    hybrid, both at once; action ``[N, H + D]`` float, heads first

Half precision is computed in float32. The network masks its logits (`brayx.nets.heads`); this module knows nothing of
masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_2 = math.log(2.0)
_EDGE = 2.0**-24
"""Squashed actions are clipped this far from -1 and 1: closer than that, float32 cannot invert the tanh."""
_NAMES = {
    "categorical": ("logits",),
    "heads": ("logits",),
    "gaussian": ("mean", "log_std"),
    "squashed": ("tanh_mean", "tanh_log_std"),
}
"""The outputs of each kind of distribution; a hybrid one has those of two."""
_CONTINUOUS = ("gaussian", "squashed")
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(20)


def log_prob_entropy(outputs: Mapping[str, Any], action: Tensor) -> tuple[Tensor, Tensor]:
    """Joint log-probability of ``action`` and the entropy, in nats.

    The entropy of a squashed Gaussian has no closed form; it is computed by Gauss-Hermite quadrature.

    Args:
        outputs: a model's outputs.
        action: ``[N]`` or ``[N, H]`` int64, or ``[N, D]`` or ``[N, H + D]`` float.

    Returns:
        ``[N]`` and ``[N]``, float32 or float64.

    Raises:
        ValueError: the outputs match no distribution, or the action has another shape.
    """
    kind = _kind(outputs)
    if kind == "hybrid":
        heads, numbers = _parts(outputs)
        count, shape = len(heads["logits"]), next(iter(numbers.values())).shape
        if action.shape != (*shape[:-1], count + shape[-1]):
            raise _misfit(action, (*shape[:-1], count + shape[-1]))
        log_prob, entropy = log_prob_entropy(heads, action[..., :count])
        continuous = log_prob_entropy(numbers, action[..., count:])
        return log_prob + continuous[0], entropy + continuous[1]
    if kind == "categorical":
        logits = outputs["logits"]
        if action.shape != logits.shape[:-1]:
            raise _misfit(action, tuple(logits.shape[:-1]))
        return categorical(logits, action)
    if kind == "heads":
        logits = outputs["logits"]
        if action.shape != (*logits[0].shape[:-1], len(logits)):
            raise _misfit(action, (*logits[0].shape[:-1], len(logits)))
        log_prob, entropy = categorical(logits[0], action[..., 0])
        for index in range(1, len(logits)):
            head = categorical(logits[index], action[..., index])
            log_prob, entropy = log_prob + head[0], entropy + head[1]
        return log_prob, entropy
    prefix = "tanh_" if kind == "squashed" else ""
    mean, log_std = _full(outputs[f"{prefix}mean"]), _full(outputs[f"{prefix}log_std"])
    if action.shape != mean.shape:
        raise _misfit(action, tuple(mean.shape))
    if kind == "gaussian":
        return _gaussian(mean, log_std, action.to(mean.dtype))
    inner = torch.atanh(action.to(mean.dtype).clamp(-1 + _EDGE, 1 - _EDGE))
    log_prob, entropy = _gaussian(mean, log_std, inner)
    nodes = torch.as_tensor(_NODES, dtype=mean.dtype, device=mean.device)
    weights = torch.as_tensor(_NODE_WEIGHTS / math.sqrt(2 * math.pi), dtype=mean.dtype, device=mean.device)
    spread = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes
    return log_prob - _squash(inner).sum(-1), entropy + (_squash(spread) * weights).sum((-2, -1))


def is_discrete(outputs: Mapping[str, Any]) -> bool:
    """Whether an action consists of categories only.

    Raises:
        ValueError: the outputs match no distribution.
    """
    return _kind(outputs) in ("categorical", "heads")


def distribution_outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's outputs that determine its distribution.

    Raises:
        ValueError: the outputs match no distribution.
    """
    kind = _kind(outputs)
    if kind == "hybrid":
        return {"logits": outputs["logits"], **_parts(outputs)[1]}
    return {name: outputs[name] for name in _NAMES[kind]}


def kl_divergence(outputs: Mapping[str, Any], reference: Mapping[str, Any]) -> Tensor:
    """KL(outputs || reference) ``[N]``, in nats and exact; summed over heads or dimensions.

    An action of probability 0, such as a masked one, adds nothing. Squashing is one-to-one, so the divergence of
    squashed Gaussians is that of the Gaussians inside. With state-dependent exploration it is that of the marginals.

    Args:
        outputs, reference: outputs of two models for the same ``[N]`` observations.

    Raises:
        ValueError: the outputs match no distribution, or two different ones.
    """
    kind = _kind(outputs)
    if kind != _kind(reference):
        raise ValueError(f"reference: expected a {kind} distribution like the model's, got a {_kind(reference)} one")
    if kind == "hybrid":
        pairs = zip(_parts(outputs), _parts(reference), strict=True)
        return torch.stack([kl_divergence(*pair) for pair in pairs]).sum(0)
    if kind == "categorical":
        return _categorical_kl(outputs["logits"], reference["logits"])
    if kind == "heads":
        heads = zip(outputs["logits"], reference["logits"], strict=True)
        return torch.stack([_categorical_kl(*pair) for pair in heads]).sum(0)
    mean, log_std = (_full(outputs[name]) for name in _NAMES[kind])
    other_mean, other_log_std = (_full(reference[name]) for name in _NAMES[kind])
    spread = log_std - other_log_std
    distance = (mean - other_mean) * (-other_log_std).exp()
    return (0.5 * ((2 * spread).exp() + distance.square() - 1) - spread).sum(-1)


def sample(outputs: Mapping[str, Any], noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A random action and its log-probability. Continuous actions are reparametrised: gradients flow through both.

    Args:
        outputs: a model's outputs.
        noise: standard Gaussian noise ``[N, D]`` for a continuous action; None: drawn here.
    """
    kind = _kind(outputs)
    if kind == "hybrid":
        (categories, log_prob), (values, density) = (sample(part, noise) for part in _parts(outputs))
        return torch.cat([categories.to(values.dtype), values], -1), log_prob + density
    if kind in ("categorical", "heads"):
        heads: Sequence[Tensor] = outputs["logits"] if kind == "heads" else [outputs["logits"]]
        # Gumbel-max: needs no normalisation, and no synchronisation with the device.
        action = torch.stack(
            [(_full(x) - torch.empty_like(_full(x)).exponential_().log()).argmax(-1) for x in heads], -1
        )
        action = action if kind == "heads" else action.squeeze(-1)
        return action, log_prob_entropy(outputs, action)[0]
    prefix = "tanh_" if kind == "squashed" else ""
    mean, log_std = _full(outputs[f"{prefix}mean"]), _full(outputs[f"{prefix}log_std"])
    inner = mean + log_std.exp() * (torch.randn_like(mean) if noise is None else noise)
    log_prob, _ = _gaussian(mean, log_std, inner)
    if kind == "gaussian":
        return inner, log_prob
    return inner.tanh(), log_prob - _squash(inner).sum(-1)


def mode(outputs: Mapping[str, Any]) -> Tensor:
    """The action without exploration: the likeliest category, the mean, or the tanh of the mean."""
    kind = _kind(outputs)
    if kind == "categorical":
        action: Tensor = outputs["logits"].argmax(-1)
        return action
    if kind == "heads":
        return torch.stack([head.argmax(-1) for head in outputs["logits"]], -1)
    if kind == "hybrid":
        categories, values = map(mode, _parts(outputs))
        return torch.cat([categories.to(values.dtype), values], -1)
    return _full(outputs["tanh_mean"]).tanh() if kind == "squashed" else _full(outputs["mean"])


def categorical(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of ``action`` ``[N]`` and entropy of the categorical distribution of ``logits`` ``[N, A]``."""
    log_probs = _full(logits).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1), entropy


def _categorical_kl(logits: Tensor, reference: Tensor) -> Tensor:
    log_probs, other = _full(logits).log_softmax(-1), _full(reference).log_softmax(-1)
    probs = log_probs.exp()
    # Where the probability is 0 the difference may be infinite or NaN.
    return (probs * (log_probs - other).masked_fill(probs == 0, 0.0)).sum(-1)


def _gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    scaled = (action - mean) * (-log_std).exp()
    spread = log_std.sum(-1)
    size = mean.shape[-1]
    return -0.5 * scaled.square().sum(-1) - spread - size * _HALF_LOG_TAU, spread + size * (_HALF_LOG_TAU + 0.5)


def _squash(inner: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), the change of density by squashing, without losing digits at large x.

    Haarnoja et al. 2018, "Soft actor-critic", appendix C, equation 21, https://arxiv.org/abs/1801.01290.
    """
    return 2 * (_LOG_2 - inner - F.softplus(-2 * inner))


def _kind(outputs: Mapping[str, Any]) -> str:
    continuous = next((kind for kind in _CONTINUOUS if all(name in outputs for name in _NAMES[kind])), None)
    if "logits" in outputs:
        if continuous is not None:
            return "hybrid"
        return "categorical" if isinstance(outputs["logits"], Tensor) else "heads"
    if continuous is not None:
        return continuous
    raise ValueError(
        "outputs match no distribution: expected 'logits', 'mean' and 'log_std', or 'tanh_mean' and 'tanh_log_std', "
        f"got {sorted(outputs)}"
    )


def _parts(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of the heads (a tuple of logits) and of the Gaussian of a hybrid distribution."""
    numbers = {name: outputs[name] for name in outputs if name != "logits"}
    return {"logits": heads_of(outputs)}, distribution_outputs(numbers)


def heads_of(outputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The logits of each head; none for a continuous policy."""
    logits = outputs.get("logits", ())
    return (logits,) if isinstance(logits, Tensor) else tuple(logits)


def _misfit(action: Tensor, expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"action: expected shape {expected} from the model's outputs, got {tuple(action.shape)}")


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
