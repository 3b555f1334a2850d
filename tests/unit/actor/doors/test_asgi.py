"""The doors over a real server and session table, without Serve: the compliance suite, and further cases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.errors import BadBody, BrayxError, ServiceFull
from brayx.gamecore.browser import Cors
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.protocol import MAX_HEADER_BYTES, WS_SUBPROTOCOL, StepKind, StepRequest, encode_numbered
from brayx.metrics import Recorder
from tests.unit.gamecore.echo_server import serving
from tests.waiting import WAIT_S, until, until_awaited

MAX_BODY_BYTES = 2 * 1024 * 1024


class Echo(Actor):
    """Answers a body with itself, and tells the test how its session ended."""

    def __init__(self, ends: list[tuple[str, str]]) -> None:
        self.ends = ends
        self.session = ""

    async def start(self, session: str, body: bytes) -> bytes:
        self.session = session
        return body

    async def tick(self, body: bytes) -> bytes:
        if body == b"slow":
            await asyncio.sleep(30)
        return body

    async def stop(self, body: bytes) -> bytes:
        return body

    async def call(self, body: bytes) -> bytes:
        return body

    async def on_end(self, reason: str) -> None:
        self.ends.append((self.session, reason))


class TableService(SessionTable):
    """A replica without Ray: the doors' service is the table itself. Keeps how each session ended."""

    def __init__(self, **options: Any) -> None:
        self.ends: list[tuple[str, str]] = []
        super().__init__(lambda: Echo(self.ends), SessionConfig(**options))


class TestDoors(DoorCompliance):
    doors = ("http", "ws")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        with serving(DoorApp(TableService(), max_body_bytes=MAX_BODY_BYTES)) as address:
            cls.url = f"http://{address}"
            yield


class TestDoorsThatAllowAnOrigin(TestDoors):
    doors = ("http",)
    cors_origin = "https://play.example.com"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        table = TableService()
        table.cors = Cors([cls.cors_origin])
        with serving(DoorApp(table, max_body_bytes=MAX_BODY_BYTES)) as address:
            cls.url = f"http://{address}"
            yield


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[tuple[TableService, str]]:
    service = TableService(**getattr(request, "param", {}))
    with serving(DoorApp(service)) as address:
        yield service, address


def test_a_websocket_that_breaks_ends_its_session_as_disconnect(service: tuple[TableService, str]) -> None:
    table, address = service
    with connect(f"ws://{address}/session?session=gone") as connection:
        connection.send("x")
        assert connection.recv() == "x"
        connection.socket.close()
    until(lambda: table.ends == [("gone", "disconnect")])


def test_a_websocket_closed_in_order_stops_its_session(service: tuple[TableService, str]) -> None:
    table, address = service
    with connect(f"ws://{address}/session?session=s") as connection:
        connection.send(b"x")
        assert connection.recv() == b"x"
    until(lambda: table.ends == [("s", "stop")])


@pytest.mark.parametrize("service", [{"idle_timeout_s": 0.2}], indirect=True)
def test_an_idle_websocket_gets_an_error_and_is_closed(service: tuple[TableService, str]) -> None:
    table, address = service
    with connect(f"ws://{address}/session?session=s") as connection, pytest.raises(ConnectionClosed) as closed:
        connection.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4410, "session ended: idle")
    assert table.ends == [("s", "idle")]


@pytest.mark.parametrize("service", [{"actors_per_worker": 1}], indirect=True)
def test_a_full_service_says_when_to_come_back(service: tuple[TableService, str]) -> None:
    _, address = service
    with Client(f"http://{address}") as first:
        first.start()
        with pytest.raises(ServiceFull):
            Client(f"http://{address}").start()
        with pytest.raises(ServiceFull):
            Client(f"ws://{address}").start()
        request = urllib.request.Request(
            f"http://{address}/step", b"", {"session": "other", "step_kind": "start"}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=WAIT_S)
        assert refused.value.code == 503
        assert refused.value.headers["retry-after"] == "1"
        assert json.loads(refused.value.read())["error"] == "service_full"


