"""`ContractBodies`: the bodies of ticks, stops and replies of a game with a contract, for both sides of the door.

    json      {"obs": {...}, "reward": 0.1, "mask": {...}}      reply: {"steer": [0.2, -1], "dash": 1}
    msgpack   the same, with arrays as their little-endian bytes
    packed    rewards float32, flags uint8, observations, masks uint8, extras as JSON;
              reply: float32 and int32 in the contract's order

Every value is checked against the contract; `BadBody` names the field and the index. Knows nothing of sessions, agents
or doors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgpack
import numpy as np

from brayx.errors import AgentError, BadBody
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_ticks import Tick, TickValues
from brayx.gamecore.fields import check_names
from brayx.strict_json import parse_json

EXTRAS = ("info", "forbidden", "forced", "result")
"""Optional parts of a tick; in a packed body a JSON object at its end."""
_FIELDS = ("obs", "reward", "mask", "terminated", "truncated", *EXTRAS)
MASKED, TERMINATED, TRUNCATED, WITH_EXTRAS, _WITHOUT_OBS = 1, 2, 4, 8, 16
"""Flags of a packed body."""
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ContractBodies:
    """Encodes and decodes the bodies of games with one contract.

    Args:
        contract: the contract; its ``encoding`` decides.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._values = TickValues(contract)
        self._is_packed = contract.encoding == "packed"
        self._is_binary = contract.encoding == "msgpack"
        self._parse: Callable[[bytes], Any] = _parse_msgpack if self._is_binary else parse_json
        self._head = struct.Struct(f"<{len(contract.rewards) or 1}fB")
        reply = "".join("i" if part.kind == "discrete" else f"{part.size}f" for part in contract.actions)
        self._reply = struct.Struct(f"<{reply}")

    def decode(self, body: bytes) -> Tick:
        """Reads a tick.

        Raises:
            BadBody: a value is missing, unknown, or does not fit the contract; or the tick says that the game ended,
                which only its stop may say.
        """
        tick = self._decode(body, is_stop=False)
        if tick.terminated or tick.truncated:
            name = "terminated" if tick.terminated else "truncated"
            raise BadBody(f"{name} is true in a tick, expected it in the stop that ends the game", field=name)
        return tick

    def decode_stop(self, body: bytes) -> Tick | None:
        """Reads a stop; None if its body is empty: the game was broken off.

        A stop may leave out its observation unless it is truncated: then the value of what would have followed counts.

        Raises:
            BadBody: a value is missing, unknown, or does not fit the contract.
        """
        return self._decode(body, is_stop=True) if body else None

    def limits(self, document: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
        """``forbidden`` and ``forced`` of a start, as `Tick` has them.

        Raises:
            BadBody: one does not fit the contract.
        """
        values = self._values
        return values.read_forbidden(document.get("forbidden")), values.read_forced(document.get("forced"))

    def encode(self, action: Mapping[str, Any]) -> bytes:
        """The reply to a tick.

        Args:
            action: by name in the game's numbers: a whole number from its ``start``, or numbers within their bounds.

        Raises:
            AgentError: an action is missing, or not in its bounds.
        """
        try:
            values = {name: part.read(action[name]) for name, part in self._values.actions.items()}
        except KeyError as error:
            raise AgentError(f"the agent chose no action {error.args[0]!r}") from None
        except BadBody as error:
            raise AgentError(f"the agent's action {error.message}") from None
        if self._is_packed:
            numbers: list[Any] = []
            for value in values.values():
                numbers.extend((value,) if isinstance(value, int) else value.tolist())
            return self._reply.pack(*numbers)
        return self._dump({name: self._reply_value(name, value) for name, value in values.items()})

    def decode_reply(self, body: bytes) -> dict[str, Any]:
        """The game's half of `encode`: actions by name, each an ``int`` or a float32 array ``[size]``.

        Raises:
            BadBody: this is no reply to a game with this contract.
        """
        actions = self._values.actions
        if self._is_packed:
            if len(body) != self._reply.size:
                raise BadBody(f"the reply has {len(body)} bytes, expected {self._reply.size}")
            numbers = iter(self._reply.unpack(body))
            document: Any = {
                name: next(numbers) if values.part.kind == "discrete" else [*islice(numbers, values.part.size)]
                for name, values in actions.items()
            }
        else:
            document = self._parse(body)
        if not isinstance(document, Mapping) or set(document) != set(actions):
            raise BadBody(f"the reply is {document!r:.80}, expected an object with {', '.join(actions)}")
        return {name: values.read(document[name]) for name, values in actions.items()}

    def encode_tick(
        self,
        obs: Any = None,
        reward: float | Mapping[str, float] | None = None,
        *,
        mask: Any = None,
        terminated: bool = False,
        truncated: bool = False,
        extras: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The game's half of `decode` and `decode_stop`: a body that the service will accept.

        Args:
            obs: values by observation, or the value of the only one; None: a stop without an observation.
            reward: since the tick before: a number, or numbers by name; None: 0.
            mask: rows of 1 (allowed) and 0 by action, or the row of the only action that has a mask.
            terminated, truncated: how the game ended, in its stop.
            extras: ``info``, ``forbidden``, ``forced`` and ``result`` as JSON values.

        Raises:
            BadBody: a value does not fit the contract.
        """
        arrays = {} if obs is None else self._values.read_observations(obs)
        total, rewards = self._values.read_reward(self._values.no_reward if reward is None else reward)
        allowed = self._values.read_mask(mask)
        if extras:
            self._read_extras(Tick({}), extras)
        rows = {} if allowed is None else {name: allowed[choices] for name, choices in self._values.masks.items()}
        observations = self._values.observations
        if self._is_packed:
            flags = MASKED * bool(rows) + TERMINATED * terminated + TRUNCATED * truncated
            flags += WITH_EXTRAS * bool(extras) + _WITHOUT_OBS * (not arrays)
            parts = [self._head.pack(*(rewards.values() or (total,)), flags)]
            parts.extend(observations[name].pack(array) for name, array in arrays.items())
            parts.extend(row.tobytes() for row in rows.values())
            return b"".join(parts) + (dumps(extras).encode() if extras else b"")
        document: dict[str, Any] = {"reward": rewards or total, **(extras or {})}
        if arrays:
            document["obs"] = {
                name: observations[name].value(array, binary=self._is_binary) for name, array in arrays.items()
            }
        if rows:
            document["mask"] = {name: self._plain(row) for name, row in rows.items()}
        document.update({name: True for name, flag in (("terminated", terminated), ("truncated", truncated)) if flag})
        return self._dump(document)

    def _decode(self, body: bytes, *, is_stop: bool) -> Tick:
        if self._is_packed:
            return self._unpack(body, is_stop=is_stop)
        document = check_names(self._document(body), _FIELDS)
        values = self._values
        reward, rewards = values.read_reward(document.get("reward", values.no_reward))
        tick = Tick({}, reward, rewards, _flag(document, "terminated"), _flag(document, "truncated"))
        obs = document.get("obs")
        if obs is not None or not is_stop or tick.truncated:
            tick.obs = values.model_arrays(values.read_observations(obs), values.read_mask(document.get("mask")))
        if len(document) > 1 and (extras := {name: document[name] for name in EXTRAS if name in document}):
            self._read_extras(tick, extras)
        return tick

    def _document(self, body: bytes) -> Mapping[str, Any]:
        document = self._parse(body)
        if not isinstance(document, Mapping):
            raise BadBody(f"the body is {document!r:.80}, expected an object with 'obs'", field="obs")
        return document

    def _unpack(self, body: bytes, *, is_stop: bool) -> Tick:
        end = self._head.size
        if len(body) < end:
            raise BadBody(f"the body has {len(body)} bytes, expected at least {end}: rewards and flags")
        *numbers, flags = self._head.unpack_from(body)
        if flags >= 2 * _WITHOUT_OBS:
            hint = ": it looks like JSON, but the contract's encoding is packed" if body[:1] == b"{" else ""
            raise BadBody(f"flags is {flags}, expected a number below {2 * _WITHOUT_OBS}{hint}", field="flags")
        names, values = self.contract.rewards, self._values
        reward, rewards = values.read_reward(dict(zip(names, numbers, strict=True)) if names else numbers[0])
        tick = Tick({}, reward, rewards, bool(flags & TERMINATED), bool(flags & TRUNCATED))
        if flags & _WITHOUT_OBS and (not is_stop or tick.truncated):
            values.read_observations(None)  # refuses
        if not flags & _WITHOUT_OBS:
            arrays, rows = {}, None
            for name, observation in values.observations.items():
                arrays[name], end = observation.unpack(body, end)
            if flags & MASKED:
                rows = {}
                for name, choices in values.masks.items():
                    begin, end = end, end + choices.stop - choices.start
                    rows[name] = body[begin:end]
            tick.obs = values.model_arrays(arrays, values.read_mask(rows))
        if flags & WITH_EXTRAS:
            self._read_extras(tick, parse_json(body[end:]))
        elif len(body) != end:
            raise BadBody(f"the body has {len(body)} bytes, expected {end}")
        return tick

    def _read_extras(self, tick: Tick, extras: Any) -> None:
        if not isinstance(extras, Mapping):
            raise BadBody(f"the extras are {extras!r:.80}, expected an object with some of {', '.join(EXTRAS)}")
        try:
            dumps(extras)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadBody(f"{', '.join(extras)}: expected JSON values; {error}") from None
        self._values.read_extras(tick, check_names(extras, EXTRAS))

    def _dump(self, document: Any) -> bytes:
        if self._is_binary:
            data: bytes = msgpack.packb(document)
            return data
        return dumps(document).encode()

    def _reply_value(self, name: str, value: Any) -> Any:
        if isinstance(value, int):
            return value
        if self._is_binary:
            return self._plain(value)
        part = self._values.actions[name].part
        return np.clip(value.astype(np.float64), part.low, part.high).tolist()  # float32 of 0.1 is above 0.1

    def _plain(self, array: np.ndarray) -> Any:
        """An array in a document: its little-endian bytes, or a list."""
        return array.astype(array.dtype.newbyteorder("<")).tobytes() if self._is_binary else array.tolist()


def _flag(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise BadBody(f"{name} is {value!r:.80}, expected true or false", field=name)
    return value


def _parse_msgpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BadBody(
            f"body is not MessagePack: {error or type(error).__name__}; it starts with {body[:40]!r}"
        ) from None
