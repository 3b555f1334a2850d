"""A job without Python on a real Serve: the champion's contract decides which games play, at every door."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import serve

from brayx.cluster.directory import stop_directory
from brayx.cluster.serving import serving_application
from brayx.errors import BadBody
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_client import ContractClient
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.model.build import build_model
from brayx.tracking import Trial, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from tests.integration.conftest import Ingress

PROJECT = "by-contract"
CONTRACT: dict[str, Any] = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {"go": {"kind": "discrete", "size": 3, "start": 1}, "steer": {"kind": "continuous", "size": 1}},
}
OBS = [[0.0, 1.0], [3.0, -2.0], [-5.0, 0.5]]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def urls(
    ingress: Ingress, new_tracking_db: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The doors of game.yaml, which has no contract, with a champion that has one."""
    options = [f"project={PROJECT}", "actor.native_port=0", "actor.tcp_port=0", "model.engine=torch"]
    trained = JobConfig.load(TEMPLATES / "game.yaml", [*options, f"contract={json.dumps(CONTRACT)}"])
    torch.manual_seed(1)
    module, _ = build_model(trained.folder, trained.models["model"].module, "model", trained.as_dict())
    place = tmp_path_factory.mktemp("champion")
    tracking_db, folder = new_tracking_db(place), place / "saved"
    folder.mkdir()
    about = {"job": trained.as_dict(), "folder": trained.folder}
    checkpoint.save(folder, module, torch.optim.Adam(module.parameters()), Counters(policy_version=7), about)
    trial = Trial.open(PROJECT, "made", tracking_db)
    register(trial, trial.save_checkpoint(folder, 100, {}), PROJECT, alias="champion")
    serve.run(
        serving_application(JobConfig.load(TEMPLATES / "game.yaml", options), tracking_db),
        name=PROJECT,
        route_prefix=f"/{PROJECT}",
    )
    url = f"{ingress.http}/{PROJECT}"
    with urllib.request.urlopen(f"{url}/", timeout=WAIT_S) as reply:
        doors: dict[str, str] = json.load(reply)["doors"]
    yield {"ingress": url, "http": doors["http"], "tcp": doors["tcp"]}
    serve.delete(PROJECT)
    stop_directory(f"{PROJECT}/sessions")


def test_every_door_and_encoding_gives_the_same_actions(urls: dict[str, str]) -> None:
    played = []
    for door, encoding in (("ingress", "json"), ("http", "msgpack"), ("tcp", "packed")):
        contract = Contract.parse({**CONTRACT, "encoding": encoding})
        with ContractClient(urls[door], contract, timeout_s=WAIT_S) as client:
            assert client.start()["policy_version"] == 1, "the registered version"
            actions = [client.tick(obs) for obs in OBS]
            client.stop(OBS[0], terminated=True)
        assert all(action["go"] in (1, 2, 3) for action in actions)
        played.append([[action["go"], float(action["steer"][0])] for action in actions])
    np.testing.assert_allclose(played, [played[0]] * 3, atol=1e-5)
    assert np.ptp(played[0], axis=0).any(), "it looks at the game"


def test_a_game_with_another_contract_is_refused_by_field(urls: dict[str, str]) -> None:
    other = Contract.parse({**CONTRACT, "observations": {"side": {"shape": [3]}}})
    with (
        ContractClient(urls["tcp"], other, timeout_s=WAIT_S) as client,
        pytest.raises(BadBody, match=r"observations\.side\.shape is \[3\], expected \[2\]"),
    ):
        client.start()
