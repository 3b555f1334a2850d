"""The applications of the shipped Serve config."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from brayx.cluster.serving import ConsoleArgs, console_app

ROOT = Path(__file__).parents[3]


def test_two_lines_of_the_shipped_config_turn_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "serve_config.yaml").read_text().splitlines()
    [first] = [index for index, line in enumerate(lines) if line.startswith("  # - {name: console")]
    lines[first : first + 2] = [line.replace("# ", "", 1) for line in lines[first : first + 2]]
    config = ServeDeploySchema.model_validate(yaml.safe_load("\n".join(lines)))
    actor, console = config.applications
    assert (console.name, console.route_prefix, console.import_path) == ("console", None, "deployments.console:app")
    args = ConsoleArgs.model_validate(console.args)
    assert args.config == actor.args["config"]
    assert console_app(args)
