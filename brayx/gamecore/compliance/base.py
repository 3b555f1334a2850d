"""The common part of the tests of every door: the service under test, and its sessions through the clients."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from brayx.errors import BrayxError, SessionExists
from brayx.gamecore.client import Client
from brayx.gamecore.doors import DOORS, ON_HTTP_PORT
from brayx.gamecore.protocol import DEFAULT_MAX_BODY_BYTES, StepKind, StepRequest
from brayx.gamecore.transports import connect
from brayx.gamecore.transports.base import Endpoint

Door = str
"""A name of `brayx.gamecore.doors.DOORS`."""

Tick = Callable[[int | None, bytes], bytes]
"""Sends a tick with a number (None: not numbered) and a body; returns its reply."""

ALL_BYTES = bytes(range(256))
ONE_MIB = 1024 * 1024


class Doors:
    """The doors of the service under test. Attributes: see `brayx.gamecore.compliance.DoorCompliance`."""

    url: str
    urls: Mapping[Door, str] = {}
    doors: tuple[Door, ...] = ON_HTTP_PORT
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    timeout_s: float = 60.0
    cors_origin: str = ""

    def url_of(self, door: Door) -> str:
        """The URL of ``door``."""
        if door in self.urls:
            return self.urls[door]
        assert DOORS[door].has_status, f"urls has no {door!r}"
        return Endpoint.parse(self.url).door_url(door)

    def client(self, door: Door) -> Client:
        return Client(self.url_of(door), timeout_s=self.timeout_s)

    @contextmanager
    def step(self, door: Door) -> Iterator[Callable[[StepKind, str, bytes, int | None], bytes]]:
        """Bare requests over one connection: kind, session, body, number."""
        transport = connect(self.url_of(door))
        try:
            yield lambda kind, session, body, seq: transport.step(
                StepRequest(kind, session, body, seq=seq), self.timeout_s
            )
        finally:
            transport.close()

    @contextmanager
    def numbered(self, door: Door, session: str = "") -> Iterator[Tick]:
        """A session whose test chooses the tick numbers."""
        session = session or uuid.uuid4().hex
        with self.step(door) as step:
            step(StepKind.START, session, b"", None)
            yield lambda seq, body: step(StepKind.TICK, session, body, seq)
            step(StepKind.STOP, session, b"", None)

    def becomes_free(self, session: str, door: Door = "ws") -> None:
        """Asserts that ``session`` can be started again before the deadline."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            with self.client(door) as client:
                try:
                    client.start(session=session)
                    return
                except SessionExists:
                    assert time.monotonic() < deadline, f"session {session} was not freed"
            time.sleep(0.02)


def error_of(request: Any) -> BrayxError | None:
    """The typed error that ``request`` raises; None if it raises none."""
    try:
        request()
    except BrayxError as error:
        return error
    return None
