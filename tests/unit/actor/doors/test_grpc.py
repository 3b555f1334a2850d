"""The gRPC door over a real server and session table, without Serve: the compliance suite, and further cases."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx import errors
from brayx.actor.config import SessionConfig
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.table import SessionTable
from brayx.errors import BrayxError, ModelError, OutOfSequence, SessionUnknown, from_wire
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.v1 import ERROR_METADATA
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from tests.unit.actor.doors.test_asgi import Echo, refusals
from tests.unit.gamecore.grpc_server import serving
from tests.waiting import until

MAX_BODY_BYTES = 2 * 1024 * 1024
WAIT_S = 30.0
CALL, START, TICK, STOP = pb.STEP_KIND_CALL, pb.STEP_KIND_START, pb.STEP_KIND_TICK, pb.STEP_KIND_STOP


class TableDoor(GrpcDoor, SessionTable):
    """A replica without Ray: the methods over a table.

    Attributes:
        ends: sessions that have ended, with the reason.
        requests: all that came, with whether the door vouches for them.
        failing: the error raised instead of an answer, by the kind of request.
        hold: starts are answered while it is set.
    """

    max_body_bytes = MAX_BODY_BYTES

    def __init__(self, **options: Any) -> None:
        self.ends: list[tuple[str, str]] = []
        super().__init__(lambda: Echo(self.ends), SessionConfig(**options))
        self.requests: list[tuple[StepRequest, bool]] = []
        self.failing: dict[StepKind, Exception] = {}
        self.hold = threading.Event()
        self.hold.set()

    async def step(self, request: StepRequest, *, let_in: bool = False) -> bytes:
        self.requests.append((request, let_in))
        if request.kind in self.failing:
            raise self.failing[request.kind]
        reply = await super().step(request, let_in=let_in)
        if request.kind is StepKind.START:
            await asyncio.to_thread(self.hold.wait, WAIT_S)
        return reply


class TestGrpcDoor(DoorCompliance):
    doors = ("grpc",)
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        door = TableDoor()
        with serving(door, door.close) as address:
            cls.urls = {"grpc": f"grpc://{address}"}
            yield


@pytest.fixture
def door(request: pytest.FixtureRequest) -> TableDoor:
    return TableDoor(**getattr(request, "param", {}))


@pytest.fixture
def address(door: TableDoor) -> Iterator[str]:
    with serving(door, door.close) as address:
        yield address


@pytest.fixture
def stub(address: str) -> Iterator[GamecoreStub]:
    with grpc.insecure_channel(address) as channel:
        yield GamecoreStub(channel)


def refusal(stub: GamecoreStub, **fields: Any) -> tuple[grpc.StatusCode, str, BrayxError]:
    """Status, its details, and the error in the metadata of a ``Step`` that must be refused."""
    with pytest.raises(grpc.RpcError) as refused:
        stub.Step(pb.StepRequest(**fields), timeout=WAIT_S)
    metadata = dict(refused.value.trailing_metadata())
    return refused.value.code(), refused.value.details(), from_wire(metadata[ERROR_METADATA])


# Step


def test_an_error_is_a_status_and_a_document(stub: GamecoreStub) -> None:
    stub.Step(pb.StepRequest(session="s", kind=START), timeout=WAIT_S)
    code, details, error = refusal(stub, session="s", kind=TICK, seq=7)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert isinstance(error, OutOfSequence)
    assert (error.details["expected"], error.details["got"]) == (0, 7)
    assert details == error.message


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"kind": 9, "session": "s"}, "bad_request", "kind is 9, expected 0 to 3"),
        ({"kind": START}, "bad_request", "session"),
        ({"kind": TICK, "session": "caf\u00e9"}, "bad_request", "caf"),
        ({"kind": CALL, "session": "s"}, "bad_request", "session came without kind"),
        ({"kind": TICK, "session": "s", "seq": 2**63}, "bad_request", "9223372036854775808"),
        ({"kind": TICK, "session": "s", "token": "t" * 257}, "header_too_large", "token has 257 characters"),
        ({"kind": TICK, "session": "s", "key": "k" * 257}, "header_too_large", "key has 257 characters"),
        ({"body": bytes(MAX_BODY_BYTES + 1)}, "body_too_large", str(MAX_BODY_BYTES + 1)),
    ],
)
def test_a_malformed_request_gets_an_exact_error_and_is_counted_once(
    door: TableDoor, stub: GamecoreStub, fields: dict[str, Any], code: str, says: str
) -> None:
    status, _, error = refusal(stub, **fields)
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.code == code
    assert says in error.message
    assert refusals(door) == {code: 1}
    refused = list(stub.Play(iter([pb.StepRequest(**{"kind": TICK, **fields})]), timeout=WAIT_S))
    assert [from_wire(reply.error).code for reply in refused] == [code]
    assert refusals(door) == {code: 2}


def test_every_error_has_a_status_that_grpc_knows() -> None:
    for error in errors.BY_CODE.values():
        assert getattr(grpc.StatusCode, error.grpc_status) is not grpc.StatusCode.OK, error


@pytest.mark.parametrize("message", ["x" * 100_000, "\N{PILE OF POO}" * 10_000, "line\nline\r\n\x00" * 1000])
def test_a_long_error_is_cut_to_what_clients_accept(door: TableDoor, stub: GamecoreStub, message: str) -> None:
    door.failing[StepKind.CALL] = ModelError(message, why="y" * 100_000)
    code, details, error = refusal(stub)
    assert code is grpc.StatusCode.INTERNAL
    assert isinstance(error, ModelError)
    assert error.message[:200] == message[:200]
    assert details[:100] == message[:100]


def test_an_unexpected_exception_is_reported_without_its_text(door: TableDoor, stub: GamecoreStub) -> None:
    door.failing[StepKind.CALL] = RuntimeError("Traceback: the secret is 42")
    code, details, error = refusal(stub)
    assert code is grpc.StatusCode.INTERNAL
    assert error.code == "internal"
    assert "secret" not in details + error.message


# Play


class Stream:
    """One call of ``Play``, a request at a time."""

    def __init__(self, stub: GamecoreStub) -> None:
        self._requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
        self.call = stub.Play(iter(self._requests.get, None), timeout=4 * WAIT_S)

    def ask(self, **fields: Any) -> bytes | BrayxError:
        """Sends a request and gives the next reply."""
        self.send(**fields)
        return self.reply()

    def send(self, **fields: Any) -> None:
        self._requests.put(pb.StepRequest(**fields))

    def reply(self) -> bytes | BrayxError:
        reply = next(self.call)
        return from_wire(reply.error) if reply.WhichOneof("reply") == "error" else reply.body

    def refused(self, **fields: Any) -> str:
        """The code of the error that a request gets."""
        answer = self.ask(**fields)
        assert isinstance(answer, BrayxError), answer
        return answer.code

    def ends(self) -> None:
        """Checks that the stream ends without another reply, with status OK."""
        assert next(self.call, None) is None
        assert self.call.code() is grpc.StatusCode.OK

    def close(self) -> None:
        """Ends this side in an orderly way."""
        self._requests.put(None)


@pytest.fixture
def open_stream(stub: GamecoreStub) -> Iterator[Callable[[], Stream]]:
    streams: list[Stream] = []

    def open_stream() -> Stream:
        streams.append(Stream(stub))
        return streams[-1]

    yield open_stream
    for stream in streams:
        stream.call.cancel()
        stream.close()


OpenStream = Callable[[], Stream]


def test_a_session_is_played_on_one_stream_which_ends_with_it(door: TableDoor, open_stream: OpenStream) -> None:
    stream = open_stream()
    assert stream.ask(session="s", kind=START, body=b"hello") == b"hello"
    for body in (b"\x00\xff", b"", bytes(MAX_BODY_BYTES)):
        assert stream.ask(kind=TICK, body=body) == body
    assert stream.ask(session="s", kind=TICK, body=b"named again") == b"named again"
    assert stream.ask(kind=STOP, body=b"bye") == b"bye"
    stream.ends()
    assert door.ends == [("s", "stop")]


def test_requests_sent_ahead_are_answered_in_order(stub: GamecoreStub) -> None:
    requests = [pb.StepRequest(session="s", kind=START, body=b"start")]
    requests += [pb.StepRequest(kind=TICK, body=b"%d" % number) for number in range(200)]
    requests += [pb.StepRequest(kind=STOP, body=b"stop")]
    replies = [reply.body for reply in stub.Play(iter(requests), timeout=WAIT_S)]
    assert replies == [request.body for request in requests]


def test_a_bad_request_on_a_stream_is_refused_and_the_session_goes_on(door: TableDoor, open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    assert stream.refused(kind=START) == "bad_request"
    assert stream.refused(kind=CALL) == "bad_request"
    assert stream.refused(kind=9) == "bad_request"
    assert stream.refused(session="another", kind=TICK) == "bad_request"
    assert stream.refused(kind=TICK, body=bytes(MAX_BODY_BYTES + 1)) == "body_too_large"
    assert stream.refused(kind=TICK, seq=3) == "out_of_sequence"
    assert stream.ask(kind=TICK, body=b"on") == b"on"
    assert door.ends == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"session": "s", "kind": TICK}, "session_unknown"),
        ({"session": "s", "kind": TICK, "seq": 0}, "session_unknown"),
        ({"session": "s", "kind": STOP}, "session_unknown"),
        ({"session": "s", "kind": CALL}, "bad_request"),
        ({"session": "", "kind": START}, "bad_request"),
        ({"session": "taken", "kind": START}, "session_exists"),
    ],
)
def test_a_stream_that_opens_no_session_gets_an_error_and_ends(
    door: TableDoor, stub: GamecoreStub, open_stream: OpenStream, fields: dict[str, Any], code: str
) -> None:
    stub.Step(pb.StepRequest(session="taken", kind=START))
    stream = open_stream()
    assert stream.refused(**fields) == code
    stream.ends()
    assert stub.Step(pb.StepRequest(session="taken", kind=TICK, body=b"unharmed")).body == b"unharmed"
    assert door.ends == []


@pytest.mark.parametrize("how", ["cancel", "close", "die"])
def test_a_stream_that_ends_without_a_stop_is_a_lost_client(door: TableDoor, address: str, how: str) -> None:
    channel = grpc.insecure_channel(address)
    stream = Stream(GamecoreStub(channel))
    stream.ask(session="s", kind=START)
    {"cancel": stream.call.cancel, "close": stream.close, "die": channel.close}[how]()
    until(lambda: door.ends == [("s", "disconnect")])
    channel.close()


def test_a_stream_that_breaks_while_its_session_starts_leaves_no_session(
    door: TableDoor, open_stream: OpenStream
) -> None:
    door.hold.clear()
    stream = open_stream()
    stream.send(session="s", kind=START)
    until(lambda: door.sessions == ["s"])
    stream.call.cancel()
    door.hold.set()
    until(lambda: door.ends == [("s", "disconnect")])


def test_a_numbered_session_continues_on_another_stream(door: TableDoor, open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    assert stream.ask(kind=TICK, seq=0, body=b"zero") == b"zero"
    stream.call.cancel()
    stream = open_stream()
    assert stream.ask(session="s", kind=TICK, seq=0, body=b"was it lost?") == b"zero"
    assert stream.ask(kind=TICK, seq=1, body=b"one") == b"one"
    stream.call.cancel()
    stream = open_stream()  # a refused number still finds the session
    assert stream.refused(session="s", kind=TICK, seq=7) == "out_of_sequence"
    assert stream.ask(kind=TICK, seq=2, body=b"two") == b"two"
    stream.call.cancel()
    stream = open_stream()
    assert stream.ask(session="s", kind=STOP, body=b"bye") == b"bye"
    stream.ends()
    assert door.ends == [("s", "stop")]


def test_a_tick_out_of_sequence_does_not_attach_its_stream_but_the_corrected_one_does(open_stream: OpenStream) -> None:
    holder, stranger, other = open_stream(), open_stream(), open_stream()
    holder.ask(session="s", kind=START)
    for stream in (stranger, other):
        assert stream.refused(session="s", kind=TICK, seq=7) == "out_of_sequence"
    stranger.close()
    stranger.ends()
    assert holder.ask(kind=TICK, body=b"mine") == b"mine"
    for seq in (0, 1):
        assert other.ask(kind=TICK, seq=seq, body=b"%d" % seq) == b"%d" % seq
    lost = holder.reply()
    assert isinstance(lost, errors.SessionLost)
    assert lost.details == {"reason": "taken"}


def test_a_session_stopped_by_another_call_ends_its_stream(stub: GamecoreStub, open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    stub.Step(pb.StepRequest(session="s", kind=STOP))
    lost = stream.reply()
    assert isinstance(lost, errors.SessionLost)
    assert lost.details == {"reason": "stop"}
    stream.ends()
    stub.Step(pb.StepRequest(session="s", kind=START))
    assert stub.Step(pb.StepRequest(session="s", kind=TICK, body=b"anew")).body == b"anew"


@pytest.mark.parametrize("door", [{"idle_timeout_s": 0.2}], indirect=True)
def test_an_idle_session_ends_its_stream(door: TableDoor, open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    lost = stream.reply()
    assert isinstance(lost, BrayxError)
    assert (lost.code, lost.details) == ("session_lost", {"reason": "idle"})
    stream.ends()
    assert door.ends == [("s", "idle")]


@pytest.mark.parametrize("failure", [errors.AgentError("raised"), SessionUnknown("gone"), ModelError("broken")])
def test_an_error_that_ends_the_session_ends_the_stream(
    door: TableDoor, open_stream: OpenStream, failure: BrayxError
) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    door.failing[StepKind.TICK] = failure
    if isinstance(failure, ModelError):  # it does not say that the session has ended; the table does
        entry = door.get("s")
        assert entry is not None
        entry.actor.tick = lambda body: _raise(failure)  # type: ignore[method-assign]
        del door.failing[StepKind.TICK]
    assert stream.refused(kind=TICK) == failure.code
    stream.ends()


async def _raise(error: Exception) -> bytes:
    raise error


def test_a_moved_session_ends_its_stream_without_an_error(door: TableDoor, open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START)
    entry = door.get("s")
    assert entry is not None
    door._living[entry].get_loop().call_soon_threadsafe(door.end_holder, entry.holder, "moved")
    stream.ends()
    assert door.ends == []


def test_a_stream_without_a_request_is_ended(door: TableDoor, open_stream: OpenStream) -> None:
    door.idle_timeout_s = 0.1
    reply = open_stream().reply()
    assert isinstance(reply, BrayxError)
    assert reply.code == "deadline_exceeded"


def test_credentials_of_the_first_request_authorize_the_others(
    door: TableDoor, stub: GamecoreStub, open_stream: OpenStream
) -> None:
    stream = open_stream()
    stream.ask(session="s", kind=START, key="k", time="1", token="t")
    stream.ask(kind=TICK)
    stream.ask(kind=TICK, key="another's")
    stream.ask(kind=STOP)
    stub.Step(pb.StepRequest(body=b"x"))
    credentials = [(request.key, request.time, request.token) for request, _ in door.requests]
    assert credentials == [("k", "1", "t"), ("k", "", ""), ("k", "", ""), ("k", "", ""), ("", "", "")]
    assert [let_in for _, let_in in door.requests] == [False, True, True, True, False]


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """The bytes of a request with random fields, perhaps with one byte changed; or random bytes."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=64))
    fields = {
        "session": draw(st.sampled_from(["", "fuzz", "fuzz2", "with space", "\u00e9" * 9, "x" * 300])),
        "kind": draw(st.integers(-1, 5)),
        "body": draw(st.binary(max_size=16)),
        "key": draw(st.text(max_size=300)),
        "seq": draw(st.none() | st.integers(0, 3) | st.integers(0, 2**64 - 1)),
    }
    data = bytearray(pb.StepRequest(**fields).SerializeToString())
    if data and draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def test_random_requests_harm_no_other_client(address: str) -> None:
    with grpc.insecure_channel(address) as channel, Client(f"grpc://{address}", timeout_s=WAIT_S) as other:
        step = channel.unary_unary("/brayx.gamecore.v1.Gamecore/Step", response_deserializer=pb.StepReply.FromString)
        play = channel.stream_stream("/brayx.gamecore.v1.Gamecore/Play", response_deserializer=pb.PlayReply.FromString)
        other.start()

        @settings(max_examples=60)
        @given(st.lists(messages(), min_size=1, max_size=8))
        def fuzz(requests: list[bytes]) -> None:
            for request in requests:
                with contextlib.suppress(grpc.RpcError):
                    step(request, timeout=WAIT_S)
            with contextlib.suppress(grpc.RpcError):
                assert len(list(play(iter(requests), timeout=WAIT_S))) <= len(requests)
            assert other.tick(b"fine") == b"fine"

        fuzz()


def test_streams_and_calls_of_many_sessions_never_mix(address: str) -> None:
    failures: list[str] = []

    def play(index: int) -> None:
        with grpc.insecure_channel(address) as channel:
            stub = GamecoreStub(channel)
            session = uuid.uuid4().hex
            requests = [pb.StepRequest(session=session, kind=START)]
            requests += [pb.StepRequest(kind=TICK, body=f"{index} {number}".encode()) for number in range(50)]
            replies = [reply.body.decode() for reply in stub.Play(iter(requests), timeout=4 * WAIT_S)]
            if replies[1:] != [f"{index} {number}" for number in range(50)]:
                failures.append(f"{index}: {replies}")

    threads = [threading.Thread(target=play, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    with Client(f"grpc://{address}", timeout_s=WAIT_S) as client:
        client.start()
        for number in range(50):
            assert client.tick(f"client {number}") == f"client {number}".encode()
    for thread in threads:
        thread.join(4 * WAIT_S)
    assert failures == []
