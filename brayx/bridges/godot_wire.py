"""The wire of Godot's add-on godot_rl, protocol 0.3 to 0.7: the game connects, and answers requests.

    frame    uint32 little endian, the length of what follows in bytes; JSON in UTF-8
    asked    {"type": "handshake", "major_version": "0", "minor_version": "7"}      no answer
             {"type": "env_info"}                                                    the spaces of all agents
             {"type": "reset"}                                                       obs of all agents
             {"type": "action", "action": [{"move": [0.1, 0.2]}, ...]}               obs, reward, done of all agents
             {"type": "close"}                                                       the game quits

What the game announces becomes a contract for each agent. Knows nothing of doors and sessions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from brayx.bridges.teams import behaviour_and_team
from brayx.errors import BadBody, BodyTooLarge, DeadlineExceeded
from brayx.gamecore.contract import Contract

PORT = 11008
"""Where a game dials unless it is started with ``--port=N``."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Maximum length of a game's message: 400 pictures of 84 x 84 in colour."""
POLICY = "shared_policy"
"""The policy of all agents of an add-on that names none."""
_HANDSHAKE = {"type": "handshake", "major_version": "0", "minor_version": "7"}
_MAX_AGENTS = 4096
_SILENT_S = 10.0
"""After this time without an answer a line says so."""
_IS_PICTURE = "2d"
"""Part of the names of observations that are pictures."""
_OBJECT, _NUMBER = frozenset([dict]), frozenset([float, int, bool])
_NOT_JSON = re.compile(rb"(?<=[\[,:])(-?)(?:(nan)|inf)(?=[\],}])")
"""How some versions of Godot write numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class GodotStep:
    """A game's answer to a reset or to actions: one entry for each agent.

    Attributes:
        obs: values by observation.
        rewards: since the answer before.
        dones: whether the agent's episode has ended. Then ``obs`` may be the first of its next one.
        truncated: whether that episode was cut instead: ``truncated`` of the answer, or of the agent's ``info``.
        infos: what ``get_info`` of the agents gave.
    """

    obs: list[Mapping[str, Any]]
    rewards: list[float]
    dones: list[bool]
    truncated: list[bool]
    infos: list[Mapping[str, Any]]


class GodotGame(asyncio.Protocol):
    """The connection of one game; one request at a time.

    Args:
        timeout_s: time limit of an answer, after which the game hangs.
        on_connect: called with the game when it is there.

    Attributes:
        say: prints a line.
        peer: the game's address.

    All methods that wait for an answer return None if the game has left, and raise:
        BadBody: the answer is not what this protocol has.
        BodyTooLarge: the game announces more than `MAX_MESSAGE_BYTES`.
        DeadlineExceeded: no answer came in time.
    """

    # No `StreamReader`, and no timer for each request: both cost CPU in every turn.

    def __init__(self, timeout_s: float, on_connect: Callable[[GodotGame], None] = lambda game: None) -> None:
        self.say: Callable[[str], None] = lambda line: None
        self.peer = ""
        self._timeout_s, self._on_connect = timeout_s, on_connect
        self._kinds: list[dict[str, str]] = []
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._has_left = self._has_said = False
        self._answer: asyncio.Future[bytearray | None] | None = None
        self._asked, self._asked_at = "", 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def announce(self) -> list[Contract] | None:
        """Greets the game; returns the contract of each of its agents, by whose number `act` and its answer go."""
        self._send(_HANDSHAKE)
        answer = await self._ask({"type": "env_info"}, "env_info")
        if answer is None:
            return None
        contracts = contracts_of(answer)
        self._kinds = [
            {spec.name: spec.kind for spec in contract.observations if spec.kind != "vector"} for contract in contracts
        ]
        return contracts

    async def reset(self) -> GodotStep | None:
        """Starts new episodes for all agents."""
        return await self._step({"type": "reset"}, "reset")

    async def act(self, actions: Sequence[Mapping[str, Any]]) -> GodotStep | None:
        """Gives each agent its actions, by name: a whole number, or a list of numbers."""
        return await self._step({"type": "action", "action": actions}, "step")

    def interrupt(self) -> None:
        """Ends the wait for the game's answer, as if the game had left."""
        self._has_left = True
        self._look()

    def close(self) -> None:
        """Tells the game to quit, and closes the connection, which does the same."""
        if self._timer is not None:
            self._timer.cancel()
        self._send({"type": "close"})
        self._transport.close()

    # As an `asyncio.Protocol`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = ":".join(map(str, (transport.get_extra_info("peername") or ())[:2]))
        self._on_connect(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._look()
        if len(self._received) > MAX_MESSAGE_BYTES + 4:  # no step waits for it
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.interrupt()

    async def _step(self, message: Mapping[str, Any], kind: str) -> GodotStep | None:
        answer = await self._ask(message, kind)
        return None if answer is None else _step_of(answer, self._kinds)

    async def _ask(self, message: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
        """Sends a message and returns the answer, which is of this ``type``."""
        self._send(message)
        self._asked, self._asked_at, self._has_said = message["type"], self._loop.time(), False
        if self._timer is None:
            self._timer = self._loop.call_later(min(_SILENT_S, self._timeout_s), self._watch)
        self._answer = self._loop.create_future()
        self._look()
        data = await self._answer
        if data is None:
            return None
        answer = parse_message(data)
        if answer.get("type") != kind:
            raise BadBody(f'type is {answer.get("type")!r:.40}, expected "{kind}"', field="type")
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self._transport.is_closing():
            data = orjson.dumps(message)
            self._transport.write(len(data).to_bytes(4, "little") + data)

    def _look(self) -> None:
        """Resolves the request that waits, if its answer is there."""
        received, answer = self._received, self._answer
        if answer is None or answer.done():
            return
        size = int.from_bytes(received[:4], "little")
        if len(received) >= 4 and size > MAX_MESSAGE_BYTES:
            answer.set_exception(
                BodyTooLarge(
                    f"the game announces a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed: is it a "
                    "Godot game with the add-on godot_rl?"
                )
            )
        elif len(received) >= 4 + size and len(received) >= 4:
            answer.set_result(received[4 : 4 + size])
            del received[: 4 + size]
        elif self._has_left:
            answer.set_result(None)

    def _watch(self) -> None:
        """Says that the game has been silent for a while, and gives it up later."""
        self._timer = None
        if self._answer is None or self._answer.done():
            return  # the next request sets the timer again
        silent_s, limit_s = self._loop.time() - self._asked_at, self._timeout_s
        what = f"has not answered {self._asked!r}"
        if silent_s >= limit_s:
            message = f"the game {what} within {limit_s:g} s: is it paused, or at a breakpoint?"
            self._answer.set_exception(DeadlineExceeded(message, timeout_s=limit_s))
            return
        if silent_s >= _SILENT_S and not self._has_said:
            self._has_said = True
            self.say(f"{what} for {_SILENT_S:g} s: is it paused, or at a breakpoint? It is given {limit_s:g} s")
        until_s = limit_s if self._has_said else min(_SILENT_S, limit_s)
        self._timer = self._loop.call_later(until_s - silent_s, self._watch)


def parse_message(data: bytes | bytearray) -> Mapping[str, Any]:
    """Parses a message. Numbers that are not finite stay so, for a refusal that names their field.

    Raises:
        BadBody: this is no object in JSON.
    """
    try:
        try:
            message = orjson.loads(data)
        except ValueError:  # orjson takes no number that is not finite
            message = json.loads(_NOT_JSON.sub(lambda word: word[1] + (b"NaN" if word[2] else b"Infinity"), data))
    except (ValueError, RecursionError) as error:
        raise BadBody(
            f"the game's message is not JSON: {error}; it starts with {bytes(data[:40])!r}: is it a Godot game with "
            "the add-on godot_rl?"
        ) from None
    if not isinstance(message, Mapping):
        raise BadBody(f"the game's message is {message!r:.40}, expected an object")
    return message


def contracts_of(announced: Mapping[str, Any]) -> list[Contract]:
    """The contract of each agent that an answer to ``env_info`` announces.

    Raises:
        BadBody: a space is missing, or has no counterpart; names it.
    """
    for name in ("observation_space", "action_space"):
        if name not in announced:
            raise BadBody(
                f"env_info has no {name}: its add-on speaks another protocol than 0.3 to 0.7; update godot_rl_agents "
                "in the project",
                field=name,
            )
    count = _whole(announced.get("n_agents", 1))
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= _MAX_AGENTS:
        hint = "set an AIController's control mode to TRAINING" if count == 0 else f"expected 1 to {_MAX_AGENTS}"
        raise BadBody(f"n_agents is {count!r:.40}: {hint}", field="n_agents")
    observations = _of_each(announced, "observation_space", count)
    actions = _of_each(announced, "action_space", count)
    policies = announced.get("agent_policy_names")
    if policies is None:
        policies = [POLICY] * count
    elif not isinstance(policies, list) or len(policies) != count:
        raise BadBody(f"agent_policy_names is {policies!r:.40}, expected {count} names", field="agent_policy_names")
    contracts = [_contract(*announcement) for announcement in zip(policies, observations, actions, strict=True)]
    known: dict[Contract, Contract] = {}  # agents with the same contract share its object
    return [known.setdefault(contract, contract) for contract in contracts]


def _contract(policy: Any, observations: Mapping[str, Any], actions: Mapping[str, Any]) -> Contract:
    behaviour, team = behaviour_and_team(policy) if isinstance(policy, str) else (policy, 0)
    return Contract.parse(
        {
            "contract": 1,
            "behaviour": behaviour,
            "team": team,
            "observations": {name: _observation(name, space) for name, space in observations.items()},
            "actions": {name: _action(name, space) for name, space in actions.items()},
            "encoding": "packed",
        }
    )


def _of_each(announced: Mapping[str, Any], name: str, count: int) -> list[Mapping[str, Any]]:
    """One space for each agent; older add-ons announce one for all."""
    value = announced[name]
    spaces = [value] * count if isinstance(value, Mapping) else value
    if not isinstance(spaces, list) or len(spaces) != count or not all(isinstance(part, Mapping) for part in spaces):
        raise BadBody(f"{name} is {value!r:.60}, expected one object for each of {count} agents", field=name)
    return spaces


def _observation(name: str, space: Any) -> dict[str, Any]:
    kind, size = _kind_and_size(f"observation_space.{name}", space, "space", ("box", "discrete"))
    if kind == "discrete":
        return {"kind": "category", "size": size}
    return {"kind": "image" if _IS_PICTURE in name else "vector", "shape": size}


def _action(name: str, space: Any) -> dict[str, Any]:
    kind, size = _kind_and_size(f"action_space.{name}", space, "action_type", ("continuous", "discrete"))
    return {"kind": kind, "size": size}


def _kind_and_size(place: str, space: Any, key: str, kinds: Sequence[str]) -> tuple[str, Any]:
    if not isinstance(space, Mapping) or space.get(key) not in kinds:
        raise BadBody(f'{place} is {space!r:.60}, expected "{key}": {" or ".join(kinds)}', field=place)
    return space[key], _whole(space.get("size"))


def _whole(value: Any) -> Any:
    """``value`` with whole numbers as ``int``: some versions of Godot write 4.0."""
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _step_of(answer: Mapping[str, Any], kinds: Sequence[Mapping[str, str]]) -> GodotStep:
    """The answer to a reset or to actions; ``kinds`` names each agent's observations that are no vectors."""
    count = len(kinds)
    rows = _entries(answer, "obs", count, _OBJECT, "objects")
    rewards, dones = [0.0] * count, [False] * count
    infos: list[Mapping[str, Any]] = [{}] * count
    if answer["type"] == "step":
        rewards = _entries(answer, "reward", count, _NUMBER, "numbers")
        dones = [*map(bool, _entries(answer, "done", count, _NUMBER, "true or false"))]
    if answer.get("info") is not None:
        infos = _entries(answer, "info", count, _OBJECT, "objects")
    cuts = [info.get("truncated") for info in infos]
    if answer.get("truncated") is not None:
        cuts = _entries(answer, "truncated", count, _NUMBER, "true or false")
    return GodotStep(
        [
            {**row, **{name: _value(kind, name, row[name]) for name, kind in special.items() if name in row}}
            if special
            else row
            for row, special in zip(rows, kinds, strict=True)
        ],
        rewards,
        dones,
        [done and bool(cut) for done, cut in zip(dones, cuts, strict=True)],
        infos,
    )


def _entries(answer: Mapping[str, Any], name: str, count: int, types: frozenset[type], expected: str) -> list[Any]:
    values = answer.get(name)
    if not isinstance(values, list) or len(values) != count or not types.issuperset(map(type, values)):
        got = (
            f"{len(values)} entries" if isinstance(values, list) else "missing" if values is None else f"{values!r:.40}"
        )
        raise BadBody(f"{name} is {got}, expected {expected}: one for each of {count} agents", field=name)
    return values


def _value(kind: str, name: str, value: Any) -> Any:
    """An observation as its contract has it: a picture's bytes, which the game sends as hex; or a category."""
    if kind == "category":
        return _whole(value[0] if isinstance(value, list) and len(value) == 1 else value)
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise BadBody(f"obs.{name} is {value!r:.40}, expected a picture as hex text", field=f"obs.{name}") from None
