"""Packs fragments of any length back to back into learner batches of one constant shape. NumPy only.

A *learner batch* is ``dict[str, np.ndarray [B, T + 1, ...]]``, batch-major. A *column* is one of its ``B`` rows of
``T + 1`` steps. The last step of a column only bootstraps; if it is a real step, it is also the first step of the next
column. Keys: the leaves of the observation (``obs``, or ``obs/...`` by path), ``action``, ``log_prob`` f32, ``reward``
f32, ``terminated`` bool, ``truncated`` bool, ``mask`` f32 (1: learn from this step), ``policy_version`` i64, and the
fragment's extras under their own names.

A fragment that does not end in ``terminated`` is followed by a step with its last observation and mask 0, and its last
transition is marked truncated. Where both flags are set, as in Gymnasium when the last allowed step ends the game,
``terminated`` wins. Hence one rule for every step: it bootstraps from the value of the next step, times
``1 - terminated``; the trace is cut where ``terminated`` or ``truncated``.

If the model's observation is known, a fragment's observation is converted to its dtypes like in `forward`: float64 to
float32, integers to floats. So an agent can push what it acts with, such as ``np.asarray`` of JSON numbers, which is
float64. Other shapes and dtypes are refused. If the model's actions are known, invalid actions are refused, such as a
category that does not exist. Whole numbers outside the limits of an observation are refused, too.

`Columns` hold many finished columns at once. They are checked as whole arrays and copied by slices; `Columns` of
exactly a batch's size become the batch without a copy. A batch may mix columns from both sources.

Knows nothing of queues, Ray or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from brayx.actions import ActionSpec
from brayx.arrays import as_dtype, is_finite
from brayx.errors import BadFragment
from brayx.spaces import Limits
from brayx.types import Columns, Fragment, NestedArray, flatten

Batch = dict[str, np.ndarray]
"""A learner batch, ``[B, T + 1, ...]``."""

_FIXED: dict[str, np.dtype] = {
    "log_prob": np.dtype(np.float32),
    "reward": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "mask": np.dtype(np.float32),
    "policy_version": np.dtype(np.int64),
}
_FIELDS = {"action", *_FIXED}

READY_KEY = "ready_s"
"""Key in a stream's batch: Unix time, ``[]`` float64, from which its buffer had a batch ready; NaN for a reused batch.
The learner removes it."""


@dataclass(frozen=True)
class Layout:
    """Shape (without batch and time axes) and dtype of every key of a learner batch.

    Attributes:
        obs: leaves of an observation, by path.
        action: one action; None: not known yet.
        extras: extras by name; None: not known yet.
        model: the paths of ``obs`` that are inputs of the model; fragments are converted to their dtypes.
        acts: the model's valid actions; None: not known.
        limits: limits of whole numbers in ``obs``, by path.
        env: actions of the environment in which the model acts, to convert recorded ones; None: there is none.
    """

    obs: dict[str, tuple[tuple[int, ...], np.dtype]]
    action: tuple[tuple[int, ...], np.dtype] | None
    extras: dict[str, tuple[tuple[int, ...], np.dtype]] | None
    model: frozenset[str] = frozenset()
    acts: ActionSpec | None = None
    limits: Mapping[str, Limits] = field(default_factory=dict, compare=False)
    env: ActionSpec | None = None

    @staticmethod
    def of(pushed: Fragment | Columns, known: Layout | None = None) -> Layout:
        """The layout of ``pushed``. What ``known`` has stays; the rest, such as leaves outside the model, is added."""
        if known is not None and known.action is not None and known.extras is not None:
            return known
        if isinstance(pushed, Fragment):
            arrays = {**flatten(pushed.obs, "obs"), "action": pushed.action, **pushed.extras}
            steps = {key: _step(array) for key, array in arrays.items()}
        else:
            steps = {key: (array.shape[2:], array.dtype) for key, array in pushed.arrays.items()}
        layout = Layout(
            obs={key: step for key, step in steps.items() if _is_observed(key)},
            action=steps.get("action"),
            extras={key: step for key, step in steps.items() if not _is_observed(key) and key not in _FIELDS},
        )
        if known is None:
            return layout
        return replace(
            known, obs={**layout.obs, **known.obs}, action=known.action or layout.action, extras=layout.extras
        )

    @staticmethod
    def of_model(
        forward_args: tuple[NestedArray, ...],
        acts: ActionSpec | None = None,
        limits: Mapping[str, Limits] | None = None,
    ) -> Layout:
        """The layout of a model's inputs, from example arguments ``[B, ...]``; the rest is not known yet."""
        example = forward_args[0] if len(forward_args) == 1 else forward_args
        obs = {path: (leaf.shape[1:], leaf.dtype) for path, leaf in flatten(example, "obs").items()}
        return Layout(obs=obs, action=None, extras=None, model=frozenset(obs), acts=acts, limits=limits or {})

    @staticmethod
    def of_example(obs: NestedArray, action: NestedArray) -> Layout:
        """The layout for one example observation and one example action, neither with a batch axis."""
        action = np.asarray(action)
        return Layout(
            obs={path: (leaf.shape, leaf.dtype) for path, leaf in flatten(obs, "obs").items()},
            action=(action.shape, action.dtype),
            extras={},
        )

    def keys(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of one step for every key of a learner batch; the layout must be complete."""
        assert self.action is not None
        assert self.extras is not None
        return {**self.obs, "action": self.action, **{k: ((), d) for k, d in _FIXED.items()}, **self.extras}

    def empty(self, batch_size: int, unroll_length: int) -> Batch:
        """A batch of zeros, with every step masked out."""
        return {
            key: np.zeros((batch_size, unroll_length + 1, *shape), dtype) for key, (shape, dtype) in self.keys().items()
        }


def check(fragment: Fragment, layout: Layout | None, newest_version: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of ``fragment`` by batch key, after checking that it is complete, finite and of the given layout.

    Args:
        fragment: a pushed value of any type.
        layout: required layout, as far as it is known; None: only consistency is checked.
        newest_version: newest policy version; None: unknown.

    Raises:
        BadFragment: names the field, its value and what was expected.
    """
    if not isinstance(fragment, Fragment):
        raise BadFragment(f"expected a Fragment or Columns, got {type(fragment).__name__}")
    if not isinstance(fragment.extras, Mapping):
        raise BadFragment(f"extras: expected arrays by name, got {type(fragment.extras).__name__}", field="extras")
    for name in ("terminated", "truncated"):
        flag = _array(name, getattr(fragment, name))
        if flag.ndim or flag.dtype.kind not in "biuf":
            raise BadFragment(f"{name}: expected true or false, got {flag.dtype} of shape {flag.shape}", field=name)
    length = len(np.atleast_1d(_array("reward", fragment.reward)))
    if length == 0:
        raise BadFragment("reward: a fragment needs at least one transition, got none")
    arrays = {
        **flatten(fragment.obs, "obs"),
        "action": _array("action", fragment.action),
        "log_prob": _array("log_prob", fragment.log_prob),
        "reward": _array("reward", fragment.reward),
        "policy_version": _array("policy_version", fragment.policy_version),
    }
    names = {*arrays, *_FIXED}
    for name, extra in fragment.extras.items():
        if name in names:
            raise BadFragment(f"extras[{name!r}]: a name of another field of the batch", field=name)
        arrays[name] = _array(name, extra)
    observed = {path for path in arrays if _is_observed(path)}
    if not observed:
        raise BadFragment("obs: has no leaves", field="obs")
    for key, array in arrays.items():
        steps = length + 1 if key in observed else length
        if array.ndim == 0 or len(array) != steps:
            raise BadFragment(f"{key}: expected {steps} steps, got shape {array.shape}", field=key)
        if array.dtype.kind not in "biuf":
            raise BadFragment(f"{key}: expected numbers, got dtype {array.dtype}", field=key)
    whole = Layout.of(fragment, layout)
    expected = whole.keys()
    for key in sorted(expected.keys() - arrays.keys() - {"terminated", "truncated", "mask"}):
        raise BadFragment(f"{key}: missing; this buffer's fragments have {sorted(expected)}", field=key)
    for key, array in arrays.items():
        arrays[key] = _fitting(key, array, 1, whole, expected)
    for key in whole.limits.keys() & arrays.keys():
        _check_limits(key, whole.limits[key], arrays[key][: length + 1 - bool(fragment.terminated)])
    _check_action(arrays["action"], 1, whole.acts)
    _check_version(arrays["policy_version"], newest_version)
    return arrays


def check_columns(
    columns: Columns, unroll_length: int, layout: Layout | None, newest_version: int | None = None
) -> Batch:
    """The arrays of ``columns``, after checking that they are complete, finite and of the given layout.

    Arrays are copied only if they need conversion.

    Args:
        columns: pushed columns.
        unroll_length: transitions of a column, ``T``.
        layout: required layout, as far as it is known; None: only consistency is checked.
        newest_version: newest policy version; None: unknown.

    Raises:
        BadFragment: names the field, its value and what was expected.
    """
    if not isinstance(columns.arrays, Mapping):
        raise BadFragment(f"arrays: expected arrays by name, got {type(columns.arrays).__name__}", field="arrays")
    arrays = {key: _array(key, array) for key, array in columns.arrays.items()}
    for key in sorted(_FIELDS - arrays.keys()):
        raise BadFragment(f"{key}: missing; these columns have {sorted(arrays)}", field=key)
    if not any(map(_is_observed, arrays)):
        raise BadFragment("obs: has no leaves", field="obs")
    rows, steps = len(np.atleast_1d(arrays["mask"])), unroll_length + 1
    if rows == 0:
        raise BadFragment("mask: needs at least one column, got none", field="mask")
    for key, array in arrays.items():
        if array.shape[:2] != (rows, steps):
            raise BadFragment(f"{key}: expected {rows} columns of {steps} steps, got shape {array.shape}", field=key)
        if array.dtype.kind not in "biuf":
            raise BadFragment(f"{key}: expected numbers, got dtype {array.dtype}", field=key)
    whole = Layout.of(Columns(arrays), layout)
    expected = whole.keys()
    for key in sorted(expected.keys() - arrays.keys()):
        raise BadFragment(f"{key}: missing; this buffer's columns have {sorted(expected)}", field=key)
    arrays = {key: _fitting(key, array, 2, whole, expected) for key, array in arrays.items()}
    mask = arrays["mask"]
    if not ((mask == 0) | (mask == 1)).all():
        raise BadFragment("mask: expected only 0 and 1, got other values", field="mask")
    if mask[:, -1].any():
        raise BadFragment("mask: is 1 at a column's last step, which only bootstraps", field="mask")
    acted = mask > 0
    seen = acted.copy()
    seen[:, 1:] |= acted[:, :-1] & ~arrays["terminated"][:, :-1]  # a step's next observation is its bootstrap
    for key in whole.limits.keys() & arrays.keys():
        _check_limits(key, whole.limits[key], arrays[key][seen])
    _check_action(arrays["action"][acted], 1, whole.acts)  # masked actions may be anything
    if newest_version is not None:
        _check_version(arrays["policy_version"][mask > 0], newest_version)
    return arrays


def transitions(pushed: Any) -> int:
    """Number of transitions in any pushed value, valid or not; 1 if it cannot be determined."""
    try:
        return len(pushed) if isinstance(pushed, Fragment | Columns) else 1
    except (AttributeError, TypeError, ValueError):  # such as a reward that is one number
        return 1


def rows(columns: Columns) -> int:
    """Number of columns according to their mask; 0 if it cannot be determined, which packing refuses."""
    try:
        return len(np.atleast_1d(np.asarray(columns.arrays.get("mask", ()))))
    except (AttributeError, ValueError):
        return 0


def oldest(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """The oldest policy version of each column ``[B]``, over the steps with mask 1."""
    never = np.iinfo(np.int64).max
    oldest: np.ndarray = batch["policy_version"].min(axis=1, where=batch["mask"] > 0, initial=never)
    return oldest


def _check_limits(key: str, limits: Limits, values: np.ndarray) -> None:
    if wrong := limits.refusal(values):
        raise BadFragment(f"{key}: {wrong}", field=key)


def _check_version(versions: np.ndarray, newest: int | None) -> None:
    if versions.min(initial=0) < 0:
        raise BadFragment(f"policy_version: expected 0 or more, got {versions.min()}", field="policy_version")
    if newest is not None and versions.max(initial=newest) > newest:
        raise BadFragment(
            f"policy_version: {versions.max()} is unknown, the newest published is {newest}", field="policy_version"
        )


def _fitting(
    key: str, array: np.ndarray, axes: int, layout: Layout, expected: dict[str, tuple[tuple[int, ...], np.dtype]]
) -> np.ndarray:
    """``array`` in the layout's dtype; raises `BadFragment` if it does not fit after ``axes`` leading axes."""
    if key not in expected:
        raise BadFragment(f"{key}: not in this buffer's layout, which has {sorted(expected)}", field=key)
    shape, dtype = expected[key]
    converted = as_dtype(array, dtype) if key in layout.model or array.dtype == dtype else None
    if converted is None or array.shape[axes:] != shape:
        raise BadFragment(
            f"{key}: expected shape {shape} of {dtype} a step, got {array.shape[axes:]} of {array.dtype}", field=key
        )
    if not is_finite(converted):
        raise BadFragment(f"{key}: holds NaN or infinity", field=key)
    return converted


def _check_action(action: np.ndarray, axes: int, acts: ActionSpec | None) -> None:
    """Raises `BadFragment` for invalid actions of the model; the first ``axes`` axes are batch and time."""
    if acts is None:
        return
    if action.shape[axes:] != acts.shape:
        raise BadFragment(
            f"action: expected the model's shape {acts.shape} a step, got {action.shape[axes:]}",
            field="action",
        )
    if acts.bounds is None or not len(action):
        return
    low, high = acts.bounds
    steps = action.reshape(-1, max(math.prod(acts.shape), 1))[:, : len(low)]
    if acts.sizes and action.dtype.kind == "f" and np.count_nonzero(steps != np.floor(steps)):
        raise BadFragment("action: expected whole numbers, got fractions", field="action")
    if not np.count_nonzero((steps < low) | (steps > high)):  # a quarter of the time of `any`
        return
    lowest, highest = steps.min(0), steps.max(0)
    for extreme, beyond in ((lowest, lowest < low), (highest, highest > high)):
        if beyond.any():
            index = int(beyond.argmax())
            raise BadFragment(
                f"action: expected {low[index]:g} to {high[index]:g}, the model's range, got {float(extreme[index]):g}",
                field="action",
            )


def _array(key: str, value: NestedArray) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise BadFragment(f"{key}: not an array: {error}", field=key) from None


def _is_observed(key: str) -> bool:
    return key == "obs" or key.startswith("obs/")


def _step(array: NestedArray) -> tuple[tuple[int, ...], np.dtype]:
    array = np.asarray(array)
    return array.shape[1:], array.dtype


class BatchPacker:
    """Writes fragments and columns into batches, column by column.

    Args:
        batch_size: columns of a batch, ``B``.
        unroll_length: transitions of a column, ``T``.
        layout: layout of fragments; missing parts are taken from the first valid fragment.

    Attributes:
        newest_version: newest policy version; fragments of a newer one are refused. None: no check.
    """

    def __init__(self, batch_size: int, unroll_length: int, layout: Layout | None = None) -> None:
        self.layout = layout
        self.newest_version: int | None = None
        self._size = batch_size
        self._length = unroll_length
        self._batch: Batch | None = None
        self._column = 0
        self._step = 0

    @property
    def waiting(self) -> int:
        """Transitions in the unfinished batch."""
        return 0 if self._batch is None else int(self._batch["mask"].sum())

    def add(self, pushed: Fragment | Columns, steps: int | None = None) -> Iterator[Batch]:
        """Packs a fragment or columns, and returns the batches that this completes, usually none.

        Columns of exactly a batch's size are returned as they are, ahead of the unfinished batch.

        Args:
            pushed: fragment or columns.
            steps: pack only the first ``steps`` transitions of a fragment, a result of `fitting`. If the rest
                (`Fragment.after`) is packed next, the columns are the same as for the whole fragment.

        Raises:
            BadFragment: raised by the call itself, before anything is packed.
        """
        if isinstance(pushed, Columns):
            columns = self.checked(pushed)
            rows = len(columns["mask"])
            return iter([columns] if rows == self._size else self._copy(columns, rows))
        arrays = check(pushed, self.layout, self.newest_version)
        self.layout = Layout.of(pushed, self.layout)
        return iter(self._pack(arrays, pushed, len(pushed) if steps is None else steps))

    def checked(self, columns: Columns) -> Batch:
        """Checks ``columns`` and returns their arrays as they would be packed; like `add`, completes the layout.

        Raises:
            BadFragment: as for `add`.
        """
        arrays = check_columns(columns, self._length, self.layout, self.newest_version)
        self.layout = Layout.of(Columns(arrays), self.layout)
        return arrays

    def fitting(self, steps: int, room: int) -> int:
        """How many of ``steps`` transitions fit if at most ``room`` columns complete: all, or up to a column's end."""
        # The step to bootstrap from needs a place after the last transition, which may be the last of its column.
        completed = (self._step + steps + (self._length > 1)) // self._length
        return steps if completed <= room else max(0, room * self._length - self._step)

    def drop_older(self, version: int) -> int:
        """Removes complete columns with a step older than ``version`` from the unfinished batch; returns how many
        transitions were removed."""
        batch = self._batch
        if batch is None or not self._column:
            return 0
        old = oldest({key: batch[key][: self._column] for key in ("mask", "policy_version")}) < version
        dropped = int(np.count_nonzero(batch["mask"][: self._column][old]))
        if old.any():
            rows = np.concatenate([np.flatnonzero(~old), np.arange(self._column, self._size)])
            for array in batch.values():
                array[: len(rows)] = array[rows]
                array[len(rows) :] = 0
            self._column -= int(old.sum())
        return dropped

    @property
    def columns(self) -> int:
        """Complete columns in the unfinished batch."""
        return self._column

    @property
    def left(self) -> int:
        """Free steps in the current column, or in the next one if that is complete."""
        return self._length - self._step

    def flush(self) -> Batch | None:
        """The unfinished batch, padded with masked steps; None if it holds no transition."""
        batch, self._batch = self._batch, None
        self._column = self._step = 0
        return batch if batch is not None and batch["mask"].any() else None

    def _pack(self, arrays: dict[str, np.ndarray], fragment: Fragment, total: int) -> list[Batch]:
        full: list[Batch] = []
        end, done = len(fragment), 0
        while done < total:
            batch = self._open()
            count = min(self._length - self._step, total - done)
            source, target = slice(done, done + count), slice(self._step, self._step + count)
            for key, array in arrays.items():
                batch[key][self._column, target] = array[source]
            batch["mask"][self._column, target] = 1.0
            done, self._step = done + count, self._step + count
            if done == end:
                batch["terminated"][self._column, self._step - 1] = fragment.terminated
                batch["truncated"][self._column, self._step - 1] = not fragment.terminated
            if done < end or not fragment.terminated:  # the observation after this step is needed for bootstrapping
                for key in arrays:
                    if _is_observed(key):
                        batch[key][self._column, self._step] = arrays[key][done]
                self._step += 1
            if self._step >= self._length:
                self._column, self._step = self._column + 1, 0
                self._give_if_full(full)
        return full

    def _copy(self, columns: Batch, rows: int) -> list[Batch]:
        full: list[Batch] = []
        batch, begun = self._open(), None
        if self._step:  # move a fragment's unfinished column behind these
            begun = {key: array[self._column].copy() for key, array in batch.items()}
        done = 0
        while done < rows:
            batch = self._open()
            count = min(self._size - self._column, rows - done)
            for key, array in batch.items():
                array[self._column : self._column + count] = columns[key][done : done + count]
            done, self._column = done + count, self._column + count
            self._give_if_full(full)
        if begun is not None:
            batch = self._open()
            for key, array in batch.items():
                array[self._column] = begun[key]
        return full

    def _open(self) -> Batch:
        if self._batch is None:
            assert self.layout is not None
            self._batch = self.layout.empty(self._size, self._length)
        return self._batch

    def _give_if_full(self, full: list[Batch]) -> None:
        if self._column == self._size and self._batch is not None:
            full.append(self._batch)
            self._batch, self._column = None, 0
