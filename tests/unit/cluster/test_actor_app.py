"""Where the weights of an application come from. The application itself is tested on Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from mlflow import MlflowClient

from brayx.cluster.acting import _normalising, _Refused, _snapshots
from brayx.cluster.actor_app import actor_spec, application, build_runtime
from brayx.cluster.pool import PoolClient
from brayx.cluster.replica import ActorReplica, ActorRuntime
from brayx.engines.base import save_weights
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.weights import pooled, registered
from brayx.league.config import LeagueConfig
from brayx.model.arms import Followed, WeightSource
from brayx.model.build import build_model
from brayx.model.following import AliasFollower
from brayx.model.local import LocalModel
from brayx.tracking import Trial, register
from brayx.types import Weights
from deployments import actor, league

ROOT = Path(__file__).parents[3]


def test_a_replica_gets_a_permanent_folder_or_the_version_to_download(tracking_db: str, tmp_path: Path) -> None:
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml")
    trial = Trial.open(job.project, "t", tracking_db)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights.npz").write_bytes(b"not read here")
    register(trial, trial.save_checkpoint(tmp_path / "made", 1), job.project)
    source = pooled(job, "model", tracking_db)
    assert Path(source.checkpoint, "weights.npz").is_file()
    assert Path(source.checkpoint).is_relative_to(tmp_path / "mlartifacts"), "the run's own folder"
    client = MlflowClient(tracking_db)
    client.create_model_version(job.project, source="http://127.0.0.1:1/elsewhere")
    client.set_registered_model_alias(job.project, "champion", "2")
    source = pooled(job, "model", tracking_db)
    assert (source.checkpoint, source.tracking, source.version) == (f"models:/{job.project}/2", tracking_db, 2)


def test_the_league_application_serves_a_job_with_a_league_only(tracking_db: str) -> None:
    templates = ROOT / "pipelines" / "templates"
    with pytest.raises(ConfigError) as refused:
        league.app(league.ServeArgs(config=str(templates / "cartpole.yaml"), tracking=tracking_db))
    assert "\n" not in str(refused.value)
    assert refused.value.message.endswith("the job has no league; deployments.actor:app serves it")
    args = league.ServeArgs(config=str(templates / "league" / "four.yaml"), tracking=tracking_db)
    assert isinstance(league.app(args), type(actor.app(args)))


@pytest.mark.parametrize("origin", ["folder", "registry"])
async def test_a_model_in_its_agents_process_starts_with_its_version(
    tracking_db: str, tmp_path: Path, origin: str
) -> None:
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml")
    module, _ = build_model(job.folder, job.models["model"].module, "model", job.as_dict())
    (tmp_path / "made").mkdir()
    save_weights(tmp_path / "made" / "weights.npz", module_weights(module))
    trial = Trial.open(job.project, "t", tracking_db)
    register(trial, trial.save_checkpoint(tmp_path / "made", 1), job.project)
    source = pooled(job, "model", tracking_db)
    if origin == "registry":
        source = replace(source, checkpoint=f"models:/{job.project}/1")
    runtime = await build_runtime(actor_spec(job, "actor", mode="serve", weights={"model": source}), {})
    assert runtime.versions() == {"model": 1}
    for close in runtime.close:
        await close()


class Built(Exception):
    """Stops a replica's start before the part that needs Ray."""


class Starting(ActorReplica):
    def __del__(self) -> None:  # type: ignore[override]  # nothing to close
        pass


