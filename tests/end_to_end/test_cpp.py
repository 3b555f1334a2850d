"""The C++ client, its example gamecores and its load generator, built here and run against a real table and door.

`make test-cluster` runs every test again in a build with the address and undefined behaviour sanitizers: a byte read or
a reference used where it must not be ends the program, and the test.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from brayx.actor.actor import Actor
from brayx.components import load_module
from brayx.errors import (
    AgentError,
    BrayxError,
    OutOfSequence,
    Overloaded,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    TooManyConnections,
)
from brayx.gamecore.contract import ActionPart, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.gamecore.tcp import encode_error, encode_reply
from brayx.ports import free_port
from tests.end_to_end.cpp_server import KEY, KEYS, MAX_BODY_BYTES, SECRET, Proxy, Server, serving
from tests.unit.gamecore.echo_server import EchoApp
from tests.unit.gamecore.echo_server import serving as serving_http
from tests.unit.gamecore.scripted_server import scripted
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "cpp"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

Both = tuple[Server, Proxy]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (looked for $CXX, g++, c++)")


def build(source: str, to: Path, *flags: str) -> Path:
    assert COMPILER is not None
    program = to / Path(source).stem
    command = [COMPILER, "-std=c++17", *flags, *WARNINGS, "-I", str(CLIENT), str(CLIENT / source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


def has_sanitizers(folder: Path) -> bool:
    """Whether the compiler has their libraries, which some installations lack."""
    assert COMPILER is not None
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [COMPILER, *SANITIZERS, str(source), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, timeout=240).returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpp")


@pytest.fixture(scope="module", params=["plain", pytest.param("sanitized", marks=pytest.mark.cluster)])
def builds(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Future[Path]]]:
    """The programs, which compile side by side while the first tests run."""
    to = folder / request.param
    to.mkdir()
    optimised, checked = ["-O0"], ["-O0"]  # compiling for speed takes five times as long as these tests would gain
    if request.param == "sanitized":
        optimised, checked = ["-O2"], SANITIZERS if has_sanitizers(to) else ["-O2"]
    with ThreadPoolExecutor(2) as pool:
        yield {
            "driver": pool.submit(build, "tests/driver.cpp", to, *checked),
            "cartpole": pool.submit(build, "examples/cartpole.cpp", to, *optimised),
            "connect_four": pool.submit(build, "examples/connect_four.cpp", to, *checked),
            "load": pool.submit(build, "load.cpp", to, *optimised),
        }


@pytest.fixture(scope="module")
def driver(builds: dict[str, Future[Path]]) -> Path:
    return builds["driver"].result()


@pytest.fixture(scope="module")
def cartpole(builds: dict[str, Future[Path]]) -> Path:
    return builds["cartpole"].result()


@pytest.fixture(scope="module")
def connect_four(builds: dict[str, Future[Path]]) -> Path:
    return builds["connect_four"].result()


@pytest.fixture(scope="module")
def load(builds: dict[str, Future[Path]]) -> Path:
    return builds["load"].result()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Both]:
    with serving(**getattr(request, "param", {})) as both:
        yield both


def hexed(data: bytes) -> str:
    return data.hex() or "-"


def unhexed(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)


class Refused(Exception):
    """What the driver said of an error."""

    def __init__(self, code: str, message: str, details: str) -> None:
        super().__init__(f"{code}: {unhexed(message).decode(errors='replace')}")
        self.code = code
        self.message = unhexed(message).decode(errors="replace")
        self.details = unhexed(details)


class Driver:
    """A running driver: a line in, a line out."""

    def __init__(self, program: Path, *arguments: object) -> None:
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        self.process = subprocess.Popen(
            [str(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def say(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {self.process.stderr.read()}"
        return line.rstrip("\n")

    def ask(self, *words: str) -> str:
        self.say(*words)
        return self.hear()

    def step(self, kind: str, body: bytes = b"", *more: str) -> bytes:
        return answer(self.ask(kind, hexed(body), *more))

    def start(self, session: str = "") -> None:
        self.step("start", b"hello", session)

    @property
    def state(self) -> list[str]:
        return self.ask("state").split(" ")

    # Of the asynchronous driver

    def send(self, kind: str, session: str, body: bytes) -> int:
        said = self.ask(*[word for word in (kind, session, hexed(body)) if word])
        if said.startswith("error"):
            answer(said)
        assert said.startswith("sent "), said
        return int(said.removeprefix("sent "))

    def poll(self, wait_ms: int) -> dict[int, str]:
        self.say("poll", str(wait_ms))
        fired = {}
        while (line := self.hear()) != ".":
            tag, _, what = line.partition(" ")
            assert tag.isdigit(), line
            fired[int(tag)] = what
        return fired

    def poll_for(self, count: int) -> dict[int, str]:
        fired: dict[int, str] = {}

        def have_fired() -> bool:
            fired.update(self.poll(100))
            return len(fired) >= count

        until(have_fired, f"{count} callbacks")
        assert len(fired) == count
        return fired


def answer(said: str) -> bytes:
    """The body of what the driver said.

    Raises:
        Refused: it said an error.
    """
    kind, *words = said.split(" ")
    if kind == "error":
        raise Refused(*words)
    assert kind == "ok", said
    return unhexed(words[0])


Run = Callable[..., Driver]


@pytest.fixture
def run(driver: Path) -> Iterator[Run]:
    """Starts drivers, and sees to it that each ends well: the sanitizers speak at the end too."""
    started: list[Driver] = []

    def start(*arguments: object) -> Driver:
        started.append(Driver(driver, *arguments))
        return started[-1]

    yield start
    for begun in started:
        try:
            _, errors = begun.process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            begun.process.kill()
            begun.process.communicate()
            raise
        assert begun.process.returncode == 0, errors
        assert errors == ""


# What needs no service


RFC_4231 = [
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
        b"hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
]


def test_hmac_of_rfc_4231(run: Run) -> None:
    hashes = run("hmac")
    for key, message, expected in RFC_4231:
        assert hashes.ask(hexed(key), hexed(message)) == expected


def test_hmac_at_every_length_around_a_block(run: Run) -> None:
    hashes, rng = run("hmac"), random.Random(0)
    for size in [*range(130), 1000]:
        key, message = rng.randbytes(rng.randrange(1, 140)), rng.randbytes(size)
        assert hashes.ask(hexed(key), hexed(message)) == hmac.new(key, message, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    "error",
    [
        SessionLost('it was "lost"\n\t\\ here', reason="idle"),
        AgentError("Ünïcödé, 日本語 and 🎮", nested={"a": [1, {"b": "]}"}], "tick": "no"}, tick=-3),
        SessionResumed("resumed", tick=2**63 - 1),
        OutOfSequence("", expected=1, got=7),
    ],
    ids=lambda error: error.code,
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_error_document_is_read(run: Run, error: BrayxError, ascii_only: bool) -> None:
    document = {"error": error.code, "message": error.message, "details": error.details}
    text = json.dumps(document, ensure_ascii=ascii_only, indent=None if ascii_only else 2)
    code, message, details, tick = run("errors").ask(text.encode().hex()).split(" ")
    assert code == error.code
    assert unhexed(message).decode() == error.message
    assert json.loads(unhexed(details)) == error.details
    assert tick == str(error.details.get("tick", "none"))


def test_an_invalid_error_document_is_quoted(run: Run) -> None:
    errors = run("errors")
    for data in (
        b"",
        b"{",
        b"[]",
        b'{"error": 5, "message": "m"}',
        b'{"error": "internal"}',
        b'{"error":"x","message":"\\',
        b'{"error":"a b","message":"m"}',
        b'{"error":"","message":"m"}',
        b"<h>\0\xff",
    ):
        code, message, *_ = errors.ask(hexed(data)).split(" ")
        assert code == "transport_error", data
        quoted = "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in data)
        assert unhexed(message).decode().endswith(f"'{quoted}'")
    _, halves, *_ = errors.ask(hexed(b'{"error":"x","message":"\\ud83c\\udfae\\ud800 \\udfae"}')).split(" ")
    assert unhexed(halves).decode() == "🎮\ufffd \ufffd"


def test_no_bytes_break_the_error_reader(run: Run) -> None:
    errors, rng = run("errors"), random.Random(1)
    whole = b'{"error": "session_lost", "message": "a\\u00e9\\"b", "details": {"tick": 5, "more": [1, {"x": "}"}]}}'
    for _ in range(3000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.choice(b'{}[]",:\\u0\xff\0 5')
        said = errors.ask(hexed(bytes(data))).split(" ")
        assert len(said) == 4


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h:1",
        "tcp://",
        "tcp://:8101",
        "tcp://h:",
        "tcp://h:x",
        "tcp://h:70000",
        "tcp://h/path",
        "tcp://[::1",
        "tcp://[::1]x:1",
        "tcp://h:-1",
    ],
)
def test_a_url_that_cannot_be_used(driver: Path, url: str) -> None:
    done = subprocess.run(
        [str(driver), "sync", url], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (1, "")
    with pytest.raises(Refused) as refused:
        answer(done.stdout.strip())
    assert refused.value.code == "bad_config"
    assert f"'{url}'" in refused.value.message


@pytest.mark.parametrize("options", [("key", "k"), ("secret", "s"), ("key", "a b", "secret", "s")])
def test_credentials_that_cannot_be_used(driver: Path, options: tuple[str, ...]) -> None:
    command = [str(driver), "sync", "tcp://127.0.0.1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.stdout.startswith("error bad_config "), done


# The blocking client


def test_a_session(run: Run, service: Both) -> None:
    server, _ = service
    client = run("sync", server.url)
    assert client.step("start", b"hello", "mine") == b"hello"
    assert client.state == ["running", "mine", "0"]
    for number in range(20):
        body = f"tick {number}".encode()
        assert client.step("tick", body) == body
    assert client.step("tick", b"") == b""
    assert client.step("tick", bytes(range(256))) == bytes(range(256))
    assert client.state == ["running", "mine", "22"]
    assert client.step("stop", b"bye") == b"bye"
    assert client.state[0] == "none"
    assert server.ends == [("mine", "stop")]
    assert client.step("call", b"stateless") == b"stateless"
    client.start()
    assert client.step("tick", b"again") == b"again"
    session = client.state[1]
    assert len(session) == 32
    assert server.applied[session] == [b"again"]
    assert server.accepted == 1


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_a_name_and_an_ipv6_address(run: Run, service: Both, host: str) -> None:
    """The server listens on IPv4: a name's other address is tried, an IPv6 address is refused in its own words."""
    server, _ = service
    client = run("sync", f"tcp://{host}:{server.port}")
    if host == "localhost":
        assert client.step("call", b"x") == b"x"
    else:
        with pytest.raises(Refused) as refused:
            client.step("call", b"x")
        assert refused.value.code == "connect_failed"


