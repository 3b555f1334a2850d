"""A model trained on normalised observations acts the same on raw ones, served and exported, as in the trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from brayx import actions
from brayx.cluster.model import ModelReplica
from brayx.cluster.serving import ModelArgs, model_app
from brayx.commands import cli
from brayx.engines.base import load_weights
from brayx.engines.scaling import from_weights, learned
from brayx.engines.torch import TorchEngine
from brayx.jobs.config import JobConfig
from brayx.jobs.models import build_model
from brayx.jobs.shipped import TEMPLATES
from brayx.local.train import train_local
from brayx.local.training import Training
from brayx.rollout.envs import make_envs
from brayx.rollout.moments import ObsNormaliser, from_arrays
from brayx.tracking import Trial, register

JOB = TEMPLATES / "ppo_env.yaml"
ENVIRONMENTS = ["CartPole-v1", "Pendulum-v1"]


class Keeper:
    """Keeps only the checkpoints of a training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def push(self, part: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def latest(self) -> Path | None:
        return None

    def save(self, folder: Path, step: int, metrics: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(folder, self.folder)


def played(env: str, count: int = 300) -> np.ndarray:
    """Observations ``[N, ...]`` of the environment, as it gives them."""
    envs = make_envs(env, 4)
    obs, _ = envs.reset(seed=5)
    seen = [obs]
    while len(seen) * 4 < count:
        obs, *_ = envs.step(envs.action_space.sample())
        seen.append(obs)
    envs.close()
    return np.concatenate(seen).astype(np.float32)


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def trained(request, tmp_path_factory):
    """Environment, YAML of its job, checkpoint, and what the trainer's own parts do for some observations."""
    env = request.param
    folder = tmp_path_factory.mktemp("trained")
    job_file = folder / "job.yaml"
    text = (
        JOB.read_text()
        .replace("env: CartPole-v1", f"env: {env}")
        .replace("normalise_obs: false", "normalise_obs: true")
    )
    job_file.write_text(text.replace("project: ppo_env", f"project: {env}"))
    job = JobConfig.load(str(job_file))
    result = train_local(
        env,
        training=Training(num_steps=4096, num_envs=8, unroll_length=64, normalise_obs=True),
        model=lambda obs, spec: build_model("model", job.as_dict()),
        clerk=Keeper(folder / "checkpoint"),
    )
    weights = learned(load_weights(folder / "checkpoint" / "weights.npz"))
    raw = played(env)
    normaliser = ObsNormaliser({"obs": raw.shape[1:]}, {"obs": raw.dtype})
    normaliser.leaves["obs"].load(from_arrays(result.normaliser)["obs"])
    normaliser.refresh()
    assert np.abs(normaliser("obs", raw) - raw).max() > 0.1, "the normaliser changes what is observed"
    engine = TorchEngine(result.module, result.forward_args)
    leaves = engine.run(engine.bind(weights), [normaliser("obs", raw)])
    outputs: Any = engine.spec.unflatten_outputs(leaves)
    return env, job_file, folder / "checkpoint", raw, outputs


async def test_a_served_champion_acts_as_the_trainer_did(trained, tracking_db):
    env, job_file, folder, raw, wanted = trained
    trial = Trial.open(env, "made", tracking_db)
    register(trial, trial.save_checkpoint(folder, 4096, {}), env, alias="champion")
    bound: Any = model_app(ModelArgs(config=str(job_file), tracking=tracking_db))._bound_deployment
    build, config, source, *_ = bound.init_args
    replica = ModelReplica(build, config, source)  # without the registry, whose alias it would follow
    for row in range(0, len(raw), 7):
        outputs, _ = await replica.model.forward(raw[row])
        action = actions.greedy({name: leaf[None] for name, leaf in outputs.items()})
        want = actions.greedy({name: leaf[row : row + 1] for name, leaf in wanted.items()})
        np.testing.assert_allclose(action, want, rtol=1e-4, atol=1e-4)
    await replica.close()


def test_an_exported_checkpoint_acts_as_the_trainer_did(trained, tmp_path):
    _, job_file, folder, raw, wanted = trained
    out = tmp_path / "bundle"
    words = ["export", folder, "--to", "onnx", "--out", out, "--job", job_file, "--batch-sizes", "1", "2"]
    assert cli.main([str(word) for word in words]) == 0
    session = onnxruntime.InferenceSession(out / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, {"obs": raw}), strict=True))
    np.testing.assert_allclose(actions.greedy(outputs), actions.greedy(wanted), rtol=1e-4, atol=1e-4)
    # Its samples are raw observations of the game, not the normalised ones.
    description = json.loads((out / "bundle.json").read_text())
    shown = np.fromfile(out / description["inputs"][0]["samples"], "<f4").reshape(-1, raw.shape[1])
    scaling = from_weights(load_weights(folder / "weights.npz"))["obs"]
    recorded = load_weights(folder / "samples.npz")["obs"][1::2][: len(shown)]
    np.testing.assert_allclose((shown - scaling.mean) * scaling.scale, recorded, atol=1e-4)
