"""`Contract`: what a game observes and what it can do, as it says at its session's start or in a file.

    {"contract": 1,
     "observations": {"vector": {"shape": [4]}},
     "actions": {"push": {"kind": "discrete", "size": 2}}}

Knows nothing of bodies' encodings (`brayx.gamecore.contract_bodies`), networks, agents or Ray.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from brayx.errors import BadBody
from brayx.gamecore.fields import check_names
from brayx.spaces import MASK

Kind: TypeAlias = Literal["vector", "image", "entities", "category", "text"]
Encoding: TypeAlias = Literal["json", "msgpack", "packed"]
Bounds: TypeAlias = tuple[float, ...]
"""Empty: unbounded. One number: for all values. Several: one for each index of the last axis."""

VERSION = 1
"""The version of contracts, the value of the key ``contract``."""
DTYPES = ("float32", "float64", "float16", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "bool")
"""The dtypes that arrays of an observation may have."""
ENCODINGS = ("json", "msgpack", "packed")
MAX_PARTS = 256
"""Maximum number of observations, and of actions."""
MAX_VALUES = 2**24
"""Maximum number of values of all observations: a contract of a few bytes must not fill the memory."""
MAX_SIZE = 2**16 - 1
"""Maximum number of categories, bytes of a text, rows of entities; and of choices and numbers of all actions."""
_MAX_NAME = 64
_OF_OBSERVATION = {
    "vector": ("shape", "dtype", "low", "high", "labels"),
    "image": ("shape", "dtype", "low", "high", "layout"),
    "entities": ("shape", "dtype", "low", "high", "labels"),
    "category": ("size", "start", "shape", "labels"),
    "text": ("size",),
}
"""The fields that an observation of each kind may have."""
_OF_ACTION = {"discrete": ("size", "start", "labels", "mask"), "continuous": ("size", "low", "high", "labels")}
_OF_PROFILE = ("env_id", "seed", "num_actions", "first_action", "agent", "agents")
_OF_START = ("rows", "opponent", "traceparent", "forbidden", "forced", "info", *_OF_PROFILE)
"""Further keys of a start's body, which are not part of the contract; the last ones are of the gym profile."""


@dataclass(frozen=True)
class ObservationSpec:
    """One observation of a contract.

    Attributes:
        name: its name.
        kind: ``vector``: numbers; ``image``: a picture; ``entities``: up to ``shape[0]`` rows whose order means
            nothing; ``category``: whole numbers that are names, not amounts; ``text``: UTF-8.
        shape: shape of the array; of an image ``[height, width, channels]`` or, by ``layout``, channels first. Empty
            for a single category, ``[size]`` for a text.
        dtype: dtype of the array in the game, and on the wire unless that is JSON.
        low, high: bounds that the game expects its values to keep; nothing checks them.
        size: number of categories, or the most bytes of a text.
        start: the first category.
        layout: where an image has its channels.
        labels: a name for each value of a vector, column of the entities, or category.
    """

    name: str
    kind: Kind = "vector"
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: Bounds = ()
    high: Bounds = ()
    size: int = 0
    start: int = 0
    layout: Literal["HWC", "CHW"] = "HWC"
    labels: tuple[str, ...] = ()

    @property
    def model_dtype(self) -> np.dtype[Any]:
        """dtype of the array as the model gets it.

        Categories are int64 and count from 0, whatever ``start`` is. A text is uint8, padded with zeros. An image of
        uint8 stays so. All else is float32.
        """
        if self.kind == "category":
            return np.dtype(np.int64)
        is_bytes = self.kind == "text" or (self.kind == "image" and self.dtype == "uint8")
        return np.dtype(np.uint8 if is_bytes else np.float32)

    def as_dict(self) -> dict[str, Any]:
        """The observation as JSON values."""
        return _as_dict(self, _OF_OBSERVATION[self.kind])


