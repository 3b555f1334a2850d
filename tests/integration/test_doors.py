"""The doors on Serve: compliance, sessions over several replicas, replicas and directories that die, idleness."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import ray
import torch
from ray import serve
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from brayx import RemoteModel
from brayx.actor.config import ActorConfig
from brayx.cluster import NAMESPACE
from brayx.cluster.actor_app import actor_spec, application
from brayx.cluster.directory import Location, stop_directory
from brayx.cluster.membership import renewals
from brayx.cluster.replica import _on_loopback
from brayx.errors import ConnectFailed, SessionExists, SessionLost, SessionResumed
from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.jobs.config import JobConfig
from brayx.model.arms import WeightSource
from brayx.ports import free_port
from deployments.echo import EchoArgs
from deployments.echo import app as echo_app
from tests.integration.conftest import Ingress
from tests.waiting import until, until_awaited

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "pipelines" / "templates" / "cartpole.yaml"
WAIT_S = 60.0
DIRECTORY = "echo/sessions"
ORIGIN = "https://play.example.com"
ECHO = EchoArgs(num_workers=2, native_port=0, tcp_port=0, snapshot_every=8, drain_timeout_s=5.0, cors_origins=[ORIGIN])


@pytest.fixture(scope="module")
def service(loopback_ingress: Ingress) -> str:
    """URL of Serve with its default ingress."""
    return loopback_ingress.http


@pytest.fixture(scope="module")
def echo(service: str) -> Iterator[str]:
    """The echo application on two replicas, below a path."""
    serve.run(echo_app(ECHO), name="echo", route_prefix="/echo")
    yield f"{service}/echo"
    serve.delete("echo")
    stop_directory(DIRECTORY)


def native_doors(url: str) -> dict[Any, str]:
    """The native ports' URLs, as the status page shows them."""
    with urllib.request.urlopen(f"{url}/", timeout=WAIT_S) as reply:
        doors: dict[Any, str] = json.load(reply)["doors"]
    return doors


class TestEchoOnServe(DoorCompliance):
    """The suite over two replicas, so that most HTTP ticks are passed on to the owner."""

    cors_origin = ORIGIN

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, echo: str) -> None:
        cls.url = echo


class TestEchoOnNativePorts(DoorCompliance):
    """The suite over the ports that the two replicas share."""

    doors = ("http", "ws", "tcp")
    cors_origin = ORIGIN

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, echo: str) -> None:
        cls.urls = native_doors(echo)
        cls.url = cls.urls["http"]


async def play_until(clients: list[AsyncClient], done: Callable[[], bool]) -> int:
    """Ticks all clients concurrently until ``done`` and checks every reply; returns the number of ticks."""

    async def play(client: AsyncClient) -> int:
        count = 0
        while not done():
            body = f"{client.session} {count}".encode()
            assert await client.tick(body) == body
            count += 1
        return count

    return sum(await asyncio.gather(*(play(client) for client in clients)))


