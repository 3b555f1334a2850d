"""Doors that wait for a contract: the first start says it, and those that come meanwhile are held, not refused."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from brayx.actor.serving import Runtime
from brayx.errors import (
    BadBody,
    BadLimits,
    BrayxError,
    LeagueError,
    Overloaded,
    ProtocolError,
    ServiceFull,
    StartupError,
    Unauthorized,
)
from brayx.gamecore.auth import new_key
from brayx.gamecore.client import Client
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import WS_SUBPROTOCOL, FrameKind, StepKind, StepRequest, encode_frame
from brayx.gamecore.status import read_status
from brayx.gamecore.tcp import encode_request
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.local.lobby import Lobby
from brayx.metrics import Recorder
from tests.unit.actor.doors.test_asgi import Echo
from tests.waiting import until

CONTRACT = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {"go": {"kind": "discrete", "size": 2}},
}
START = json.dumps(CONTRACT)
OTHER = {**CONTRACT, "observations": {"side": {"shape": [3]}}}
PORTS = ("actor.port=0", "actor.native_port=0", "actor.tcp_port=0")


def lobby(*options: str) -> Lobby:
    return Lobby(JobConfig.load(TEMPLATES / "game.yaml", [*PORTS, *options]), "actor")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_the_first_start_says_the_contract_and_starts_are_held_until_the_model_acts(pool: ThreadPoolExecutor) -> None:
    recorder, said = Recorder(), list[str]()
    with lobby() as waiting:
        waiting.say = said.append
        urls = waiting.doors.urls
        deciding = pool.submit(waiting.wait)
        with Client(urls["tcp"]) as first, Client(urls["http"]) as second, Client(urls["ws"]) as third:
            with pytest.raises(BadBody, match="observations is missing"):
                first.start(json.dumps({"contract": 1}))
            with pytest.raises(BadBody, match=r"observations\.side takes the network to \d+ parameters"):
                first.start(json.dumps({**CONTRACT, "observations": {"side": {"shape": [2**24]}}}))
            with pytest.raises(BadBody, match="no contract is known yet: send the whole one"):
                first.start(json.dumps({"contract": "sha256:1"}))
            with pytest.raises(Overloaded, match="no game has sent its contract yet"):
                second.call("1")
            starts: list[Future[bytes]] = [pool.submit(first.start, START, "a")]
            job = deciding.result(30)
            assert job.contract == Contract.parse(CONTRACT).as_dict()
            assert said == [f"waiting for a game: it connects to {', '.join(urls.values())}"]
            with pytest.raises(BadBody, match=r"observations\.side\.shape is \[3\], expected \[2\]"):
                second.start(json.dumps(OTHER), "b")
            starts.append(pool.submit(third.start, START, "c"))
            until(lambda: len(waiting.doors.table.sessions) == 2, "both starts are held")
            waiting.bind(Runtime(functools.partial(Echo, []), recorder), said.append, lambda: None)
            assert not any(start.done() for start in starts)
            waiting.admit("agent")
            assert [start.result(30) for start in starts] == [START.encode()] * 2
            assert first.tick("5") == b"5"
        part, _ = recorder.drain()
    assert part["sessions_started", ""].total == 2.0, "the doors' own samples are the job's"


GAME = """
import sys, time
from brayx.gamecore.auth import credentials
from brayx.gamecore.client import Client
Client(sys.argv[1], timeout_s=600.0, **credentials()).start(sys.argv[2])
"""


def test_the_doors_require_the_jobs_keys_which_its_own_games_find(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    keys, game = tmp_path / "keys.txt", tmp_path / "game.py"
    new_key(keys)
    game.write_text(GAME)
    command = shlex.join([sys.executable, str(game), "{tcp_url}", START])
    gamecores = json.dumps([{"command": command}])
    with lobby(f"actor.keys_file={keys}", f"actor.gamecores={gamecores}") as waiting:
        for url in waiting.doors.urls.values():
            with Client(url) as stranger, pytest.raises(Unauthorized, match="requires keys"):
                stranger.start(json.dumps(OTHER))
        assert pool.submit(waiting.wait).result(60).contract == Contract.parse(CONTRACT).as_dict()


@pytest.mark.parametrize(
    ("body", "options", "error", "message"),
    [
        ({"forbidden": {"jump": [1]}}, {}, BadBody, "jump"),
        ({"forced": {"go": 1}}, {}, BadLimits, "forced.go limits an action while the model learns"),
        ({}, {"opponent": {"level": "hard"}}, LeagueError, "this service has no league"),
        ({}, {"record": True}, ProtocolError, "does not record sessions on request"),
    ],
)
def test_a_start_that_the_job_would_refuse_decides_no_contract(
    body: dict[str, Any], options: dict[str, Any], error: type[BrayxError], message: str, pool: ThreadPoolExecutor
) -> None:
    with lobby() as waiting, Client(waiting.doors.url) as refused, Client(waiting.doors.url) as game:
        with pytest.raises(error, match=message):
            refused.start(json.dumps({**OTHER, **body}), **options)
        start = pool.submit(game.start, START)
        assert waiting.wait().contract == Contract.parse(CONTRACT).as_dict()
        waiting.bind(Runtime(functools.partial(Echo, [])), waiting.say, lambda: None)
        waiting.admit("agent")
        start.result(30)


def by_tcp(address: tuple[str, int]) -> Callable[[], None]:
    connection = socket.create_connection(address)
    connection.sendall(encode_request(StepRequest(StepKind.START, "s", START.encode()), 1))
    return connection.close


def by_http(address: tuple[str, int]) -> Callable[[], None]:
    connection = socket.create_connection(address)
    head = f"POST /step HTTP/1.1\r\nhost: 127.0.0.1\r\nsession: s\r\nstep_kind: start\r\ncontent-length: {len(START)}"
    connection.sendall(f"{head}\r\n\r\n{START}".encode())
    return connection.close


def by_websocket(address: tuple[str, int], early: int = 0) -> Callable[[], None]:
    url = f"ws://{address[0]}:{address[1]}/session?session=s"
    stack = contextlib.ExitStack()
    connection = stack.enter_context(connect(url, subprotocols=[Subprotocol(WS_SUBPROTOCOL)]))
    for frame in (FrameKind.START, *[FrameKind.TICK] * early):
        connection.send(encode_frame(frame, START.encode()))
    return stack.close


def by_grpc(address: tuple[str, int], method: str) -> Callable[[], None]:
    channel = grpc.insecure_channel(f"{address[0]}:{address[1]}")
    stub, request = GamecoreStub(channel), pb.StepRequest(kind=pb.STEP_KIND_START, session="s", body=START.encode())
    call = stub.Step.future(request) if method == "Step" else stub.Play(iter([request]))

    def leave() -> None:
        call.cancel()
        channel.close()

    return leave


def test_a_client_that_leaves_while_its_start_is_held_leaves_its_slot(pool: ThreadPoolExecutor) -> None:
    with lobby("actor.actors_per_worker=1", "actor.grpc_port=0") as waiting:
        endpoints = {name: Endpoint.parse(url) for name, url in waiting.doors.urls.items()}
        addresses = {name: (endpoint.host, endpoint.port) for name, endpoint in endpoints.items()}

        def sessions() -> int:
            status = read_status(endpoints["http"], 30)
            assert status is not None
            return int(status["sessions"])

        for door, send_start in (
            ("tcp", by_tcp),
            ("http", by_http),
            ("ws", by_websocket),
            ("ws", functools.partial(by_websocket, early=3)),
            ("grpc", functools.partial(by_grpc, method="Step")),
            ("grpc", functools.partial(by_grpc, method="Play")),
        ):
            leave = send_start(addresses[door])
            until(lambda: sessions() == 1, f"the start over {door} is held")
            leave()
            until(lambda: sessions() == 0, f"the slot of the client of {door} is free")
        waiting.bind(Runtime(functools.partial(Echo, [])), waiting.say, lambda: None)
        with Client(waiting.doors.url) as client:
            start = pool.submit(client.start, START, "s")
            until(lambda: sessions() == 1, "a later start is held in the only slot")
            waiting.admit("agent")
            assert start.result(30) == START.encode()


def test_what_a_client_sends_behind_its_held_start_is_answered_in_order(pool: ThreadPoolExecutor) -> None:
    with lobby() as waiting:
        url = f"{waiting.doors.urls['ws']}/session?session=s"
        with connect(url, subprotocols=[Subprotocol(WS_SUBPROTOCOL)]) as connection:
            bodies = [START.encode(), *(f"{number}".encode() for number in range(100))]
            for number, body in enumerate(bodies):
                connection.send(encode_frame(FrameKind.TICK if number else FrameKind.START, body))
            waiting.wait()
            waiting.bind(Runtime(functools.partial(Echo, [])), waiting.say, lambda: None)
            waiting.admit("agent")
            assert [connection.recv(30) for _ in bodies] == [encode_frame(FrameKind.REPLY, body) for body in bodies]


def test_another_behaviour_is_held_until_it_acts_or_is_refused(pool: ThreadPoolExecutor) -> None:
    keeper = {**OTHER, "behaviour": "keeper"}
    runner = {**CONTRACT, "behaviour": "runner"}
    with lobby() as waiting, contextlib.ExitStack() as clients:
        first, second, third, fourth = (clients.enter_context(Client(waiting.doors.urls["tcp"])) for _ in range(4))
        starts = [pool.submit(first.start, START, "a")]
        waiting.wait()
        assert waiting.arrived() == []
        waiting.bind(Runtime(functools.partial(Echo, []), Recorder()), lambda line: None, lambda: None)
        starts.append(pool.submit(second.start, json.dumps(keeper), "b"))
        starts.append(pool.submit(third.start, json.dumps(runner), "c"))
        until(lambda: waiting._arrived.qsize() == 2, "both starts are held")
        assert {contract.behaviour for contract in waiting.arrived()} == {"keeper", "runner"}
        assert waiting.arrived() == []
        waiting.admit("runner")
        assert starts[2].result(30) == json.dumps(runner).encode()
        with pytest.raises(BadBody, match='several behaviours have this contract: add "behaviour"'):
            fourth.start(json.dumps({"contract": Contract.parse(CONTRACT).id}), "d")
        by_id = json.dumps({"contract": Contract.parse(CONTRACT).id, "behaviour": "runner"})
        assert fourth.start(by_id, "e") == by_id.encode()
        assert not starts[0].done()
        assert not starts[1].done()
        waiting.admit("keeper", "no network for it")
        with pytest.raises(BadBody, match="behaviour 'keeper' cannot be learned: no network for it"):
            starts[1].result(30)
        with pytest.raises(BadBody, match="behaviour 'keeper' cannot be learned: no network for it"):
            second.start(json.dumps(keeper), "b")
        assert waiting.arrived() == []
        waiting.expect(Contract.parse({**CONTRACT, "behaviour": "resumed"}))
        with pytest.raises(BadBody, match=r"observations\.side\.shape is \[3\], expected \[2\]"):
            second.start(json.dumps({**OTHER, "behaviour": "resumed"}), "g")
        assert waiting.arrived() == [], "the job has it already"
        again = pool.submit(second.start, json.dumps({**keeper, **CONTRACT}), "f")
        until(lambda: [contract.behaviour for contract in waiting.arrived()] == ["keeper"], "it may come otherwise")
        waiting.admit("keeper")
        waiting.admit("agent")
        assert again.result(30)
        assert starts[0].result(30)


def test_behaviours_that_the_job_does_not_name_may_be_refused(pool: ThreadPoolExecutor) -> None:
    options = ("behaviours={keeper: {}, runner: {}}", "other_behaviours=refuse")
    with lobby(*options) as waiting, Client(waiting.doors.urls["tcp"]) as client:
        with pytest.raises(BadBody, match='behaviour is \'agent\', expected one of "keeper", "runner"; rename it'):
            client.start(START, "a")
        start = pool.submit(client.start, json.dumps({**CONTRACT, "behaviour": "keeper"}), "b")
        assert Contract.parse(waiting.wait().contract).behaviour == "keeper"
        waiting.bind(Runtime(functools.partial(Echo, [])), waiting.say, lambda: None)
        waiting.admit("keeper")
        assert start.result(30)


def test_there_are_only_so_many_behaviours_and_refused_ones_do_not_count(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.jobs.admission.MAX_BEHAVIOURS", 2)
    monkeypatch.setattr("brayx.jobs.admission.MAX_CONTRACTS", 4)
    with contextlib.ExitStack() as clients:
        with lobby() as waiting:
            client, other = (clients.enter_context(Client(waiting.doors.urls["tcp"])) for _ in range(2))
            start = pool.submit(client.start, START, "a")
            waiting.wait()

            def said_by(name: str, contract: Any = CONTRACT) -> str:
                with pytest.raises(BadBody) as refused:
                    pool.submit(other.start, json.dumps({**contract, "behaviour": name}), name).result(30)
                return str(refused.value)

            def refused(name: str, contract: Any = CONTRACT) -> None:
                saying = pool.submit(said_by, name, contract)
                until(lambda: [contract.behaviour for contract in waiting.arrived()] == [name], "it has come")
                waiting.admit(name, "no network for it")
                assert "no network for it" in saying.result(30)

            refused("keeper")
            refused("runner")
            refused("runner", OTHER)
            assert "has begun to learn 4 contracts" in said_by("jumper")
            assert "no network for it" in said_by("runner", OTHER)
            monkeypatch.setattr("brayx.jobs.admission.MAX_BEHAVIOURS", 1)
            assert "behaviour is 'jumper', expected one of \"agent\"" in said_by("jumper")
        with pytest.raises(ServiceFull):
            start.result(30)


def test_games_that_fail_and_send_no_contract_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.jobs.waiting._CONNECT_S", 0.0)
    said: list[str] = []
    with lobby("actor.gamecores=[{command: \"sh -c 'echo no screen; exit 3'\"}]") as waiting:
        waiting.say = said.append
        with pytest.raises(StartupError, match=r"no game has sent its contract .*1 gamecore was given no URL"):
            waiting.wait()
    assert waiting.games.running == 0
    assert any("no screen" in line for line in said), "what a game says while all wait is on the screen"


def test_a_game_that_ends_too_often_ends_the_wait() -> None:
    options = 'actor.gamecores=[{command: "false", restarts: 0}]'
    with lobby(options) as waiting, pytest.raises(StartupError, match="gamecore 'false' ended once within 60 s"):
        waiting.wait()


def test_a_bridge_that_cannot_listen_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bridge = f"brayx gamecore godot --url {{tcp_url}} --listen {port}"
        waiting = lobby(f'actor.gamecores=[{{command: "{bridge}"}}]')
        waiting.say = said.append
        with waiting:
            until(lambda: waiting.games.failures > 1, "it has tried again")
            monkeypatch.setattr("brayx.jobs.waiting._CONNECT_S", 0.0)
            with pytest.raises(StartupError, match=f"port {port} is taken"):
                waiting.wait()
    assert "waiting for a game" in said, "the job's doors are not where its engine connects"
    lines = [line for line in said if "is taken" in line]
    assert len(lines) == 1
    assert re.fullmatch(rf"port {port} is taken: .*--set game.listen=PORT.*; next try in 1 s", lines[0])


def test_a_wait_for_a_game_is_said_again_and_again(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.jobs.watching._HINT_S", 0.0)
    said: list[str] = []
    with contextlib.ExitStack() as clients, lobby() as waiting:
        waiting.say = said.append
        deciding = pool.submit(waiting.wait)
        until(lambda: len(said) > 2, "it is said again")
        pool.submit(clients.enter_context(Client(waiting.doors.urls["tcp"])).start, START)
        deciding.result(30)
    assert all(line.endswith(said[0]) for line in said)
    assert {line.partition(" for ")[0] for line in said[1:]} == {"no request has come to the door"}


def test_a_start_that_is_held_when_the_job_fails_is_told_so(pool: ThreadPoolExecutor) -> None:
    with contextlib.ExitStack() as clients:
        with lobby() as waiting:
            client = clients.enter_context(Client(waiting.doors.urls["tcp"]))
            start = pool.submit(client.start, START, "a")
            waiting.wait()
        with pytest.raises(ServiceFull, match="the training ended before its model acted"):
            start.result(30)
