"""Two nodes: pushes stay on theirs, one that dies takes only its shard, and each has one relay of weights."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import RAY_IS_LATE, ray_trouble

pytestmark = pytest.mark.chaos  # its two nodes need a Ray with other settings, and one of them is killed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that reads to the end must not start another Ray
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray notices a dead node within seconds; its default is a quarter of a minute."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """The observations of `tests.integration.two_nodes`. A Ray that starts late is started once more."""
    command = [sys.executable, "-m", "tests.integration.two_nodes"]
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    done = run(command, env={**os.environ, **ENVIRONMENT})
    if done.returncode and RAY_IS_LATE in done.stderr:
        ray_trouble.append(f"{' '.join(command)}: the node {RAY_IS_LATE}")
        done = run(command, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_weights_come_over_one_relay_on_each_node_even_if_it_is_killed_or_hangs(
    seen: dict[str, Any],
) -> None:
    assert seen["weights"] == [[1, 2, 3, 4, 5, 6]] * 4, "each once, on both nodes"
    assert seen["another"], "a new relay replaces the killed one"


def test_shards_are_on_both_nodes_the_first_on_that_of_the_buffers_creator(seen: dict[str, Any]) -> None:
    assert seen["at_home"] == [True, False]


def test_a_push_goes_to_the_shard_of_its_node_and_when_that_is_full_to_the_other(seen: dict[str, Any]) -> None:
    assert seen["nearest"] == [8, 24], "one from here, three from there"
    assert seen["full"] == [24, 24]
    assert seen["read"] == [1, 2, 3, 4, 5, 6]


def test_the_stream_goes_on_when_a_node_dies(seen: dict[str, Any]) -> None:
    assert seen["error"] == ""
    assert seen["read_of_pushed"] + seen["lost"] == seen["pushed"], "what is lost is counted"
    assert seen["read_of_pushed"] > 0.9 * seen["pushed"]
    assert seen["twice"] == []


def test_a_batch_on_its_way_from_the_dead_node_is_lost_and_the_stream_goes_on(seen: dict[str, Any]) -> None:
    assert seen["wide"] == [1, 3]


def test_a_push_that_may_not_drop_waits_until_its_shard_restarts_on_a_live_node(
    seen: dict[str, Any],
) -> None:
    assert seen["waited"] == [False, [8, 8]]
    assert seen["shards"] == 2