@pytest.mark.parametrize("mode", ["train", "serve"])
@pytest.mark.parametrize("where", ["file", "environment"])
async def test_keys_are_required_for_serving_and_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["train", "serve"], where: str
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("arena: sixteen or more of them\n")
    file.chmod(0o600)
    overrides = [f"actor.keys_file={file}"] if where == "file" else []
    if where == "environment":
        monkeypatch.setenv("BRAYX_KEYS_FILE", str(file))
    # The command decides between training and serving, whatever mode the YAML has.
    other = {"train": "serve", "serve": "train"}[mode]
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml", [*overrides, f"mode={other}"])
    spec = actor_spec(job, "actor", mode=mode, weights={"model": WeightSource()})
    bound: Any = application(spec, name="actor", directory="sessions")._bound_deployment

    def create(directory: str) -> Any:
        raise Built

    monkeypatch.setattr("brayx.cluster.replica.create_directory", create)
    replica = Starting.__new__(Starting)
    with pytest.raises(Built):
        await ActorReplica.__init__(replica, *bound.init_args, **bound.init_kwargs)
    assert replica._keys is not None
    assert replica._keys.ids == ["arena"]


async def test_the_status_page_names_the_registered_version(tmp_path: Path, tracking_db: str) -> None:
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml", ["model.engine=torch"])
    module, example = build_model(job.folder, job.models["model"].module, "model", job.as_dict())
    save_weights(tmp_path / "weights.npz", module_weights(module))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "weights.npz").rename(tmp_path / "checkpoint" / "weights.npz")
    trial = Trial.open("cartpole", "t", tracking_db)
    register(trial, trial.save_checkpoint(tmp_path / "checkpoint", 1), "cartpole")
    for weights, versions in (
        (pooled(job, "model", tracking_db, "models:/cartpole/1"), ["models:/cartpole/1"]),
        (WeightSource(), []),
    ):
        runtime = await build_runtime(actor_spec(job, "actor", mode="serve", weights={"model": weights}), {})
        assert runtime.describe()["registered"] == {"model": versions}
        for close in runtime.close:
            await close()

    # With a followed alias it is the version for new sessions, and the canary's.
    engine = TorchEngine(module, example)

    async def fetch(version: int) -> Weights:
        return engine.initial

    followed = Followed("cartpole", canary="candidate", share=0.5)
    client = PoolClient("pool", tracking_db, "", {"model": followed})
    model = LocalModel(engine, version=1, max_versions=4, fetch=fetch)
    following = AliasFollower(client, {"model": followed}, {"model": model})
    source = pooled(job, "model", tracking_db, "models:/cartpole@champion")
    assert registered({"model": source}, following.versions()) == {"model": ["models:/cartpole/1"]}
    await following.move({"model": {"champion": 1, "candidate": 4}})
    assert registered({"model": source}, following.versions()) == {
        "model": ["models:/cartpole/1", "models:/cartpole/4"]
    }
    await following.move({"model": {"champion": 1}})
    assert registered({"model": source}, following.versions()) == {"model": ["models:/cartpole/1"]}
    await model.close()


@pytest.mark.parametrize("resident", [1, 2])
async def test_a_replica_keeps_as_many_snapshots_as_may_stay_in_memory(resident: int) -> None:
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml", ["model.engine=torch"])
    players = {"main": {"role": "main"}}
    config = LeagueConfig.model_validate({"model": "model", "resident": resident, "players": players})
    spec = actor_spec(job, "actor", mode="train", weights={"model": WeightSource()})
    module, _ = build_model(job.folder, job.models["model"].module, "model", job.as_dict())

    async def weights(version: int) -> Weights:
        return module_weights(module)

    model = await _snapshots(spec, config, ActorRuntime(make_actor=Built), weights)  # type: ignore[arg-type]
    for version in range(1, 6):
        await model.pin(version)
    await asyncio.sleep(0.01)  # the last fetch ends, and no longer holds its version
    assert model._versions.known() == [0, *range(6 - resident, 6)]
    await model.close()


def test_games_cannot_fill_a_buffer_of_normalised_observations() -> None:
    """Nor a buffer of their own that the same model learns from."""
    config: dict[str, Any] = {"a": {"kind": "rollout", "buffer": "b", "normalise_obs": True}, "c": {"buffer": "d"}}
    assert _normalising({**config, "e": 1}) == "a"
    config["a"]["normalise_obs"] = False
    assert _normalising(config) is None
    with pytest.raises(ConfigError, match="agents of this job cannot push"):
        _Refused("why").push(1)
