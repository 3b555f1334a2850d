"""`RowBodies`: the bodies of a session of several agents, whose ticks have a row for each of them.

    json      {"agent": [3, 8], "obs": {"vector": [[0, 1], [2, 3]]}, "reward": [0.1, 0]}      reply: {"dash": [1, 0]}
    msgpack   the same, with arrays as their little-endian bytes
    packed    number of rows uint16, flags uint8, agents int32, rewards float32, ends uint8, groups int32, observations,
              masks uint8, extras as JSON; reply: the rows' replies, one after the other

A row with ``terminated`` or ``truncated`` ends its agent's episode and gets no action; the agent's next episode may
begin with a further row. Knows nothing of sessions, agents or doors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from brayx.arrays import place_of
from brayx.errors import AgentError, BadBody
from brayx.gamecore.contract import MAX_VALUES, Contract
from brayx.gamecore.contract_bodies import (
    EXTRAS,
    MASKED,
    TERMINATED,
    TRUNCATED,
    WITH_EXTRAS,
    ContractBodies,
    dumps,
)
from brayx.gamecore.contract_columns import (
    ObservationRows,
    as_sent,
    bytes_of,
    read_flags,
    read_numbers,
    whole_numbers,
)
from brayx.gamecore.contract_ticks import Tick
from brayx.gamecore.fields import array_of, check_names
from brayx.spaces import MASK
from brayx.strict_json import parse_json

MAX_ROWS = 4096
"""Maximum number of rows of a tick, less if its observations or choices are many; and of agents of a session."""
_FIELDS = ("agent", "group", "obs", "reward", "mask", "terminated", "truncated", *EXTRAS)
_HEAD = struct.Struct("<HB")
_GROUPED = 32
"""Flag of a packed body: groups follow."""


class Decoded(bytes):
    """A body between a game and a service in one process, which need not be encoded; ``bytes`` encodes it.

    Attributes:
        value: what it decodes to.
        encode: returns its bytes.
    """

    value: Any
    encode: Callable[[], bytes]

    @classmethod
    def of(cls, value: Any, encode: Callable[[], bytes]) -> Decoded:
        """A body that decodes to ``value``."""
        body = cls()
        body.value, body.encode = value, encode
        return body

    def __bytes__(self) -> bytes:
        return self.encode()


class RowBodies(ContractBodies):
    """Encodes and decodes the bodies of a session of several agents with one contract.

    Args:
        contract: the contract of each agent; its ``encoding`` decides.
    """

    def __init__(self, contract: Contract) -> None:
        super().__init__(contract)
        self._columns = {spec.name: ObservationRows(spec) for spec in contract.observations}
        values = sum(math.prod(spec.shape) for spec in contract.observations)
        self._choices = sum(contract.sizes)
        self._max_rows = min(MAX_ROWS, MAX_VALUES // max(values, self._choices, 1))
        self._fields = {part.name: f"f{index}" for index, part in enumerate(contract.actions)}
        self._row = np.dtype(
            [
                (self._fields[part.name], "<i4")
                if part.kind == "discrete"
                else (self._fields[part.name], "<f4", part.size)
                for part in contract.actions
            ]
        )

    def decode(self, body: bytes) -> Tick:
        """Reads a tick.

        Raises:
            BadBody: a value is missing, unknown, or does not fit the contract; or an agent has two rows that want an
                action.
        """
        if type(body) is Decoded:
            tick: Tick = body.value
            return tick
        return self._unpack_rows(body) if self._is_packed else self._read_rows(self._document(body))

    def decode_stop(self, body: bytes) -> Tick | None:
        """Reads a stop; None if its body is empty. A row that has not ended is broken off."""
        return self.decode(body) if body else None

    def encode(self, action: Mapping[str, Any]) -> bytes:
        """The reply to a tick.

        Args:
            action: by name for each row that has not ended, in the game's numbers: ``[N]`` whole numbers from their
                ``start``, or ``[N, size]`` numbers within their bounds. Empty: all rows have ended.

        Raises:
            AgentError: an action is missing, or not in its bounds.
        """
        return self._encoded_reply(self._reply_columns(action))

    def encode_decoded(self, action: Mapping[str, Any]) -> Decoded:
        """As `encode`, for a game in this process; errors are the same."""
        columns = self._reply_columns(action)
        return Decoded.of(columns, partial(self._encoded_reply, columns))

    def _reply_columns(self, action: Mapping[str, Any]) -> dict[str, np.ndarray]:
        columns = {}
        try:
            for name, values in self._values.actions.items():
                columns[name] = values.read_rows(action[name] if action else ())
        except KeyError as error:
            raise AgentError(f"the agent chose no action {error.args[0]!r}") from None
        except BadBody as error:
            raise AgentError(f"the agent's action {error.message}") from None
        return columns

    def _encoded_reply(self, columns: Mapping[str, np.ndarray]) -> bytes:
        if self._is_packed:
            rows = np.empty(len(next(iter(columns.values()))), self._row)
            for name, column in columns.items():
                rows[self._fields[name]] = column
            return rows.tobytes()
        return self._dump({name: self._reply_rows(name, column) for name, column in columns.items()})

    def decode_reply(self, body: bytes) -> dict[str, Any]:
        """The game's half of `encode`: actions by name, each int64 ``[N]`` or float32 ``[N, size]``.

        Raises:
            BadBody: this is no reply to a session with this contract.
        """
        if type(body) is Decoded:
            columns: dict[str, Any] = body.value
            return columns
        actions = self._values.actions
        if self._is_packed:
            if len(body) % self._row.itemsize:
                raise BadBody(f"the reply has {len(body)} bytes, expected {self._row.itemsize} for each row")
            rows = np.frombuffer(body, self._row)
            return {name: values.read_rows(rows[self._fields[name]]) for name, values in actions.items()}
        document = self._parse(body)
        if not isinstance(document, Mapping) or set(document) != set(actions):
            raise BadBody(f"the reply is {document!r:.80}, expected an object with {', '.join(actions)}")
        return {name: values.read_rows(document[name]) for name, values in actions.items()}

    def decoded_rows(
        self,
        agents: Sequence[int],
        obs: Any,
        reward: Any = None,
        mask: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        groups: Sequence[int] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Decoded:
        """The game's half of `decode` and `decode_stop`: a body that the service will accept.

        ``bytes`` encodes it; a service in this process takes it as it is.

        Args:
            agents: number of each row's agent, 0 or more.
            obs: values by observation, or those of the only one, each with a row for each agent. In the row of an
                episode that is ``terminated`` they do not matter, but have to be valid.
            reward: since the tick before: ``[N]`` numbers, by name if the contract names them; None: 0.
            mask: ``[N]`` rows of 1 (allowed) and 0 by action, or of the only action that has a mask.
            terminated, truncated: ``[N]``: how a row's episode ended; None: no one did.
            groups: number of the group of each row's agent, 0 for none; None: there are no groups.
            extras: ``info``, ``forbidden``, ``forced`` and ``result`` as JSON values, for all rows; ``info`` may also
                be a list with an object for each row.

        Raises:
            BadBody: a value does not fit the contract.
        """
        tick = self._read_numbers(agents, groups)
        count = len(agents)
        columns = self._read_columns(obs, count)
        self._read_rewards(tick, self._no_reward(count) if reward is None else reward, count)
        self._read_ends(tick, terminated, truncated, count)
        allowed = self._read_masks(mask, count)
        if extras:
            self._read_extras(tick, extras)
        if self._is_packed:  # as a service elsewhere would get them
            sent = {name: as_sent(rewards) for name, rewards in tick.rewards.items()}
            self._read_rewards(tick, sent or as_sent(tick.reward), count)
        tick.obs = self._model_rows(columns, allowed, count)
        return Decoded.of(tick, partial(self._encoded_rows, tick, columns, allowed, extras))

    def _encoded_rows(
        self,
        tick: Tick,
        columns: Mapping[str, Any],
        allowed: np.ndarray | None,
        extras: Mapping[str, Any] | None,
    ) -> bytes:
        """The body of a checked tick."""
        assert tick.agents is not None
        count = len(tick.agents)
        if self._is_packed:
            rewards = np.stack([*tick.rewards.values()], -1) if tick.rewards else tick.reward
            flags = MASKED * (allowed is not None) + WITH_EXTRAS * bool(extras) + _GROUPED * (tick.groups is not None)
            ends = bytes(count)
            if tick.acting is not None:
                ends = (tick.terminated * np.uint8(TERMINATED) + tick.truncated * np.uint8(TRUNCATED)).tobytes()
            parts = [_HEAD.pack(count, flags), bytes_of(tick.agents, "<i4"), bytes_of(rewards, "<f4"), ends]
            if tick.groups is not None:
                parts.append(bytes_of(tick.groups, "<i4"))
            parts.extend(self._columns[name].pack_rows(column) for name, column in columns.items())
            if allowed is not None:
                parts.append(b"".join(allowed[:, choices].tobytes() for choices in self._values.masks.values()))
            return b"".join(parts) + (dumps(extras).encode() if extras else b"")
        is_binary = self._is_binary
        document: dict[str, Any] = {
            "agent": bytes_of(tick.agents, "<i4") if is_binary else tick.agents.tolist(),
            "obs": {name: self._columns[name].row_values(column, is_binary) for name, column in columns.items()},
            "reward": {name: row.tolist() for name, row in tick.rewards.items()} or tick.reward.tolist(),
            **(extras or {}),
        }
        if tick.groups is not None:
            document["group"] = bytes_of(tick.groups, "<i4") if is_binary else tick.groups.tolist()
        if allowed is not None:
            document["mask"] = {name: self._plain(allowed[:, choices]) for name, choices in self._values.masks.items()}
        for name, ended in (("terminated", tick.terminated), ("truncated", tick.truncated)):
            if ended.any():
                document[name] = ended.tolist()
        return self._dump(document)

    def _read_rows(self, document: Mapping[str, Any]) -> Tick:
        check_names(document, _FIELDS)
        tick = self._read_numbers(document.get("agent"), document.get("group"))
        assert tick.agents is not None
        count = len(tick.agents)
        columns, allowed = self._read_columns(document.get("obs"), count), self._read_masks(document.get("mask"), count)
        tick.obs = self._model_rows(columns, allowed, count)
        self._read_rewards(tick, document.get("reward", self._no_reward(count)), count)
        self._read_ends(tick, document.get("terminated"), document.get("truncated"), count)
        if extras := {name: document[name] for name in EXTRAS if name in document}:
            self._read_extras(tick, extras)
        return tick

    def _unpack_rows(self, body: bytes) -> Tick:
        if len(body) < _HEAD.size:
            raise BadBody(f"the body has {len(body)} bytes, expected at least {_HEAD.size}: rows and flags")
        count, flags = _HEAD.unpack_from(body)
        if flags & ~(MASKED | WITH_EXTRAS | _GROUPED):
            raise BadBody(f"flags is {flags}, expected a sum of {MASKED}, {WITH_EXTRAS} and {_GROUPED}", field="flags")
        names = self.contract.rewards
        numbers = len(names) or 1
        ends_at = _HEAD.size + count * (4 + 4 * numbers)
        groups_at = ends_at + count
        end = groups_at + 4 * count * bool(flags & _GROUPED)
        if len(body) < end:
            raise BadBody(f"the body has {len(body)} bytes, expected at least {end}: {count} agents, rewards and ends")
        groups = np.frombuffer(body, "<i4", count, groups_at) if flags & _GROUPED else None
        tick = self._read_numbers(np.frombuffer(body, "<i4", count, _HEAD.size), groups)
        rewards = np.frombuffer(body, "<f4", count * numbers, _HEAD.size + 4 * count).astype(np.float64)
        by_name = dict(zip(names, rewards.reshape(count, numbers).T, strict=True)) if names else rewards
        self._read_rewards(tick, by_name, count)
        if any(ends_data := body[ends_at:groups_at]):
            ends = np.frombuffer(ends_data, np.uint8)
            if (ends & ~np.uint8(TERMINATED | TRUNCATED)).any():
                index = int((ends & ~np.uint8(TERMINATED | TRUNCATED)).argmax())
                raise BadBody(f"ends[{index}] is {ends[index]}, expected 0, 2, 4 or 6", field=f"ends[{index}]")
            self._read_ends(tick, ends & TERMINATED > 0, ends & TRUNCATED > 0, count)
        else:
            self._read_ends(tick, None, None, count)
        columns: dict[str, Any] = {}
        for name, observation in self._columns.items():
            columns[name], end = observation.unpack_rows(body, end, count)
        masks: dict[str, bytes] | None = None
        if flags & MASKED:
            masks = {}
            for name, choices in self._values.masks.items():
                begin, end = end, end + count * (choices.stop - choices.start)
                masks[name] = body[begin:end]
        tick.obs = self._model_rows(columns, self._read_masks(masks, count), count)
        if flags & WITH_EXTRAS:
            self._read_extras(tick, parse_json(body[end:]))
        elif len(body) != end:
            raise BadBody(f"the body has {len(body)} bytes, expected {end}")
        return tick

    def _read_numbers(self, agents: Any, groups: Any) -> Tick:
        """A tick with the numbers of its rows' agents and groups, and nothing else yet."""
        if agents is None:
            raise BadBody("agent is missing, expected the number of each row's agent", field="agent")
        tick = Tick({}, agents=whole_numbers("agent", agents))
        assert tick.agents is not None
        if not 0 < len(tick.agents) <= self._max_rows:
            raise BadBody(f"agent has {len(tick.agents)} rows, expected 1 to {self._max_rows}", field="agent")
        if groups is not None:
            tick.groups = whole_numbers("group", groups)
            if len(tick.groups) != len(tick.agents):
                got = f"group has {len(tick.groups)} rows, expected {len(tick.agents)}"
                raise BadBody(f"{got}, with 0 for an agent without a group", field="group")
        return tick

    def _read_columns(self, value: Any, count: int) -> dict[str, Any]:
        """The rows of all observations, in the contract's order and the game's dtypes."""
        value = self._values.observations_by_name(value)
        columns = {}
        for name, observation in self._columns.items():
            if value.get(name) is None:
                place = observation.place
                raise BadBody(f"{place} is missing, expected {count} rows: {observation.expected}", field=place)
            columns[name] = observation.read_rows(value[name], count)
        return columns

    def _model_rows(self, columns: Mapping[str, Any], allowed: np.ndarray | None, count: int) -> dict[str, np.ndarray]:
        """What the model gets of `_read_columns` and `_read_masks`."""
        obs = {name: self._columns[name].model_rows(column) for name, column in columns.items()}
        if self.contract.has_mask:
            obs[MASK] = np.ones((count, self._choices), np.uint8) if allowed is None else allowed
        return obs

    def _no_reward(self, count: int) -> Any:
        """The value of rewards that are left out."""
        return self._values.no_reward if self.contract.rewards else np.zeros(count)

    def _read_rewards(self, tick: Tick, value: Any, count: int) -> None:
        weights = self.contract.rewards
        if not weights:
            tick.reward = read_numbers("reward", self._values.given_reward(value), count)
            return
        value = self._values.rewards_by_name(value)
        tick.reward = np.zeros(count)
        for name, weight in weights.items():
            rewards = read_numbers(f"reward.{name}", value[name], count) if name in value else np.zeros(count)
            tick.rewards[name] = rewards
            tick.reward = tick.reward + weight * rewards

    def _read_ends(self, tick: Tick, terminated: Any, truncated: Any, count: int) -> None:
        """Sets the rows' ends; refuses two rows of an agent, unless the first of them ends its episode."""
        assert tick.agents is not None
        ended = tick.terminated = tick.truncated = np.zeros(count, np.bool_)
        if terminated is not None:
            ended = tick.terminated = read_flags("terminated", terminated, count)
        if truncated is not None:
            tick.truncated = read_flags("truncated", truncated, count)
            ended = ended | tick.truncated
        agents, ends = tick.agents.tolist(), ended.tolist()
        if True in ends:
            tick.acting = np.flatnonzero(~ended)
        if len(set(agents)) == count:
            return
        waiting: set[int] = set()
        for index, (agent, has_ended) in enumerate(zip(agents, ends, strict=True)):
            if agent in waiting:
                place = f"agent[{index}]"
                raise BadBody(f"{place} is {agent}, which has a row before it that has not ended", field=place)
            if not has_ended:
                waiting.add(agent)

    def _read_masks(self, value: Any, count: int) -> np.ndarray | None:
        """The masks of all choices, uint8 ``[N, choices]``; None if there are none."""
        if value is None:
            return None
        allowed = np.ones((count, self._choices), np.uint8)
        for name, rows in self._values.masks_by_name(value).items():
            choices, place = self._values.masks[name], f"mask.{name}"
            array = np.frombuffer(rows, np.uint8) if isinstance(rows, bytes) else array_of(rows, place, np.uint8)
            shape = (count, choices.stop - choices.start)
            if array.size != math.prod(shape):
                raise BadBody(f"{place} has shape {list(array.shape)}, expected {list(shape)}", field=place)
            array = array.reshape(shape)
            if array.max() > 1:
                index = np.unravel_index(int(array.argmax()), shape)
                value_place = place_of(place, [int(part) for part in index])
                raise BadBody(f"{value_place} is {array[index]}, expected 0 or 1", field=value_place)
            if not (allows := array.any(-1)).all():
                row = f"{place}[{int(allows.argmin())}]"
                raise BadBody(f"{row} allows no choice, expected at least one", field=row)
            allowed[:, choices] = array
        return allowed

    def _read_extras(self, tick: Tick, extras: Any) -> None:
        infos = extras.get("info") if isinstance(extras, Mapping) else None
        if not isinstance(infos, list):
            return super()._read_extras(tick, extras)
        assert tick.agents is not None
        if len(infos) != len(tick.agents) or not all(isinstance(info, Mapping) for info in infos):
            raise BadBody(f"info is {infos!r:.80}, expected {len(tick.agents)} objects, one for each row", field="info")
        super()._read_extras(tick, {**extras, "info": {"rows": infos}})
        tick.info = infos
        return None

    def _reply_rows(self, name: str, column: np.ndarray) -> Any:
        part = self._values.actions[name].part
        if self._is_binary:
            return self._plain(column.astype("<i4") if part.kind == "discrete" else column)
        if part.kind == "discrete":
            return column.tolist()
        return np.clip(column.astype(np.float64), part.low, part.high).tolist()  # float32 of 0.1 is above 0.1
