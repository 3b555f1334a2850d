"""Ray's Prometheus endpoint shows the games played: two replicas on Serve, read as Prometheus reads them."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from brayx.actor.config import ActorConfig
from brayx.cluster.directory import stop_directory
from brayx.cluster.replica import ActorRuntime, actor_deployment
from brayx.metrics import METRICS, Kind
from brayx.metrics.prometheus import EXPORTED
from brayx.ports import free_port
from deployments.echo import EchoActor
from tests.prometheus import DOCKER, dashboard, needs_prometheus, prometheus
from tests.waiting import until

pytestmark = pytest.mark.cluster

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

APPLICATION = "seen"
DIRECTORY = "seen/sessions"
WAIT_S = 60.0
FALLEN = b"too late"
SLOW = b"slow"
OWN = 'coins "found" ☃\n'
DEADLINE_MS = 1000


class Counting(EchoActor):
    """Counts its ticks by a metric of its own; takes twice the deadline for some."""

    def __init__(self, runtime: ActorRuntime) -> None:
        self._runtime = runtime

    async def tick(self, body: bytes) -> bytes:
        import asyncio

        self._runtime.recorder.add(OWN, 0.5, label="gold", kind=Kind.SUM)
        if body == SLOW:
            await asyncio.sleep(2 * DEADLINE_MS / 1000)
        return body

    async def missed(self) -> None:
        pass


UNPLAYED = (
    "sessions_resumed",
    "snapshots_failed",
    "forward_seconds",
    "forward_wait_seconds",
    "forward_batch_size",
    "ticks_skipped",
    "episode_return",
)
"""What the dashboard shows besides, and games without a model do not have."""


async def build(handles: Mapping[str, Any]) -> ActorRuntime:
    runtime = ActorRuntime(make_actor=lambda: Counting(runtime), versions=lambda: {"policy": 7})
    for name in UNPLAYED:
        runtime.recorder.add(name, 1.0)
    return runtime


@pytest.fixture(scope="module")
def url(ingress: object) -> Iterator[str]:
    """The native HTTP port that two replicas share."""
    port = free_port()
    config = ActorConfig(
        agents=["counting"],
        num_workers=2,
        serialize=None,
        native_port=port,
        tcp_port=None,
        tick_deadline_ms=DEADLINE_MS,
        drain_timeout_s=0.5,  # one session plays on
        fallback="default",
        fallback_body=FALLEN.decode(),
    )
    serve.run(actor_deployment(build, config, name="counting", directory=DIRECTORY), name=APPLICATION)
    yield f"http://127.0.0.1:{port}"
    serve.delete(APPLICATION)
    stop_directory(DIRECTORY)


def post(url: str, kind: str, session: str, body: bytes = b"x", **headers: str) -> tuple[int, bytes]:
    """Status and body of a request over a separate connection, which either replica may get."""
    headers |= {"session": session, "step_kind": kind, "content-type": "application/octet-stream"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/step", body, headers), timeout=WAIT_S) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def scrape() -> dict[str, Any]:
    """The metrics of brayx by family, from the endpoint for Prometheus."""
    (node,) = ray.nodes()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=WAIT_S) as reply:
            text = reply.read().decode()
    except OSError:
        return {}  # the node's agent is not up yet
    return {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("ray_brayx_")}


def totals(families: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Counters, levels and numbers of observations of this application, by metric and label, over all replicas."""
    numbers: dict[str, dict[str, float]] = defaultdict(dict)
    for name, family in families.items():
        for sample in family.samples:
            whole = sample.name == name or sample.name.endswith(("_total", "_count"))
            if whole and sample.labels["application"] == APPLICATION:
                label = sample.labels["label"]
                by_label = numbers[name.removeprefix("ray_brayx_")]
                by_label[label] = by_label.get(label, 0.0) + sample.value
    return numbers


