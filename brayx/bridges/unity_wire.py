"""The wire of Unity's package ML-Agents, communicator 1.x: the game calls, and each answer has its agents' actions.

    call    hello: versions                                   answer  welcome: versions, seed
    call    nothing                                           answer  RESET, side channels
    call    what agents observe, by behaviour; new behaviours answer  STEP, an action for each agent that is not done
    call    status 400: the game quits; as an answer: it has to

`UnityBehaviour` makes a contract of a behaviour and its first agent, steps of agents, and their actions. A group's
reward is added to each member's. Knows nothing of doors, sessions and gRPC.
"""

from __future__ import annotations

import io
import math
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from PIL import Image, UnidentifiedImageError

from brayx.bridges.engine import AgentStep
from brayx.bridges.teams import behaviour_and_team
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import BadBody, ProtocolError
from brayx.gamecore.contract import Contract, ObservationSpec

EDITOR_PORT = 5004
"""Where the Editor calls."""
BUILD_PORT = 5005
"""Port of the first build that a trainer starts; the next builds get the next ports."""
PATH = ("communicator_objects.UnityToExternalProto", "Exchange")
"""Service and method of the call."""
GO_ON, QUIT = 200, 400
MAX_MESSAGE_BYTES = 256 * 2**20
VERSION = "1.5.0"
"""The communicator that the answers speak; ML-Agents' packages 2.0 to 4.0 have it."""
_OUTDATED = re.compile(r"1\.[0-4]\b")
_PYTHON_PACKAGE = "1.1.0"
"""The trainer's package that speaks it; the game only writes it to its log."""
CONTINUOUS, BRANCH = "continuous", "branch_{}"
"""Names of the actions of a behaviour."""
_STATISTICS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520").bytes_le
_MOST_RECENT, _SUM = 1, 2
_PNG = b"\x89PNG\r\n\x1a\n"
_TRANSLATION, _VARIABLE = 2, 4
"""Bits of an observation's dimensions."""
UNMODIFIED = "use the package com.unity.ml-agents unmodified"
_UPDATE = "update the package com.unity.ml-agents in the project to 2.0 or newer"


def parse_message(data: bytes) -> pb.Message:
    """Parses a call.

    Raises:
        ProtocolError: the bytes are not a call of ML-Agents.
    """
    try:
        return pb.Message.FromString(data)
    except DecodeError:
        raise ProtocolError(
            f"the call is no message of ML-Agents; it starts with {data[:40]!r}: is this a Unity game?"
        ) from None


def quit_message() -> pb.Message:
    """The answer that ends a game."""
    actions = pb.Actions(command=pb.Actions.QUIT)
    return pb.Message(header=pb.Header(status=QUIT), input=pb.Input(actions=actions))


def welcome(hello: pb.Hello, seed: int, num_areas: int = 1) -> pb.Message:
    """The answer to a hello.

    Raises:
        ProtocolError: the package speaks another version.
    """
    version = hello.communicator_version
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise ProtocolError(f"the game's communicator has version {version:.20}, expected {VERSION}: {_UPDATE}")
    can = pb.Capabilities(
        base=True,
        concatenated_pngs=True,
        channel_mapping=True,
        hybrid_actions=True,
        variable_length=True,
        groups=True,
    )
    answer = pb.Welcome(
        seed=seed,
        communicator_version=VERSION,
        package_version=_PYTHON_PACKAGE,
        capabilities=can,
        num_areas=num_areas,
    )
    return pb.Message(header=pb.Header(status=GO_ON), input=pb.Input(welcome=answer))


def outdated(version: str) -> str:
    """What a communicator of an older minor version lacks, and what to do; empty: it lacks nothing."""
    if not _OUTDATED.match(version):
        return ""
    return f"its communicator {version:.20} is older than {VERSION}: it has no groups and no Buffer Sensors; {_UPDATE}"


def reset_message(side_channel: bytes) -> pb.Message:
    """The answer that starts the agents' first episodes."""
    actions = pb.Actions(command=pb.Actions.RESET, side_channel=side_channel)
    return pb.Message(header=pb.Header(status=GO_ON), input=pb.Input(actions=actions))


def actions_message(actions: Mapping[str, Sequence[pb.Action]]) -> pb.Message:
    """The answer with the actions of agents, by behaviour."""
    by_behaviour = {name: pb.Actions.List(actions=listed) for name, listed in actions.items()}
    return pb.Message(header=pb.Header(status=GO_ON), input=pb.Input(actions=pb.Actions(by_behaviour=by_behaviour)))


