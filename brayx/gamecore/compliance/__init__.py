"""The compliance suite: tests any service that speaks brayx's protocol, through its doors alone.

The service under test must be an echo: a tick and a stateless call answer with their own body; start and stop may
answer anything. Subclass it in a pytest module, name the service's address and doors, and pytest collects the tests:

    class TestMyServer(DoorCompliance):
        url = "http://127.0.0.1:8000"           # or set it from a fixture
        doors = ("http", "ws")                  # and "tcp" and "grpc", with their addresses in `urls`

Knows nothing of the service's implementation. Tests of the byte format use bare connections, all others the clients.
The WebSocket tests need the package ``websockets``, the gRPC tests ``grpcio``.
"""

from __future__ import annotations

from typing import Any

from brayx.gamecore.compliance.base import Door
from brayx.gamecore.compliance.held import HeldSessions
from brayx.gamecore.compliance.http1 import HttpTests
from brayx.gamecore.compliance.sessions import EveryDoor
from brayx.gamecore.compliance.tcp import TcpTests
from brayx.gamecore.doors import DOORS

__all__ = ["Door", "DoorCompliance"]


class DoorCompliance(EveryDoor, HeldSessions, HttpTests, TcpTests):
    """The suite.

    Tests named ``test_http_*``, ``test_ws_*``, … run for that door only. ``test_stateless_*`` run for each of `doors`
    except WebSocket, which has no stateless call. ``test_held_*`` run for each door if the service has one whose
    connections hold sessions (``ws``, ``grpc``). All others run for each door. In a subclass, tests of absent doors are
    None, so that pytest does not collect them.

    Attributes:
        url: URL of the HTTP and WebSocket doors, including any path before ``/step``.
        urls: URLs of doors with another address, by door: ``{"tcp": "tcp://127.0.0.1:8101"}``.
        doors: which of `brayx.gamecore.doors.DOORS` the service has.
        max_body_bytes: the service's limit; a body of one byte more must be refused.
        timeout_s: time limit of each wait.
        cors_origin: origin that the HTTP door allows, and no other; empty: it allows none.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in filter(lambda name: name.startswith("test_"), dir(DoorCompliance)):
            if not cls._doors_of(name):
                setattr(cls, name, None)
            elif getattr(cls, name) is None:  # a base has fewer doors
                setattr(cls, name, getattr(DoorCompliance, name))

    @classmethod
    def _doors_of(cls, test: str) -> list[Door]:
        """The service's doors that a test runs for."""
        only = test.split("_")[1]
        if only in DOORS:
            return [door for door in cls.doors if door == only]
        if only == "held" and not any(DOORS[door].holds_sessions for door in cls.doors):
            return []
        return [door for door in cls.doors if only != "stateless" or DOORS[door].answers_calls]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrises each test by its doors."""
        if "door" in metafunc.fixturenames:
            metafunc.parametrize("door", self._doors_of(metafunc.function.__name__))
