"""Which host runs a job."""

from __future__ import annotations

import pytest
import torch

from brayx.commands import cli
from brayx.errors import ConfigError
from brayx.hosts import cluster_of
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES


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
