"""A service with replies that prove which ticks were applied to a session, in what order; and its process.

A session's state is the number of its ticks and a hash chained over their bodies. Every reply contains both. A client
that computes the same chain detects a tick that was applied twice, left out, reordered, or taken from another session.
Starts and ends of sessions in a replica are written to a file of that process, which survives its kill.

`main` serves it on a separate Ray behind HAProxy and follows the file ``wish.json``: the number of replicas and their
generation. Knows nothing of kills.
"""

# No `from __future__ import annotations`: Serve reads the class of `app`'s argument from its annotation, not from text.

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from brayx.actor.actor import Actor

ROOT = Path(__file__).parents[2]
APPLICATION = "ledger"
PLAIN = b"no snapshots"
"""Body of the start of a session whose actor gives none, so that it ends with its replica."""
_counts: Counter[str] = Counter()


def chained(digest: str, body: bytes) -> str:
    """The hash of a session after one more tick."""
    return hashlib.blake2b(digest.encode() + body, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Entry:
    """What a reply says of its session, after the request.

    Attributes:
        session: its id.
        ticks: how many were applied.
        digest: `chained` over their bodies, from the id on.
        run: where it runs: process id, and which run of a session in that process.
    """

    session: str
    ticks: int
    digest: str
    run: str

    def encode(self) -> bytes:
        return f"{self.session} {self.ticks} {self.digest} {self.run}".encode()

    @classmethod
    def decode(cls, data: bytes) -> "Entry":
        session, ticks, digest, run = data.decode().split(" ")
        return cls(session, int(ticks), digest, run)


def pid_of(run: str) -> int:
    """The process of a run."""
    return int(run.partition(".")[0])


class LedgerActor(Actor):
    """Keeps the chain of its session, and records its begin and its end.

    Args:
        folder: gets a file of each process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._session = self._digest = self._run = ""
        self._ticks = 0
        self._plain = False

    async def start(self, session: str, body: bytes) -> bytes:
        self._plain = body == PLAIN
        self._begin(session, 0, session, before="")
        return self._entry()

    async def tick(self, body: bytes) -> bytes:
        self._ticks += 1
        self._digest = chained(self._digest, body)
        return self._entry()

    async def stop(self, body: bytes) -> bytes:
        return self._entry()

    async def snapshot(self) -> bytes | None:
        return None if self._plain else self._entry()

    async def restore(self, session: str, snapshot: bytes) -> None:
        entry = Entry.decode(snapshot)
        assert entry.session == session, f"the snapshot of {entry.session} was given to {session}"
        self._begin(session, entry.ticks, entry.digest, before=entry.run)

    async def on_end(self, reason: str) -> None:
        self._write("end", reason=reason)

    def _begin(self, session: str, ticks: int, digest: str, *, before: str) -> None:
        self._session, self._ticks, self._digest = session, ticks, digest
        _counts["runs"] += 1
        self._run = f"{os.getpid()}.{_counts['runs']}"
        self._write("begin", before=before)

    def _entry(self) -> bytes:
        return Entry(self._session, self._ticks, self._digest, self._run).encode()

    def _write(self, what: str, *, reason: str = "", before: str = "") -> None:
        event = Event(time.time(), what, self._session, self._run, self._ticks, reason, before)
        file = os.open(self._folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(asdict(event)).encode() + b"\n")
        finally:
            os.close(file)


@dataclass(frozen=True)
class Event:
    """A run's begin or end.

    Attributes:
        at: seconds since 1970.
        what: ``begin`` or ``end``.
        session, run, ticks: as in `Entry`.
        reason: of an end.
        before: the run whose snapshot a run began with; empty: it began with a start.
    """

    at: float
    what: str
    session: str
    run: str
    ticks: int
    reason: str
    before: str


def events(folder: Path) -> list[Event]:
    """What the replicas have written down, by time."""
    read = [Event(**json.loads(line)) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(read, key=lambda event: event.at)


class LedgerArgs(BaseModel):
    """Arguments of `app`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    native_port: int
    tcp_port: int
    native_host: str = "127.0.0.1"
    snapshot_every: int = 5
    drain_timeout_s: float = 10.0


def app(args: LedgerArgs) -> Any:
    """The Serve application. An outage shorter than its idle and reconnect timeouts ends no session."""
    from brayx.actor.config import ActorConfig
    from brayx.cluster.replica import ActorRuntime, actor_deployment

    folder = args.folder

    async def build(handles: object) -> ActorRuntime:
        return ActorRuntime(make_actor=lambda: LedgerActor(folder))

    config = ActorConfig(
        agents=["ledger"],
        share="game",
        actors_per_worker=4096,
        serialize=None,
        native_port=args.native_port,
        tcp_port=args.tcp_port,
        native_host=args.native_host,
        snapshot_every=args.snapshot_every,
        idle_timeout_s=60.0,
        reconnect_timeout_s=60.0,
        tick_timeout_s=20.0,
        drain_timeout_s=args.drain_timeout_s,
    )
    return actor_deployment(build, config, name=APPLICATION, directory=f"{APPLICATION}/sessions")


@dataclass(frozen=True)
class Wish:
    """What is to run."""

    replicas: int
    generation: int = 0
    code: str = ""
    """Folder with the brayx that its replicas run; empty: the one that is installed."""


def deploy(options: argparse.Namespace, wish: Wish) -> None:
    """Applies the wish, like ``serve deploy``: only another generation restarts replicas.

    On a Ray of several nodes each has one replica.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    args = LedgerArgs(
        folder=options.folder / "events",
        native_port=options.native_port,
        tcp_port=options.tcp_port,
        native_host=_host(options),
    )
    # In the deployment: Serve would import a changed application first, and send all through its own proxy meanwhile.
    variables = {"LEDGER_GENERATION": str(wish.generation)}
    if wish.code:
        variables["PYTHONPATH"] = os.pathsep.join([wish.code, str(ROOT)])
    deployment: dict[str, Any] = {
        "name": APPLICATION,
        "num_replicas": wish.replicas,
        "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": variables}},
    }
    if options.address:
        deployment["max_replicas_per_node"] = 1
    application: dict[str, Any] = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": f"{__spec__.name}:app",
        "args": args.model_dump(mode="json"),
        "deployments": [deployment],
    }
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None and status.status.value == "RUNNING":
            states = status.deployments[APPLICATION].replica_states
            if dict(states) == {"RUNNING": wish.replicas}:
                return
        time.sleep(0.2)


def _host(options: argparse.Namespace) -> str:
    """Where the doors listen."""
    return "0.0.0.0" if options.address else "127.0.0.1"


def main() -> None:
    """Serves until it is killed; ``wish.json`` and ``done.json`` in the folder contain the wish and the state."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    for port in ("port", "grpc_port", "native_port", "tcp_port"):
        parser.add_argument(port, type=int)
    parser.add_argument("--address", default="", help="a Ray of several nodes to join, instead of starting one")
    options = parser.parse_args()
    (options.folder / "events").mkdir(exist_ok=True)

    from ray import serve

    from brayx.cluster.start import join_ray, start_ray

    if options.address:
        join_ray(options.address, log_to_driver=False)
    else:
        start_ray(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    serve.start(
        proxy_location="EveryNode" if options.address else "HeadOnly",
        http_options={"host": _host(options), "port": options.port},
        grpc_options={
            "port": options.grpc_port,
            "grpc_servicer_functions": ["brayx.gamecore.v1.gamecore_pb2_grpc.add_GamecoreServicer_to_server"],
        },
    )
    wished, done = options.folder / "wish.json", options.folder / "done.json"
    so: Wish | None = None
    while True:
        wish = Wish(**json.loads(wished.read_text()))
        if wish != so:
            deploy(options, wish)
            so = wish
            replace(done, asdict(wish))
        time.sleep(0.1)


def replace(file: Path, document: dict[str, Any]) -> None:
    """Replaces a file atomically, so that a reader never sees half of it."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.rename(file)


def at_free_ports(folder: Path) -> tuple[list[str], dict[str, str | None], dict[str, str]]:
    """The command of `main` in this folder, its environment, and the URL of each of its six doors."""
    from brayx.ports import free_port
    from tests.end_to_end.jobs import tuned

    http, grpc, native, tcp, metrics, stats = (free_port() for _ in range(6))
    environment: dict[str, str | None] = {
        "PYTHONPATH": str(ROOT),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    doors = {
        "http": f"http://127.0.0.1:{http}",
        "ws": f"ws://127.0.0.1:{http}",
        "native http": f"http://127.0.0.1:{native}",
        "native ws": f"ws://127.0.0.1:{native}",
        "tcp": f"tcp://127.0.0.1:{tcp}",
        "grpc": f"grpc://127.0.0.1:{grpc}",
    }
    words = tuned("python", "-m", "tests.chaos.ledger", str(folder), *map(str, (http, grpc, native, tcp)))
    return words, environment, doors


if __name__ == "__main__":
    main()
