"""`serve run serve_config.yaml` as a separate process: answers plain HTTP, shows its models, leaves nothing behind."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from brayx.jobs.config import JobConfig
from brayx.model.build import build_model
from brayx.ports import free_port
from brayx.tracking import Trial, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from tests.end_to_end.jobs import ROOT, is_free, serve_run, tuned

POLICY_VERSION = 41


def serve_config(folder: Path, **args: Any) -> str:
    """A copy of the repository's ``serve_config.yaml`` in ``folder``, on a free port; gives the URL."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    application["args"]["config"] = str(ROOT / application["args"]["config"])
    application["args"] |= args
    config["http_options"]["port"] = free_port()
    (folder / "serve_config.yaml").write_text(yaml.safe_dump(config))
    return f"http://127.0.0.1:{config['http_options']['port']}"


def call(url: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """One request as ``curl -d BODY -H ...`` sends it."""
    request = urllib.request.Request(f"{url}/step", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def status(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/", timeout=5) as reply:
            return json.load(reply)
    except (OSError, ValueError):
        return {}


def play(url: str) -> list[int]:
    """The three calls of the README; gives the actions."""
    assert call(url, session="game-1", step_kind="start") == (200, b"Game Started")
    actions = []
    for angle in (-0.1, 0.0, 0.1):
        body = json.dumps({"obs": [0.0, 0.0, angle, 0.0], "reward": 1.0}).encode()
        code, reply = call(url, body, session="game-1", step_kind="tick")
        assert code == 200
        actions.append(json.loads(reply)["action"])
    last = b'{"obs": [0, 0, 0.3, 0], "reward": 1.0, "terminated": true, "truncated": false}'
    assert call(url, last, session="game-1", step_kind="stop") == (200, b"Game Stopped")
    return actions


@pytest.mark.cluster
def test_the_shipped_file_before_any_champion_serves_untrained_and_says_what_to_run(
    tmp_path: Path, tracking_db: str
) -> None:
    """It runs in the repository, with the whole file except the port, which may be taken, and without the champion of a
    developer's own training in this folder."""
    port = free_port()
    shipped = (ROOT / "serve_config.yaml").read_text()
    assert shipped.count("port: 8000\n") == 1
    config, url = tmp_path / "serve_config.yaml", f"http://127.0.0.1:{port}"
    config.write_text(shipped.replace("port: 8000\n", f"port: {port}\n"))
    words, environment = ["serve", "run", str(config)], {"MLFLOW_TRACKING_URI": tracking_db}
    with serve_run(words, tmp_path, lambda: bool(status(url)), environment, runs_in=ROOT) as command:
        facts = status(url)
        expected = {"service": "brayx", "sessions": 0, "mode": "serve"}
        expected |= {"policy_versions": {"model": 0}, "registered": {"model": []}}
        assert facts == {**facts, **expected}
        (shown,) = re.findall(r'^# (\{"service": .*\})$', (ROOT / "docs" / "guide-serve.md").read_text(), re.M)
        assert list(json.loads(shown)) == list(facts), "the guide shows what there is"
        native = {"http": "http://127.0.0.1:8100", "ws": "ws://127.0.0.1:8100", "tcp": "tcp://127.0.0.1:8101"}
        assert facts["doors"] == native, "serve_config.yaml opens the default native ports"
        assert all(action in (0, 1) for action in play(url))
        code, reply = call(url, b"{}", session="game-2", step_kind="tick")
        assert (code, json.loads(reply)["error"]) == (404, "session_unknown")
        assert "send step_kind start first" in json.loads(reply)["message"]
        assert "requires no token" not in command.err + command.out
        said = [line for line in (command.err + command.out).splitlines() if "untrained" in line]
        assert len(said) == 1, said
        assert re.search(r"brayx (train|demo)|make demo", said[0]), said
        assert not command.pids("haproxy")
    assert is_free(port)
    assert not list(tmp_path.glob("mlruns"))


@pytest.mark.cluster
def test_the_champion_is_served_behind_haproxy(tmp_path: Path, tracking_db: str) -> None:
    champion(tracking_db, tmp_path)
    url = serve_config(tmp_path, tracking=tracking_db)
    # A cluster of `ray start` also has no token until a user creates one.
    opened = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": None}
    words = tuned("serve", "run", "serve_config.yaml")
    with serve_run(words, tmp_path, lambda: bool(status(url)), opened) as command:
        command.until(command.says("Ray requires no token: anyone who reaches its ports"), "it warned")
        assert status(url)["policy_versions"] == {"model": 1}, "the registry's version, by which it is promoted"
        assert status(url)["registered"] == {"model": ["models:/cartpole/1"]}
        assert play(url) == [0, 0, 1], "it pushes where the pole leans"
        assert "untrained" not in command.err + command.out
        assert command.pids("haproxy")
    assert is_free(int(url.rpartition(":")[2]))


def champion(uri: str, folder: Path) -> None:
    """Registers a policy that differs from a fresh one: action 1 if and only if the pole's angle is positive."""
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml")
    module, _ = build_model(job.folder, job.models["model"].module, "model", job.as_dict())
    layers = module.policy.layers
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        layers[0].weight[0, 2] = layers[2].weight[0, 0] = layers[4].weight[1, 0] = 1.0
    saved = folder / "checkpoint"
    saved.mkdir()
    counters = Counters(env_steps=1000, policy_version=POLICY_VERSION)
    checkpoint.save(saved, module, torch.optim.Adam(module.parameters()), counters, {})
    trial = Trial.open(job.project, "made", uri)
    register(trial, trial.save_checkpoint(saved, 1000, {"episode_return": 500.0}), job.project, alias="champion")
    trial.finish()