@contextlib.asynccontextmanager
async def sessions(url: str, count: int) -> Any:
    """``count`` sessions, and more until both replicas have some: one just started is in the directory at once, but
    the ingress sends it nothing for a while."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(10 * WAIT_S):
        clients: list[AsyncClient] = []
        while len(clients) < count or len({locate(str(client.session)) for client in clients}) < 2:
            clients.append(AsyncClient(url, timeout_s=WAIT_S))
            stack.push_async_callback(clients[-1].close)
            await clients[-1].start()
        yield clients


def locate(session: str) -> Location | None:
    directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
    return ray.get(directory.locate.remote(session), timeout=WAIT_S)


def serve_controller() -> Any:
    return ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")


def pid_of(address: str) -> int:
    """The replica that listens at a peer address."""
    port = int(address.rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    return int(pid or 0)


def post(url: str, kind: str, session: str, body: bytes = b"x") -> tuple[int, str]:
    """Status and, of a refusal, the error's code."""
    request = urllib.request.Request(
        f"{url}/step", body, {"session": session, "step_kind": kind, "content-type": "application/octet-stream"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as error:
        with error:
            refusal = json.loads(error.read())
        print(kind, session, refusal)  # pytest shows it if the test fails
        return error.code, str(refusal["error"])


async def test_sessions_live_on_either_replica_and_never_mix(echo: str) -> None:
    async with sessions(echo, 24) as clients:
        asked = iter(range(10 * len(clients)))
        assert await play_until(clients, lambda: next(asked, None) is None) == 10 * len(clients)
        for client in clients:
            await client.stop(b"bye")
        assert locate(clients[0].session or "gone") is None


@pytest.mark.cluster
async def test_a_killed_replica_loses_its_own_sessions_and_each_loss_is_reported_once(echo: str) -> None:
    async with sessions(echo, 16) as clients:
        where = {client: locate(client.session) for client in clients}
        victim = next(iter(where.values()))
        lost = [client for client, owner in where.items() if owner == victim]
        survivors = [client for client, owner in where.items() if owner != victim]
        ids = [str(client.session) for client in lost]
        os.kill(pid_of(victim.address), signal.SIGKILL)
        answers: dict[str, list[tuple[int, str]]] = {}

        def ask() -> None:
            for session in ids:
                answers[session] = [post(echo, "tick", session) for _ in range(3)]

        asking = asyncio.create_task(asyncio.to_thread(ask))
        assert await play_until(survivors, asking.done) > 0
        await asking
        for session, replies in answers.items():
            assert replies == [(410, "session_lost"), (404, "session_unknown"), (404, "session_unknown")], session
        for session in ids:
            assert post(echo, "start", session) == (200, "")
            assert post(echo, "stop", session) == (200, "")
        await asyncio.to_thread(until, lambda: len(replicas()) == 2, "Serve starting the replica again", WAIT_S)


@pytest.mark.cluster
async def test_sessions_with_snapshots_survive_a_killed_replica_and_report_the_tick_they_resumed_at(
    echo: str,
) -> None:
    until(lambda: len(replicas()) == 2, "two replicas", WAIT_S)
    async with contextlib.AsyncExitStack() as stack:
        clients = [AsyncClient(echo, timeout_s=WAIT_S, reconnect_s=WAIT_S) for _ in range(12)]
        for client in clients:
            stack.push_async_callback(client.close)
            await client.start()
            for number in range(21):  # snapshots after 8 and 16 ticks
                assert await client.tick(b"%d" % number) == b"%d" % number
        where = {client: locate(str(client.session)) for client in clients}
        victim = next(iter(where.values()))
        assert victim is not None
        os.kill(pid_of(victim.address), signal.SIGKILL)
        for client, owner in where.items():
            if owner == victim:
                with pytest.raises(SessionResumed) as raised:
                    await client.tick(b"21")
                assert raised.value.details == {"tick": 22, "restored": 16}
            assert await client.tick(b"next") == b"next"
            await client.stop()
        assert where[clients[0]] == victim
    await asyncio.to_thread(until, lambda: len(replicas()) == 2, "Serve starting the replica again", WAIT_S)


@pytest.mark.cluster
async def test_a_killed_serve_controller_costs_no_replica_and_no_session(echo: str) -> None:
    def controller() -> int:
        """Its process; 0 while there is none."""
        with contextlib.suppress(ray.exceptions.RayError):
            return int(ray.get(serve_controller().get_pid.remote(), timeout=WAIT_S))
        return 0

    def taken_over() -> bool:
        with contextlib.suppress(ray.exceptions.RayError):
            states = serve.status().applications["echo"].deployments["echo"].replica_states
            return controller() not in (0, killed) and dict(states) == {"RUNNING": 2}
        return False

    doors = native_doors(echo)
    async with contextlib.AsyncExitStack() as stack:
        clients = [AsyncClient(doors[door], timeout_s=WAIT_S, reconnect_s=WAIT_S) for door in (*doors, "tcp") * 5]
        for client in clients:
            stack.push_async_callback(client.close)
            await client.start()
        where = {str(client.session): locate(str(client.session)) for client in clients}
        killed = controller()
        os.kill(killed, signal.SIGKILL)
        waiting = asyncio.create_task(asyncio.to_thread(until, taken_over, "another controller", WAIT_S))
        assert await play_until(clients, waiting.done) > 0
        await waiting
        assert {session: locate(session) for session in where} == where, "each session is where it was"
        for client in clients:
            assert await client.tick(b"on") == b"on"
            await client.stop()


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._file,)


def test_a_replicas_serve_port_refuses_pickles_without_the_token(echo: str, tmp_path: Path) -> None:
    with Client(echo, timeout_s=WAIT_S) as client:
        client.start()
        location = locate(str(client.session))
        client.stop()
    assert location is not None
    replica = psutil.Process(pid_of(location.address))
    assert not [file.path for file in replica.memory_maps() if "libtorch" in file.path], "200 MB for nothing"
    listening = replica.net_connections("tcp")
    ports = {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN and c.laddr.ip in ("::", "0.0.0.0")}
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(Touch(tmp_path / "touched")))
    codes = []
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            ASGIServiceStub(channel).HandleRequest(request, timeout=WAIT_S)
        codes.append(refused.value.code())
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
async def test_sessions_move_without_an_error_when_their_replica_is_scaled_away(echo: str) -> None:
    """Over HTTP and over WebSocket, each on both replicas."""
    until(lambda: len(replicas()) == 2, "two replicas", WAIT_S)
    async with contextlib.AsyncExitStack() as stack:
        clients: list[AsyncClient] = []
        async with asyncio.timeout(WAIT_S):
            # A replica that was just started again is in the directory before the ingress sends it anything.
            while len({(locate(str(c.session)).owner, c.url) for c in clients}) < 4:  # type: ignore[union-attr]
                url = echo.replace("http", "ws", 1) if len(clients) % 2 else echo
                clients.append(AsyncClient(url, timeout_s=WAIT_S, reconnect_s=WAIT_S))
                stack.push_async_callback(clients[-1].close)
                await clients[-1].start()
        smaller = echo_app(ECHO.model_copy(update={"num_workers": 1}))
        scaling = asyncio.create_task(asyncio.to_thread(serve.run, smaller, name="echo", route_prefix="/echo"))
        assert await play_until(clients, lambda: scaling.done() and len(replicas()) == 1) > 0
        await scaling
        assert await play_until(clients, iter([False] * 24 + [True] * len(clients)).__next__) > 0
    serve.run(echo_app(ECHO), name="echo", route_prefix="/echo")


