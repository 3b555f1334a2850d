"""`EnvBodies`: the bodies of one agent of a Gymnasium or PettingZoo environment, by contract or in the gym profile.

A start has both the fields of the gym profile and a contract of the spaces (`SpacesBodies`). The reply says which of
the two the service plays. Knows nothing of sessions, doors or environments.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np

from brayx.arrays import jsonable
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import DTYPES, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.games import say
from brayx.spaces import MASK
from brayx.strict_json import parse_json

Space = gymnasium.Space[Any]
spaces = gymnasium.spaces
_Named = tuple[str, dict[str, Any]]
_ENCODING = "packed"
BEHAVIOUR = "agent"
"""Behaviour of an environment's contract."""
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class TickBodies(Protocol):
    """Bodies of a session's ticks and its stop, and the actions in their replies.

    Each method raises `BadBody` for a value that is not finite or does not fit its space.
    """

    def tick(self, obs: Any, reward: float, info: Mapping[str, Any], **more: Any) -> bytes: ...

    def stop(self, obs: Any, reward: float, *, terminated: bool, truncated: bool, **more: Any) -> bytes: ...

    def action(self, reply: bytes) -> Any:
        """The environment's action."""


class EnvBodies:
    """Bodies of one agent's sessions.

    Args:
        observation_space, action_space: of the agent.
        has_mask: its info says which discrete actions are allowed.
        behaviour: of the contract.
        by_contract: send the contract.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        has_mask: bool = False,
        behaviour: str = BEHAVIOUR,
        by_contract: bool = True,
    ) -> None:
        self._profile = GymBodies(action_space)
        self._contract: SpacesBodies | None = None
        try:
            if by_contract:
                self._contract = SpacesBodies(observation_space, action_space, has_mask, behaviour)
        except ConfigError as error:
            _say_once(f"plays without a contract: {error.message}")

    def start(self, about: Mapping[str, Any]) -> bytes:
        """A start's body: ``about``, the action space and the contract."""
        said = {} if self._contract is None else self._contract.bodies.contract.as_dict()
        return _encode({**about, **self._profile.about, **said})

    def started(self, reply: bytes) -> TickBodies:
        """The bodies of the session, by the reply to its start."""
        with contextlib.suppress(BadBody, KeyError, TypeError):
            if self._contract is not None and parse_json(reply)["id"] == self._contract.bodies.contract.id:
                return self._contract
        return self._profile


class GymBodies:
    """The gym profile: JSON, with ``obs``, ``reward`` and ``action_mask``.

    Args:
        action_space: of the agent.

    Attributes:
        about: fields of the start: for a ``Discrete`` action space ``num_actions``, and ``first_action``
            unless it is 0.
    """

    def __init__(self, action_space: Space) -> None:
        self.action = _action_reader(action_space)
        self.about: dict[str, int] = {}
        if isinstance(action_space, spaces.Discrete):
            first = {"first_action": int(action_space.start)} if action_space.start else {}
            self.about = {"num_actions": int(action_space.n), **first}

    def tick(self, obs: Any, reward: float, info: Mapping[str, Any], **more: Any) -> bytes:
        """See `TickBodies`; ``more`` are further fields."""
        mask = {MASK: jsonable(info[MASK])} if MASK in info else {}
        return _encode({"obs": jsonable(obs), "reward": reward, **more, **mask})

    def stop(self, obs: Any, reward: float, *, terminated: bool, truncated: bool, **more: Any) -> bytes:
        """See `TickBodies`."""
        ended = {"terminated": terminated, "truncated": truncated}
        return _encode({"obs": jsonable(obs), "reward": reward, **more, **ended})


