"""The alerts: of exported metrics, in the runbook, run by promtool; and Prometheus scrapes a real host."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.gamecore.client import Client
from brayx.metrics import Recorder
from brayx.metrics.prometheus import EXPORTED
from tests.prometheus import RULES, dashboard, needs_prometheus, prometheus
from tests.unit.actor.doors.test_asgi import Echo
from tests.waiting import until

ROOT = Path(__file__).parents[3]


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def test_alerts_are_of_exported_metrics() -> None:
    series = {name for declared in EXPORTED.values() for name in declared.series}
    queried = {name for rule in rules() for name in re.findall(r"\bray_\w+", rule["expr"])}
    assert queried
    assert queried <= series, f"not exported: {queried - series}"


def test_the_runbook_has_every_alert_and_no_other() -> None:
    text = (ROOT / "docs" / "guide-operate.md").read_text()
    assert sorted(re.findall(r"^### (Brayx\w+)$", text, re.MULTILINE)) == sorted(rule["alert"] for rule in rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_each_alert_fires_on_its_samples_and_on_no_others() -> None:
    samples = Path(__file__).parent / "rules_test.yaml"
    subprocess.run(["promtool", "test", "rules", str(samples)], check=True, timeout=120)
    groups = yaml.safe_load(samples.read_text())["tests"]
    tested = {test["alertname"] for group in groups for test in group["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in rules()}


@pytest.fixture
def played() -> Iterator[LocalHost]:
    """A host at which one session of two ticks was played."""
    recorder = Recorder()
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=None)
    host = LocalHost(config, Runtime(functools.partial(Echo, []), recorder), name="arena")
    host.export(recorder)
    host.open()
    try:
        with Client(host.url) as client:
            client.start(session="one")
            client.tick(b"1")
            client.tick(b"2")
            client.stop()
        yield host
    finally:
        host.close()


@needs_prometheus
def test_prometheus_scrapes_a_local_host_and_answers_the_dashboard(played: LocalHost, tmp_path: Path) -> None:
    target = played.url.removeprefix("http://")
    with prometheus(tmp_path, {"job_name": "brayx", "static_configs": [{"targets": [target]}]}) as value:
        until(lambda: value('ray_brayx_ticks_total{application="arena", replica="local"}') == ["2"])
        assert value("ray_brayx_tick_seconds_count") == ["2"]
        assert value('up{job="brayx"}') == ["1"]
        for query in dashboard():
            value(query)  # an error of the query raises
