"""Watches an endless job: nothing that it drops, reuses or publishes may make it grow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from brayx.metrics.charts import NUMBERS_FILE
from tests.end_to_end.jobs import (
    FREE_PORTS,
    TEMPLATES,
    Command,
    brayx,
    numbers_of,
    said_on_failure,
    setting,
    trials,
)
from tests.memory import MemoryWatch


@dataclass(frozen=True)
class Job:
    """An endless job.

    Attributes:
        file: name of a template, and of its project.
        words: further words of its command.
        options: overrides.
        rate: updates a second that it makes at least.
        parts: processes that must be seen.
    """

    file: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    rate: float
    parts: tuple[str, ...]


_ENVIRONMENTS = (
    "trainer.algorithm.epochs=2", "rollout.mode=non_blocking", "rollout.normalise_obs=true",
    "rollout.normalise_reward=true", "buffer.max_policy_lag=4",
)  # fmt: skip
_ON_RAY = ("RolloutWorker", "BufferActor", "Hub", "raylet")
_RANKS = ("RayTrainWorker", "SplitCoordinator", "ReadReplay")
JOBS = {
    "local": Job("cartpole", (), FREE_PORTS, 0.5, ("gamecore", "clerk")),
    "process": Job("ppo_env", ("--cluster",), _ENVIRONMENTS, 0.5, _ON_RAY),
    "train": Job(
        "ppo_env",
        ("--cluster",),
        (*_ENVIRONMENTS, "trainer.where=train", "trainer.num_workers=2"),
        0.1,
        (*_ON_RAY, *_RANKS),
    ),
}
"""Games at the door of the local host; environments on Ray, with the learner in the job's process or in two ranks."""
ENDLESS = ("trainer.target_return=null", "trainer.num_steps=1000000000", "trainer.checkpoint_interval_s=5")
GROWTH_MIB = 8.0
"""That a fitted line may rise in the time watched: allocators, and pages that are touched late."""
GROWTH_SHARE = 0.04
"""Of a process's memory, where that is more."""
GROWTH_DESCRIPTORS = 4.0
"""That a fitted line may rise: connections that come and go."""


def soak(folder: Path, job: Job, seconds: float, warm_up_s: float) -> str:
    """Runs the job for ``seconds`` after ``warm_up_s`` and gives what every process held, for people.

    Args:
        folder: where it runs.
        job: one of `JOBS`.
        seconds: that count.
        warm_up_s: before that, which do not.

    Raises:
        AssertionError: something grew, or the job stopped learning.
    """
    words = ["train", str(TEMPLATES / f"{job.file}.yaml"), *job.words, *setting(*ENDLESS, *job.options)]
    with brayx(folder, *words) as command, said_on_failure(command):
        command.until(lambda: _updates(command, job.file) > 10, "it learns")
        with MemoryWatch(command.processes, every_s=max(0.5, seconds / 600)) as watch:
            began, ends = _updates(command, job.file), time.monotonic() + warm_up_s + seconds
            command.until(lambda: time.monotonic() > ends, "the time is over", warm_up_s + seconds + 60)
        assert _updates(command, job.file) > began + seconds * job.rate, "it went on learning"
        table = watch.table(warm_up_s)
        growing = watch.growing(warm_up_s, mib=GROWTH_MIB, share=GROWTH_SHARE, descriptors=GROWTH_DESCRIPTORS)
        assert not growing, "\n".join(["grew:", *growing, "of all:", table])
        names = [course.name for course in watch.courses if course.growth(warm_up_s) is not None]
        for part in job.parts:
            assert any(part in name for name in names), f"{part} was not watched; watched were {names}"
        command.control_c()
        command.gone(60.0)
    return table


def _updates(command: Command, project: str) -> float:
    if not any(command.folder.glob(f"mlartifacts/*/*/artifacts/{NUMBERS_FILE}")):  # as in `metrics_of`
        return 0.0
    return numbers_of(trials(command.folder, project)["main"][-1]).get("updates", 0.0)
