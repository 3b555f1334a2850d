"""What the host of one machine cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.job import JobConfig
from pipelines.cli import TEMPLATES
from pipelines.local import beyond_local


def cartpole(*overrides: str) -> JobConfig:
    return JobConfig.load(TEMPLATES / "cartpole.yaml", overrides)


@pytest.mark.parametrize("overrides", [(), ("model.placement=remote",)])
def test_the_template_is_for_this_host_too(overrides: tuple[str, ...]) -> None:
    assert beyond_local(cartpole(*overrides)) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor.num_workers=2", "actor.num_workers is 2"),
        ("buffer.num_workers=3", "buffer.num_workers is 3"),
        ("trainer.num_workers=2", "trainer.num_workers is 2"),
    ],
)
def test_what_takes_more_than_a_process_is_named(override: str, named: str) -> None:
    assert beyond_local(cartpole(override)) == [named]


def test_all_that_is_in_the_way_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        "project: p\ntrial: t\nbuffer: {kind: buffer}\n"
        "left: {kind: model, module: mine, placement: remote, num_workers: 2}\nright: {kind: model, module: mine}\n"
        "data: {kind: source, module: mine, buffer: buffer}\n"
    )
    found = beyond_local(JobConfig.load(tmp_path / "job.yaml"))
    assert found == ["data is a source without an actor", "left.num_workers is 2"]