def test_large_bodies(run: Run, service: Both) -> None:
    server, _ = service
    client = run("sync", server.url)
    client.start()
    body = random.Random(2).randbytes(MAX_BODY_BYTES)
    assert client.step("tick", body) == body
    with pytest.raises(Refused) as refused:
        client.step("tick", body + b"!")
    assert refused.value.code == "body_too_large"
    assert json.loads(refused.value.details) == {"limit": MAX_BODY_BYTES}
    assert client.step("tick", b"after") == b"after"


def test_error_codes(run: Run, service: Both) -> None:
    server, _ = service
    client, other = run("sync", server.url), run("sync", server.url)

    def refused(client: Driver, *words: Any) -> str:
        with pytest.raises(Refused) as error:
            client.step(*words)
        return error.value.code

    assert refused(client, "tick", b"x") == "session_unknown"
    assert refused(client, "stop", b"x") == "session_unknown"
    assert refused(client, "start", b"", "x" * 257) == "bad_request"
    assert refused(client, "start", b"", "café") == "bad_request"
    client.start("mine")
    assert refused(client, "start", b"") == "session_exists"
    assert refused(other, "start", b"", "mine") == "session_exists"
    assert other.state[0] == "none"
    assert refused(client, "tick", b"bad") == "bad_body"
    assert client.step("tick", b"good") == b"good"
    assert refused(client, "tick", b"raise") == "agent_error"
    assert client.state[0] == "none"
    client.start("mine")
    other.say("start", "-", "its")
    other.hear()
    server.stop()
    server.start()
    assert refused(other, "tick", b"x") == "session_unknown"


def test_a_deadline(run: Run, service: Both) -> None:
    server, _ = service
    client = run("sync", server.url, "timeout_ms", 3000, "numbered", 1)
    client.start("s")
    with pytest.raises(Refused, match=r"within 3000 ms .*tick of session s") as refused:
        client.step("tick", b"slow")
    assert refused.value.code == "deadline_exceeded"
    assert client.state == ["running", "s", "0"]
    until(lambda: server.applied["s"] == [b"slow"])
    server.go_on.set()

    def answered() -> bool:
        with contextlib.suppress(Refused):
            assert client.step("tick", b"slow") == b"slow"
            return True
        return False

    until(answered, "the reply to the same tick")
    assert server.applied["s"] == [b"slow"]
    assert client.step("tick", b"next") == b"next"


