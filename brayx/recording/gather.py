"""Gathers what the agents set at each tick as arrays ``[N, ...]`` by name. Pure.

Each array that agents set on a tick's state becomes a column. ``step`` gives ``obs``, ``action``, ``log_prob``,
``policy_version`` and its extras; other attributes keep their names. Nested arrays are named by their paths:
``obs/board``. Outputs of forwards are added, unless an agent set an array of that name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.types import NestedArray, Step, flatten

if TYPE_CHECKING:
    from brayx.recording.columns import Forwarded

MAX_COLUMNS = 64
"""Maximum columns that agents can set; further ones are left out, with the reason."""
OWN_PREFIX = "tick."
"""Prefix of a recording's own columns in a file; agents' arrays with this prefix are left out."""
AS_FRAMES = "it is recorded as frames"
"""Why an image is not among the columns."""
_VARIES = "it is not an array, or its shape varies"
_NOT_ALWAYS = "not every tick has it"
_STATE = "state"
"""Output of recurrent models that is left out: the agent's `Step` has the memory before the tick, which suffices."""

Values = dict[str, list[Any]]
"""The values of all ticks by name."""


class Irregular(Exception):
    """Ticks have different attributes, or attributes of different shapes."""


def arrays_of(
    attributes: Sequence[Mapping[str, Any]],
    forwards: Sequence[Sequence[Forwarded]],
    failed: Sequence[bool],
    without: Collection[str],
    frames: str = "",
    strict: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of some ticks, and why other values are left out; see `brayx.recording.columns.columns_by_field`."""
    left_out: dict[str, str] = {}
    try:
        gathered: Values = {}
        for name, values in _by_key(attributes, without).items():
            _gather(name, values, gathered)
    except Irregular:
        if strict:
            raise
        gathered = _by_tick([_flat(tick, without) for tick in attributes], failed, left_out)
    if any(forwards):
        outputs: Values = {}
        try:
            _gather_forwards(forwards, outputs)
        except Irregular:
            if strict:
                raise
            outputs = _by_tick([_flat_forwards(tick) for tick in forwards], failed, left_out)
        gathered.update({name: values for name, values in outputs.items() if name not in gathered})
    if frames:
        gathered.pop(frames, None)
        left_out[frames] = AS_FRAMES
    arrays: dict[str, np.ndarray] = {}
    for name, values in gathered.items():
        if len(arrays) == MAX_COLUMNS:
            left_out[name] = f"there are more than {MAX_COLUMNS} columns"
        elif name.startswith(OWN_PREFIX):
            left_out[name] = f"its name starts with {OWN_PREFIX}"
        elif name != _printable(name):
            left_out[name] = "its name is not Unicode text"
        elif (array := _stacked(values)) is None:
            if strict and any(np.shape(value) != np.shape(values[0]) for value in values):
                raise Irregular
            left_out[name] = _VARIES
        else:
            arrays[name] = array
    return arrays, {_printable(name): why for name, why in left_out.items()}


def _printable(name: str) -> str:
    """A name without surrogates, which a key of a game's JSON may have, but text in a file may not."""
    return name.encode(errors="backslashreplace").decode()


def value_at(attributes: Mapping[str, Any], name: str) -> Any:
    """The tick's value for the column ``name``; None: it has none."""
    for step in attributes.values():
        if type(step) is Step:
            if name in step.extras:
                return step.extras[name]
            attributes = {**attributes, "obs": step.obs, "action": step.action}
    value: Any = attributes
    for key in name.split("/"):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


DROPPED: Any = object()
"""Takes the place of an image in `without_image`."""


def without_image(attributes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A tick's attributes with `DROPPED` in the place of its value for the column ``name``, which it must have."""
    head, *rest = name.split("/")
    for key, step in attributes.items():
        if type(step) is Step:
            if name in step.extras:
                return {**attributes, key: replace(step, extras={**step.extras, name: DROPPED})}
            if head in ("obs", "action"):
                return {**attributes, key: replace(step, **{head: _dropped(getattr(step, head), rest)})}
    return {**attributes, head: _dropped(attributes[head], rest)}


def _dropped(value: Any, keys: Sequence[str]) -> Any:
    if not keys:
        return DROPPED
    first, *rest = keys
    if isinstance(value, Mapping):
        return {**value, first: _dropped(value[first], rest)}
    items = [_dropped(item, rest) if index == int(first) else item for index, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _by_key(ticks: Sequence[Mapping[str, Any]], without: Collection[str] = ()) -> Values:
    """The values of mappings with equal keys, by key."""
    names = ticks[0]
    if len(set(map(len, ticks))) > 1:
        raise Irregular
    try:
        return {name: [tick[name] for tick in ticks] for name in names if name not in without}
    except KeyError:
        raise Irregular from None


def _gather(name: str, values: list[Any], gathered: Values) -> None:
    """Adds the leaves of the ticks' nested values to ``found``, by path.

    Raises:
        Irregular: the values have different structures.
    """
    first = values[0]
    kind = type(first)
    if kind is np.ndarray or kind is float or kind is int:
        gathered[name] = values
    elif len(set(map(type, values))) > 1:
        raise Irregular
    elif kind is Step:
        if len({np.shape(step.log_prob) for step in values}) > 1:
            raise Irregular
        _gather("obs", [step.obs for step in values], gathered)
        _gather("action", [step.action for step in values], gathered)
        if np.shape(first.log_prob):  # of several agents
            gathered["log_prob"] = [step.log_prob for step in values]
        else:
            gathered["log_prob"] = [float(step.log_prob) for step in values]
        gathered["policy_version"] = [step.policy_version for step in values]
        if first.extras or any(step.extras for step in values):
            gathered.update(_by_key([step.extras for step in values]))
    elif kind is dict:
        for key, nested in sorted(_by_key(values).items(), key=lambda pair: str(pair[0])):
            _gather(f"{name}/{key}", nested, gathered)
    elif kind is list or kind is tuple:
        if any(len(value) != len(first) for value in values):
            raise Irregular
        for index, elements in enumerate(zip(*values, strict=True)):
            _gather(f"{name}/{index}", list(elements), gathered)
    elif isinstance(first, Mapping | list | tuple):
        raise Irregular
    else:
        gathered[name] = values


def _gather_forwards(forwards: Sequence[Sequence[Forwarded]], gathered: Values) -> None:
    """As `_gather`, for the outputs of the ticks' forwards."""
    count = len(forwards[0])
    if any(len(tick) != count for tick in forwards):
        raise Irregular
    for index in range(count):
        models, outputs, versions, _ = zip(*[tick[index] for tick in forwards], strict=True)
        model = models[0]
        if len(set(models)) > 1:
            raise Irregular
        if set(map(type, outputs)) == {dict}:
            for name, values in _by_key(outputs).items():
                if name != _STATE:
                    _gather(f"{model}/{name}" if count > 1 else name, values, gathered)
        else:
            _gather(f"{model}/output" if count > 1 else "output", list(outputs), gathered)
        gathered[f"{model}/policy_version" if count > 1 else "policy_version"] = list(versions)


def _flat_forwards(forwards: Sequence[Forwarded]) -> dict[str, Any]:
    gathered: Values = {}
    if forwards:
        _gather_forwards([forwards], gathered)
    return {name: values[0] for name, values in gathered.items()}


def _by_tick(ticks: Sequence[Mapping[str, Any]], failed: Sequence[bool], left_out: dict[str, str]) -> Values:
    """The values of ticks with different attributes; a failed tick gets zeros for those it lacks."""
    gathered: Values = {}
    for name in dict.fromkeys(name for tick in ticks for name in tick):
        if all(name in tick or is_failed for tick, is_failed in zip(ticks, failed, strict=True)):
            like = next(tick[name] for tick in ticks if name in tick)
            gathered[name] = [tick[name] if name in tick else _zeros(like) for tick in ticks]
        else:
            left_out[name] = _NOT_ALWAYS
    return gathered


def _zeros(like: Any) -> Any:
    return 0.0 if isinstance(like, float) else np.zeros_like(like)


def _flat(attributes: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """One tick's arrays and numbers by path; other values as they are."""
    flat: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in without:
            continue
        if isinstance(value, Step):
            flat |= {**_paths(value.obs, "obs"), **_paths(value.action, "action")}
            flat |= {"log_prob": np.float32(value.log_prob), "policy_version": value.policy_version}
            flat.update(value.extras)
        else:
            flat |= _paths(value, name)
    return flat


def _paths(value: NestedArray, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping | list | tuple):
        return flatten(value, name)
    return {name: value}


def _stacked(values: Sequence[Any]) -> np.ndarray | None:
    """The values as ``[N, ...]``; None: they are not numbers of one shape. Python floats become float32."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        return None
    if isinstance(values[0], float):
        array = array.astype(np.float32)
    return array if array.dtype.kind in "biuf" and array.size else None
