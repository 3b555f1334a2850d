"""The learner in a child process: it learns what a thread does, and its errors and its death are the job's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx import systems
from brayx.errors import ConfigError, Diverged, StartupError
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.local.learner_process import ChildLoop, learner_child
from brayx.metrics.numbers import LocalNumbers
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.packing import Batch
from brayx.trainer.fits import built_to_learn
from brayx.trainer.loop import LearnerLoop
from brayx.types import Fragment
from tests.unit.trainer.parts import Folders, Weights

CONTRACT = Contract.parse(
    {
        "contract": 1,
        "observations": {"side": {"shape": [3]}},
        "actions": {"go": {"kind": "discrete", "size": 2}},
    }
)
STEPS = 32


def job_of(*overrides: str) -> JobConfig:
    job = JobConfig.load(TEMPLATES / "game.yaml", ["buffer.unroll_length=8", "buffer.batch_size=4", *overrides])
    return job.model_copy(update={"contract": CONTRACT.as_dict()})


def batches(job: JobConfig, count: int) -> Iterator[Batch]:
    """Random play of the game."""
    rng, buffer = np.random.default_rng(0), ReplayBuffer(job.buffers["buffer"])
    for _ in range(count * STEPS // 8):
        buffer.push(
            Fragment(
                obs={"side": rng.normal(size=(9, 3)).astype(np.float32)},
                action=rng.integers(0, 2, 8),
                log_prob=np.full(8, -np.log(2), np.float32),
                reward=rng.normal(size=8).astype(np.float32),
                terminated=True,
                truncated=False,
                policy_version=np.ones(8, np.int64),
            )
        )
        while (batch := buffer.pop()) is not None:
            yield batch


class Parts:
    """What a loop works with, and what it did with it."""

    def __init__(self, folder: Path) -> None:
        self.weights, self.keeper, self.numbers = Weights(), Folders(folder), LocalNumbers({}, "env_steps")
        self.skipped: list[int] = []

    def of(self, job: JobConfig, stream: Iterator[Batch]) -> dict[str, Any]:
        return {
            "about": {"job": job.in_mode("train").as_dict(), "folder": job.folder},
            "batches": stream,
            "publisher": self._publisher,
            "numbers": self.numbers,
            "keeper": self.keeper,
            "feedback": lambda index, priorities: None,
            "resumed": self.skipped.append,
        }

    def _publisher(self, newest: int) -> Weights:
        self.weights.version = newest
        return self.weights


def in_thread(job: JobConfig, parts: Parts, stream: Iterator[Batch]) -> LearnerLoop:
    config = job.trainers["trainer"]
    options = parts.of(job, stream)
    torch.manual_seed(job.seed)
    module, args, _ = built_to_learn(config, "model", job.models["model"].module, job.folder, options["about"]["job"])
    return LearnerLoop(config, module, args, **options)


def in_child(job: JobConfig, parts: Parts, stream: Iterator[Batch]) -> ChildLoop:
    child = learner_child(job)
    assert child is not None
    return ChildLoop(child, weights=None, **parts.of(job, stream))


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "cores", lambda: 2)


def test_a_child_learns_what_a_thread_does_and_its_death_is_an_error(tmp_path: Path) -> None:
    job = job_of("trainer.checkpoint_interval=1")
    there, here = Parts(tmp_path / "there"), Parts(tmp_path / "here")
    child, thread = in_child(job, there, batches(job, 3)), in_thread(job, here, batches(job, 3))
    summary = child.run()
    unequal = {"seconds": 0.0, "return_mean": 0.0}  # NaN: no game has ended
    assert replace(summary, **unequal) == replace(thread.run(), **unequal)
    assert (summary.reason, summary.env_steps, summary.policy_version) == ("stream_ended", 3 * STEPS, 4)
    assert not child.child.runs
    for (version, step, ours), (*theirs, weights) in zip(there.weights.published, here.weights.published, strict=True):
        assert [version, step] == theirs
        for name, array in ours.items():
            np.testing.assert_array_equal(array, weights[name])
    assert [saved[:2] for saved in there.keeper.saved] == [saved[:2] for saved in here.keeper.saved]
    ours, theirs = there.numbers.snapshot(), here.numbers.snapshot()
    assert ours.keys() == theirs.keys()
    assert ours["loss"] == theirs["loss"]

    def killed() -> Iterator[Batch]:
        yield from batches(job, 1)
        os.kill(resumed.child.pid, signal.SIGKILL)
        yield from batches(job, 1)

    resumed = in_child(job, there, killed())
    with pytest.raises(StartupError, match="its process was killed by SIGKILL"):
        resumed.run()
    assert there.skipped == [3]
    assert there.weights.version == 6, "it went on from the checkpoint"


def test_an_error_of_the_loop_is_raised_here(tmp_path: Path) -> None:
    job = job_of()
    (batch,) = batches(job, 1)
    bad = {**batch, "reward": np.full_like(batch["reward"], np.nan)}
    with pytest.raises(Diverged, match="in the batch reward") as diverged:
        in_child(job, Parts(tmp_path), iter([bad])).run()
    assert diverged.value.details["fields"] == ["reward"]


@pytest.mark.parametrize(
    ("template", "overrides", "has_one"),
    [
        ("game.yaml", (), True),
        ("godot.yaml", (), True),
        ("game.yaml", ("trainer.where=process",), False),
        ("game.yaml", ("trainer.prefetch=1",), False),
        ("game.yaml", ("trainer.algorithm={name: impala}",), False),
        ("cartpole.yaml", (), False),
        ("cartpole.yaml", ("trainer.where=child",), True),
    ],
)
def test_ppo_of_games_that_say_their_contract_has_a_child(
    template: str, overrides: tuple[str, ...], has_one: bool
) -> None:
    assert (learner_child(JobConfig.load(TEMPLATES / template, overrides)) is not None) is has_one


def test_on_a_single_core_the_learner_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "cores", lambda: 1)
    assert learner_child(job_of()) is None


def test_rollouts_that_normalise_refuse_a_child() -> None:
    job = JobConfig.load(TEMPLATES / "ppo_env.yaml", ["rollout.normalise_obs=true", "trainer.where=child"])
    with pytest.raises(ConfigError, match=r"trainer\.where is child"):
        learner_child(job)