class SpacesBodies:
    """Bodies by the contract of an agent's spaces.

    Raises:
        ConfigError: a space has no contract.
    """

    def __init__(self, observation_space: Space, action_space: Space, has_mask: bool, behaviour: str) -> None:
        self._leaves = list(_observations(observation_space, ()))
        self._with_mask = isinstance(observation_space, spaces.Dict) and MASK in observation_space.spaces
        actions, self._action = _actions(action_space, ())
        if has_mask or self._with_mask:
            actions = [(name, {**part, "mask": True} if part["kind"] == "discrete" else part) for name, part in actions]
        try:
            contract = Contract.parse(
                {
                    "contract": 1,
                    "behaviour": behaviour,
                    "observations": [{"name": name, **part} for name, _, part in self._leaves],
                    "actions": [{"name": name, **part} for name, part in actions],
                    "encoding": _ENCODING,
                }
            )
        except BadBody as error:
            raise ConfigError(error.message, **error.details) from None
        self.bodies = ContractBodies(contract)
        self._masked = [part.name for part in contract.discrete if part.mask]
        self._last: dict[str, Any] | None = None

    def tick(self, obs: Any, reward: float, info: Mapping[str, Any], **more: Any) -> bytes:
        """See `TickBodies`."""
        self._last = self._values(obs)
        mask = obs[MASK] if self._with_mask else info.get(MASK)
        return self.bodies.encode_tick(self._last, reward, mask=None if mask is None else self._mask(mask))

    def stop(self, obs: Any, reward: float, *, terminated: bool, truncated: bool, **more: Any) -> bytes:
        """See `TickBodies`."""
        # The value after a cut needs an observation: if the environment gives none, take the last one.
        last = self._last if obs is None and truncated else None if obs is None else self._values(obs)
        return self.bodies.encode_tick(last, reward, terminated=terminated, truncated=truncated)

    def action(self, reply: bytes) -> Any:
        """See `TickBodies`."""
        return self._action(self.bodies.decode_reply(reply))

    def _values(self, obs: Any) -> dict[str, Any]:
        return {name: read(obs) for name, read, _ in self._leaves}

    def _mask(self, rows: Any) -> dict[str, Any]:
        """The rows by action: of the only one, or one for each."""
        rows = [rows] if len(self._masked) == 1 and np.ndim(rows[0]) == 0 else rows
        return {name: np.asarray(row, np.uint8) for name, row in zip(self._masked, rows, strict=True)}


