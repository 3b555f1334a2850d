"""PPO's two classes train: one with workers on a running Ray, as a script that joins it, the other in its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.parallel_ppo import ParallelPPO
from tests.end_to_end.jobs import trials

ENVS, STEPS = 4, 64
ROUND = ENVS * STEPS
"""Steps of all environments for an update."""
JOINS = """
import sys
from pipelines.parallel_ppo import DistributedPPO

ppo = DistributedPPO(
    "CartPole-v1", num_workers=2, num_envs=4, steps_per_worker=256, epochs=2, address=sys.argv[1], log_dir=sys.argv[2]
)
result = ppo.train(total_timesteps=2_000, log_interval=1)
print(result.reason, result.env_steps, result.updates, len(result.module.state_dict()))
"""


def measured(folder: Path) -> dict[str, float]:
    """Metrics of the only trial, which has a checkpoint."""
    (trial,) = trials(folder, "CartPole-v1")["ppo CartPole-v1 seed 0"]
    assert trial.checkpoints()
    return trial.metrics()


@pytest.mark.cluster
def test_workers_on_ray_train(ray_cluster: str, tracking_db: str, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    script = subprocess.run(
        [sys.executable, "-c", JOINS, address, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert script.returncode == 0, script.stderr
    reason, env_steps, updates, arrays = script.stdout.split()
    assert reason == "num_steps"
    assert int(env_steps) >= 2_000
    assert int(updates) >= 2_000 // 512, "an update learns from 256 transitions of each worker"
    assert int(arrays) > 0
    assert measured(tmp_path)["learner/updates"] == int(updates)


def test_environments_in_this_process_train(
    tracking_db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo = ParallelPPO("CartPole-v1", num_envs=ENVS, num_steps=STEPS, epochs=2, log_dir=str(tmp_path))
    result = ppo.train(total_timesteps=3 * ROUND, log_interval=2, save_interval=2)
    assert result.reason == "num_steps"
    # A step in which an environment only resets is no transition.
    assert 3 * ROUND <= result.env_steps <= ROUND * result.updates < 3 * ROUND + 2 * ROUND
    assert result.return_mean > 0
    lines = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("update ")]
    assert lines[0] == "update 2", "every second one"
    assert measured(tmp_path)["learner/updates"] == result.updates
