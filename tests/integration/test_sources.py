"""Data at rest reaches a replay buffer whole, waits for room, and a failing source is reported."""

from __future__ import annotations

import functools
import io
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from brayx.cluster.hub import create_hub, numbers_of
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.trainee import RayTrainee
from brayx.errors import ConfigError, ReplayError
from brayx.jobs.config import JobConfig
from brayx.jobs.progress import Progress
from brayx.jobs.sources import Sources
from brayx.jobs.training import JobTraining
from brayx.replay.config import BufferConfig
from tests.waiting import until

WAIT_S = 60.0

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
    made = RemoteBuffer(f"sources-{uuid.uuid4().hex}", config)
    yield made
    made.shards.kill()


def job(tmp_path: Path, function: str) -> JobConfig:
    (tmp_path / "rest_data.py").write_text(DATA)
    (tmp_path / "job.yaml").write_text(JOB.replace("FUNC", function))
    return JobConfig.load(tmp_path / "job.yaml")


def pid(buffer: Any) -> int | None:
    try:
        return int(ray.get(buffer.shards[0].actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))
    except ray.exceptions.RayActorError:  # it is being restarted
        return None


def test_everything_arrives_in_order_although_the_buffer_is_small(
    tmp_path: Path, buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sources(job(tmp_path, "good"), {"buffer": buffer}) as sources:
        seen: list[float] = []
        for batch in buffer.batches(timeout_s=30):
            seen.extend(batch["reward"][:, 0].tolist())
            if len(seen) == 16:
                break
        assert sources.join(WAIT_S)
    assert seen == [float(value) for _ in range(2) for value in range(8)]
    assert sources.fed == {"data": 16}
    assert not sources.errors


@pytest.mark.parametrize(("function", "said"), [("wrong", "yielded int"), ("breaks", "OSError: no such file")])
def test_a_failing_source_is_reported(
    tmp_path: Path, buffer: Any, function: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "rest_data", raising=False)
    with Sources(job(tmp_path, function), {"buffer": buffer}) as sources:
        assert sources.join(WAIT_S)
    (error,) = sources.errors
    assert isinstance(error, ConfigError)
    assert said in error.message
    assert "'data'" in error.message


@pytest.mark.cluster
def test_a_source_outlives_the_process_of_its_buffer(
    tmp_path: Path, buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "rest_data", raising=False)
    with Sources(job(tmp_path, "good"), {"buffer": buffer}) as sources:
        until(lambda: sources.fed["data"] >= 4, timeout_s=60)  # full: it waits for room
        victim = pid(buffer)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        until(lambda: pid(buffer) not in (None, victim), "another process", timeout_s=60)
        seen: list[float] = []
        for batch in buffer.batches(timeout_s=30):
            seen.extend(batch["reward"][:, 0].tolist())
            if len(seen) == 12:
                break
        assert sources.join(WAIT_S)
    assert seen == [4.0, 5.0, 6.0, 7.0, *map(float, range(8))], "all but the four lost with it, once each"
    assert sources.fed == {"data": 16}
    assert not sources.errors


def test_a_lost_buffer_is_reported_in_one_line(tmp_path: Path, buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "rest_data", raising=False)
    with Sources(job(tmp_path, "good"), {"buffer": buffer}) as sources:
        until(lambda: sources.fed["data"] >= 4, timeout_s=60)  # full: it waits for room
        buffer.shards.kill()
        assert sources.join(WAIT_S)
    (error,) = sources.errors
    assert isinstance(error, ReplayError)
    assert error.message.startswith("source 'data': buffer 'sources-")
    assert "\n" not in error.message


@pytest.mark.cluster
def test_a_restarted_buffer_is_ended_again(buffer: Any) -> None:
    actor = buffer.shards[0].actor
    hub = create_hub(f"hub-{uuid.uuid4().hex}", None)
    over = threading.Event()
    config = SimpleNamespace(buffers=["buffer"], num_workers=1, max_lost_share=None)
    trainee = SimpleNamespace(learned=[buffer], config=config)
    learning = SimpleNamespace(
        trainees={"": trainee},
        wait=over.wait,
        is_over=functools.partial(RayTrainee.is_over, trainee),
        look=lambda: None,
    )
    training = SimpleNamespace(
        learning=learning,
        newest=lambda: numbers_of(hub),
        carry_out_requests=list,
        rollouts=[],
        urls={},
        job=SimpleNamespace(needs_games=False, buffers={"buffer": buffer.config}, rollouts=[], sources={}),
        actor="",
        config=config,
        clerk=SimpleNamespace(check=lambda: None),
        progress=Progress("t", num_steps=1, console=Console(file=io.StringIO())),
    )
    games = SimpleNamespace(num=0, running=0, failures=0, messages=[])
    sources = SimpleNamespace(errors=[], done=True)
    watching = threading.Thread(target=JobTraining.watch, args=(training, sources, games))
    watching.start()

    def ended() -> bool:
        try:
            return bool(ray.get(actor.ended.remote(), timeout=10))
        except ray.exceptions.RayError:
            return False

    def attach() -> int:
        try:
            return int(ray.get(actor.attach.remote(), timeout=10))
        except ray.exceptions.RayError:
            return before

    try:
        until(ended, timeout_s=60)
        before = ray.get(actor.attach.remote(), timeout=60)  # numbered from a start of each process's own
        ray.kill(actor, no_restart=False)
        until(lambda: abs(attach() - before) > 10**6, timeout_s=60)
        until(ended, timeout_s=60)
        assert watching.is_alive()
    finally:
        over.set()
        watching.join(30)
        ray.kill(hub)