def test_headers_above_the_limit_are_refused(service: tuple[TableService, str]) -> None:
    table, address = service
    piece = "x" * (MAX_HEADER_BYTES // 4)  # servers and clients have limits of their own on one of them
    padding = {f"x-padding-{number}": piece for number in range(4)}
    request = urllib.request.Request(f"http://{address}/step", b"", padding, method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_S)
    assert refused.value.code == 431
    assert json.loads(refused.value.read())["error"] == "header_too_large"
    with connect(f"ws://{address}/session", additional_headers=padding) as connection:
        assert json.loads(connection.recv(timeout=WAIT_S))["error"] == "header_too_large"
        assert closing(connection)[0] == 4431
    del padding["x-padding-0"]
    with connect(f"ws://{address}/session?x={piece}", additional_headers=padding) as connection:
        assert json.loads(connection.recv(timeout=WAIT_S))["error"] == "header_too_large"
    assert refusals(table) == {"header_too_large": 3}
    assert len(table) == 0


def test_the_status_page(service: tuple[TableService, str]) -> None:
    _, address = service
    with Client(f"http://{address}") as client:
        client.start()
        assert json.loads(urllib.request.urlopen(f"http://{address}/", timeout=WAIT_S).read()) == {"sessions": 1}


def closing(connection: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as closed:
        connection.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


@pytest.mark.parametrize("subprotocols", [None, ["brayx.v1"]])
def test_a_bad_session_id_is_refused_and_not_echoed(
    service: tuple[TableService, str], subprotocols: list[Any] | None
) -> None:
    table, address = service
    url = f"ws://{address}/session?session=a%0D%0Ax-evil:%201"
    with connect(url, subprotocols=subprotocols) as connection:
        assert connection.response is not None
        assert "session" not in connection.response.headers
        assert "x-evil" not in connection.response.headers
        message = connection.recv(timeout=WAIT_S)
        error = json.loads(message if isinstance(message, str) else message[1:])
        assert error["error"] == "bad_request"
        assert closing(connection)[0] == 4400
    assert table.sessions == []


def test_an_envelope_of_another_version_is_refused(service: tuple[TableService, str]) -> None:
    table, address = service
    with connect(f"ws://{address}/session", subprotocols=[Subprotocol("brayx.v99")]) as connection:
        error = json.loads(connection.recv(timeout=WAIT_S))
        assert error["error"] == "bad_request"
        assert "'brayx.v99', expected 'brayx.v1'" in error["message"]
        assert closing(connection)[0] == 4400
    with connect(
        f"ws://{address}/session", subprotocols=[Subprotocol("brayx.v99"), Subprotocol("brayx.v1")]
    ) as connection:
        assert connection.subprotocol == "brayx.v1"
    assert table.sessions == []


@pytest.fixture
def impatient() -> Iterator[tuple[TableService, str]]:
    service = TableService()
    with serving(DoorApp(service, idle_timeout_s=0.2)) as address:
        yield service, address


def test_an_enveloped_connection_without_a_session_is_closed(impatient: tuple[TableService, str]) -> None:
    _, address = impatient
    with connect(f"ws://{address}/session", subprotocols=[Subprotocol("brayx.v1")]) as connection:
        assert closing(connection) == (4408, "no session for 0.2 s")


def test_an_enveloped_connection_that_stays_after_its_stop_is_closed(impatient: tuple[TableService, str]) -> None:
    table, address = impatient

    def stayed() -> bool:
        """Whether it started two sessions; otherwise a pause of this process made it idle before."""
        with connect(f"ws://{address}/session?session=s", subprotocols=[Subprotocol("brayx.v1")]) as connection:
            try:
                for message in (b"S1", b"P2", b"S3"):
                    connection.send(message)
                    assert connection.recv(timeout=WAIT_S) == b"R" + message[1:]
            except ConnectionClosed:
                assert closing(connection) == (4408, "no session for 0.2 s")
                return False
            table.ends.clear()
            time.sleep(0.4)  # a connection with a running session is not idle
            connection.send(b"P4")
            assert connection.recv(timeout=WAIT_S) == b"R4"
            assert closing(connection) == (4408, "no session for 0.2 s")
        return True

    until(stayed, "a session after another one")
    assert table.ends == [("s", "stop")]


@contextlib.contextmanager
def enveloped(address: str, session: str) -> Iterator[ClientConnection]:
    with connect(f"ws://{address}/session?session={session}", subprotocols=[Subprotocol(WS_SUBPROTOCOL)]) as connection:
        yield connection


def test_a_tick_out_of_sequence_does_not_attach_its_connection_but_the_corrected_one_does(
    service: tuple[TableService, str],
) -> None:
    table, address = service
    with enveloped(address, "s") as holder:
        holder.send(b"S")
        holder.recv(timeout=WAIT_S)
        for corrects in (False, True):
            with enveloped(address, "s") as other:
                other.send(encode_numbered(7, b"7"))
                assert json.loads(other.recv(timeout=WAIT_S)[1:])["error"] == "out_of_sequence"
                if not corrects:
                    continue
                for seq in (0, 1):
                    other.send(encode_numbered(seq, b"%d" % seq))
                    assert other.recv(timeout=WAIT_S) == b"R%d" % seq
                assert closing(holder) == (4410, "session ended: taken")
            if not corrects:
                holder.send(b"Tmine")
                assert holder.recv(timeout=WAIT_S) == b"Rmine"
    until(lambda: table.ends == [("s", "disconnect")])


def test_a_connection_whose_session_is_taken_over_while_its_stop_is_refused_is_closed() -> None:
    may_refuse = threading.Event()

    class Reluctant(Echo):
        async def stop(self, body: bytes) -> bytes:
            await asyncio.to_thread(may_refuse.wait, WAIT_S)
            raise BadBody("not that")

    table = TableService()
    table._make_actor = lambda: Reluctant(table.ends)
    with serving(DoorApp(table)) as address, enveloped(address, "s") as old, enveloped(address, "s") as new:
        old.send(b"S")
        old.recv(timeout=WAIT_S)
        held_by = table.get("s").holder  # type: ignore[union-attr]
        old.send(b"P")
        until(lambda: table.get("s").unanswered)  # type: ignore[union-attr]
        new.send(encode_numbered(0, b"0"))
        until(lambda: table.get("s").holder != held_by)  # type: ignore[union-attr]
        may_refuse.set()
        assert json.loads(old.recv(timeout=WAIT_S)[1:])["error"] == "bad_body"
        assert closing(old) == (4410, "session ended: taken")
        assert new.recv(timeout=WAIT_S) == b"R0"


def test_a_connection_that_took_a_session_over_by_a_failed_tick_ends_it_when_it_closes() -> None:
    may_refuse = threading.Event()

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await asyncio.to_thread(may_refuse.wait, WAIT_S)
            raise BadBody("not that")

    table = TableService()
    table._make_actor = lambda: Slow(table.ends)
    with serving(DoorApp(table)) as address, enveloped(address, "s") as old, enveloped(address, "s") as new:
        old.send(b"S")
        old.recv(timeout=WAIT_S)
        session = table.get("s")
        assert session is not None
        held_by = session.holder
        old.send(encode_numbered(0, b"0"))
        until(lambda: session.began)
        new.send(encode_numbered(1, b"1"))  # valid only if the running tick succeeds
        until(lambda: session.holder != held_by)
        may_refuse.set()
        assert json.loads(new.recv(timeout=WAIT_S)[1:])["error"] == "out_of_sequence"
        new.close()
        until(lambda: table.ends == [("s", "disconnect")])


def refusals(table: SessionTable) -> dict[str, float]:
    """The refusals that a table's recorder has counted, by error code."""
    assert isinstance(table.recorder, Recorder)
    numbers = table.recorder.summary().items()
    return {name.removeprefix("requests_refused."): count for name, count in numbers if "requests_refused" in name}


def test_a_refusal_is_counted_once_whether_by_the_door_or_the_service() -> None:
    table = TableService()
    with serving(DoorApp(table, max_body_bytes=8)) as address:
        for path, body, headers, status in (
            ("step", None, {}, 405),
            ("nothing", b"", {}, 404),
            ("step", b"", {"step_kind": "jump"}, 400),
            ("step", bytes(9), {}, 413),
            ("step", b"", {"step_kind": "tick", "session": "unknown"}, 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(
                    urllib.request.Request(f"http://{address}/{path}", body, headers), timeout=WAIT_S
                )
            assert refused.value.code == status
        assert refusals(table) == {"bad_request": 3, "body_too_large": 1, "session_unknown": 1}
        with connect(f"ws://{address}/session?session=s", subprotocols=[Subprotocol(WS_SUBPROTOCOL)]) as connection:
            for message in (b"?", b"T" + bytes(9), b"S", b"S"):
                connection.send(message)
                connection.recv(timeout=WAIT_S)
            for query in ("seq=x", "session=s"):
                with connect(f"ws://{address}/session?{query}") as other:
                    other.recv(timeout=WAIT_S)
    assert refusals(table) == {
        "bad_request": 5,
        "body_too_large": 2,
        "session_unknown": 1,
        "session_error": 1,
        "session_exists": 1,
    }


class Gated(TableService):
    """Holds every start until a test allows it."""

    allowed = False

    async def step(self, request: StepRequest, **options: Any) -> bytes:
        if request.kind is StepKind.START:
            await until_awaited(lambda: self.allowed)
        return await super().step(request, **options)


def test_a_bare_websocket_is_open_once_its_session_runs() -> None:
    """So a client with an open connection already holds its session when others try to attach, at any replica."""
    table = Gated()
    with serving(DoorApp(table)) as address:
        with pytest.raises(TimeoutError):
            connect(f"ws://{address}/session?session=early", open_timeout=2.0)
        table.allowed = True
        until(lambda: table.ends == [("early", "disconnect")])
        with connect(f"ws://{address}/session?session=early") as connection:
            connection.send("x")
            assert connection.recv(timeout=WAIT_S) == "x"


class Broken(TableService):
    """A service with a bug."""

    async def step(self, request: StepRequest, **_: Any) -> bytes:
        raise LookupError("an unforeseen bug")


def test_an_unexpected_exception_is_an_internal_error_without_its_details() -> None:
    with serving(DoorApp(Broken())) as address:
        with Client(f"http://{address}") as client, pytest.raises(BrayxError) as failed:
            client.call(b"x")
        assert type(failed.value) is BrayxError
        assert "unforeseen bug" not in failed.value.message
        with connect(f"ws://{address}/session", subprotocols=[Subprotocol(WS_SUBPROTOCOL)]) as connection:
            connection.send(b"S")
            assert json.loads(connection.recv()[1:])["error"] == "internal"
