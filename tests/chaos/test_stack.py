"""`make stack`: games through its edge are in its Prometheus, and a minute without its database loses no metric.

It takes the ports 5000, 8000, 8443 and 9090, and prints what it measures: `make test-chaos ARGS="-k test_stack -s"`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from brayx.gamecore.client import Client
from brayx.metrics import Recorder
from brayx.tracking.clerk import Clerk
from brayx.tracking.options import Options
from tests.prometheus import dashboard, values
from tests.waiting import until

MISSING = [program for program in ("prometheus", "haproxy", "openssl") if shutil.which(program) is None]
needs_database = pytest.mark.skipif(
    not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")), reason="PostgreSQL is not installed"
)
"""Mark of tests with a `Database`."""
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    needs_database,
]
ROOT = Path(__file__).parents[2]
EDGE, MLFLOW, PROMETHEUS = "https://127.0.0.1:8443", "http://127.0.0.1:5000", "http://127.0.0.1:9090"
WITHOUT_S = 60.0
"""How long the database is stopped."""
START_S = 240.0


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stack", ROOT / "docker" / "stack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stack"] = module
    spec.loader.exec_module(module)
    return module


class Database:
    """A PostgreSQL of the stack's kind that the test starts and stops."""

    def __init__(self, folder: Path) -> None:
        self._stack, self._folder = load(), folder
        self._running = contextlib.ExitStack()
        self.url = self._stack.DATABASE.format(folder)
        self._stack.make_database(folder)

    def start(self) -> None:
        import psycopg

        process = subprocess.Popen(self._stack.postgres(self._folder), stderr=subprocess.DEVNULL, cwd="/")
        self._running.callback(process.wait, 60.0)
        self._running.callback(process.send_signal, signal.SIGINT)
        until(lambda: self._stack.is_database_ready(self._folder), "PostgreSQL was ready")
        # One for all queries: PostgreSQL starts a process for each connection.
        self._connection = psycopg.connect(f"host={self._folder} user=postgres dbname=mlflow", autocommit=True)
        self._running.callback(self._connection.close)

    def stop(self) -> None:
        """Ends what `start` began, even if it failed."""
        self._running.close()

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    folder = Path("/tmp") / f"brayx-stack-{time.time_ns()}"  # short, since a socket is in it, and open to its user
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def database(data: Path) -> Iterator[Database]:
    database = Database(data / "postgres")
    try:
        database.start()
        yield database
    finally:
        database.stop()


@pytest.fixture(scope="module")
def stack(data: Path, database: Database) -> Iterator[None]:
    """The stack, with a database that the test can stop; Ctrl-C ends it clean."""
    command = [sys.executable, str(ROOT / "docker" / "stack.py"), "--data", str(data), "--database", database.url]
    with (data / "stack.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (data / "stack.log").read_text()
        return "games:" in (data / "stack.log").read_text()

    try:
        until(is_ready, "the stack was ready", START_S)
        print((data / "stack.log").read_text())
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(180.0) == 0, (data / "stack.log").read_text()
    ended = re.findall(r"^(\w+) ended$", (data / "stack.log").read_text(), re.MULTILINE)
    assert ended == ["haproxy", "prometheus", "brayx", "mlflow"]


def value(query: str) -> list[str]:
    """As `tests.prometheus.values`, of the stack."""
    return values(PROMETHEUS, query)


@pytest.mark.usefixtures("stack")
def test_games_through_the_edge_are_on_the_dashboard(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(data / "tls.pem"))
    for url in (EDGE, EDGE.replace("https", "wss")):
        with Client(url, timeout_s=60.0) as client:
            client.start()
            for _ in range(20):
                assert b"action" in client.tick(b'{"obs": [0.0, 0.0, 0.1, 0.5], "reward": 1.0}')
            client.stop(b'{"terminated": true}')
    for path in ("/metrics", "//%6detrics"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(EDGE + path, timeout=30.0)
    until(lambda: value("sum(ray_brayx_ticks_total)") == ["40"], "Prometheus had all ticks")
    assert value('up{job="brayx"}') == ["1"]
    queries = dashboard()
    for query in queries:
        value(query)
    played = "|".join(("sessions_active", "sessions_started", "ticks", "tick_seconds", "forward_seconds"))
    shown = [query for query in queries if re.search(rf"ray_brayx_({played})(_total|_bucket)?{{", query)]
    assert len(shown) > len(played.split("|"))
    until(lambda: all(value(query) for query in shown), "the dashboard had samples of what was played")


@pytest.mark.usefixtures("stack")
def test_a_minute_without_the_database_loses_no_metric(database: Database) -> None:
    clerk = Clerk("outage", "main", MLFLOW, Options({}, {}))

    def add(ticks: int) -> int:
        recorder = Recorder()
        for _ in range(ticks):
            recorder.add("ticks", 1.0)
        clerk.push(recorder.drain())
        return ticks

    def counted() -> float:
        rows = database.ask("SELECT value FROM latest_metrics WHERE run_uuid = %s AND key = 'tick/count'", run_id)
        return float(rows[0][0]) if rows else 0.0

    try:
        total, times = add(1), []
        until(clerk.opened, "the trial was open", START_S)
        run_id = clerk.trial().run_id
        for ticks in range(1, 11):
            began = time.monotonic()
            total += add(ticks)
            until(lambda: counted() == total, "the metric was in PostgreSQL")  # noqa: B023
            times.append(time.monotonic() - began)
        print(f"from push to PostgreSQL: {sorted(times)[4]:.2f} s in the median, {max(times):.2f} s at most")
        database.stop()
        stopped = time.monotonic()
        while time.monotonic() < stopped + WITHOUT_S:
            total += add(7)
            time.sleep(0.5)
        database.start()
        began = time.monotonic()
        until(lambda: counted() == total, "every metric was in PostgreSQL", 120.0)
        print(
            f"after {WITHOUT_S:g} s without PostgreSQL all {total} ticks were there in {time.monotonic() - began:.1f} s"
        )
        clerk.close("FINISHED")
        assert counted() == total
    finally:
        clerk.end()
