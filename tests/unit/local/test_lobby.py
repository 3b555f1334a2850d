"""Doors that wait for a contract: the first start says it, and those that come meanwhile are held, not refused."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from brayx.actor.serving import Runtime
from brayx.errors import BadBody, Overloaded, ServiceFull, StartupError
from brayx.gamecore.client import Client
from brayx.gamecore.contract import Contract
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
            with pytest.raises(BadBody, match="no contract is known yet: send all of it"):
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
            waiting.admit()
            assert [start.result(30) for start in starts] == [START.encode()] * 2
            assert first.tick("5") == b"5"
        part, _ = recorder.drain()
    assert part["sessions_started", ""].total == 2.0, "the doors' own samples are the job's"


def test_games_that_fail_and_send_no_contract_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.local.lobby._CONNECT_S", 0.0)
    said: list[str] = []
    with lobby("actor.gamecores=[{command: \"sh -c 'echo no screen; exit 3'\"}]") as waiting:
        waiting.say = said.append
        with pytest.raises(StartupError, match=r"no game has sent its contract .*1 gamecore was given no URL"):
            waiting.wait()
    assert waiting.games.running == 0
    assert any("no screen" in line for line in said), "what a game says while all wait is on the screen"


def test_a_start_that_is_held_when_the_job_fails_is_told_so(pool: ThreadPoolExecutor) -> None:
    with contextlib.ExitStack() as clients:
        with lobby() as waiting:
            client = clients.enter_context(Client(waiting.doors.urls["tcp"]))
            start = pool.submit(client.start, START, "a")
            waiting.wait()
        with pytest.raises(ServiceFull, match="the training ended before its model acted"):
            start.result(30)