@dataclass(frozen=True)
class ActionPart:
    """One named action of a contract.

    Attributes:
        name: its name.
        kind: ``discrete``: one of ``size`` choices; ``continuous``: ``size`` numbers.
        size: number of choices, or of numbers.
        start: the first choice in the game's own numbers.
        low, high: bounds of each number of a continuous action, ``size`` each; empty for a discrete one.
        labels: a name for each choice, or for each number.
        mask: the game may say at each tick which choices are allowed.
    """

    name: str
    kind: Literal["discrete", "continuous"]
    size: int = 1
    start: int = 0
    low: Bounds = ()
    high: Bounds = ()
    labels: tuple[str, ...] = ()
    mask: bool = False

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``low``, ``high`` and half of their distance as float64 arrays."""
        low, high = np.array(self.low), np.array(self.high)
        return low, high, 0.5 * (high - low)

    def as_dict(self) -> dict[str, Any]:
        """The action as JSON values."""
        return _as_dict(self, _OF_ACTION[self.kind])


@dataclass(frozen=True)
class Contract:
    """What a game observes and what it can do.

    Attributes:
        behaviour: name of the policy that plays.
        team: side of the game.
        seat: place in a game of several sessions; empty: the game names none.
        observations, actions: in the contract's order, at least one of each.
        rewards: weights of the named rewards; empty: a reward is one number.
        encoding: of the bodies of ticks, stops and their replies.
    """

    behaviour: str = "agent"
    team: int = 0
    seat: str = ""
    observations: tuple[ObservationSpec, ...] = ()
    actions: tuple[ActionPart, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict, hash=False)
    encoding: Encoding = "json"

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Reads a contract from JSON values: a start's body, or the content of a file.

        ``observations`` and ``actions`` are objects by name, or lists of objects with a ``name``, for languages whose
        maps have no order.

        Raises:
            BadBody: a field is missing, unknown or wrong; names it.
        """
        known = ("contract", "behaviour", "team", "seat", "observations", "actions", "rewards", "encoding")
        top = _Fields("", document, (*known, *_OF_START), whole="a contract")
        version = top.get("contract")
        if isinstance(version, bool) or version != VERSION:
            raise _refusal("contract", version, f"{VERSION}")
        observations = tuple(_observation(part) for part in _parts(top, "observations"))
        actions = tuple(_action(part) for part in _parts(top, "actions"))
        _check_total("observations", "values", sum(math.prod(spec.shape) for spec in observations), MAX_VALUES)
        _check_total("actions", "choices and numbers", sum(part.size for part in actions), MAX_SIZE)
        return cls(
            behaviour=top.name("behaviour", "agent"),
            team=top.integer("team", 0, least=0, most=2**31 - 1),
            seat=top.name("seat", "") if top.get("seat") else "",
            observations=observations,
            actions=actions,
            rewards=_rewards(top),
            encoding=top.choice("encoding", "json", ENCODINGS),
        )

    def as_dict(self) -> dict[str, Any]:
        """The contract as JSON values, from which `parse` makes an equal one.

        Observations and actions are lists, since some files of JSON and YAML sort an object's keys.
        """
        return {
            "contract": VERSION,
            "behaviour": self.behaviour,
            "team": self.team,
            **({"seat": self.seat} if self.seat else {}),
            "observations": [spec.as_dict() for spec in self.observations],
            "actions": [part.as_dict() for part in self.actions],
            **({"rewards": dict(self.rewards)} if self.rewards else {}),
            "encoding": self.encoding,
        }

    @cached_property
    def id(self) -> str:
        """``sha256:`` and the hash of what decides the network: two games with the same id can share a model.

        Names, kinds, shapes, dtypes, sizes, layouts and masks, in the contract's order. Labels, bounds, starts,
        rewards, the behaviour and the encoding are not part of it.
        """
        text = json.dumps(self._deciding, separators=(",", ":"), sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def differences(self, expected: Contract) -> list[str]:
        """What gives this contract another `id`: ``actions.dash.size is 3, expected 2``; empty if nothing does."""
        return [
            difference
            for group, ours in self._deciding.items()
            for difference in _differences(group, dict(ours), dict(expected._deciding[group]))
        ]

    def example(self) -> dict[str, np.ndarray]:
        """One observation as a model gets it: zeros, and an ``action_mask`` of ones if an action has a mask."""
        arrays = {spec.name: np.zeros(spec.shape, spec.model_dtype) for spec in self.observations}
        if self.has_mask:
            arrays[MASK] = np.ones(sum(self.sizes), np.uint8)
        return arrays

    @cached_property
    def discrete(self) -> tuple[ActionPart, ...]:
        """The discrete actions."""
        return tuple(part for part in self.actions if part.kind == "discrete")

    @cached_property
    def continuous(self) -> tuple[ActionPart, ...]:
        """The continuous actions."""
        return tuple(part for part in self.actions if part.kind == "continuous")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each discrete action."""
        return tuple(part.size for part in self.discrete)

    @cached_property
    def dimensions(self) -> int:
        """Number of numbers of all continuous actions together."""
        return sum(part.size for part in self.continuous)

    @cached_property
    def has_mask(self) -> bool:
        """Whether observations have an ``action_mask``: uint8, one value for each choice of all discrete actions."""
        return any(part.mask for part in self.discrete)

    @cached_property
    def _deciding(self) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        return {
            "observations": [
                (spec.name, _values(spec, ("kind", "shape", "dtype", "size", "layout"))) for spec in self.observations
            ],
            "actions": [(part.name, _values(part, ("kind", "size", "mask"))) for part in self.actions],
        }


def _as_dict(part: ObservationSpec | ActionPart, names: Iterable[str]) -> dict[str, Any]:
    values = _values(part, names)
    for name in ("low", "high"):
        if len(set(values.get(name, ()))) == 1:
            values[name] = values[name][0]
    return {"name": part.name, "kind": part.kind, **{name: value for name, value in values.items() if value != []}}


def _values(part: ObservationSpec | ActionPart, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(part, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _known(kind: str) -> tuple[str, ...]:
    """The fields that a part of this kind may have."""
    return ("kind", *(_OF_OBSERVATION.get(kind) or _OF_ACTION[kind]))


def _differences(group: str, ours: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for name, values in expected.items():
        if name not in ours:
            known = {key: values[key] for key in _known(values["kind"]) if key in values}
            yield f"{group}.{name} is missing, expected {json.dumps(known)}"
            continue
        has_kind = ours[name]["kind"] == values["kind"]
        for key in _known(values["kind"]) if has_kind else ("kind",):
            if key in values and ours[name][key] != (value := values[key]):
                yield f"{group}.{name}.{key} is {json.dumps(ours[name][key])}, expected {json.dumps(value)}"
    for name in ours:
        if name not in expected:
            yield f"{group}.{name} is unknown, expected only {', '.join(expected)}"
    if list(ours) != list(expected) and set(ours) == set(expected):
        yield f"{group} are in the order {', '.join(ours)}, expected {', '.join(expected)}"


class _Fields:
    """Reads a JSON object field by field.

    Args:
        place: where the object is in its document, such as ``actions.dash``; empty for the document itself.
        document: the object.
        known: the fields that it may have.
        whole: what the document is, for a refusal of one that is no object.
    """

    def __init__(self, place: str, document: Any, known: Sequence[str], *, whole: str = "") -> None:
        if not isinstance(document, Mapping):
            raise _refusal(place or "the body", document, f"an object: {whole or 'its fields by name'}")
        self._place = place
        self._values = document
        check_names(document, known, self.place(""))

    def place(self, name: str) -> str:
        """Where a field is in the document."""
        return f"{self._place}.{name}" if self._place else name

    def get(self, name: str) -> Any:
        """A field's value; None if there is none."""
        return self._values.get(name)

    def name(self, name: str, default: str) -> str:
        """A short printable text."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
            raise _refusal(self.place(name), value, f"1 to {_MAX_NAME} printable characters")
        return value

    def integer(self, name: str, default: int | None, *, least: int, most: int) -> int:
        """A whole number within limits."""
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _refusal(self.place(name), value, f"a whole number from {least} to {most}")
        return value

    def choice(self, name: str, default: Any, choices: Sequence[str]) -> Any:
        """One of several words."""
        value = self._values.get(name, default)
        if value not in choices:
            raise _refusal(self.place(name), value, f"one of {', '.join(choices)}")
        return value

    def shape(self, *, least_axes: int, most_axes: int) -> tuple[int, ...]:
        """The field ``shape``."""
        value = self._values.get("shape", [] if least_axes == 0 else None)
        is_list = isinstance(value, list | tuple) and least_axes <= len(value) <= most_axes
        is_whole = is_list and all(isinstance(size, int) and not isinstance(size, bool) for size in value)
        if not is_whole or not all(0 < size <= MAX_VALUES for size in value):
            axes = f"{least_axes}" if least_axes == most_axes else f"{least_axes} to {most_axes}"
            raise _refusal(self.place("shape"), value, f"a list of {axes} whole numbers from 1 to {MAX_VALUES}")
        return tuple(value)

    def bounds(self, name: str, default: Any, count: int) -> Bounds:
        """Finite numbers: one, or ``count``."""
        value = self._values.get(name, default)
        given = tuple(value) if isinstance(value, list | tuple) else (value,)
        if default is None and value in (None, [], ()):
            return ()
        if len(given) not in (1, count) or not all(map(_is_finite, given)):
            raise _refusal(self.place(name), value, f"a finite number, or a list of {count}")
        return tuple(map(float, given))

    def low_high(self, default: float | None, count: int) -> tuple[Bounds, Bounds]:
        """The fields ``low`` and ``high``."""
        low = self.bounds("low", None if default is None else -default, count)
        high = self.bounds("high", default, count)
        if low and high and not np.all(np.asarray(low) < np.asarray(high)):
            raise _refusal(self.place("high"), list(high), f"above low, which is {list(low)}")
        return low, high

    def labels(self, count: int) -> tuple[str, ...]:
        """The field ``labels``: one for each of ``count`` values, or none."""
        value = self._values.get("labels", ())
        if not isinstance(value, list | tuple) or not all(isinstance(label, str) for label in value):
            raise _refusal(self.place("labels"), value, "a list of texts")
        if len(value) not in (0, count):
            raise BadBody(
                f"{self.place('labels')} has {len(value)} labels, expected {count}", field=self.place("labels")
            )
        return tuple(value)


def _parts(top: _Fields, group: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, place and document of each observation or action."""
    value = top.get(group)
    if isinstance(value, Mapping):
        named = [(name, part) for name, part in value.items()]
    elif isinstance(value, list | tuple) and all(isinstance(part, Mapping) for part in value):
        named = [(part.get("name"), {key: part[key] for key in part if key != "name"}) for part in value]
    else:
        raise _refusal(group, value, "an object by name, or a list of objects with a name")
    if not 0 < len(named) <= MAX_PARTS:
        raise BadBody(f"{group} has {len(named)} entries, expected 1 to {MAX_PARTS}", field=group)
    names = [name for name, _ in named]
    for index, (name, part) in enumerate(named):
        place = f"{group}.{name}"
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable() or "/" in name:
            raise _refusal(f"{group}: the name", name, f"1 to {_MAX_NAME} printable characters without '/'")
        if name == MASK:
            raise BadBody(f"{place}: the name is taken by the mask of the actions, expected another", field=place)
        if name in names[:index]:
            raise BadBody(f"{place} comes twice in {group}", field=place)
        if not isinstance(part, Mapping):
            raise _refusal(place, part, "an object with its fields")
        yield name, place, part


def _observation(named: tuple[str, str, Mapping[str, Any]]) -> ObservationSpec:
    name, place, document = named
    kind = document.get("kind", "vector")
    if not isinstance(kind, str) or kind not in _OF_OBSERVATION:
        raise _refusal(f"{place}.kind", kind, f"one of {', '.join(_OF_OBSERVATION)}")
    part = _Fields(place, document, ("kind", *_OF_OBSERVATION[kind]))
    if kind == "text":
        size = part.integer("size", None, least=1, most=MAX_SIZE)
        return ObservationSpec(name, "text", (size,), "uint8", size=size)
    if kind == "category":
        size = part.integer("size", None, least=1, most=MAX_SIZE)
        start = part.integer("start", 0, least=-(2**31), most=2**31 - size)
        shape = part.shape(least_axes=0, most_axes=1)
        return ObservationSpec(name, "category", shape, "int32", size=size, start=start, labels=part.labels(size))
    least_axes, most_axes = {"image": (3, 3), "entities": (2, 2)}.get(kind, (1, 4))
    shape = part.shape(least_axes=least_axes, most_axes=most_axes)
    if kind == "entities" and shape[0] > MAX_SIZE:
        raise _refusal(f"{place}.shape", list(shape), f"at most {MAX_SIZE} rows")
    low, high = part.low_high(None, shape[-1])
    return ObservationSpec(
        name,
        kind,  # type: ignore[arg-type]
        shape,
        part.choice("dtype", "uint8" if kind == "image" else "float32", DTYPES),
        low,
        high,
        layout=part.choice("layout", "HWC", ("HWC", "CHW")),
        labels=part.labels(math.prod(shape) if kind == "vector" else shape[-1]),
    )


def _action(named: tuple[str, str, Mapping[str, Any]]) -> ActionPart:
    name, place, document = named
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _OF_ACTION:
        raise _refusal(f"{place}.kind", kind, f"one of {', '.join(_OF_ACTION)}")
    part = _Fields(place, document, ("kind", *_OF_ACTION[kind]))
    if kind == "continuous":
        size = part.integer("size", 1, least=1, most=MAX_SIZE)
        low, high = (bounds * size if len(bounds) == 1 else bounds for bounds in part.low_high(1.0, size))
        return ActionPart(name, "continuous", size, low=low, high=high, labels=part.labels(size))
    size = part.integer("size", None, least=1, most=MAX_SIZE)
    mask = part.get("mask")
    if mask is not None and not isinstance(mask, bool):
        raise _refusal(f"{place}.mask", mask, "true or false")
    start = part.integer("start", 0, least=-(2**31), most=2**31 - size)
    return ActionPart(name, "discrete", size, start, labels=part.labels(size), mask=bool(mask))


def _rewards(top: _Fields) -> dict[str, float]:
    value = top.get("rewards")
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_PARTS:
        raise _refusal("rewards", value, f"an object: at most {MAX_PARTS} weights by name")
    for name, weight in value.items():
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise _refusal("rewards: the name", name, f"1 to {_MAX_NAME} printable characters")
        if not _is_finite(weight):
            raise _refusal(f"rewards.{name}", weight, "a finite number")
    return {name: float(weight) for name, weight in value.items()}


def _check_total(group: str, what: str, total: int, most: int) -> None:
    if total > most:
        raise BadBody(f"{group} have {total} {what} together, expected at most {most}", field=group)


def _is_finite(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float(np.finfo(np.float32).max)
    )


def _refusal(place: str, value: Any, expected: str) -> BadBody:
    got = "missing" if value is None else f"{json.dumps(value, default=str, skipkeys=True):.80}"
    return BadBody(f"{place} is {got}, expected {expected}", field=place)