def replicas() -> set[str]:
    directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
    return set(ray.get(directory.addresses.remote(), timeout=WAIT_S))


@pytest.mark.cluster
async def test_a_killed_directory_comes_back_and_sessions_go_on(echo: str) -> None:
    until(lambda: len(replicas()) == 2, "two replicas", WAIT_S)
    async with sessions(echo, 8) as clients:
        directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        before = replicas()
        ray.kill(directory, no_restart=False)
        expected = "the directory knowing the replicas again"
        watching = asyncio.create_task(asyncio.to_thread(until, lambda: replicas() == before, expected, WAIT_S))
        assert await play_until(clients, watching.done) > 0
        await watching
        for client in clients:
            async with AsyncClient(echo, timeout_s=WAIT_S) as second:
                with pytest.raises(SessionExists):
                    await second.start(session=client.session)
        assert await play_until(clients[:1], iter([False, True]).__next__) == 1


@pytest.mark.cluster
async def test_a_session_whose_owner_died_while_the_directory_was_down_is_reported_lost_once(echo: str) -> None:
    until(lambda: len(replicas()) == 2, "two replicas", WAIT_S)
    written = renewals(DIRECTORY)
    async with sessions(echo, 8) as clients:
        where = {str(client.session): locate(str(client.session)) for client in clients}
        await until_awaited(
            lambda: set(where) <= {s for sessions in written.read_all().values() for s in sessions}, "a renewal", WAIT_S
        )
        victim = next(iter(where.values()))
        assert victim is not None
        os.kill(pid_of(victim.address), signal.SIGKILL)
        ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE), no_restart=False)
        replies: dict[str, list[tuple[int, str]]] = {session: [] for session, owner in where.items() if owner == victim}
        deadline = time.monotonic() + WAIT_S
        for session, answers in replies.items():
            while len(answers) < 2 and time.monotonic() < deadline:
                answer = await asyncio.to_thread(post, echo, "tick", session)
                if answer[0] != 503:  # while the directory restarts
                    answers.append(answer)
            assert answers == [(410, "session_lost"), (404, "session_unknown")], session
        for client in clients:
            if str(client.session) not in replies:
                assert await client.tick(b"on") == b"on"
    await asyncio.to_thread(until, lambda: len(replicas()) == 2, "Serve starting the replica again", WAIT_S)


@pytest.fixture(scope="module")
def cartpole(service: str) -> Iterator[str]:
    """The template's job, untrained, with its model in a separate deployment and a short idle timeout."""
    overrides = [
        "actor.native_port=0",
        "actor.tcp_port=0",
        "model.placement=remote",
        "actor.idle_timeout_s=1.0",
        "actor.num_workers=1",
    ]
    job = JobConfig.load(TEMPLATE, overrides)
    spec = actor_spec(job, "actor", mode="serve", weights={"model": WeightSource()})
    serve.run(application(spec, name="actor", directory="cartpole/sessions"), name="cartpole", route_prefix="/cartpole")
    yield f"{service}/cartpole"
    serve.delete("cartpole")
    stop_directory("cartpole/sessions")


def observation(*values: float) -> bytes:
    return json.dumps({"obs": values, "reward": 0.0}).encode()


