"""Serving in one process: an alias is followed, a canary gets its share, and sessions' results are logged."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mlflow import MlflowClient

from brayx.actor.doors.ports import open_to_all
from brayx.commands import cli
from brayx.engines.base import Engine, save_weights
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from brayx.errors import BadWeights, BrayxError, ModelNotFound, ServiceFull, Unauthorized
from brayx.gamecore.auth import Keys, new_key
from brayx.gamecore.client import Client
from brayx.gamecore.status import read_status
from brayx.gamecore.transports.base import Endpoint
from brayx.jobs.config import JobConfig
from brayx.local.serving import Serving
from brayx.model.arms import Followed
from brayx.model.checkpoints import engine_from
from brayx.recording import open as open_recordings
from brayx.tracking import Trial, register
from tests.recorded import ended
from tests.scale_job import AGENT, MODEL
from tests.waiting import until

PROJECT = "served"
SHARE = 0.3
WAIT_S = 30.0
DRAWING = """
import numpy as np

def render(states):
    return [np.full((40, 50, 3), 20 * state.tick, np.uint8) for state in states]
"""

QUIET = """

class QuietAgent(VersionAgent):
    async def on_session_end(self, reason):
        pass
"""


class Registry:
    """Registers versions of the job's model, whose only weight is the version's number."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.trial = Trial.open(PROJECT, "t", uri)

    def add(self, factor: int, alias: str | None, weight: str = "factor") -> None:
        folder = self.folder / f"checkpoint-{factor}"
        folder.mkdir()
        save_weights(folder / "weights.npz", {weight: np.array([factor], np.float32)})
        register(self.trial, self.trial.save_checkpoint(folder, factor), PROJECT, alias=alias)


