"""Which host runs a job."""

from __future__ import annotations

import pytest

from deployments.job import JobConfig
from pipelines.cli import TEMPLATES
from pipelines.hosts import cluster_of


@pytest.mark.parametrize("cluster", [None, "", "auto"])
def test_a_job_that_fits_runs_where_the_command_says(cluster: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster_of(JobConfig.load(TEMPLATES / "cartpole.yaml"), cluster) == cluster
    assert capsys.readouterr() == ("", "")


def test_a_job_that_needs_more_goes_to_ray_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml", ["actor.num_workers=2", "trainer.num_workers=3"])
    assert cluster_of(job, None) == ""
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{job.file}: runs on Ray: actor.num_workers is 2; trainer.num_workers is 3"


def test_a_cluster_that_is_named_is_taken_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml", ["actor.num_workers=2"])
    assert cluster_of(job, "10.0.0.7:6379") == "10.0.0.7:6379"
    assert capsys.readouterr().err == ""