def test_a_service_that_never_answers(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = run("sync", f"tcp://127.0.0.1:{listener.getsockname()[1]}", "timeout_ms", 100)
        with pytest.raises(Refused) as refused:
            client.step("start")
        assert refused.value.code == "deadline_exceeded"
        with pytest.raises(Refused) as refused:  # one that does not read either
            client.step("call", bytes(8 * 1024 * 1024))
        assert refused.value.code == "deadline_exceeded"


def test_nothing_listens(run: Run) -> None:
    client = run("sync", f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(Refused, match="Connection refused") as refused:
        client.step("start")
    assert refused.value.code == "connect_failed"


def test_a_connection_closed_while_idle_is_made_anew(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url)
    client.start("s")
    proxy.cut()
    assert client.step("tick", b"one") == b"one"
    proxy.cut()
    assert client.step("stop", b"bye") == b"bye"
    assert proxy.connections == 3
    assert server.applied["s"] == [b"one"]


def test_without_reconnect_a_lost_reply_is_an_error(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "numbered", 1)
    client.start("s")
    proxy.lose_in = 0
    with pytest.raises(Refused, match="may or may not have been applied") as refused:
        client.step("tick", b"one")
    assert refused.value.code == "connection_lost"
    assert server.applied["s"] == [b"one"]
    assert client.step("tick", b"one") == b"one"
    assert client.step("tick", b"two") == b"two"
    assert server.applied["s"] == [b"one", b"two"]


def test_reconnect_applies_each_tick_once(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "reconnect_ms", 10000)
    client.start("s")
    bodies = [b"%d" % number for number in range(20)]
    for number, body in enumerate(bodies):
        if number % 3 == 0:
            proxy.lose_in = 0
        assert client.step("tick", body) == body
    assert server.applied["s"] == bodies
    assert proxy.connections == 8
    proxy.lose_in = 0
    assert client.step("stop", b"bye") == b""  # the reply was lost; that it was applied is known
    assert client.state[0] == "none"
    until(lambda: server.ends == [("s", "stop")])


def test_reconnect_outlasts_a_service_that_is_away(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "reconnect_ms", 10000)
    client.start("s")
    proxy.refusing = True
    proxy.cut()
    client.say("tick", hexed(b"one"))
    before = proxy.connections
    until(lambda: proxy.connections > before + 2)
    proxy.refusing = False
    assert answer(client.hear()) == b"one"
    assert server.applied["s"] == [b"one"]


def test_reconnect_has_an_end(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "reconnect_ms", 200)
    client.start("s")
    server.stop()
    with pytest.raises(Refused) as refused:
        client.step("tick", b"one")
    assert refused.value.code in ("connection_lost", "connect_failed")
    assert client.state == ["running", "s", "0"]


def test_a_restarted_service_no_longer_knows_the_session(run: Run, service: Both) -> None:
    server, _ = service
    client = run("sync", server.url, "reconnect_ms", 10000)
    client.start("s")
    assert client.step("tick", b"one") == b"one"
    server.stop()
    client.say("tick", hexed(b"two"))
    server.start()
    with pytest.raises(Refused) as refused:
        answer(client.hear())
    assert refused.value.code == "session_unknown"
    client.start("s")
    assert client.step("tick", b"three") == b"three"


def test_a_start_is_repeated_only_if_nothing_was_sent(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "reconnect_ms", 10000)
    proxy.lose_in = 0
    with pytest.raises(Refused) as refused:
        client.step("start", b"", "s")
    assert refused.value.code == "connection_lost"
    assert server.table.sessions == ["s"]
    server.stop()
    other = run("sync", server.url, "reconnect_ms", 10000)
    other.say("start", "-", "other")
    server.start()
    assert answer(other.hear()) == b""


def test_a_tick_and_a_stop_that_meet_a_move_are_tried_again(run: Run, service: Both) -> None:
    server, _ = service
    client = run("sync", server.url, "reconnect_ms", 20_000)
    client.start("s")
    server.moving = 3
    assert client.step("tick", b"a") == b"a"
    assert client.step("tick", b"b") == b"b"
    server.moving = 2
    assert client.step("stop", b"c") == b"c"
    assert (server.moving, server.applied["s"], server.ends) == (0, [b"a", b"b"], [("s", "stop")])
    assert server.accepted == 1


def test_other_sessions_go_on_while_one_moves(run: Run, service: Both) -> None:
    server, _ = service
    client = run("async", server.url, 1, "reconnect_ms", 20_000)
    for session in "ab":
        client.send("start", session, b"")
    client.poll_for(2)
    server.moving = 3
    moved = client.send("tick", "a", b"moves")
    until(lambda: client.poll(10) == {} and server.moving == 0)
    stayed = client.send("tick", "b", b"stays")
    assert client.poll_for(2) == {moved: f"ok {b'moves'.hex()}", stayed: f"ok {b'stays'.hex()}"}


def test_trying_a_moved_session_again_has_an_end(run: Run, service: Both) -> None:
    server, _ = service
    never, briefly = run("sync", server.url, "numbered", 1), run("sync", server.url, "reconnect_ms", 2000)
    server.moving = 10**9
    for client in (never, briefly):
        client.start()
        with pytest.raises(Refused, match="overloaded: the session is moving") as refused:
            client.step("tick", b"x")
        assert json.loads(refused.value.details) == {"layer": "between"}
        assert 10**9 - server.moving == 1 if client is never else 10**9 - server.moving > 2
    server.moving = 0
    assert briefly.step("tick", b"x") == b"x"
    assert briefly.state[2] == "1"
    assert server.accepted == 2


def test_a_connection_that_breaks_while_its_session_moves(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "reconnect_ms", 20_000)
    client.start("s")
    server.moving = 10**9
    client.say("tick", hexed(b"x"))
    until(lambda: server.moving < 10**9 - 2)
    proxy.cut()
    until(lambda: server.accepted == 2)
    server.moving = 0
    assert answer(client.hear()) == b"x"
    assert server.applied["s"] == [b"x"]


@pytest.mark.parametrize("refusals", [[], [Overloaded("moving", layer="between")]], ids=["sent once", "refused once"])
def test_only_a_stop_that_may_have_been_applied_takes_unknown_for_done(run: Run, refusals: list[BrayxError]) -> None:
    def script(sock: socket.socket) -> None:
        for error in (None, *refusals, SessionUnknown("gone")):
            (session, *_), stamp = read_frame(sock)
            sock.sendall(encode_reply(session, b"", stamp) if error is None else encode_error(session, error, stamp))

    with scripted(script) as (address, _):
        client = run("sync", f"tcp://{address}", "reconnect_ms", 20_000)
        client.start("s")
        with pytest.raises(Refused, match="session_unknown: gone"):
            client.step("stop")


def read_frame(sock: socket.socket) -> tuple[list[bytes], int]:
    """The fields and the time of one request."""
    files = sock.makefile("rb")
    *sizes, number = struct.unpack(">6q", files.read(48))
    return [files.read(size) for size in sizes], number


def test_a_resumed_session_goes_on_at_its_tick(run: Run) -> None:
    kinds = []

    def script(sock: socket.socket) -> None:
        for number in range(10):
            (session, kind, _, _, body), stamp = read_frame(sock)
            kinds.append(kind)
            resumed = SessionResumed("resumed from a snapshot", tick=7)
            sock.sendall(
                encode_error(session, resumed, stamp) if number in (2, 4) else encode_reply(session, body, stamp)
            )
            if kind == b"stop" and number > 4:
                return

    with scripted(script) as (address, _):
        client = run("sync", f"tcp://{address}", "reconnect_ms", 1000)
        client.start("s")
        assert client.step("tick", b"a") == b"a"
        with pytest.raises(Refused) as refused:
            client.step("tick", b"b")
        assert refused.value.code == "session_resumed"
        assert json.loads(refused.value.details) == {"tick": 7}
        assert client.state == ["running", "s", "7"]
        assert client.step("tick", b"c") == b"c"
        with pytest.raises(Refused):
            client.step("stop", b"d")
        assert client.step("tick", b"e") == b"e"
        assert client.step("stop", b"f") == b"f"
    assert kinds == [b"start", b"tick#0", b"tick#1", b"tick#7", b"stop", b"tick#7", b"stop"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_resume_notice_that_is_lost_with_its_connection(run: Run, kind: str) -> None:
    """The repeated tick is refused with the number that is expected, and the session goes on from there."""
    kinds = []

    def lose(sock: socket.socket) -> None:
        for number in range(4):
            (session, what, _, _, body), stamp = read_frame(sock)
            kinds.append(what)
            if number < 3:
                sock.sendall(encode_reply(session, body, stamp))

    def refuse(sock: socket.socket) -> None:
        for number in range(3):
            (session, what, _, _, body), stamp = read_frame(sock)
            kinds.append(what)
            error = OutOfSequence("the next tick is 1", expected=1, got=2)
            sock.sendall(encode_reply(session, body, stamp) if number else encode_error(session, error, stamp))

    def tick(body: bytes) -> bytes:
        if kind == "sync":
            return client.step("tick", body)
        client.send("tick", "s", body)
        return answer(*client.poll_for(1).values())

    with scripted(lose, refuse) as (address, _):
        client = run(kind, f"tcp://{address}", *[1] * (kind == "async"), "reconnect_ms", 5000)
        if kind == "sync":
            client.start("s")
        else:
            client.send("start", "s", b"")
            client.poll_for(1)
        assert [tick(b"a"), tick(b"b")] == [b"a", b"b"]
        with pytest.raises(Refused, match="out_of_sequence") as refused:
            tick(b"c")
        assert json.loads(refused.value.details) == {"expected": 1, "got": 2}
        assert [tick(b"d"), tick(b"e")] == [b"d", b"e"]
    assert kinds == [b"start", b"tick#0", b"tick#1", b"tick#2", b"tick#2", b"tick#1", b"tick#2"]


def test_ticks_have_no_number_unless_asked_for(run: Run) -> None:
    kinds = []

    def script(sock: socket.socket) -> None:
        for _ in range(3):
            (session, kind, key, token, body), stamp = read_frame(sock)
            kinds.append((kind, key, token))
            sock.sendall(encode_reply(session, body, stamp))

    with scripted(script) as (address, _):
        client = run("sync", f"tcp://{address}")
        client.start("s")
        client.step("tick", b"a")
        client.step("call", b"a")
    assert kinds == [(b"start", b"", b""), (b"tick", b"", b""), (b"", b"", b"")]


def test_a_start_asks_for_a_recording_if_the_option_says_so(run: Run) -> None:
    kinds = []

    def script(sock: socket.socket) -> None:
        for _ in range(2):
            (session, kind, _, _, body), stamp = read_frame(sock)
            kinds.append(kind)
            sock.sendall(encode_reply(session, body, stamp))

    with scripted(script) as (address, _):
        client = run("sync", f"tcp://{address}", "record", "1")
        client.start("s")
        client.step("tick", b"a")
    assert kinds == [b"start+record", b"tick"]


@pytest.mark.parametrize("service", [{"keys": KEYS}], indirect=True)
def test_credentials(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("sync", proxy.url, "key", KEY, "secret", SECRET.decode(), "reconnect_ms", 5000)
    client.start("s")
    assert client.step("tick", b"one") == b"one"
    proxy.lose_in = 0
    assert client.step("tick", b"two") == b"two"
    assert client.step("call", b"three") == b"three"
    assert server.applied["s"] == [b"one", b"two"]
    for options in ((), ("key", KEY, "secret", "wrong"), ("key", "other", "secret", SECRET.decode())):
        with pytest.raises(Refused) as refused:
            run("sync", server.url, *options).step("start")
        assert refused.value.code == "unauthorized"


def test_a_full_door(run: Run, service: Both) -> None:
    server, _ = service
    server.stop()
    server.start(max_connections=1)
    first = run("sync", server.url)
    first.start()
    second = run("sync", server.url)
    with pytest.raises(Refused, match="this door holds 1 connections") as refused:
        second.step("start")
    assert refused.value.code == "too_many_connections"
    assert first.step("tick", b"x") == b"x"
    first.ask("close")
    until(lambda: len(server._door) == 0)
    second.start()


# A peer that speaks another protocol


def hostile(run: Run, data: bytes, *, close: bool = True, timeout_ms: int = 60_000) -> str:
    """Code of the error that the client gives when ``data`` answers its start."""

    def script(sock: socket.socket) -> None:
        read_frame(sock)
        sock.sendall(data)
        if not close:
            sock.recv(1)

    with scripted(script) as (address, _):
        client = run("sync", f"tcp://{address}", "timeout_ms", timeout_ms, "max_reply_bytes", 1024)
        with pytest.raises(Refused) as refused:
            client.step("start", b"", "s")
        assert client.state[0] == "none"
        with pytest.raises(Refused):
            client.step("call", b"after")
    return refused.value.code


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
        b"\xff" * 24,
        struct.pack(">3q", 257, 0, 1),
        struct.pack(">3q", -1, 0, 1),
        struct.pack(">3q", 1, -1, 1),
        struct.pack(">3q", 1, 1025, 1),
        struct.pack(">3q", 1, 2**63 - 1, 1),
        encode_reply(b"nobody", b"x", 1),
        encode_reply(b"nobody", b"x", -(2**63)),
        encode_reply(b"s", b"x", 999),
        encode_error(b"", BrayxError("of nobody's"), 2**63 - 1),
    ],
    ids=["http", "ones", "session", "session-", "body-", "body", "body+", "other", "least", "time", "error"],
)
def test_a_peer_that_is_not_a_door(run: Run, data: bytes) -> None:
    assert hostile(run, data, close=False) == "transport_error"


def test_an_error_that_belongs_to_no_request_keeps_its_code(run: Run) -> None:
    assert hostile(run, encode_error(b"", TooManyConnections("full"), 0)) == "too_many_connections"


@pytest.mark.parametrize("data", [b"", b"\0", struct.pack(">3q", 1, 100, 1) + b"half"])
def test_a_peer_that_stops_in_the_middle(run: Run, data: bytes) -> None:
    assert hostile(run, data) == "connection_lost"
    assert hostile(run, data, close=False, timeout_ms=300) == "deadline_exceeded"


def test_random_bytes(run: Run) -> None:
    rng = random.Random(3)
    answers = [rng.randbytes(rng.randrange(1, 200)) for _ in range(30)]
    for index in range(0, 30, 2):  # half of them begin like a reply
        head = struct.pack(">3q", rng.randrange(300), rng.randrange(300), rng.randrange(-3, 3))
        answers[index] = head + answers[index]

    def script(data: bytes) -> Callable[[socket.socket], None]:
        def play(sock: socket.socket) -> None:
            read_frame(sock)
            sock.sendall(data)

        return play

    with scripted(*map(script, answers)) as (address, connections):
        client = run("sync", f"tcp://{address}", "timeout_ms", 60_000)
        for _ in answers:
            with pytest.raises(Refused) as refused:
                client.step("start")
            assert refused.value.code in ("transport_error", "connection_lost", "connect_failed"), refused.value
        assert len(connections) == len(answers)


# Callbacks


def test_callbacks_fire_in_poll_and_nowhere_else(run: Run, service: Both) -> None:
    server, _ = service
    client = run("async", server.url, 1)
    first, second = client.send("start", "a", b"1"), client.send("start", "b", b"2")
    assert client.ask("state", "a") == "none 0 2"
    fired = client.poll_for(2)
    assert fired == {first: f"ok {b'1'.hex()}", second: f"ok {b'2'.hex()}"}
    assert client.ask("state", "a") == "running 0 0"
    tags = [client.send("tick", "a", b"x"), client.send("call", "", b"y"), client.send("call", "", b"z")]
    assert {answer(what) for what in client.poll_for(3).values()} == {b"x", b"y", b"z"}
    assert client.ask("state", "a") == "running 1 0"
    assert client.poll(10) == {}
    stopped = client.send("stop", "a", b"bye")
    assert client.poll_for(1) == {stopped: f"ok {b'bye'.hex()}"}
    assert client.ask("state", "a") == "none 0 0"
    assert tags == [2, 3, 4]
    assert server.accepted == 1


def test_calls_that_are_refused_at_once(run: Run, service: Both) -> None:
    server, _ = service
    client = run("async", server.url, 1, "max_in_flight", 2)

    def refused(kind: str, session: str, body: bytes = b"") -> str:
        with pytest.raises(Refused) as error:
            client.send(kind, session, body)
        return error.value.code

    assert refused("tick", "a") == "session_unknown"
    client.send("start", "a", b"")
    assert refused("start", "a") == "session_exists"
    assert refused("tick", "a") == "session_error"
    client.send("call", "", b"x")
    assert refused("call", "", b"y") == "queue_full"
    assert refused("start", "b") == "queue_full"
    assert len(client.poll_for(2)) == 2
    client.send("tick", "a", b"x")
    assert refused("stop", "a") == "session_error"
    client.poll_for(1)


@pytest.mark.parametrize("service", [{"keys": KEYS}, {}], indirect=True, ids=["keys", "no keys"])
def test_replies_out_of_order_and_late_ones(run: Run, service: Both, request: Any) -> None:
    """A late reply is dropped: it is not taken for that of the session's next request, even if both have one time."""
    server, _ = service
    keys = ("key", KEY, "secret", SECRET.decode()) if "no keys" not in request.node.name else ()
    client = run("async", server.url, 1, "timeout_ms", 3000, *keys)
    a, b = client.send("start", "a", b""), client.send("start", "b", b"")
    assert set(client.poll_for(2)) == {a, b}
    slow, fast = client.send("tick", "a", b"slow"), client.send("tick", "b", b"fast")
    slow_call = client.send("call", "", b"slow")
    assert client.poll_for(1) == {fast: f"ok {b'fast'.hex()}"}
    again = client.send("tick", "b", b"again")
    assert answer(client.poll_for(1)[again]) == b"again"
    late = client.poll_for(2)
    assert {late[slow].split()[1], late[slow_call].split()[1]} == {"deadline_exceeded"}
    queued = client.send("tick", "a", b"queued")  # goes out before the late reply is there
    server.go_on.set()
    assert client.poll_for(1) == {queued: f"ok {b'queued'.hex()}"}
    assert server.applied["a"] == [b"slow", b"queued"]
    assert server.accepted == 1


def crowd(client: Driver) -> dict[str, int]:
    seen = {}
    while (line := client.hear()) != ".":
        what, count = line.split()
        seen[what] = int(count)
    return seen


@pytest.mark.parametrize("service", [{"keys": KEYS}, {}], indirect=True, ids=["keys", "no keys"])
def test_a_hundred_sessions_on_two_connections(run: Run, service: Both, request: Any) -> None:
    server, _ = service
    keys = ("key", KEY, "secret", SECRET.decode()) if "no keys" not in request.node.name else ()
    client = run("crowd", server.url, 100, 2, 20, *keys)
    assert client.hear() == "playing"
    # A start answers its own body, which the player does not compare with a name: it is "right" when empty.
    assert crowd(client) == {"right": 100 * 22}
    assert server.accepted == 2
    assert {name: len(bodies) for name, bodies in server.applied.items()} == {f"crowd-{n}": 20 for n in range(100)}
    assert all(
        body.split(b".")[0] == f"{name}/{number}".encode()
        for name, bodies in server.applied.items()
        for number, body in enumerate(bodies, 1)
    )


def test_connections_that_break_under_a_crowd(run: Run, service: Both) -> None:
    server, proxy = service
    client = run("crowd", proxy.url, 40, 2, 50, "reconnect_ms", 10000)
    assert client.hear() == "playing"
    until(lambda: len(server.applied) == 40 and all(server.applied.values()))
    done: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: done.append(crowd(client)))
    reader.start()
    while reader.is_alive():
        proxy.lose_in = 17
        reader.join(0.02)
    seen = done[0]
    # A stop whose reply was lost succeeds with an empty body, which the player calls wrong; no tick may be.
    assert seen.pop("wrong", 0) <= 40
    assert set(seen) == {"right"}
    assert proxy.connections > 2
    for name, bodies in server.applied.items():
        assert [body.split(b".")[0] for body in bodies] == [f"{name}/{number}".encode() for number in range(1, 51)]
    assert Counter(reason for _, reason in server.ends) == {"stop": 40}


# The examples


class Balancer(Actor):
    """Answers CartPole's JSON with the obvious policy, and keeps what it saw."""

    def __init__(self, games: list[dict[str, Any]]) -> None:
        self.games = games

    async def start(self, session: str, body: bytes) -> bytes:
        self.game: dict[str, Any] = {"start": json.loads(body), "obs": [], "actions": [], "rewards": []}
        self.games.append(self.game)
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        tick = json.loads(body)
        assert set(tick) == {"obs", "reward"}
        action = int(tick["obs"][2] + tick["obs"][3] > 0) if len(self.games) % 2 else 1
        self.game["obs"].append(tick["obs"])
        self.game["rewards"].append(tick["reward"])
        self.game["actions"].append(action)
        return json.dumps({"action": action}).encode()

    async def stop(self, body: bytes) -> bytes:
        self.game["stop"] = json.loads(body)
        return b"Game Stopped"


def test_the_example_plays_cartpole(cartpole: Path) -> None:
    """Its games are replayed in Gymnasium: the same actions from the same state lead to the same observations."""
    games: list[dict[str, Any]] = []
    with serving(lambda: Balancer(games)) as (server, _):
        command = [str(cartpole), server.url, "--games", "4", "--seed", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(games) == 4
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    ends = set()
    for number, (game, line) in enumerate(zip(games, done.stdout.splitlines(), strict=True)):
        stop = game["stop"]
        length = len(game["actions"])
        how = "terminated" if stop["terminated"] else "truncated"
        assert line == f"game {number}: return {length}, {how}"
        assert game["start"] == {"env_id": "CartPole-v1", "seed": 5 + number}
        assert game["rewards"] == [0.0] + [1.0] * (length - 1)
        assert stop["reward"] == 1.0
        assert stop["terminated"] is not stop["truncated"]
        assert max(map(abs, game["obs"][0])) <= 0.05
        env.reset()
        env.state = np.array(game["obs"][0])
        for action, seen in zip(game["actions"], [*game["obs"][1:], stop["obs"]], strict=True):
            expected, _, terminated, _, _ = env.step(action)
            np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-6)
            env.state = np.array(seen)  # what is rounded in one step shall not grow over the next
        assert terminated == stop["terminated"]
        assert length == 500 or stop["terminated"]
        ends.add(how)
    assert ends == {"terminated", "truncated"}, "both ways to end are seen"


class ByContract(Actor):
    """Pushes to the side to which the pole falls, and keeps the ticks of each game."""

    def __init__(self, games: list[list[Tick]]) -> None:
        self.ticks: list[Tick] = []
        games.append(self.ticks)

    async def start(self, session: str, body: bytes) -> bytes:
        self.bodies = ContractBodies(Contract.parse(json.loads(body)))
        return json.dumps({"contract": 1, "id": self.bodies.contract.id}).encode()

    async def tick(self, body: bytes) -> bytes:
        self.ticks.append(self.bodies.decode(body))
        obs = self.ticks[-1].obs["obs"]
        return self.bodies.encode({"push": int(obs[2] + obs[3] > 0)})

    async def stop(self, body: bytes) -> bytes:
        last = self.bodies.decode_stop(body)
        assert last is not None
        self.ticks.append(last)
        return b""


def test_the_example_plays_cartpole_by_contract(cartpole: Path) -> None:
    games: list[list[Tick]] = []
    with serving(lambda: ByContract(games)) as (server, _):
        command = [str(cartpole), server.url, "--games", "2", "--seed", "5", "--contract"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    for number, (ticks, line) in enumerate(zip(games, done.stdout.splitlines(), strict=True)):
        *before, last = ticks
        assert line == f"game {number}: return {len(before)}, {'terminated' if last.terminated else 'truncated'}"
        assert last.terminated is not last.truncated
        assert [tick.reward for tick in ticks] == [0.0] + [1.0] * len(before)
        env.reset()
        for tick, following in itertools.pairwise(ticks):
            env.state = tick.obs["obs"].astype(np.float64)
            expected, *_ = env.step(int(tick.obs["obs"][2] + tick.obs["obs"][3] > 0))
            np.testing.assert_allclose(following.obs["obs"], expected, rtol=1e-5, atol=1e-5)


def test_bodies_by_contract_are_those_of_the_protocol(run: Run) -> None:
    """Every kind of part, written in C++ and read in Python."""
    game = run("contract")
    contract = Contract.parse(json.loads(game.step("start")))
    assert (contract.behaviour, contract.encoding) == ('a "b"', "packed")
    kinds = [(spec.name, spec.kind, spec.shape, spec.dtype) for spec in contract.observations]
    assert kinds == [
        ("cart", "vector", (2,), "float32"),
        ("wide", "vector", (2,), "float64"),
        ("eyes", "image", (1, 2, 3), "uint8"),
        ("units", "entities", (3, 2), "float32"),
        ("card", "category", (), "int32"),
        ("said", "text", (8,), "uint8"),
    ]
    assert contract.actions == (
        ActionPart("go", "discrete", 3, 5, mask=True),
        ActionPart("steer", "continuous", 2, low=(-0.5, -0.5), high=(2.0, 2.0)),
        ActionPart("dash", "discrete", 2, mask=True),
    )
    assert contract.rewards == pytest.approx({"win": 1.0, "style": 0.1})

    bodies = ContractBodies(contract)
    tick = bodies.decode(game.step("tick"))
    assert tick.rewards == {"win": 1.0, "style": 0.5}
    assert {name: array.tolist() for name, array in tick.obs.items()} == {
        "cart": [0.5, -1.0],
        "wide": [np.float32(0.1), -2.0],
        "eyes": [[[1, 2, 3], [4, 5, 255]]],
        "units": [[1, 2], [3, 4], [0, 0]],
        "card": 51,
        "said": [*"né".encode(), 0, 0, 0, 0, 0],
        "action_mask": [0, 1, 1, 1, 0],
    }
    cut = bodies.decode_stop(game.step("cut"))
    assert cut is not None
    assert (cut.truncated, cut.obs["action_mask"].tolist()) == (True, [1] * 5)
    stop = bodies.decode_stop(game.step("stop"))
    assert stop is not None
    assert (stop.terminated, stop.obs) == (True, {})
    reply = bodies.encode({"go": 7, "steer": [-0.5, 2.0], "dash": 1})
    assert game.step("reply", reply) == b"7 -0.5 2 1"


def test_rows_of_several_agents_are_those_of_the_protocol(run: Run) -> None:
    game = run("contract")
    start = json.loads(game.step("start-rows"))
    assert start.pop("rows") is True
    bodies = RowBodies(Contract.parse(start))
    tick = bodies.decode(game.step("rows"))
    assert tick.agents.tolist() == [3, 3, 8]
    assert tick.groups.tolist() == [0, 7, 7]
    assert tick.terminated.tolist() == [True, False, False]
    assert not tick.truncated.any()
    assert {name: rewards.tolist() for name, rewards in tick.rewards.items()} == {
        "win": [1, 1, 2],
        "style": [0.5, 0.5, 0],
    }
    obs = {name: array.tolist() for name, array in tick.obs.items()}
    assert obs["cart"] == [[0.5, -1.0], [0.5, -1.0], [2.0, 3.0]]
    assert obs["units"] == [[[1, 2], [3, 4], [0, 0]], [[1, 2], [3, 4], [0, 0]], [[9, 8], [0, 0], [0, 0]]]
    assert obs["card"] == [51, 51, 0]
    assert obs["said"][1:] == [[*"né".encode(), 0, 0, 0, 0, 0], [0] * 8]
    assert obs["action_mask"] == [[1] * 5, [0, 1, 1, 1, 0], [1] * 5]
    reply = bodies.encode({"go": np.array([7, 6]), "steer": np.zeros((2, 2)), "dash": np.array([1, 0])})
    assert game.step("row-replies", reply) == b"71 60 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rewards"], "bad_body: the tick has 1, expected 2 rewards"),
        (["count"], "bad_body: obs.cart has 3, expected 2 numbers"),
        (["dtype"], "bad_body: obs.cart is uint8, expected float32"),
        (["few"], "bad_body: the tick has 1, expected 6 observations"),
        (["many"], "bad_body: the tick has 7, expected 6 observations"),
        (["rows"], "bad_body: obs.units has 8, expected 6 numbers at most, in whole rows"),
        (["mask"], "bad_body: mask has 1, expected 5 choices"),
        (["early"], "bad_body: the tick has 0, expected 6 observations before its mask"),
        (["row"], "bad_body: the row has 0, expected 6 observations"),
        (["row-reply"], "transport_error: the reply has 1 bytes, expected 16"),
        (["name"], "bad_config: the contract has no discrete action 'steer'"),
        (["check", hexed(b"Game Started")], "transport_error: the service takes no contracts: expected a job like"),
    ],
)
def test_what_does_not_fit_a_contract_is_refused(run: Run, words: list[str], message: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(message)}"):
        answer(run("contract").ask("wrong", *words))