class Players:
    """Sessions of one service."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.count = 0

    def begin(self, session: str = "") -> Client:
        self.count += 1
        client = Client(self.url, timeout_s=WAIT_S)
        client.start(session=session or uuid.uuid4().hex)
        return client

    def new(self) -> int:
        """The version that a new session gets."""
        client = self.begin()
        try:
            return version_of(client)
        finally:
            client.stop()
            client.close()


def version_of(client: Client) -> int:
    value, version = json.loads(client.tick(b"{}"))
    assert value == version, "the weights are those of the version that the reply names"
    return int(version)


@pytest.fixture
def registry(tmp_path: Path, tracking_db: str) -> Registry:
    return Registry(tmp_path, tracking_db)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("job")
    (folder / "served_model.py").write_text(MODEL)
    (folder / "served_agent.py").write_text(AGENT + QUIET)
    parts: dict[str, Any] = {
        "project": PROJECT,
        "trial": "t",
        "model": {
            "kind": "model", "module": "served_model", "follow_s": 0.2,
            "canary": {"alias": "candidate", "share": SHARE},
        },
        "agent": {"kind": "agent", "module": "served_agent", "class": "VersionAgent"},
        "actor": {"kind": "actor", "agents": ["agent"], "port": 0, "native_port": 0, "tcp_port": 0},
    }  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(parts))
    return JobConfig.load(folder / "job.yaml")


@pytest.fixture
def serving(job: JobConfig, registry: Registry) -> Iterator[Serving]:
    registry.add(1, "champion")
    with Serving(job, registry.uri) as serving:
        yield serving


def test_a_canary_and_its_promotion(serving: Serving, registry: Registry) -> None:
    players = Players(serving.url)
    assert {players.new() for _ in range(5)} == {1}, "without a candidate, every session gets the champion"
    assert serving.registered == {"model": [f"models:/{PROJECT}/1"]}
    old = players.begin("old")
    assert version_of(old) == 1

    registry.add(2, "candidate")
    both = {"model": [f"models:/{PROJECT}/1", f"models:/{PROJECT}/2"]}
    until(lambda: serving.registered == both, "the candidate is served", WAIT_S)
    page = read_status(Endpoint.parse(serving.url), WAIT_S)
    assert page is not None
    assert page["registered"] == both
    followed = Followed(PROJECT, canary="candidate", share=SHARE)
    names = [f"session-{i}" for i in range(60)]
    expected = {
        name: 2 if followed.choose(name, {"champion": 1, "candidate": 2}) == "candidate" else 1 for name in names
    }
    running = {name: players.begin(name) for name in names}
    assert {name: version_of(client) for name, client in running.items()} == expected, "by the session's id alone"
    assert Counter(expected.values())[2] > 5

    assert cli.main(["promote", f"models:/{PROJECT}@candidate", "--tracking", registry.uri]) == 0
    until(lambda: serving.registered == {"model": [f"models:/{PROJECT}/2"]}, "the alias is followed", WAIT_S)
    assert {players.new() for _ in range(20)} == {2}
    assert {name: version_of(client) for name, client in running.items()} == expected, "running sessions keep theirs"
    assert version_of(old) == 1
    for client in (*running.values(), old):
        client.stop()
        client.close()
    serving.close()

    logged = MlflowClient(registry.uri)
    experiment = logged.get_experiment_by_name(PROJECT)
    assert experiment is not None
    logged_runs = logged.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'serving%'")
    runs = {run.info.run_name: run.data.metrics for run in logged_runs}
    assert len(runs) == 3, "champion 1, candidate 2, champion 2"
    assert sum(metrics["session/sessions"] for metrics in runs.values()) == players.count
    for name, metrics in runs.items():
        assert metrics["return/mean"] == pytest.approx(10.0 * int(name.split()[2]))
        assert metrics["session/games"] == metrics["session/sessions"] <= metrics["tick/count"]


def test_it_answers_with_torch_until_the_engine_is_exported(
    job: JobConfig, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion, a canary and running sessions move to the engine once it is built."""
    exported, said = threading.Event(), []

    def engine_when_exported(*args: Any) -> tuple[Engine, int]:
        assert exported.wait(WAIT_S)
        return engine_from(*args)

    def engines() -> set[type]:
        return {type(ready.run.func.__self__) for ready in list(serving._models["model"]._versions._alive.values())}

    monkeypatch.setattr("brayx.model.checkpoints.engine_from", engine_when_exported)
    registry.add(1, "champion")
    registry.add(2, "candidate")
    with Serving(job, registry.uri, say=said.append) as serving:
        players = Players(serving.url)
        until(lambda: len(serving.registered["model"]) == 2, "the candidate is served", WAIT_S)
        running = [players.begin(f"session-{i}") for i in range(20)]
        versions = [version_of(client) for client in running]
        assert set(versions) == {1, 2}
        assert (engines(), said) == ({TorchEngine}, [])
        exported.set()
        until(lambda: said, "the engine is built", WAIT_S)
        assert said == ["'model': the model acts with engine onnx from policy version 1 on, no longer with torch"]
        assert engines() == {OnnxEngine}
        assert [version_of(client) for client in running] == versions, "running sessions keep their versions"
        registry.add(3, "champion")
        until(lambda: 3 in {players.new() for _ in range(5)}, "the alias is followed", WAIT_S)
        assert engines() == {OnnxEngine}
        for client in running:
            client.stop()
            client.close()


def test_draining_refuses_starts_and_waits_for_running_sessions(serving: Serving) -> None:
    with Client(serving.url) as client, Client(serving.url) as late:
        client.start()
        assert serving.drain(0.2) == 1, "the session still runs"
        with pytest.raises(ServiceFull):
            late.start()
        assert version_of(client) == 1
        client.stop()
    assert serving.drain(WAIT_S) == 0
    page = read_status(Endpoint.parse(serving.url), WAIT_S)
    assert page is not None
    assert page["draining"]


def test_games_that_stop_without_a_return_get_a_hint_once(job: JobConfig, registry: Registry) -> None:
    quiet = JobConfig.of(job.as_dict(), job.folder, ["agent.class=QuietAgent"])
    with Serving(quiet, registry.uri) as serving:
        players, hints = Players(serving.url), [serving.hint()]
        for _ in range(3):
            players.begin().stop(b'{"reward": 1}')
        until(lambda: hints.append(serving.hint()) or hints[-1], "the third game has ended")
        said = "3 games stopped without a return; the newest: its stop had neither terminated nor truncated besides rew"
        assert hints[-1].startswith(said)
        assert not any(hints[:-1])
        assert not serving.hint()


