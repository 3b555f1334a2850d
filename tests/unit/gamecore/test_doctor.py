"""The doctor on real services, healthy and broken, on every door: the broken layer that it names, and its advice."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.contracts import contract_of
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.examples import contract_facts
from brayx.actor.service import Reply
from brayx.actor.table import SessionTable
from brayx.bridges import gym, pettingzoo
from brayx.errors import BadBody, ConfigError, Unauthorized
from brayx.gamecore.auth import Keys, new_key
from brayx.gamecore.client import Client
from brayx.gamecore.contract import ActionPart, Contract, ObservationSpec
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.doctor import LAYERS, Finding, examine
from brayx.gamecore.protocol import StepRequest
from brayx.ports import free_port
from brayx.strict_json import parse_json
from tests.unit.gamecore import echo_server, grpc_server
from tests.waiting import until

DOORS = ("http", "ws", "tcp", "grpc")
SECRET = "0123456789abcdef"


class Patient(Actor):
    """An agent that answers JSON objects only, and not all of them."""

    async def start(self, session: str, body: bytes) -> bytes:
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        if body == b'{"obs": "slow"}':
            await asyncio.sleep(30)
        if body == b"{}":
            raise KeyError("obs")
        if not body.startswith(b"{"):
            raise BadBody("body is not JSON")
        return b'{"action":1}'

    async def stop(self, body: bytes) -> bytes:
        return b"Game Stopped"


CONTRACT = Contract(
    observations=(ObservationSpec("obs", shape=(2,)),), actions=(ActionPart("action", "discrete", size=2),)
)


class ContractPatient(Actor):
    """An agent that checks bodies by its contract."""

    async def start(self, session: str, body: bytes) -> bytes:
        contract_of(parse_json(body or b"{}"), CONTRACT)
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        ContractBodies(CONTRACT).decode(body)
        return b'{"action":1}'

    async def stop(self, body: bytes) -> bytes:
        return b"Game Stopped"


class Clinic(GrpcDoor, SessionTable):
    """A replica without Ray, with keys and models."""

    idle_timeout_s = 60.0

    def __init__(
        self,
        keys: Keys | None = None,
        models: dict[str, int] | None = None,
        facts: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Patient if facts is None else ContractPatient, SessionConfig(**options))
        self._keys = keys
        self._models = models
        self._page_facts = facts or {}

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        try:
            if self._keys is not None and not let_in:
                self._keys.check(request, time.time())
        except Unauthorized as error:
            reply(error)
            return
        super().submit(request, reply, let_in=let_in)

    def status(self) -> dict[str, Any]:
        models = {} if self._models is None else {"policy_versions": self._models}
        return {"service": "brayx", **super().status(), **models, **self._page_facts}


@contextlib.contextmanager
def door(kind: str, clinic: Clinic) -> Iterator[str]:
    """The URL of a service by one of its doors."""
    if kind in ("http", "ws"):
        with echo_server.serving(DoorApp(clinic)) as address:
            yield f"{kind}://{address}"
    elif kind == "grpc":
        with grpc_server.serving(clinic, clinic.close) as address:
            yield f"grpc://{address}"
    else:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        listener = Listener(clinic, TcpConnection, DoorLimits())
        asyncio.run_coroutine_threadsafe(listener.open("127.0.0.1", 0), loop).result(60)
        try:
            yield "tcp://{}:{}".format(*listener.address)
        finally:
            asyncio.run_coroutine_threadsafe(listener.close(), loop).result(60)
            asyncio.run_coroutine_threadsafe(clinic.close(), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            loop.close()


def broken_layer(findings: list[Finding]) -> Finding:
    """The one finding that failed. All later ones are skipped, except the stop of a session that still runs."""
    assert tuple(finding.layer for finding in findings) == LAYERS
    index = next(number for number, finding in enumerate(findings) if finding.outcome == "failed")
    assert all(finding.outcome == "ok" for finding in findings[:index])
    assert all(finding.outcome == "skipped" or finding.layer == "stop" for finding in findings[index + 1 :])
    assert findings[index].said
    assert findings[index].advice
    return findings[index]


@pytest.mark.parametrize("kind", DOORS)
def test_a_healthy_service(kind: str) -> None:
    clinic = Clinic(models={"model": 401})
    with door(kind, clinic) as url:
        findings = list(examine(url, body=b'{"obs": []}'))
        assert len(clinic) == 0
    said = {finding.layer: finding.said for finding in findings}
    outcomes = {finding.layer: finding.outcome for finding in findings}
    assert said["start"] == "replied 'Game Started'"
    assert said["tick"] == "replied '{\"action\":1}'"
    assert said["stop"] == "replied 'Game Stopped'"
    assert said["auth"] == "no key is required"
    assert set(outcomes.values()) - {"skipped"} == {"ok"}
    if kind in ("http", "ws"):
        assert said["protocol"] == "brayx answers; 0 sessions at this replica"
        assert said["model version"] == "model 401"
    else:
        assert outcomes.pop("model version") == "skipped"
        assert f"{kind} has no status page" in said["model version"]
        assert "http://127.0.0.1:PORT" in said["model version"]
    assert set(outcomes.values()) == {"ok"}


@pytest.mark.parametrize("kind", DOORS)
@pytest.mark.parametrize("waits", [False, True])
def test_a_contract_jobs_door_gets_the_example_of_its_status_page(kind: str, waits: bool) -> None:
    waiting = {"waits_for": "a game's contract"} if waits else {}
    with door(kind, Clinic(facts={**contract_facts(CONTRACT.as_dict()), **waiting})) as url:
        findings = {finding.layer: finding for finding in examine(url)}
    assert {finding.outcome for finding in findings.values()} <= {"ok", "skipped"}
    if kind in ("http", "ws") and not waits:
        assert [findings[layer].outcome for layer in ("start", "tick", "stop")] == ["ok"] * 3
        assert findings["tick"].said == "replied '{\"action\":1}'"
    else:
        assert "so the door works: the start has no contract" in findings["start"].said
        assert findings["stop"].said == "no session is running"


@pytest.mark.parametrize("kind", DOORS)
def test_nothing_listens(kind: str) -> None:
    failed = broken_layer(list(examine(f"{kind}://127.0.0.1:{free_port()}")))
    assert failed.layer == "connect"
    assert "is the service running" in failed.advice


def test_an_unknown_host_name() -> None:
    failed = broken_layer(list(examine("http://no-such-host.invalid")))
    assert failed.layer == "dns"
    assert "no-such-host.invalid" in failed.said


@pytest.fixture
def other_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@pytest.mark.parametrize("kind", DOORS)
def test_another_server_answers(kind: str, other_server: str) -> None:
    failed = broken_layer(list(examine(f"{kind}://{other_server}", timeout_s=2.0)))
    assert failed.layer == "protocol"
    assert "TCP at 8101" in failed.advice


def test_an_echo_answers() -> None:
    """A service that answers a tick of an unknown session does not keep sessions."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with echo_server.serving(echo) as address:
        failed = broken_layer(list(examine(f"http://{address}")))
    assert failed.layer == "protocol"
    assert "never started got a reply" in failed.said