def statistics(side_channel: bytes) -> dict[str, float]:
    """The statistics that a game has recorded, by name: sums, the most recent values, or else means.

    Raises:
        ProtocolError: the bytes are no messages of side channels.
    """
    values: dict[str, list[float]] = {}
    kinds: dict[str, int] = {}
    for channel, payload in _channels(side_channel):
        if channel != _STATISTICS:
            continue
        try:
            (length,) = struct.unpack_from("<i", payload)
            name = payload[4 : 4 + length].decode(errors="replace")
            value, kind = struct.unpack_from("<fi", payload, 4 + length)
        except struct.error:
            raise ProtocolError(
                f"a statistic of the game is cut off, expected its name, value and aggregation: {UNMODIFIED}"
            ) from None
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
            kinds[name] = kind
    return {name: _aggregated(numbers, kinds[name]) for name, numbers in values.items()}


def _aggregated(numbers: Sequence[float], kind: int) -> float:
    if kind == _MOST_RECENT:
        return numbers[-1]
    return sum(numbers) if kind == _SUM else sum(numbers) / len(numbers)


def _channels(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    first = 0
    while first < len(data):
        size = int.from_bytes(data[first + 16 : first + 20], "little", signed=True)
        end = first + 20 + size
        if size < 0 or end > len(data):
            raise ProtocolError(
                f"a side channel's message has {size} bytes, but {len(data) - first - 20} are there: {UNMODIFIED}"
            )
        yield data[first : first + 16], data[first + 20 : end]
        first = end


class UnityBehaviour:
    """A behaviour: the contract of its agents, what they observe, and their actions.

    Args:
        announced: its name and its actions.
        agent: its first agent, which says what is observed.

    Raises:
        BadBody: an observation or action has no counterpart in a contract; names it.
    """

    def __init__(self, announced: pb.Behaviour, agent: pb.Agent) -> None:
        self.name = announced.name
        behaviour, team = behaviour_and_team(announced.name)
        self._specs = [_observation(index, observation) for index, observation in enumerate(agent.observations)]
        names = [spec["name"] for spec in self._specs]
        for index, spec in enumerate(self._specs):
            if names.count(spec["name"]) > 1:
                spec["name"] = f"{spec['name'][:56]}_{index}"
        self.contract = Contract.parse(
            {
                "contract": 1,
                "behaviour": behaviour,
                "team": team,
                "observations": self._specs,
                "actions": list(_actions(announced)),
                "encoding": "packed",
            }
        )
        self._branches = [part.name for part in self.contract.discrete]

    def check_same(self, announced: pb.Behaviour, agents: Sequence[pb.Agent]) -> None:
        """Checks the behaviour as it is announced again, with those of its agents that are in the same call.

        Raises:
            BadBody: its actions are others, or what the first of ``agents`` observes; names the fields.
        """
        if agents:
            again = UnityBehaviour(announced, agents[0]).contract
        else:
            again = Contract.parse({**self.contract.as_dict(), "actions": list(_actions(announced))})
        if differences := again.differences(self.contract):
            raise BadBody(f"behaviour {announced.name!r} changed while the game runs: {'; '.join(differences)}")

    def step(self, agent: pb.Agent, info: Mapping[str, float] | None = None) -> AgentStep:
        """An agent's step, from its message.

        Raises:
            BadBody: an observation is missing, or has another size or kind than before; names the agent and the field.
        """
        specs = self.contract.observations
        try:
            if len(agent.observations) != len(specs):
                raise BadBody(f"obs has {len(agent.observations)} observations, expected {len(specs)}", field="obs")
            obs = {spec.name: _value(spec, given) for spec, given in zip(specs, agent.observations, strict=True)}
            mask = self._mask(agent.action_mask)
        except BadBody as error:
            raise BadBody(f"agent {agent.id}: {error.message}", **error.details) from None
        ended: Literal["terminated", "truncated"] | None = None
        if agent.done:
            ended = "truncated" if agent.max_step_reached else "terminated"
        reward = agent.reward + agent.group_reward
        return AgentStep(agent.id, obs, reward, None if ended else mask, ended, info or {}, agent.group_id)

    def action(self, actions: Mapping[str, Any]) -> pb.Action:
        """The message of an agent's actions."""
        return pb.Action(continuous=actions.get(CONTINUOUS, ()), discrete=[actions[name] for name in self._branches])

    def _mask(self, forbidden: Sequence[bool]) -> dict[str, list[int]] | None:
        sizes = self.contract.sizes
        if not forbidden:
            return None
        if len(forbidden) != sum(sizes):
            raise BadBody(f"action_mask has {len(forbidden)} values, expected {sum(sizes)}", field="action_mask")
        allowed = [int(not value) for value in forbidden]
        firsts = [sum(sizes[:branch]) for branch in range(len(sizes))]
        return {
            name: allowed[first : first + size] for name, first, size in zip(self._branches, firsts, sizes, strict=True)
        }


def _actions(announced: pb.Behaviour) -> Iterator[dict[str, Any]]:
    spec = announced.actions
    if not spec.num_continuous and not spec.branch_sizes:
        raise BadBody(
            f"behaviour {announced.name!r} has no actions: set some in its Behavior Parameters; or {_UPDATE}",
            field="actions",
        )
    if spec.num_continuous:
        yield {"name": CONTINUOUS, "kind": "continuous", "size": spec.num_continuous}
    for branch, size in enumerate(spec.branch_sizes):
        yield {"name": BRANCH.format(branch), "kind": "discrete", "size": size, "mask": True}


def _observation(index: int, given: pb.Observation) -> dict[str, Any]:
    """The part of a contract for an observation."""
    shape, dimensions = list(given.shape), list(given.dimensions)
    name = given.name.replace("/", "_")[:64]
    spec = {"name": name if name and name.isprintable() else f"obs_{index}", "shape": shape}
    if len(shape) == 3:
        is_last = len(dimensions) == 3 and dimensions[0] & _TRANSLATION and not dimensions[2] & _TRANSLATION
        dtype = "uint8" if given.compression == pb.Observation.PNG else "float32"
        return {**spec, "kind": "image", "dtype": dtype, "layout": "HWC" if is_last else "CHW"}
    if len(shape) == 2 and dimensions and dimensions[0] & _VARIABLE:
        return {**spec, "kind": "entities"}
    return spec


def _value(spec: ObservationSpec, given: pb.Observation) -> Any:
    """The value of an observation as its contract has it: a picture's array, or its numbers in one list."""
    place = f"obs.{spec.name}"
    if tuple(given.shape) != spec.shape:
        raise BadBody(f"{place} has shape {list(given.shape)}, expected {list(spec.shape)}", field=place)
    is_png = spec.dtype == "uint8"
    if is_png != (given.compression == pb.Observation.PNG):
        expected = "a PNG" if is_png else "numbers"
        raise BadBody(f"{place} changed its compression, expected {expected} as at first", field=place)
    if is_png:
        picture = decode_pngs(given.compressed, spec.shape, list(given.channel_mapping), spec.layout, place)
        return picture if spec.layout == "CHW" else np.moveaxis(picture, 0, -1)
    values = given.floats.data[:]
    if len(values) != math.prod(spec.shape):
        raise BadBody(f"{place} has {len(values)} values, expected {math.prod(spec.shape)}", field=place)
    return values if len(spec.shape) == 1 else np.array(values, np.float32).reshape(spec.shape)


def decode_pngs(data: bytes, shape: Sequence[int], mapping: Sequence[int], layout: str, place: str) -> np.ndarray:
    """The picture of an observation, uint8 ``[channels, height, width]``, from PNGs that follow each other.

    Args:
        data: the PNGs, three channels each.
        shape: of the observation.
        mapping: for each channel of the PNGs that of the picture, which is their mean; or -1. Empty: a grey picture is
            the mean of the first PNG's channels, another has as many of the PNGs' channels as it needs.
        layout: of ``shape``.
        place: names the observation in a refusal.

    Raises:
        BadBody: a PNG is broken or has another size, or the channels do not fit.
    """
    channels, height, width = shape if layout == "CHW" else (shape[2], shape[0], shape[1])
    wanted = len(mapping) or max(3, channels)
    pieces: list[np.ndarray] = []
    for png in _split(data, place):
        if 3 * len(pieces) >= wanted:
            raise BadBody(f"{place} has more PNGs than its {channels} channels need", field=place)
        try:
            with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
                if image.size != (width, height):
                    got = f"{image.size[0]} x {image.size[1]}"
                    raise BadBody(f"{place} is a picture of {got}, expected {width} x {height}", field=place)
                pieces.append(np.moveaxis(np.asarray(image.convert("RGB")), -1, 0))
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise BadBody(f"{place} is no PNG that can be read: {error}", field=place) from None
    picture = np.concatenate(pieces) if pieces else np.empty((0, height, width), np.uint8)
    targets = list(mapping) or ([0, 0, 0] if channels == 1 else [*range(channels)] + [-1] * (-channels % 3))
    if len(targets) != len(picture) or max(targets) >= channels or not set(range(channels)) <= set(targets):
        raise BadBody(
            f"{place} has {len(picture)} channels of PNGs for {channels}, with the mapping {list(mapping)}", field=place
        )
    if targets[:channels] == [*range(channels)] and set(targets[channels:]) <= {-1}:
        return picture[:channels]
    rows = [[row for row, target in enumerate(targets) if target == channel] for channel in range(channels)]
    return np.stack([picture[row].mean(0).round().astype(np.uint8) for row in rows])


def _split(data: bytes, place: str) -> Iterator[bytes]:
    """The PNGs in ``data``, by the lengths of their chunks."""
    first = 0
    while first < len(data):
        end, kind = first + len(_PNG), b""
        if data[first:end] != _PNG:
            raise BadBody(f"{place} is no PNG at byte {first}", field=place)
        while kind != b"IEND":
            kind = data[end + 4 : end + 8]
            end += 12 + int.from_bytes(data[end : end + 4], "big")
            if end > len(data) or not kind:
                raise BadBody(f"{place} is a PNG that is cut off", field=place)
        yield data[first:end]
        first = end
