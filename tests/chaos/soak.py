"""Watches an endless job: nothing that it drops, reuses or publishes may make it grow."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from brayx.tracking import Trial
from tests.end_to_end.jobs import TEMPLATES, Command, brayx, said_on_failure, setting, trials
from tests.memory import MemoryWatch

OPTIONS = (
    "trainer.target_return=null", "trainer.num_steps=1000000000", "trainer.checkpoint_interval_s=5",
    "trainer.algorithm.epochs=2", "rollout.mode=non_blocking", "rollout.normalise_obs=true",
    "rollout.normalise_reward=true", "buffer.max_policy_lag=4",
)  # fmt: skip
LEARNERS = {
    "process": ((), 0.5, ("RolloutWorker", "BufferActor", "Hub", "raylet")),
    "train": (
        ("trainer.where=train", "trainer.num_workers=2"),
        0.1,
        ("RolloutWorker", "BufferActor", "Hub", "raylet", "RayTrainWorker", "SplitCoordinator", "ReadReplay"),
    ),
}
"""Where the learner is: its options, the updates a second that it makes at least, and processes that must be seen."""
GROWTH_MIB = 8.0
"""That a fitted line may rise in the time watched: allocators, and pages that are touched late."""
GROWTH_SHARE = 0.04
"""Of a process's memory, where that is more."""
GROWTH_DESCRIPTORS = 4.0
"""That a fitted line may rise: connections that come and go."""


def soak(folder: Path, learner: str, seconds: float, warm_up_s: float) -> str:
    """Runs the job for ``seconds`` after ``warm_up_s`` and gives what every process held, for people.

    Args:
        folder: where it runs.
        learner: one of `LEARNERS`.
        seconds: that count.
        warm_up_s: before that, which do not.

    Raises:
        AssertionError: something grew, or the job stopped learning.
    """
    options, rate, parts = LEARNERS[learner]
    shutil.copy(TEMPLATES / "ppo_env.yaml", folder)
    words = ["train", str(folder / "ppo_env.yaml"), "--cluster", *setting(*OPTIONS, *options)]
    with brayx(folder, *words) as command, said_on_failure(command):
        command.until(lambda: _updates(command) > 10, "it learns")
        with MemoryWatch(command.processes, every_s=max(0.5, seconds / 600)) as watch:
            began, ends = _updates(command), time.monotonic() + warm_up_s + seconds
            command.until(lambda: time.monotonic() > ends, "the time is over", warm_up_s + seconds + 60)
        assert _updates(command) > began + seconds * rate, "it went on learning"
        table = watch.table(warm_up_s)
        growing = watch.growing(warm_up_s, mib=GROWTH_MIB, share=GROWTH_SHARE, descriptors=GROWTH_DESCRIPTORS)
        assert not growing, "\n".join(["grew:", *growing, "of all:", table])
        names = [course.name for course in watch.courses if course.growth(warm_up_s) is not None]
        for part in parts:
            assert any(part in name for name in names), f"{part} was not watched; watched were {names}"
        command.control_c()
        command.gone(60.0)
    return table


def _updates(command: Command) -> float:
    if "Ray is up" not in command.err:
        return 0.0
    trial: Trial = trials(command.folder, "ppo_env")["main"][-1]
    return trial.metrics().get("learner/updates", 0.0)
