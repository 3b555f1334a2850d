"""Debian's Prometheus with brayx's rules, and the dashboard's queries."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from brayx.ports import free_port

DOCKER = Path(__file__).parents[1] / "docker"
RULES = DOCKER / "prometheus" / "rules.yaml"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def dashboard() -> list[str]:
    """The dashboard's queries, of every application and replica, and over five minutes."""
    texts = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', (DOCKER / "grafana" / "brayx.json").read_text())
    plain = [json.loads(f'"{text}"').replace("$__rate_interval", "5m") for text in texts]
    return [re.sub(r"\$\w+", ".*", query) for query in plain]


def values(url: str, query: str) -> list[str]:
    """The values that a Prometheus has for a query now; none while it starts. An error of the query raises."""
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=30
        ) as reply:
            return [series["value"][1] for series in json.loads(reply.read())["data"]["result"]]
    except urllib.error.URLError as error:
        is_starting = isinstance(error, urllib.error.HTTPError) and error.code == 503
        if not (is_starting or isinstance(error.reason, ConnectionError)):
            raise
        return []


@contextlib.contextmanager
def prometheus(folder: Path, *scraped: Mapping[str, object]) -> Iterator[Callable[[str], list[str]]]:
    """A Prometheus with these scrape configs; gives `values` of it."""
    settings = {"global": {"scrape_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": [*scraped]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(["prometheus", f"--web.listen-address={address}", *words], stderr=log)
    try:
        yield lambda query: values(f"http://{address}", query)
    finally:
        server.terminate()
        server.wait(60.0)
