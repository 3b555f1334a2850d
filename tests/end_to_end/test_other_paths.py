"""A training job that only reads data at rest, on both hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from yaml import safe_dump, safe_load

from tests.end_to_end.jobs import FREE_PORTS, brayx, job_folder, setting, trials, without_ray

DATA = """
import numpy as np
from brayx import Fragment

def build_source(name, config):
    rng = np.random.default_rng(config["seed"])
    for _ in range(40):
        yield Fragment(
            obs=rng.normal(size=(33, 4)).astype(np.float32), action=rng.integers(0, 2, 32),
            log_prob=np.full(32, np.log(0.5), np.float32), reward=np.ones(32, np.float32),
            terminated=True, truncated=False, policy_version=np.ones(32, np.int64),
        )
"""


def reading(folder: Path) -> Path:
    """A job that only reads what a function gives."""
    yaml = job_folder(folder, rest_data=DATA)
    yaml.write_text(yaml.read_text() + "\ndata: {kind: source, module: rest_data, buffer: buffer}\n")
    return yaml


def without_an_actor(yaml: Path) -> Path:
    """The same job with no actor at all, and two shards."""
    job = safe_load(yaml.read_text())
    for name in ("actor", "agent", "render"):
        job.pop(name, None)
    job["buffer"]["num_workers"] = 2
    yaml.write_text(safe_dump(job))
    return yaml


def test_a_source_without_an_actor_is_learned_from_to_its_end_in_one_process(tmp_path: Path) -> None:
    yaml = without_an_actor(reading(tmp_path))
    words = setting("trainer.target_return=null")
    with brayx(tmp_path, "train", str(yaml), *words, environment=without_ray(tmp_path)) as command:
        assert command.ended() == 0, command.err
        assert "buffer.num_workers is 2: one buffer keeps their" in command.err
        assert "no more transitions to learn from" in command.out
        command.gone()
    ((trial,),) = trials(tmp_path).values()
    assert trial.metrics()["replay/env_steps"] == 40 * 32
    assert trial.status == "FINISHED"


@pytest.mark.chaos
def test_a_source_without_games_is_learned_from_to_its_end_on_a_ray_that_starts_late(tmp_path: Path) -> None:
    yaml = reading(tmp_path)
    words = setting(*FREE_PORTS, "trainer.where=process", "trainer.target_return=null", "actor.gamecores=[]")
    with brayx(tmp_path, "train", str(yaml), "--cluster", *words) as command:
        # As on a busy machine: what Ray's node waits for is not up in time.
        command.until(lambda: bool(command.processes("dashboard/agent.py")), "Ray started its agent")
        for agent in command.processes("dashboard/agent.py"):
            agent.suspend()
        assert command.ended() == 0, command.err
        assert "Ray did not start, trying again (1 of 5 tries failed)" in command.err
        # What the node waited for, or where its log is if that had not been written when `ray.init` gave up.
        assert re.search(r"metrics_agent_port|See \S+/logs", command.err)
        command.gone()
    ((trial,),) = trials(tmp_path).values()
    assert trial.metrics()["replay/env_steps"] == 40 * 32
    assert trial.status == "FINISHED"
