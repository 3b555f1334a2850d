"""The jobs that the local host cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx import systems
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.local.job import beyond_local, in_one_process, open_lobby


def cartpole(*overrides: str) -> JobConfig:
    return JobConfig.load(TEMPLATES / "cartpole.yaml", overrides)


@pytest.mark.parametrize("overrides", [(), ("model.placement=remote",)])
def test_the_template_is_for_this_host_too(overrides: tuple[str, ...]) -> None:
    assert beyond_local(cartpole(*overrides)) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor.num_workers=2", "actor.num_workers is 2"),
        ("trainer.num_workers=2", "trainer.num_workers is 2"),
    ],
)
def test_what_needs_more_than_one_process_is_named(override: str, named: str) -> None:
    assert beyond_local(cartpole(override)) == [named]


def test_all_obstacles_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        "project: p\ntrial: t\nbuffer: {kind: buffer}\n"
        "left: {kind: model, module: mine, placement: remote, num_workers: 2}\nright: {kind: model, module: mine}\n"
        "data: {kind: source, module: mine, buffer: buffer}\n"
        "games: {kind: rollout, env: CartPole-v1, model: right, buffer: buffer, num_workers: 64, cpus_per_worker: 64}\n"
    )
    obstacles = beyond_local(JobConfig.load(tmp_path / "job.yaml"))
    cpus = systems.cores()
    reserved = f"the workers of games reserve 4096 CPUs, and this machine has {cpus}"
    assert obstacles == [reserved, "left.num_workers is 2"]


def test_shards_and_rollout_workers_become_one_buffer_and_one_thread() -> None:
    job = JobConfig.load(
        TEMPLATES / "ppo_env.yaml", ["rollout.mode=non_blocking", "rollout.num_workers=3", "buffer.num_workers=2"]
    )
    assert beyond_local(job) == []
    local_job, said = in_one_process(job)
    assert (local_job.rollouts["rollout"].num_workers, local_job.rollouts["rollout"].num_envs) == (1, 24)
    assert (local_job.buffers["buffer"].num_workers, local_job.buffers["buffer"].size) == (1, 8)
    assert said == [
        "buffer.num_workers is 2: one buffer keeps their 8 batches",
        "rollout.num_workers is 3: one thread steps their 24 environments",
    ]
    assert in_one_process(local_job) == (local_job, [])


def test_workers_whose_function_makes_their_environments_at_once_keep_their_number() -> None:
    overrides = ("rollout.env=null", "rollout.module=brayx.rollout.multi", "rollout.func=AgentsAsRows")
    local_job, said = in_one_process(JobConfig.load(TEMPLATES / "ppo_env.yaml", overrides))
    assert (local_job.rollouts["rollout"].num_workers, local_job.rollouts["rollout"].num_envs) == (2, 8)
    assert said == ["rollout.num_workers is 2: one thread steps their 16 environments"]


def test_options_of_the_network_are_refused_before_the_first_game_comes() -> None:
    with pytest.raises(ConfigError, match=r"network\.hiden: unknown key; nearest is 'hidden'"):
        open_lobby(JobConfig.load(TEMPLATES / "game.yaml", ["network.hiden=[7]"]))
