"""Serve changes the number of replicas by their sessions, as the overlay for Kubernetes has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from brayx.cluster.directory import stop_directory
from brayx.gamecore.client import Client
from tests.integration.conftest import Ingress
from tests.waiting import until

OVERLAY = Path(__file__).parents[2] / "docker" / "kubernetes" / "overlays" / "serve" / "rayservice.yaml"
WAIT_S = 120.0


def running() -> int:
    deployments = serve.status().applications["echo"].deployments
    return deployments["echo"].replica_states.get("RUNNING", 0) if "echo" in deployments else 0


@pytest.mark.cluster
def test_sessions_add_and_remove_replicas(ingress: Ingress) -> None:
    """The sessions play over HTTP, where no request runs between two ticks."""
    config = yaml.safe_load(yaml.safe_load(OVERLAY.read_text())["spec"]["serveConfigV2"])
    (deployment,) = config["applications"][0]["deployments"]
    bounds = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0}
    scaling = deployment["autoscaling_config"] | bounds | {"look_back_period_s": 11}
    scaling["policy"]["policy_kwargs"] = {"sessions": 2}
    application: dict[str, Any] = {
        "name": "echo",
        "route_prefix": "/echo",
        "import_path": "deployments.echo:app",
        "args": {"native_port": 0, "tcp_port": 0, "snapshot_every": 1},
        "deployments": [
            deployment | {"name": "echo", "autoscaling_config": scaling, "ray_actor_options": {"num_cpus": 0}}
        ],
    }
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    try:
        until(lambda: running() == 1, "one replica", WAIT_S)
        games = [Client(f"{ingress.http}/echo", reconnect_s=WAIT_S) for _ in range(3)]
        for game in games:
            game.start()
        until(lambda: running() == 2, "a second replica", WAIT_S)
        for game in games[1:]:
            game.stop()
        until(lambda: running() == 1, "one replica again", WAIT_S)
        assert games[0].tick(b"still there") == b"still there"
        games[0].stop()
        for game in games:
            game.close()
    finally:
        serve.delete("echo")
        stop_directory("echo/sessions")
