"""Data at rest reaches a replay buffer whole, waits for room, and a source that fails is told."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from brayx.actor.directory import NAMESPACE
from brayx.errors import ConfigError
from brayx.replay.buffer import create_buffer
from brayx.replay.config import BufferConfig
from deployments.job import JobConfig
from pipelines.sources import Sources

JOB = """
project: p
trial: t
data: {kind: source, module: rest_data, func: FUNC, buffer: buffer, epochs: 2}
buffer: {kind: buffer, size: 2, batch_size: 2, unroll_length: 4}
"""

DATA = """
import numpy as np
from brayx import Fragment

def fragment(value):
    return Fragment(
        obs=np.full((5, 3), value, np.float32), action=np.zeros(4, np.int64), log_prob=np.zeros(4, np.float32),
        reward=np.full(4, value, np.float32), terminated=True, truncated=False, policy_version=np.zeros(4, np.int64),
    )

def good(name, config):
    return (fragment(float(value)) for value in range(8))

def wrong(name, config):
    return [1, 2]

def breaks(name, config):
    yield fragment(0.0)
    raise OSError("no such file")
"""


@pytest.fixture
def buffer(ray_cluster: object) -> Iterator[Any]:
    config = BufferConfig(size=2, batch_size=2, unroll_length=4)
    handle = create_buffer(f"sources-{uuid.uuid4().hex}", config, namespace=NAMESPACE)
    yield handle
    ray.kill(handle)


def job(tmp_path: Path, function: str) -> JobConfig:
    (tmp_path / "rest_data.py").write_text(DATA)
    (tmp_path / "job.yaml").write_text(JOB.replace("FUNC", function))
    return JobConfig.load(tmp_path / "job.yaml")


def test_everything_arrives_in_order_although_the_buffer_is_small(
    tmp_path: Path, buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sources(job(tmp_path, "good"), {"buffer": buffer}, {"buffer": 2}) as sources:
        reader, seen = ray.get(buffer.attach.remote()), []
        while len(seen) < 16:
            answer = ray.get(buffer.next_batch.remote(reader, 5.0), timeout=30)
            assert answer.batch is not None, "the source stopped before its end"
            seen.extend(answer.batch["reward"][:, 0].tolist())
            ray.get(buffer.ack.remote(1))
        assert sources.join(10.0)
    assert seen == [float(value) for _ in range(2) for value in range(8)]
    assert sources.fed == {"data": 16}
    assert not sources.errors


@pytest.mark.parametrize(("function", "said"), [("wrong", "gave a int"), ("breaks", "OSError: no such file")])
def test_a_source_that_fails_is_told(
    tmp_path: Path, buffer: Any, function: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "rest_data", raising=False)
    with Sources(job(tmp_path, function), {"buffer": buffer}, {"buffer": 2}) as sources:
        assert sources.join(10.0)
    (error,) = sources.errors
    assert isinstance(error, ConfigError)
    assert said in error.message
    assert "'data'" in error.message
