"""What the host of one machine refuses, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.errors import ConfigError
from deployments.job import JobConfig
from pipelines.cli import TEMPLATES
from pipelines.local import check_local


def cartpole(*overrides: str) -> JobConfig:
    return JobConfig.load(TEMPLATES / "cartpole.yaml", overrides)


def test_the_template_is_for_this_host_too() -> None:
    check_local(cartpole())


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.placement=remote", "model.placement is remote"),
        ("actor.num_workers=2", "actor.num_workers is 2"),
        ("buffer.num_workers=3", "buffer.num_workers is 3"),
        ("trainer.num_workers=2", "trainer.num_workers is 2"),
    ],
)
def test_what_takes_more_than_a_process_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_local(cartpole(override))
    assert raised.value.message.endswith(f"cannot do this yet: {told}. Leave out --local")
    assert raised.value.details["found"] == [told]


def test_all_that_is_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        "project: p\ntrial: t\nbuffer: {kind: buffer}\n"
        "left: {kind: model, module: mine}\nright: {kind: model, module: mine}\n"
        "data: {kind: source, module: mine, buffer: buffer}\n"
    )
    with pytest.raises(ConfigError, match=r"data is a source; there are 2 models \(left, right\) and one may be"):
        check_local(JobConfig.load(tmp_path / "job.yaml"))