@pytest.mark.parametrize("protocol", ["http", "ws"])
def test_a_model_in_a_separate_deployment_answers_ticks(cartpole: str, protocol: str) -> None:
    actions: list[Any] = []

    def played() -> bool:
        actions.clear()
        url = cartpole.replace("http", protocol, 1)
        with Client(url, timeout_s=WAIT_S) as client, contextlib.suppress(SessionLost):
            client.start(b"{}")
            bodies = [observation(0.1, 0.2, angle, 0.4) for angle in (-0.2, 0.0, 0.2, 0.0)]
            actions.extend(json.loads(client.tick(body)) for body in bodies)
        return len(actions) == 4

    until(played, "a session that no pause of this process made idle", WAIT_S)
    assert all(action in ({"action": 0}, {"action": 1}) for action in actions)
    assert actions[3] == actions[1], "serving is greedy"


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b"\xff{", 400, "bad_body", "body is not JSON"),
        (b'{"reward": 0.0}', 400, "bad_body", "no field 'obs'"),
        (b'{"obs": [0.0, 0.0, null, 0.0]}', 400, "bad_body", "obs[2] is null"),
        (b'{"obs": [0.0, 0.0, 0.0, 1e999]}', 400, "bad_body", "obs[3] is inf"),
        (observation(1.0, 2.0), 422, "shape_mismatch", "expected"),
    ],
)
def test_bad_ticks_get_an_exact_error(cartpole: str, body: bytes, status: int, code: str, says: str) -> None:
    answers: list[tuple[int, dict[str, str]]] = []

    def answered() -> bool:
        session = uuid.uuid4().hex
        assert post(cartpole, "start", session, b"{}") == (200, "")
        request = urllib.request.Request(f"{cartpole}/step", body, {"session": session, "step_kind": "tick"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=WAIT_S)
        with caught.value as error:
            answers.append((error.code, json.loads(error.read())))
        return answers[-1][1]["error"] != "session_lost"

    until(answered, "an answer to a session that no pause of this process made idle", WAIT_S)
    got, document = answers[-1]
    assert (got, document["error"]) == (status, code)
    assert says in document["message"]
    assert "Traceback" not in document["message"]


@pytest.mark.parametrize(
    ("options", "loopback"),
    [
        ({}, True),
        ({"native_host": "0.0.0.0"}, False),
        ({"native_host": "0.0.0.0", "native_port": None, "tcp_port": None}, True),
    ],
)
async def test_whether_all_doors_are_on_loopback(service: str, options: dict[str, Any], loopback: bool) -> None:
    assert await _on_loopback(ActorConfig(agents=["a"], **options)) == loopback


def test_an_idle_session_is_ended_and_its_next_tick_reports_it(cartpole: str) -> None:
    session = uuid.uuid4().hex
    assert post(cartpole, "start", session, b"{}") == (200, "")

    def active() -> int:
        with urllib.request.urlopen(f"{cartpole}/", timeout=WAIT_S) as reply:
            return int(json.load(reply)["sessions"])

    until(lambda: active() == 0, "the reaper", WAIT_S)
    assert post(cartpole, "tick", session, observation(0, 0, 0, 0)) == (410, "session_lost")
    assert post(cartpole, "tick", session, observation(0, 0, 0, 0)) == (404, "session_unknown")


def test_an_idle_websocket_is_closed_with_its_reason(cartpole: str) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    url = cartpole.replace("http", "ws", 1)
    with connect(f"{url}/session", open_timeout=WAIT_S, proxy=None) as connection:
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(WAIT_S)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4410, "session ended: idle")


JOIN = """
import sys
from brayx.errors import StartupError
from brayx.cluster.cluster import Cluster

address, *ports = sys.argv[1:]
for port in ports:
    try:
        with Cluster(port=int(port), address=address) as cluster:
            print(cluster.url)
    except StartupError as error:
        print(error)
"""


def test_a_model_on_loopback_answers_to_names_of_this_machine(service: str) -> None:
    model = RemoteModel("near", torch.nn.Identity(), (np.zeros(2, np.float32),), route_prefix="/near", use_onnx=False)
    statuses = []
    for host in ("localhost", "rebound.example.com"):
        connection = http.client.HTTPConnection(service.removeprefix("http://"), timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/near", headers={"host": host})
            statuses.append(connection.getresponse().status)
    model.delete()
    assert statuses == [200, 403]


def test_a_cluster_is_joined_only_where_its_serve_listens(service: str) -> None:
    """Runs in a separate process, like a job: this one is connected to Ray already."""
    port = int(service.rpartition(":")[2])
    address = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-c", JOIN, address, str(port), "0", str(free_port())]
    joined = subprocess.run(words, capture_output=True, text=True, timeout=4 * WAIT_S, check=True, cwd=ROOT)
    same, any_port, other = joined.stdout.splitlines()
    assert same == any_port == service
    assert f"listens at 127.0.0.1:{port} already: use that with --set" in other


def test_an_unreachable_service_is_an_error_at_once() -> None:
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", timeout_s=5.0) as client, pytest.raises(ConnectFailed, match=str(port)):
        client.start()
