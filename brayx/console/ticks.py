"""Ticks as documents, with bodies, arrays and images as JSON values, and curves over them. Knows nothing of jobs."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from pydantic_core import from_json

from brayx.actor.live_ticks import LiveTick
from brayx.console.documents import Document
from brayx.errors import BrayxError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.recording.columns import ERROR
from brayx.recording.frames import is_image, png

_SHOWN_VALUES = 256
"""Maximum elements of an array that is shown as numbers."""
_MAX_TEXT = 65_536
_LEAST_PIXELS = 16


class TickDocument(Document):
    """One tick of a session, live or recorded."""

    number: int
    at_s: float
    """Live: Unix time of the reply. Recorded: seconds since the session's start."""
    seconds: float
    """How long the actor took; 0: not known."""
    event: str
    """``error: WHY``, ``fallback``, ``forwarded``, ``skipped N`` or ``resumed``; empty: nothing unusual happened."""
    input: Any
    """The game's body: JSON, a packed one decoded by its contract, or text."""
    output: Any
    """The reply."""
    arrays: dict[str, Any]
    """What the agents set on the state, by path."""
    action: Any = None
    probabilities: list[float] | None = None
    """Probabilities of the actions, if the tick has logits."""
    value: float | None = None
    policy_version: int | None = None
    image: str | None = None
    """An image among the arrays, as a PNG in a data URL."""


class RecordedCurvesDocument(Document):
    """Curves over a recording's ticks, thinned."""

    ticks: list[int]
    curves: dict[str, list[float]]
    """By name, a value for each tick; of labelled observations a curve for each label. ``reward`` also has a value for
    the session's stop, if that has a reward. Then ``ticks`` ends with the number after that of the last tick."""


class SessionBodies:
    """Bodies of a session as JSON values: by its contract if that is packed or MessagePack, else as `body_of`.

    Args:
        start: the start's body, as from `body_of`.

    Attributes:
        labels: names of the values of observations, by the observation's name; empty: the start is no contract that has
            them.
        action_labels: names of the choices of the only discrete action; empty: the contract has none.
    """

    def __init__(self, start: Any) -> None:
        self._by_contract: ContractBodies | None = None
        self.labels: dict[str, list[str]] = {}
        self.action_labels: list[str] = []
        with contextlib.suppress(BrayxError):
            contract = Contract.parse(start)
            self.labels = {spec.name: list(spec.labels) for spec in contract.observations if spec.labels}
            choices = [part.labels for part in contract.discrete]
            self.action_labels = list(choices[0]) if len(choices) == 1 else []
            if contract.encoding != "json":
                self._by_contract = RowBodies(contract) if start.get("rows") is True else ContractBodies(contract)

    def tick(self, body: bytes) -> Any:
        """The body of a tick."""
        return self._read(body, lambda bodies: _as_json(bodies.decode(body)))

    def stop(self, body: bytes) -> Any:
        """The body of a stop."""
        return self._read(body, lambda bodies: _as_json(bodies.decode_stop(body)))

    def reply(self, body: bytes) -> Any:
        """The reply to a tick."""
        return self._read(body, lambda bodies: _as_json(bodies.decode_reply(body)))

    def _read(self, body: bytes, read: Callable[[ContractBodies], Any]) -> Any:
        if self._by_contract is not None and body:
            with contextlib.suppress(BrayxError):
                return read(self._by_contract)
        return body_of(body)


def _as_json(value: Any) -> Any:
    """A decoded body with its arrays as `array_of`, without the fields of a tick that have their defaults."""
    if isinstance(value, Tick):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "acting"}
        return _as_json({name: part for name, part in given.items() if name == "reward" or _is_set(part)})
    if isinstance(value, Mapping):
        return {name: _as_json(part) for name, part in value.items()}
    return array_of(value) if isinstance(value, np.ndarray) else value


def _is_set(value: Any) -> bool:
    return bool(value.any() if isinstance(value, np.ndarray) else value)


def tick_of(tick: LiveTick, bodies: SessionBodies) -> TickDocument:
    """The document of a tick, live or recorded. A failed one has no arrays: a recording fills them with zeros."""
    arrays = {} if tick.event.startswith(ERROR) else tick.arrays
    logits, mask, value = (named(arrays, name) for name in ("logits", "action_mask", "value"))
    version = arrays.get("policy_version")
    return TickDocument(
        number=tick.number,
        at_s=tick.at_s,
        seconds=tick.seconds,
        event=tick.event,
        input=bodies.tick(tick.input),
        output=bodies.reply(tick.output),
        arrays={name: array_of(array) for name, array in arrays.items()},
        action=array_of(arrays["action"]) if "action" in arrays else None,
        probabilities=None if logits is None else probabilities_of(np.asarray(logits), mask),
        value=np.asarray(value).item()
        if value is not None and np.size(value) == 1 and np.isfinite(value).all()
        else None,
        policy_version=int(np.asarray(version).item()) if version is not None and np.size(version) == 1 else None,
        image=next(filter(None, (_image(array) for array in arrays.values())), None),
    )


def named(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """The array with this name, or else the first one whose path ends with it."""
    return arrays.get(name, next((array for path, array in arrays.items() if path.rpartition("/")[2] == name), None))


def body_of(body: bytes) -> Any:
    """The body as JSON, or else as text, such as one that is nested too deeply for the console's own JSON."""
    try:
        return from_json(body) if body else None
    except ValueError:
        return body[:_MAX_TEXT].decode(errors="replace")


def array_of(array: np.ndarray) -> Any:
    """An array as nested lists; a large one as its dtype and shape. NaN and infinity become text: JSON lacks them."""
    array = np.asarray(array)
    if array.size > _SHOWN_VALUES:
        return f"{array.dtype} {list(array.shape)}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return np.vectorize(str, otypes=[object])(array).tolist()
    return array.tolist()


def probabilities_of(logits: np.ndarray, mask: np.ndarray | None) -> list[float] | None:
    """Probabilities of actions ``[A]`` from logits ``[A]``; 0 for actions that the mask ``[A]`` forbids."""
    if logits.ndim != 1:
        return None
    shown = logits.astype(np.float64)
    if mask is not None and np.shape(mask) == shown.shape:
        shown = np.where(np.asarray(mask) != 0, shown, -np.inf)
    largest = shown.max(initial=-np.inf)
    if not np.isfinite(largest):  # NaN or infinity among them, or nothing is allowed
        return None
    shown = np.exp(shown - largest)
    probabilities: list[float] = (shown / shown.sum()).tolist()
    return probabilities


def _image(array: np.ndarray) -> str | None:
    """An image ``[height, width]`` or ``[height, width, 1, 3 or 4]`` uint8 as a data URL; None: not one, or small."""
    if not is_image(array) or min(array.shape[:2]) < _LEAST_PIXELS:
        return None
    return data_url(png(array))


def data_url(image: bytes) -> str:
    """A PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(image).decode()