@pytest.mark.parametrize("kind", DOORS)
def test_a_server_that_accepts_connections_and_is_silent(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"{kind}://127.0.0.1:{listener.getsockname()[1]}"
        failed = broken_layer(list(examine(url, timeout_s=0.5)))
    assert failed.layer == "protocol"
    assert "does not answer" in failed.advice


@pytest.mark.parametrize(("kind", "other"), [("http", "tcp"), ("tcp", "http"), ("grpc", "tcp"), ("ws", "grpc")])
def test_another_door_of_brayx_than_the_url_says(kind: str, other: str) -> None:
    with door(other, Clinic()) as url:
        failed = broken_layer(list(examine(f"{kind}://{url.partition('://')[2]}", timeout_s=2.0)))
    assert failed.layer == "protocol"
    assert "TCP at 8101" in failed.advice


@pytest.mark.parametrize("kind", DOORS)
def test_a_service_that_is_full(kind: str) -> None:
    with door(kind, Clinic(actors_per_worker=1)) as url, Client(url) as client:
        client.start()
        failed = broken_layer(list(examine(url)))
    assert failed.layer == "start"
    assert failed.said.startswith("service_full: ")
    assert "actors_per_worker" in failed.advice


@pytest.mark.parametrize("kind", DOORS)
def test_a_service_that_requires_keys(kind: str) -> None:
    clinic = Clinic(keys=Keys({"game": SECRET.encode()}))
    with door(kind, clinic) as url:

        def auth(**given: Any) -> Finding:
            return broken_layer(list(examine(url, **given)))

        none = auth()
        assert (none.layer, none.said) == ("auth", "the service requires a key, and none was given")
        assert "--keys-file" in none.advice
        wrong = auth(key="game", secret=b"another secret!!")
        assert (wrong.layer, "'token' is not the HMAC" in wrong.said) == ("auth", True)
        assert "keys file" in wrong.advice or "service's file" in wrong.advice
        assert auth(key="stranger", secret=SECRET.encode()).said == wrong.said
        findings = list(examine(url, body=b'{"obs": []}', key="game", secret=SECRET.encode()))
    assert {finding.outcome for finding in findings} <= {"ok", "skipped"}
    assert findings[LAYERS.index("auth")].said == "key 'game' is accepted"
    assert findings[LAYERS.index("stop")].outcome == "ok"


def test_a_wrong_clock() -> None:
    with door("http", Clinic(keys=Keys({"game": SECRET.encode()}, window_s=0.0))) as url:
        failed = broken_layer(list(examine(url, key="game", secret=SECRET.encode())))
    assert failed.layer == "auth"
    assert "behind this service's clock" in failed.said
    assert "clock" in failed.advice


def test_a_key_that_is_not_required() -> None:
    with door("http", Clinic()) as url:
        findings = list(examine(url, body=b'{"obs": []}', key="game", secret=SECRET.encode()))
    assert findings[LAYERS.index("auth")].said == "no key is required; the given key is ignored"


@pytest.mark.parametrize("kind", DOORS)
def test_an_agent_that_raises(kind: str) -> None:
    clinic = Clinic()
    with door(kind, clinic) as url:
        findings = list(examine(url))
    failed = broken_layer(findings)
    assert failed.layer == "tick"
    assert failed.said.startswith("agent_error: ")
    assert "--body" in failed.advice
    assert "replica's log" in failed.advice


@pytest.mark.parametrize("kind", DOORS)
def test_an_agent_that_expects_another_body(kind: str) -> None:
    with door(kind, Clinic()) as url:
        findings = {finding.layer: finding for finding in examine(url, body=b"\x00")}
    assert findings["tick"].outcome == "ok"
    assert "expects another body, so the door works: body is not JSON" in findings["tick"].said
    assert findings["stop"].outcome == "ok"


@pytest.mark.parametrize("kind", DOORS)
def test_an_agent_that_is_slow(kind: str) -> None:
    clinic = Clinic(tick_timeout_s=0.3)
    with door(kind, clinic) as url:
        failed = broken_layer(list(examine(url, body=b'{"obs": "slow"}')))
    assert failed.layer == "tick"
    assert failed.said.startswith("deadline_exceeded: ")
    assert "tick_timeout_s" in failed.advice


def test_a_session_that_survives_a_failed_tick_is_stopped() -> None:
    """The client gave up before the actor did."""
    clinic = Clinic(tick_timeout_s=4.0)
    with door("http", clinic) as url:
        findings = list(examine(url, body=b'{"obs": "slow"}', timeout_s=2.0))
        assert broken_layer(findings).layer == "tick"
        assert findings[LAYERS.index("stop")].outcome != "skipped"
        until(lambda: len(clinic) == 0)


def test_untrained_models_are_reported() -> None:
    with door("http", Clinic(models={"model": 0})) as url:
        *_, last = examine(url, body=b'{"obs": []}')
    assert last.said == "model 0 (0: as built, untrained)"


@pytest.mark.parametrize("url", ["localhost", "ftp://x", "http://x?y=1"])
def test_an_invalid_url(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        list(examine(url))


# The commands


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "brayx", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command(tmp_path: Path) -> None:
    keys, body = tmp_path / "keys.txt", tmp_path / "body.json"
    made = run("keys", "new", "--file", str(keys), "--id", "game")
    assert (made.returncode, made.stdout) == (0, "game\n")
    new_key(keys, "later")
    body.write_text('{"obs": [1]}')
    with door("tcp", Clinic(keys=Keys.load(keys))) as url:
        well = run("doctor", url, "--keys-file", str(keys), "--key", "later", "--body", f"@{body}")
        assert well.returncode == 0, well.stdout + well.stderr
        *lines, last = well.stdout.splitlines()
        assert [line[:13].strip() for line in lines] == list(LAYERS)
        assert last == f"{url} is well"
        ill = run("doctor", url)
        assert ill.returncode == 1
        assert ill.stdout.splitlines()[-1].startswith(f"{url}: auth failed. What to do: give --keys-file")
        report = run("doctor", url, "--json", "--body", '{"obs": 1}', BRAYX_KEYS_FILE=str(keys))
        assert report.returncode == 0, report.stdout
        document = json.loads(report.stdout)
        assert document["ok"] is True
        assert [layer["layer"] for layer in document["layers"]] == list(LAYERS)
        assert set(document["layers"][0]) == {"layer", "outcome", "ms", "said", "advice"}


def test_the_command_with_invalid_arguments(tmp_path: Path) -> None:
    for words, said in [
        (["doctor", "localhost"], "cannot be used"),
        (["doctor", "http://127.0.0.1:1", "--body", f"@{tmp_path}/none"], "--body: .*none cannot be read"),
        (["doctor", "http://127.0.0.1:1", "--key", "game"], "needs its secret"),
        (["doctor", "http://127.0.0.1:1", "--keys-file", f"{tmp_path}/none"], "cannot be read"),
        (["keys", "new", "--file", f"{tmp_path}/keys", "--id", "a b"], "cannot be the id of a key"),
    ]:
        done = run(*words)
        assert done.returncode == 2, words
        assert re.search(said, done.stderr), done.stderr
    refused = run("doctor", "http://127.0.0.1:1", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["ok"] is False


@pytest.mark.parametrize("kind", DOORS)
def test_gamecores_sign_too(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.txt"
    new_key(keys)
    games: list[tuple[Callable[[list[str]], int], str]] = [
        (gym.main, "CartPole-v1"),
        (pettingzoo.main, "tests.unit.bridges.zoo:race"),
    ]
    with door(kind, Clinic(keys=Keys.load(keys))) as url:
        for main, env_id in games:
            words = [env_id, "--url", url, "--games", "1", "--max-ticks", "3"]
            assert main([*words, "--keys-file", str(keys)]) == 0, capsys.readouterr().err
            assert main(words) == 1
            assert "this service requires keys" in capsys.readouterr().err