def _observations(space: Space, path: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[Any], Any], dict[str, Any]]]:
    """Name, reader and contract of each part of an observation."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            if path or key != MASK:
                yield from _observations(part, (*path, key))
        return
    if isinstance(space, spaces.MultiDiscrete) and len({*space.nvec.flat}) * len({*space.start.flat}) > 1:
        for index in np.ndindex(space.shape):
            part = spaces.Discrete(int(space.nvec[index]), start=int(space.start[index]))
            yield from _observations(part, (*path, index if len(index) > 1 else index[0]))
        return
    shape, document = _observation(space)
    yield (
        _name(path, "obs"),
        functools.partial(_reshaped, path, None if shape == (space.shape or ()) else shape),
        document,
    )


def _observation(space: Space) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of a part of an observation on the wire, and its contract."""
    shape: tuple[int, ...] = space.shape or ()
    size = int(np.prod(shape))
    match space:
        case spaces.Discrete():
            return shape, {"kind": "category", "size": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            first, count = int(space.start.flat[0]), int(space.nvec.flat[0])
            return (size,), {"kind": "category", "size": count, "start": first, "shape": [size]}
        case spaces.MultiBinary():
            return (size,), {"shape": [size], "dtype": "int8"}
        case spaces.Text():
            return shape, {"kind": "text", "size": 4 * space.max_length}
        case spaces.Box():
            dtype = "float32" if space.dtype.kind == "f" else space.dtype.name
            dtype = dtype if dtype in DTYPES else "int64"
            if len(shape) == 2 and dtype == "uint8":
                shape = (*shape, 1)
            if len(shape) == 3:
                # Height and width differ least. The number of channels says little: a chess board has 111.
                layout = "CHW" if abs(shape[1] - shape[2]) < abs(shape[0] - shape[1]) else "HWC"
                return shape, {"kind": "image", "shape": [*shape], "dtype": dtype, "layout": layout}
            shape = shape if 1 <= len(shape) <= 4 else (size,)
            return shape, {"shape": [*shape], "dtype": dtype}
    raise ConfigError(f"{space} is no space of a contract's observation", space=str(space))


def _actions(space: Space, path: tuple[Any, ...]) -> tuple[list[_Named], Callable[[Mapping[str, Any]], Any]]:
    """Names and contracts of an action's parts, and a function that makes the environment's action from a reply's."""
    name = _name(path, "action")
    match space:
        case spaces.Discrete():
            number = space.dtype.type
            part = {"kind": "discrete", "size": int(space.n), "start": int(space.start)}
            return [(name, part)], lambda chosen: number(chosen[name])
        case spaces.Box():
            return [(name, _continuous(space))], lambda chosen: _in_box(space, chosen[name])
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            sizes = space.nvec.flat if isinstance(space, spaces.MultiDiscrete) else [2] * int(np.prod(space.shape))
            starts = space.start.flat if isinstance(space, spaces.MultiDiscrete) else [0] * len(sizes)
            parts = [
                (_name((*path, index), ""), {"kind": "discrete", "size": int(size), "start": int(start)})
                for index, (size, start) in enumerate(zip(sizes, starts, strict=True))
            ]
            names, kind, shape = [part_name for part_name, _ in parts], space.dtype, space.shape
            return parts, lambda chosen: np.array([chosen[part] for part in names], kind).reshape(shape)
        case spaces.Dict():
            named = {key: _actions(part, (*path, key)) for key, part in space.spaces.items()}
            nested = [part for parts, _ in named.values() for part in parts]
            return nested, lambda chosen: {key: read(chosen) for key, (_, read) in named.items()}
        case spaces.Tuple():
            listed = [_actions(part, (*path, index)) for index, part in enumerate(space.spaces)]
            nested = [part for parts, _ in listed for part in parts]
            return nested, lambda chosen: tuple(read(chosen) for _, read in listed)
    raise ConfigError(f"{space} is no space of a contract's action", space=str(space))


def _continuous(space: spaces.Box) -> dict[str, Any]:
    if not space.is_bounded():
        raise ConfigError(f"{space} has no bounds, which a contract's action needs", space=str(space))
    size = int(np.prod(space.shape))
    low, high = (np.asarray(bound, np.float64).reshape(-1).tolist() for bound in (space.low, space.high))
    return {"kind": "continuous", "size": size, "low": low, "high": high}


def _in_box(space: spaces.Box, values: np.ndarray) -> np.ndarray:
    if space.dtype.kind in "iu":
        values = np.rint(values)
    # float32 of a bound may be beyond it.
    action: np.ndarray = np.clip(values.reshape(space.shape), space.low, space.high).astype(space.dtype)
    return action


def _reshaped(path: tuple[Any, ...], shape: tuple[int, ...] | None, obs: Any) -> Any:
    for key in path:
        obs = obs[key]
    return obs if shape is None else np.reshape(obs, shape)


def _name(path: tuple[Any, ...], whole: str) -> str:
    return ".".join(map(str, path)) or whole


@functools.cache
def _say_once(text: str) -> None:
    say(text)


def _encode(document: dict[str, Any]) -> bytes:
    """A body, as JSON.

    Raises:
        BadBody: it holds NaN or infinity, which JSON cannot represent.
    """
    try:
        return _dumps(document).encode()
    except ValueError:
        raise BadBody(f"the environment gave NaN or infinity, which JSON cannot carry: {document}") from None


def _action_reader(space: Space) -> Callable[[bytes], Any]:
    """A function that reads the environment's action from a reply; it raises `BadBody` if there is none."""
    from_json = _from_json(space)
    loads = json.loads

    def read(reply: bytes) -> Any:
        try:
            return from_json(loads(reply)["action"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            quoted = reply[:120].decode("utf-8", "replace")
            reason = "no field 'action'" if isinstance(error, KeyError) else error
            raise BadBody(f'the reply {quoted!r} is no {{"action": ...}} of {space}: {reason}') from None

    return read


def _from_json(space: Space) -> Callable[[Any], Any]:
    """A function that converts an action's JSON to the space's dtype, for ``env.step``. It raises ValueError for an
    invalid action."""
    if isinstance(space, spaces.Discrete):
        first, past, kind = int(space.start), int(space.start + space.n), space.dtype.type

        def read_discrete(action: Any) -> Any:
            if type(action) is not int or not first <= action < past:
                raise ValueError(f"not an integer from {first} to {past - 1}")
            return kind(action)

        return read_discrete
    if isinstance(space, spaces.Tuple | spaces.Dict):
        return _from_nested_json(space)

    def read(action: Any) -> Any:
        if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            action = np.asarray(action, dtype=space.dtype)
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            action = _rounded_into(space, action)
        if not space.contains(action):
            raise ValueError(f"not in {space}")
        return action

    return read


def _from_nested_json(space: spaces.Tuple[Any] | spaces.Dict) -> Callable[[Any], Any]:
    """As `_from_json`, for a Tuple or Dict."""
    if isinstance(space, spaces.Tuple):
        parts = [_from_json(part) for part in space.spaces]
        return lambda action: tuple(read(part) for read, part in zip(parts, action, strict=True))
    named = {name: _from_json(part) for name, part in space.spaces.items()}

    def read_named(action: Any) -> Any:
        if set(action) != set(named):
            raise ValueError(f"not an object with {', '.join(named)}")
        return {name: read(action[name]) for name, read in named.items()}

    return read_named


def _rounded_into(space: spaces.Box, action: np.ndarray) -> np.ndarray:
    """Clips ``action`` to the bounds if only rounding to float32 took it beyond them."""
    clipped: np.ndarray = np.clip(action, space.low, space.high)
    same = action.shape == space.shape and np.array_equal(action.astype(np.float32), clipped.astype(np.float32))
    return clipped if same else action
