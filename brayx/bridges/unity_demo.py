"""Reads the demonstrations that ML-Agents' Demonstration Recorder writes: files ``.demo``.

    head, at byte 33 the behaviour, then an agent's observation and its action for each decision

Each message follows its length. A file becomes a contract and steps, as a game's messages do
(`brayx.bridges.unity_wire`). Knows nothing of learning.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.proto import parse_length_prefixed

from brayx.bridges.engine import AgentStep
from brayx.bridges.unity_wire import BRANCH, CONTINUOUS, UnityBehaviour
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import BadBody, ConfigError

_BEHAVIOUR_AT = 33
_VERSIONS = (0, 1)

_Sent = TypeVar("_Sent", bound=Message)


class UnityDemo:
    """A file of demonstrations.

    Args:
        file: its path.

    All members raise `ConfigError` with the file and the place if it cannot be read, is cut off, or is of another kind.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    @cached_property
    def behaviour(self) -> UnityBehaviour:
        """The behaviour and its contract."""
        _, demonstrated, at = next(self._demonstrated(), (0, None, _BEHAVIOUR_AT))
        if demonstrated is None:
            raise self._error(at, "the file has no step")
        try:
            return UnityBehaviour(self._announced, demonstrated.agent)
        except BadBody as error:
            raise self._error(at, f"step 0: {error.message}") from None

    def steps(self) -> Iterator[tuple[AgentStep, dict[str, Any]]]:
        """What the agent observed at each decision, and its actions by name, unchecked.

        A step that ended its episode repeats the last actions.
        """
        for number, demonstrated, at in self._demonstrated():
            try:
                yield self.behaviour.step(demonstrated.agent), self._given(demonstrated.action)
            except BadBody as error:
                raise self._error(at, f"step {number}: {error.message}") from None

    def _given(self, action: pb.Action) -> dict[str, Any]:
        contract = self.behaviour.contract
        if len(action.discrete) != len(contract.discrete):
            raise BadBody(f"action has {len(action.discrete)} branches, expected {len(contract.discrete)}")
        given: dict[str, Any] = {BRANCH.format(branch): choice for branch, choice in enumerate(action.discrete)}
        return {**given, CONTINUOUS: list(action.continuous)} if contract.continuous else given

    @cached_property
    def _data(self) -> bytes:
        try:
            return self._file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read: {error.strerror}", path=str(self._file)) from None

    @cached_property
    def _head(self) -> pb.Demonstration:
        head, end = self._message(pb.Demonstration, 0)
        if head.api_version not in _VERSIONS or end > _BEHAVIOUR_AT:
            raise self._error(0, f"the version is {head.api_version}, expected 0 or 1: is it a file of ML-Agents?")
        return head

    @cached_property
    def _announced(self) -> pb.Behaviour:
        return self._message(pb.Behaviour, _BEHAVIOUR_AT)[0]

    def _demonstrated(self) -> Iterator[tuple[int, pb.Demonstrated, int]]:
        """Number, message and place of each step."""
        expected = self._head.num_steps
        number, at = 0, self._message(pb.Behaviour, _BEHAVIOUR_AT)[1]
        while at < len(self._data) and (number < expected or not expected):
            demonstrated, end = self._message(pb.Demonstrated, at)
            yield number, demonstrated, at
            number, at = number + 1, end
        if number < expected:
            raise self._error(at, f"the file ends after {number} steps, and its head says {expected}")

    def _message(self, kind: type[_Sent], at: int) -> tuple[_Sent, int]:
        """The message at a byte, and where it ends."""
        source = io.BytesIO(self._data)
        source.seek(at)
        try:
            message = parse_length_prefixed(kind, source)
        except (DecodeError, ValueError, OverflowError, OSError, EOFError) as error:
            raise self._error(at, f"this is no whole message of ML-Agents: {error}") from None
        if message is None:
            raise self._error(at, "the file is cut off")
        return message, source.tell()

    def _error(self, at: int, why: str) -> ConfigError:
        return ConfigError(f"{self._file}: at byte {at}: {why}", path=str(self._file), byte=at)
