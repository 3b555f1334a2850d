"""The Python front: its arguments, its results, the cost of its import, and which host runs a job."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import brayx
import brayx.front
from brayx.commands import cli
from brayx.errors import ConfigError, ConnectFailed
from brayx.front import cluster_of
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.jobs.evaluate import Evaluation
from brayx.jobs.result import TrainResult
from brayx.jobs.shipped import TEMPLATES
from brayx.tracking import Trial
from tests.unit.gamecore.echo_server import EchoApp, serving


def test_every_public_name_exists() -> None:
    for name in brayx.__all__:
        assert getattr(brayx, name) is not None
    assert {"train", "serve", "evaluate", "tune"} <= set(dir(brayx))


def test_editors_see_every_name_from_where_it_comes() -> None:
    """An editor reads the imports for types; a missing name has the type `Any`."""
    (types,) = [node for node in ast.parse(inspect.getsource(brayx)).body if isinstance(node, ast.If)]
    seen = {
        name.name: statement.module
        for statement in types.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    # These classes of `brayx.front` return the cluster's, or on the local host one with the same members.
    either = {"RemoteBuffer": "brayx.front", "RemoteModel": "brayx.front"}
    assert {**seen, **either} == brayx._HOME
    assert set(brayx.__all__) == set(seen)
    for package in (brayx, brayx.front):
        assert Path(package.__file__ or "").with_name("py.typed").exists(), "otherwise everything from it is Any"


def test_its_names_load_neither_ray_nor_torch() -> None:
    code = "import sys, brayx; brayx.train, brayx.serve, brayx.evaluate; "
    code += "assert not {'ray', 'torch', 'mlflow'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_train_takes_a_shipped_job_and_overrides_and_prints_the_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}
    trial = Trial("sqlite:///none.db", "id", "p", "t")
    result = TrainResult(trial, {}, True, "cartpole", 2, 1.0, [], "champion: cartpole version 2", ended="it ended")

    def train(job: JobConfig, **options: object) -> TrainResult:
        asked.update(options, job=job)
        return result

    monkeypatch.setattr(brayx.front, "train_job", train)
    overrides = {"trainer.num_steps": 50_000, "trainer.target_return": None, "agent.module": "gym_agent"}
    assert brayx.train("cartpole.yaml", overrides, trial="second", tracking=tmp_path) is result
    printed = capsys.readouterr().out
    assert printed == f"{result.summary()}\n"
    assert "champion: cartpole version 2\n" in printed
    job = asked.pop("job")
    assert (job.trainers["trainer"].num_steps, job.trainers["trainer"].target_return) == (50_000, None)  # type: ignore[attr-defined]
    assert asked == {"cluster": None, "trial_name": "second", "resume": True, "tracking": str(tmp_path)}


def test_a_missing_job_is_named() -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        brayx.train("none.yaml")


def test_evaluate_plays_against_a_url() -> None:
    with serving(EchoApp(lambda body: b'{"action":0}')) as address:
        played = brayx.evaluate(f"http://{address}", "CartPole-v1", games=2)
    assert isinstance(played, Evaluation)
    assert "over 2 games (standard deviation " in repr(played)
    assert repr(played).endswith(f", lowest {min(played.returns):g}, highest {max(played.returns):g})")


def test_serve_opens_the_jobs_doors_for_evaluate_until_its_block_ends(tracking_db: str) -> None:
    free = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": None}
    with brayx.serve("cartpole.yaml", free, tracking=tracking_db) as service:
        url = service.url
        assert len(brayx.evaluate(service, "CartPole-v1", games=2).returns) == 2
    with pytest.raises(ConfigError, match="no actor named 'other'"):
        brayx.serve("cartpole.yaml", free, tracking=tracking_db, actor="other")
    with Client(url, timeout_s=5.0) as client, pytest.raises(ConnectFailed):
        client.start()


@pytest.mark.parametrize("cluster", [None, "", "auto"])
def test_a_job_that_fits_runs_where_the_command_says(cluster: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster_of(JobConfig.load(TEMPLATES / "cartpole.yaml"), cluster) == cluster
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("cluster", [None, "", "auto"])
def test_so_does_a_league(cluster: str | None) -> None:
    assert cluster_of(JobConfig.load(TEMPLATES / "league" / "four.yaml"), cluster) == cluster


def test_a_job_that_needs_more_goes_to_ray_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml", ["actor.num_workers=2", "trainer.num_workers=3"])
    assert cluster_of(job, None) == ""
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{job.file}: runs on Ray: actor.num_workers is 2; trainer.num_workers is 3"


def test_a_cluster_that_is_named_is_taken_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml", ["actor.num_workers=2"])
    assert cluster_of(job, "10.0.0.7:6379") == "10.0.0.7:6379"
    assert capsys.readouterr().err == ""


ON_GPU = [
    ("trainer.use_gpu=true",),
    ("model.engine=torch", "model.device=cuda"),
    ("model.engine=tensorrt",),
    ("trainer.use_gpu=true", "trainer.num_workers=2"),
]


@pytest.mark.parametrize("overrides", ON_GPU)
def test_a_job_for_a_gpu_runs_here_only_where_there_is_one(overrides: tuple[str, ...]) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml", overrides)
    assert cluster_of(job, "10.0.0.7:6379") == "10.0.0.7:6379"
    for cluster in (None, ""):  # a Ray that is started here has the GPUs of this machine
        if torch.cuda.is_available():
            cluster_of(job, cluster)
            continue
        with pytest.raises(ConfigError) as refused:
            cluster_of(job, cluster)
        option = overrides[-1 if overrides[0].startswith("model") else 0].replace("=", " is ")
        assert refused.value.message.startswith(f"{job.file}: {option}: torch finds no GPU on this machine; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_command_says_in_one_line_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(TEMPLATES / "cartpole.yaml")
    assert cli.main(["train", file, "--set", "trainer.use_gpu=true"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"brayx: {file}: trainer.use_gpu is true: torch finds no GPU")
    assert line.endswith("--cluster ADDRESS")
