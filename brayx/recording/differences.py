"""Compares what one policy did with what another would do on the same observations. Arrays in, arrays out.

NumPy only; knows nothing of files, models or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from brayx import actions
from brayx.errors import BadRecording, ModelError

TOLERANCE = 1e-3
"""Largest difference of two continuous actions that count as equal, in each dimension."""
_LARGEST = 80.0
"""Largest logarithm of a ratio of probabilities; beyond it the estimate of the divergence would overflow."""
_POLICIES = (("mean", "log_std"), ("tanh_mean", "tanh_log_std"))


@dataclass(frozen=True)
class Acted:
    """What a policy did at ``N`` ticks, and what is known of its distribution.

    Attributes:
        action: ``[N, ...]``, as chosen by the policy.
        policy: outputs that determine the policy's distribution, see `brayx.actions`; None: not known.
        log_prob: ``[N]``, log-probability of ``action``; None: not known.
        value: ``[N, ...]``; None: not known.
    """

    action: np.ndarray
    policy: Mapping[str, Any] | None = None
    log_prob: np.ndarray | None = None
    value: np.ndarray | None = None

    @staticmethod
    def recorded(arrays: Mapping[str, np.ndarray]) -> Acted:
        """From the arrays of a recording, by name: ``action`` and, if present, ``log_prob``,
        ``value``, and ``logits`` (of several heads ``logits/0``, ...) or ``mean`` and ``log_std``.

        Raises:
            BadRecording: there is no ``action``.
        """
        if "action" not in arrays:
            raise BadRecording(f"expected an array 'action', got {sorted(arrays)}", column="action")
        policy: dict[str, Any] | None = None
        heads = [arrays[f"logits/{head}"] for head in range(len(arrays)) if f"logits/{head}" in arrays]
        if "logits" in arrays or heads:
            policy = {"logits": arrays["logits"] if "logits" in arrays else tuple(heads)}
        for names in _POLICIES:
            if policy is None and all(name in arrays for name in names):
                policy = {name: arrays[name] for name in names}
        return Acted(arrays["action"], policy, arrays.get("log_prob"), arrays.get("value"))

    @staticmethod
    def most_likely(outputs: Mapping[str, Any]) -> Acted:
        """The most likely actions of a policy.

        Args:
            outputs: a model's outputs, ``[N, ...]``.

        Raises:
            ModelError: these are not a policy's outputs.
        """
        return Acted(actions.greedy(outputs), outputs, None, outputs.get("value"))


_RECORDED = ("action", "log_prob", "value", "logits", *(name for names in _POLICIES for name in names))


def is_read(name: str) -> bool:
    """Whether `Acted.recorded` reads the array of this name."""
    return name in _RECORDED or name.startswith("logits/")


@dataclass(frozen=True)
class Differences:
    """How a policy differs from what was done, tick by tick.

    Attributes:
        equal: ``[N]`` bool, whether its most likely action is the one that was done.
        kl: ``[N]`` float32, KL(what was done || policy) in nats; NaN: not known.
        value: ``[N]`` float32, its value minus the one there was; NaN: not known.
        exact: whether ``kl`` was computed from both distributions. Otherwise it is estimated from the probabilities of
            the action that was done.
    """

    equal: np.ndarray
    kl: np.ndarray
    value: np.ndarray
    exact: bool


def differences(acted: Acted, outputs: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> Differences:
    """Compares a policy with what was done on the same observations.

    If the distribution behind the actions is not known, but their log-probabilities are, the divergence is estimated
    at the action ``a``: ``q(a) / p(a) - 1 - log(q(a) / p(a))``. It is never negative, 0 where both are equally likely,
    and its mean over actions drawn from ``p`` is KL(p || q) (Schulman 2020, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html).

    Args:
        acted: what was done at ``N`` ticks.
        outputs: the policy's outputs for these ticks, ``[N, ...]``.
        tolerance: largest difference of continuous actions that count as equal.

    Raises:
        ModelError: these are not a policy's outputs, or hold NaN.
        BadRecording: what was done is no action of this policy.
    """
    action = actions.greedy(outputs)
    _check_outputs(outputs)
    _check_action(acted.action, action, outputs)
    near = acted.action == action if action.dtype.kind != "f" else np.abs(acted.action - action) <= tolerance
    kl = value = np.full(len(action), np.nan, np.float32)
    if acted.policy is not None:
        kl = actions.kl_divergence(acted.policy, outputs).astype(np.float32)
    elif acted.log_prob is not None:
        kl = _estimated(acted.log_prob, actions.log_prob(outputs, acted.action))
    if acted.value is not None and "value" in outputs and np.shape(outputs["value"]) == acted.value.shape:
        value = _rows(np.asarray(outputs["value"], np.float64) - acted.value).mean(-1).astype(np.float32)
    equal = np.asarray(_rows(np.asarray(near)).all(-1))
    return Differences(equal, kl, value, acted.policy is not None)


def _rows(array: np.ndarray) -> np.ndarray:
    """``[N, ...]`` as ``[N, K]``, also for no rows."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _estimated(log_prob: np.ndarray, other: np.ndarray) -> np.ndarray:
    ratio = np.minimum(other.astype(np.float64) - log_prob.reshape(len(other)), _LARGEST)
    with np.errstate(over="ignore"):
        found: np.ndarray = np.maximum(np.expm1(ratio) - ratio, 0.0).astype(np.float32)
    return found


def _check_outputs(outputs: Mapping[str, Any]) -> None:
    for name in ("logits", "mean", "log_std", "tanh_mean", "tanh_log_std", "value"):
        each = outputs.get(name, ())
        for leaf in each if isinstance(each, tuple | list) else (each,):
            rows = _rows(np.isnan(leaf)).any(-1)
            if rows.any():
                raise ModelError(f"the model's {name} is NaN at {int(rows.sum())} of {len(leaf)} ticks", leaf=name)


def _check_action(recorded: np.ndarray, action: np.ndarray, outputs: Mapping[str, Any]) -> None:
    continuous = action.dtype.kind == "f"
    if recorded.shape != action.shape or (recorded.dtype.kind == "f") != continuous:
        kind = "continuous" if continuous else "discrete"
        raise BadRecording(
            f"the recorded action is {recorded.dtype} {list(recorded.shape[1:])}, the model's {kind} "
            f"{list(action.shape[1:])}",
            column="action",
        )
    if continuous:
        return
    logits = outputs["logits"]
    sizes = [head.shape[-1] for head in logits] if isinstance(logits, tuple | list) else [logits.shape[-1]]
    for head, size in enumerate(sizes):
        of = recorded.reshape(len(recorded), len(sizes))[:, head]
        if len(of) and (of.min() < 0 or of.max() >= size):
            raise BadRecording(
                f"the recorded actions go from {of.min()} to {of.max()}, the model has {size}", column="action"
            )