@pytest.mark.parametrize("reply", [b"", b'{"action": 2}', b'{"action": "left"}', b"left"])
def test_the_example_refuses_an_invalid_action(cartpole: Path, reply: bytes) -> None:
    class Wrong(Balancer):
        async def tick(self, body: bytes) -> bytes:
            return reply

    with serving(lambda: Wrong([])) as (server, _):
        done = subprocess.run([str(cartpole), server.url, "--games", "1"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cartpole: transport_error: the actor's reply is no")


class Columns(Actor):
    """Plays legal columns of connect four at random, and keeps each seat's bodies by game and seat."""

    def __init__(self, games: dict[str, dict[str, list[Any]]]) -> None:
        self.games = games
        self.rng = random.Random(len(games))

    async def start(self, session: str, body: bytes) -> bytes:
        game, _, seat = session.partition("-agent-")
        self.bodies = self.games.setdefault(game, {})[seat] = [json.loads(body)]
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        tick = json.loads(body)
        column = self.rng.choice([column for column, legal in enumerate(tick["legal"]) if legal])
        self.bodies.append({**tick, "move": column})
        return json.dumps({"move": column}).encode()

    async def stop(self, body: bytes) -> bytes:
        self.bodies.append(json.loads(body) if body else None)
        return b"Game Stopped"


def test_the_example_plays_connect_four(connect_four: Path) -> None:
    """Its games are replayed by the template's rules: the same moves lead to the same bodies."""
    rules = load_module("four_rules", str(ROOT / "pipelines" / "templates" / "league"))
    games: dict[str, dict[str, list[Any]]] = {}
    with serving(lambda: Columns(games)) as (server, _):
        command = [str(connect_four), server.url, "--games", "20"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(games) == 20
    firsts = [rules.RED, rules.YELLOW] * 10
    for number, (seats, first, line) in enumerate(zip(games.values(), firsts, done.stdout.splitlines(), strict=True)):
        game, bodies = rules.Four(first), {rules.RED: iter(seats["red"]), rules.YELLOW: iter(seats["yellow"])}
        assert [next(seat_bodies) for seat_bodies in bodies.values()] == [{"against": ""}] * 2
        while not game.over:
            tick = next(bodies[game.turn])
            move = tick.pop("move")
            assert tick == {"board": game.see(game.turn), "legal": game.legal, "reward": 0.0}
            game.move(move)
        for seat, rest in bodies.items():
            reward = game.winner * seat
            result = {1: "win", 0: "draw", -1: "loss"}[reward]
            last = {"board": game.see(seat), "legal": game.legal, "reward": reward, "result": result}
            assert list(rest) == [last]
        won = {rules.RED: "red wins", rules.YELLOW: "yellow wins", 0: "draw"}[game.winner]
        assert line == f"game {number}: {won}"


@pytest.mark.parametrize("reply", [b"", b'{"move": 7}', b'{"move": "left"}', b"left"])
def test_an_illegal_column_ends_the_game_of_connect_four(connect_four: Path, reply: bytes) -> None:
    class Wrong(Columns):
        async def tick(self, body: bytes) -> bytes:
            return reply

    games: dict[str, dict[str, list[Any]]] = {}
    with serving(lambda: Wrong(games)) as (server, _):
        command = [str(connect_four), server.url, "--games", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith('connect_four: transport_error: the reply to red is no {"move": legal column}')
    (seats,) = games.values()
    assert [bodies[-1] for bodies in seats.values()] == [None, None], "both sessions end, without a result"


# The load generator


def loaded(program: Path, *arguments: object, code: int = 0) -> dict[str, float]:
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    assert set(result) == {"ticks", "ticks_per_s", "p50_s", "p99_s", "errors", "cpu_s"}
    return result


@pytest.mark.parametrize(("connections", "check"), [(1, ("--check",)), (3, ()), (16, ("--check",))])
def test_load_over_tcp(load: Path, service: Both, connections: int, check: tuple[str, ...]) -> None:
    server, _ = service
    result = loaded(load, "--url", server.url, "--sessions", 16, "--connections", connections, "--seconds", 1, *check)
    assert result["errors"] == 0
    assert result["ticks"] > 0
    assert result["ticks_per_s"] == pytest.approx(result["ticks"], abs=0.1)
    assert 0 < result["p50_s"] <= result["p99_s"] < 10
    assert server.accepted == connections
    assert len(server.applied) == 16
    until(lambda: Counter(reason for _, reason in server.ends) == {"stop": 16})
    applied = [body for bodies in server.applied.values() for body in bodies]
    assert result["ticks"] <= len(applied), "the warm-up and the last ticks are not counted"
    assert {len(body) for body in applied} == {256}
    assert len(set(applied)) == (len(applied) if check else 1)


@pytest.mark.parametrize("scheme", ["http", "ws"])
@pytest.mark.parametrize("body", ["echo", "cartpole"])
def test_load_over_http_and_websocket(load: Path, scheme: str, body: str) -> None:
    app = EchoApp(prefix="/game")
    with serving_http(app) as address:
        url = f"{scheme}://{address}/game/"
        check = ["--check"] if body == "echo" else []
        result = loaded(load, "--url", url, "--sessions", 4, "--seconds", 1, "--body", body, *check)
        until(lambda: not app.running)
    assert result["errors"] == 0
    assert result["ticks"] > 0
    assert {len(r.body) for r in app.requests if r.kind == "tick"} == {256 if body == "echo" else 65}
    assert len({r.session for r in app.requests}) == 4


@pytest.mark.parametrize("scheme", ["http", "ws"])
@pytest.mark.parametrize(
    ("wrong", "options"),
    [(lambda body: body[:-1], ()), (lambda body: bytes(256), ("--check",))],
    ids=["short", "other"],
)
def test_load_counts_wrong_replies(
    load: Path, scheme: str, wrong: Callable[[bytes], bytes], options: tuple[str, ...]
) -> None:
    with serving_http(EchoApp(wrong)) as address:
        result = loaded(load, "--url", f"{scheme}://{address}", "--sessions", 3, "--seconds", 0.1, *options, code=1)
    assert (result["errors"], result["ticks"]) == (3, 0)


class Swapper(Actor):
    """Answers one session's tick with another's: what a load that checks must see, and one that does not cannot."""

    last = b"x" * 256

    async def start(self, session: str, body: bytes) -> bytes:
        return body

    async def tick(self, body: bytes) -> bytes:
        Swapper.last, body = body, Swapper.last
        return body

    async def stop(self, body: bytes) -> bytes:
        return body


def test_load_detects_a_reply_of_another_session(load: Path) -> None:
    with serving(Swapper) as (server, _):
        assert loaded(load, "--url", server.url, "--sessions", 4, "--seconds", 1)["errors"] == 0
        result = loaded(load, "--url", server.url, "--sessions", 4, "--seconds", 0.1, "--check", code=1)
        assert result["errors"] > 0


@pytest.mark.parametrize("service", [{"actors_per_worker": 2}], indirect=True)
def test_load_counts_errors_of_the_door(load: Path, service: Both) -> None:
    server, _ = service
    done = subprocess.run(
        [str(load), "--url", server.url, "--sessions", "5", "--seconds", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["errors"] == 3
    assert json.loads(done.stdout)["ticks"] > 0
    assert "service_full" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://h"], "expected tcp://, http:// or ws://"),
        (["--url", "tcp://127.0.0.1:1"], "cannot connect to 127.0.0.1:1: Connection refused"),
        (["--url", "http://127.0.0.1", "--connections", "1"], "each session has a connection of its own"),
        (["--url", "tcp://127.0.0.1", "--sessions", "0"], "--sessions: expected a number from 1"),
        (["--url", "tcp://127.0.0.1", "--body", "x"], "--body x: expected"),
        (["--url"], "--url: expected a value"),
    ],
)
def test_load_says_what_it_cannot_do(load: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([str(load), *arguments], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_load_names_a_peer_that_is_not_a_door(load: Path, service: Both) -> None:
    server, _ = service
    with serving_http(EchoApp()) as address:
        for url in (f"tcp://{address}", server.url.replace("tcp", "http"), server.url.replace("tcp", "ws")):
            command = [str(load), "--url", url, "--sessions", "2", "--seconds", "0.1"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert (done.returncode, done.stdout) == (1, ""), url
            assert done.stderr.startswith("load: "), url


def test_the_readme(folder: Path, service: Both) -> None:
    server, _ = service
    programs = re.findall(r"```cpp\n(.*?)```", (CLIENT / "README.md").read_text(), re.S)
    said = []
    for number, text in enumerate(programs):
        (folder / f"readme{number}.cpp").write_text(text.replace("tcp://127.0.0.1:8101", server.url))
        program = build(str(folder / f"readme{number}.cpp"), folder)
        said.append(subprocess.run([str(program)], capture_output=True, text=True, timeout=240, check=True).stdout)
    assert said == ["observation\n", "100 actions\n"]


def test_the_header_stands_in_two_files_of_one_program(folder: Path) -> None:
    """Header-only means that no definition is there twice when the program is linked."""
    assert COMPILER is not None
    name = uuid.uuid4().hex
    for unit, text in (("one", "int two(); int main() { return two(); }"), ("two", "int two() { return 0; }")):
        (folder / f"{name}-{unit}.cpp").write_text(f'#include "brayx.hpp"\n{text}\n')
    sources = [str(folder / f"{name}-{unit}.cpp") for unit in ("one", "two")]
    command = [COMPILER, "-std=c++17", *WARNINGS, "-I", str(CLIENT), *sources, "-o", str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