def test_a_named_version_is_served_and_stays(job: JobConfig, registry: Registry) -> None:
    registry.add(1, "champion")
    registry.add(2, None)
    with Serving(job, registry.uri, models={"model": f"models:/{PROJECT}/2"}) as serving:
        assert Players(serving.url).new() == 2
        assert serving.registered == {"model": [f"models:/{PROJECT}/2"]}
    with pytest.raises(ModelNotFound):
        Serving(job, registry.uri, models={"model": f"models:/{PROJECT}/3"})


def test_without_a_champion_the_model_acts_as_built_and_follows_the_first(job: JobConfig, registry: Registry) -> None:
    with Serving(job, registry.uri) as serving:
        players = Players(serving.url)
        assert players.new() == 0
        assert serving.registered == {"model": []}
        registry.add(1, "champion")
        until(lambda: players.new() == 1, "the champion is followed", WAIT_S)


def test_keys_are_required(job: JobConfig, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    key = new_key(path)
    loaded = JobConfig.load(job.file, [f"actor.keys_file={path}"])
    with Serving(loaded, registry.uri) as serving:
        assert not open_to_all(serving.config.model_copy(update={"host": "0.0.0.0"}))
        with Client(serving.url) as client, pytest.raises(Unauthorized):
            client.start()
        with Client(serving.url, key=key, secret=Keys.load(path).secret(key)) as client:
            client.start()
            client.stop()


def test_doors_that_other_machines_reach_without_keys_are_open(job: JobConfig) -> None:
    assert open_to_all(JobConfig.load(job.file, ["actor.host=0.0.0.0"]).actors["actor"])


def test_a_version_of_a_model_with_other_options_is_served_by_its_own_job(job: JobConfig, registry: Registry) -> None:
    registry.add(1, "champion", weight="other")
    refusal = f"model: models:/{PROJECT}/1 was trained .*: weights lack 'factor' .*; `brayx serve models:/{PROJECT}/1`"
    with pytest.raises(BadWeights, match=refusal):
        Serving(job, registry.uri)


def test_a_failed_start_leaves_no_door_open(job: JobConfig, registry: Registry) -> None:
    with Serving(job, registry.uri) as serving:
        port = serving.url.rpartition(":")[2]
        with pytest.raises(BrayxError, match=f"port {port}"):
            Serving(JobConfig.load(job.file, [f"actor.port={port}"]), registry.uri)


def test_a_render_draws_the_frames_of_recorded_sessions(job: JobConfig, registry: Registry, tmp_path: Path) -> None:
    registry.add(1, "champion")
    Path(job.folder, "served_drawing.py").write_text(DRAWING)
    parts = yaml.safe_load(Path(job.file).read_text())
    parts["picture"] = {"kind": "render", "module": "served_drawing"}
    parts["recording"] = {"kind": "recording", "folder": str(tmp_path / "recorded"), "frames": "picture"}
    file = Path(job.folder, "drawn.yaml")
    file.write_text(yaml.safe_dump(parts))
    with Serving(JobConfig.load(file), registry.uri) as serving:
        client = Players(serving.url).begin("drawn")
        for _ in range(10):
            client.tick(b"{}")
        client.stop()
        client.close()
    recorded = tmp_path / "recorded"  # on a busy machine its writer starts later than the service ends
    until(lambda: recorded.is_dir() and ended(recorded), "it is written", WAIT_S)
    (episode,) = open_recordings(str(recorded))
    assert len(episode) == 10
    shades = {tick: float(image.mean()) for tick, image in enumerate(episode.images()) if image is not None}
    assert shades == pytest.approx({tick: 20 * tick for tick in shades}, abs=3)
    assert shades, "a writer that is paused leaves frames out, but not the first ones"
