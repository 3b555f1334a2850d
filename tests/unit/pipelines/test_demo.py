"""The demo finds out what is wrong with a job before Ray is started."""

from __future__ import annotations

import argparse

import pytest

from brayx.errors import ConfigError
from pipelines import demo as demo_module

JOB = """
project: p
trial: t
agent: {kind: agent, module: my_agent, class: Mine}
model: {kind: model, module: my_agent}
actor: {kind: actor, agents: [agent]}
buffer: {kind: buffer}
trainer: {kind: trainer, model: model, buffers: [buffer]}
"""


def test_code_that_is_not_there_is_told_before_ray_starts(tmp_path, tracking_db, monkeypatch):
    def start(*_):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(demo_module, "cluster_for", start)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "my_agent.py").write_text("class Other:\n    pass\n")
    arguments = argparse.Namespace(
        config=str(tmp_path / "job.yaml"), overrides=[], tracking=tracking_db, ingress="serve", address=""
    )
    with pytest.raises(ConfigError, match="Mine"):
        demo_module.demo(arguments)