def play(url: str) -> dict[str, dict[str, float]]:
    """Plays sessions of every kind; returns the expected counts."""
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    for number in range(4):
        session = uuid.uuid4().hex
        assert post(url, "start", session)[0] == 200
        expected["sessions_started"][""] += 1
        for seq in range(12):
            body = SLOW if (number, seq) == (0, 3) else b"%d" % seq
            status, reply = post(url, "tick", session, body, seq=str(seq))
            assert status == 200
            assert reply in (body, FALLEN)
            expected["ticks"][""] += 1
            expected["own_sum"]["gold"] += 0.5
            if reply == FALLEN:
                expected["ticks_fallen_back"]["default"] += 1
        assert post(url, "tick", session, b"again", seq="11") == (status, reply)
        expected["ticks_repeated"][""] += 1
        assert post(url, "start", session)[0] == 409
        expected["requests_refused"]["session_exists"] += 1
        if number < 3:
            assert post(url, "stop", session)[0] == 200
            expected["sessions_ended"]["stop"] += 1
            assert post(url, "tick", session)[0] == 404
            expected["requests_refused"]["session_unknown"] += 1
    expected["sessions_active"][""] = 1
    expected["tick_seconds"] = expected["tick_seconds_samples"] = expected["ticks"]
    assert expected["ticks_fallen_back"]["default"] >= 1
    return {name: dict(numbers) for name, numbers in expected.items()}


@pytest.fixture(scope="module")
def expected(url: str) -> dict[str, dict[str, float]]:
    return play(url)


@pytest.mark.slow  # Ray's processes report every ten seconds
def test_the_endpoint_shows_exactly_what_was_played(expected: dict[str, dict[str, float]]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        families = scrape()
        numbers = totals(families)
        seen = {name: numbers.get(name, {}) for name in expected}
        if seen == expected or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert seen == expected
    assert numbers["ticks_forwarded"][""] == numbers["forwarded_seconds"][""] > 0
    waits = numbers["tick_wait_seconds"][""]
    assert waits == numbers["tick_wait_seconds_samples"][""]
    assert expected["ticks"][""] - 2 * 7 <= waits <= expected["ticks"][""], "one tick in eight is sampled"
    assert numbers["acting_version"]["policy"] == 2 * 7

    declared = {name.removesuffix("_total") for exported in EXPORTED.values() for name in exported.series}
    for name, family in families.items():
        mine = [sample for sample in family.samples if sample.labels["application"] == APPLICATION]
        assert {sample.name.removesuffix("_total") for sample in mine} <= declared
        assert all(sample.labels["deployment"] == "counting" and sample.labels["replica"] for sample in mine)
        exported = EXPORTED[name.removeprefix("ray_")]
        assert (family.type, family.documentation) == (exported.type, exported.help)
    assert families["ray_brayx_ticks"].documentation == f"{METRICS['ticks'].help} [{METRICS['ticks'].unit}]"
    assert {s.labels["metric"] for s in families["ray_brayx_own_sum"].samples} == {'coins "found" \\u2603\\n'}
    active = families["ray_brayx_sessions_active"].samples
    assert len({s.labels["replica"] for s in active if s.labels["application"] == APPLICATION}) == 2


@needs_prometheus
@pytest.mark.slow
@pytest.mark.usefixtures("expected")
def test_every_query_of_the_dashboard_has_samples_of_ray(tmp_path: Path) -> None:
    (node,) = ray.nodes()
    # As Ray's dashboard writes it, which this Ray does not run.
    found = [{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{node['MetricsExportPort']}"]}]
    (tmp_path / "ray.json").write_text(json.dumps(found))
    configured = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    (cluster,) = (config for config in configured if config["job_name"] == "brayx-cluster")
    cluster["file_sd_configs"][0]["files"] = [str(tmp_path / "ray.json")]
    with prometheus(tmp_path, cluster) as value:
        for query in dashboard():
            until(lambda: value(query), f"{query} had an answer")  # noqa: B023
        until(lambda: value('up{job=~"brayx.*"}') == ["1"], "alerts found the job by its name")
