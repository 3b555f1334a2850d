"""`Codec`: bodies as JSON values, protobuf messages or bytes. Knows nothing of sessions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import DecodeError, EncodeError, Message

from brayx.errors import AgentError, BadBody
from brayx.strict_json import parse_json

dumps_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Encodes a JSON value as text, without spaces; a ``ValueError`` for NaN."""


@dataclass(frozen=True)
class Codec:
    """Converts bodies to ``state.input`` and ``state.output`` to replies.

    Attributes:
        kind: ``json``, ``proto`` or None for raw bytes.
        tick_input, tick_output: message classes for ``proto``.
    """

    kind: Literal["json", "proto"] | None = "json"
    tick_input: Callable[[], Message] | None = None
    tick_output: Callable[[], Message] | None = None

    def opened(self, start: bytes) -> tuple[Codec, Any]:
        """The codec of a session whose start has this body, and the parsed body.

        Raises:
            BadBody: as for `decode`, or the session cannot start with it.
        """
        return self, self.decode(start)

    def decode_stop(self, body: bytes) -> Any:
        """Parses a stop's body; errors as for `decode`."""
        return self.decode(body)

    def results(self, stop: Any) -> list[Any]:
        """The result of the session's seat in a league, if a parsed stop has one."""
        return [stop["result"]] if isinstance(stop, dict) and "result" in stop else []

    def started(self, output: Any) -> bytes:
        """The reply to a start, after which the agents left ``output``."""
        return b"Game Started"

    def decode(self, body: bytes) -> Any:
        """Parses a body; an empty JSON body is None.

        Raises:
            BadBody: the body does not parse, or a number in a JSON body is NaN or infinite.
        """
        if self.kind == "json":
            if not body:
                return None
            return parse_json(body)
        if self.kind == "proto" and self.tick_input is not None:
            message = self.tick_input()
            try:
                message.ParseFromString(body)
            except DecodeError as error:
                raise BadBody(f"body is not a {message.DESCRIPTOR.full_name} message: {error}") from None
            return message
        return body

    def empty(self) -> Any:
        """Initial ``state.output``."""
        if self.kind == "json":
            return {}
        if self.kind == "proto" and self.tick_output is not None:
            return self.tick_output()
        return b""

    def reply(self, output: Any, body: bytes) -> bytes:
        """As `encode`, in answer to a tick's body."""
        return self.encode(output)

    def encode(self, output: Any) -> bytes:
        """The reply for an output.

        Raises:
            AgentError: the agents left something that cannot be encoded.
        """
        if isinstance(output, bytes):
            return output
        try:
            if self.kind == "json":
                return dumps_json(output).encode()
            if isinstance(output, Message):
                return output.SerializeToString()
        except (TypeError, ValueError, RecursionError, EncodeError) as error:
            raise AgentError(f"state.output cannot be sent as {self.kind}") from error
        raise AgentError(f"state.output is {type(output).__name__}, expected bytes with serialize: {self.kind}")
