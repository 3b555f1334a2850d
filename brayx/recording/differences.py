"""Compares what a policy did with what another would do on the same observations. Arrays in, arrays out.

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
"""Maximum difference of continuous actions that count as equal, in each dimension."""
_MAX_LOG_RATIO = 80.0
"""Limit for the logarithm of a ratio of probabilities: with larger ones the estimate would overflow."""
_CONTINUOUS = (("mean", "log_std"), ("tanh_mean", "tanh_log_std"))


@dataclass(frozen=True)
class Decisions:
    """A policy's actions at ``N`` ticks, and what is known of its distribution.

    Attributes:
        action: ``[N, ...]``, as chosen by the policy.
        policy: outputs that define the policy's distribution, see `brayx.actions`; None: not known.
        log_prob: ``[N]``, log-probability of ``action``; None: not known.
        value: ``[N, ...]``; None: not known.
    """

    action: np.ndarray
    policy: Mapping[str, Any] | None = None
    log_prob: np.ndarray | None = None
    value: np.ndarray | None = None

    @staticmethod
    def recorded(arrays: Mapping[str, np.ndarray]) -> Decisions:
        """From a recording's arrays by name: ``action`` and, if present, ``log_prob``, ``value``, and ``logits`` (with
        several heads ``logits/0``, ...) or ``mean`` and ``log_std``.

        Raises:
            BadRecording: there is no ``action``.
        """
        if "action" not in arrays:
            raise BadRecording(f"expected an array 'action', got {sorted(arrays)}", column="action")
        policy: dict[str, Any] | None = None
        heads = [arrays[f"logits/{head}"] for head in range(len(arrays)) if f"logits/{head}" in arrays]
        if "logits" in arrays or heads:
            policy = {"logits": arrays["logits"] if "logits" in arrays else tuple(heads)}
        numbers = next((names for names in _CONTINUOUS if all(name in arrays for name in names)), ())
        if numbers and (policy is None or arrays["action"].dtype.kind == "f"):  # both: hybrid
            policy = {**(policy or {}), **{name: arrays[name] for name in numbers}}
        return Decisions(arrays["action"], policy, arrays.get("log_prob"), arrays.get("value"))

    @staticmethod
    def most_likely(outputs: Mapping[str, Any]) -> Decisions:
        """The most likely actions of a policy.

        Args:
            outputs: a model's outputs, ``[N, ...]``.

        Raises:
            ModelError: these are not a policy's outputs.
        """
        return Decisions(actions.greedy(outputs), outputs, None, outputs.get("value"))


_READ = ("action", "log_prob", "value", "logits", *(name for names in _CONTINUOUS for name in names))


def is_read(name: str) -> bool:
    """Whether `Acted.recorded` reads the array of this name."""
    return name in _READ or name.startswith("logits/")


@dataclass(frozen=True)
class Differences:
    """How a policy differs from given decisions, tick by tick.

    Attributes:
        equal: ``[N]`` bool, whether the policy's most likely action is the given one.
        kl: ``[N]`` float32, KL(given || policy) in nats; NaN: not known.
        value: ``[N]`` float32, the policy's value minus the given one; NaN: not known.
        exact: whether ``kl`` was computed from both distributions. Otherwise it is estimated from both probabilities of
            the given action.
    """

    equal: np.ndarray
    kl: np.ndarray
    value: np.ndarray
    exact: bool


def differences(decisions: Decisions, outputs: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> Differences:
    """Compares a policy with decisions on the same observations.

    If the distribution ``p`` of the given actions is not known, but their log-probabilities are, the divergence from
    ``p`` to the policy ``q`` is estimated at the action ``a``: ``q(a) / p(a) - 1 - log(q(a) / p(a))``. The estimate is
    never negative, 0 where ``p(a) = q(a)``, and its mean over actions drawn from ``p`` is KL(p || q) (Schulman 2020,
    "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).

    Args:
        decisions: the given actions at ``N`` ticks.
        outputs: the policy's outputs for these ticks, ``[N, ...]``.
        tolerance: maximum difference of continuous actions that count as equal.

    Raises:
        ModelError: these are not a policy's outputs, or hold NaN.
        BadRecording: the given actions are not possible actions of this policy.
    """
    action = actions.greedy(outputs)
    _check_outputs(outputs)
    _check_action(decisions.action, action, outputs)
    near = decisions.action == action if action.dtype.kind != "f" else np.abs(decisions.action - action) <= tolerance
    kl = value = np.full(len(action), np.nan, np.float32)
    if decisions.policy is not None:
        kl = actions.kl_divergence(decisions.policy, outputs).astype(np.float32)
    elif decisions.log_prob is not None:
        kl = _estimated(decisions.log_prob, actions.log_prob(outputs, decisions.action))
    if decisions.value is not None and "value" in outputs and np.shape(outputs["value"]) == decisions.value.shape:
        value = _rows(np.asarray(outputs["value"], np.float64) - decisions.value).mean(-1).astype(np.float32)
    equal = np.asarray(_rows(np.asarray(near)).all(-1))
    return Differences(equal, kl, value, decisions.policy is not None)


def _rows(array: np.ndarray) -> np.ndarray:
    """``[N, ...]`` as ``[N, K]``; also works for 0 rows."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _estimated(log_prob: np.ndarray, other: np.ndarray) -> np.ndarray:
    ratio = np.minimum(other.astype(np.float64) - log_prob.reshape(len(other)), _MAX_LOG_RATIO)
    with np.errstate(over="ignore"):
        estimate: np.ndarray = np.maximum(np.expm1(ratio) - ratio, 0.0).astype(np.float32)
    return estimate


def _check_outputs(outputs: Mapping[str, Any]) -> None:
    for name in ("logits", "mean", "log_std", "tanh_mean", "tanh_log_std", "value"):
        output = outputs.get(name, ())
        for leaf in output if isinstance(output, tuple | list) else (output,):
            rows = _rows(np.isnan(leaf)).any(-1)
            if rows.any():
                raise ModelError(f"the model's {name} is NaN at {int(rows.sum())} of {len(leaf)} ticks", leaf=name)


def _check_action(recorded: np.ndarray, action: np.ndarray, outputs: Mapping[str, Any]) -> None:
    continuous = action.dtype.kind == "f"
    if recorded.shape != action.shape or (recorded.dtype.kind == "f") != continuous:
        kind = "discrete" if not continuous else "hybrid" if "logits" in outputs else "continuous"
        raise BadRecording(
            f"the recorded action is {recorded.dtype} {list(recorded.shape[1:])}, the model's {kind} "
            f"{list(action.shape[1:])}",
            column="action",
        )
    if "logits" not in outputs:
        return
    logits = outputs["logits"]
    sizes = [head.shape[-1] for head in logits] if isinstance(logits, tuple | list) else [logits.shape[-1]]
    for head, size in enumerate(sizes):
        chosen = _rows(recorded)[:, head]
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= size):
            span = f"{chosen.min():g} to {chosen.max():g}"
            raise BadRecording(f"the recorded actions go from {span}, the model has {size}", column="action")
