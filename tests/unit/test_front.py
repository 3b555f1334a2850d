"""The Python front: its arguments, its results, and the cost of its import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import brayx
import brayx.front
from brayx import hosts
from brayx.errors import ConfigError, ConnectFailed
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.jobs.evaluate import Evaluation
from brayx.jobs.result import TrainResult
from brayx.tracking import Trial
from tests.unit.gamecore.echo_server import EchoApp, serving


def test_every_public_name_exists() -> None:
    for name in brayx.__all__:
        assert getattr(brayx, name) is not None
    assert {"train", "serve", "evaluate", "tune"} <= set(dir(brayx))


def test_editors_see_every_name_from_where_it_comes() -> None:
    """An editor reads the imports for types; a missing name has the type `Any`."""
    (types,) = [node for node in ast.parse(inspect.getsource(brayx)).body if isinstance(node, ast.If)]
    seen = {name.name: each.module for each in types.body if isinstance(each, ast.ImportFrom) for name in each.names}
    # The classes of `brayx.remote` return the cluster's, or on the local host one with the same members.
    assert {name: home for name, home in brayx._HOME.items() if home != "brayx.remote"} == {
        name: home for name, home in seen.items() if name not in ("RemoteBuffer", "RemoteModel")
    }
    assert set(brayx.__all__) == set(seen)
    for package in (brayx, brayx.front):
        assert Path(package.__file__ or "").with_name("py.typed").exists(), "otherwise everything from it is Any"


def test_its_names_load_neither_ray_nor_torch() -> None:
    code = "import sys, brayx; brayx.train, brayx.serve, brayx.evaluate; "
    code += "assert not {'ray', 'torch', 'mlflow'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_train_takes_a_shipped_job_and_overrides_and_prints_the_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}
    trial = Trial("sqlite:///none.db", "id", "p", "t")
    result = TrainResult(trial, {}, True, "cartpole", 2, 1.0, [], "champion: cartpole version 2", ended="it ended")

    def train(job: JobConfig, **options: object) -> TrainResult:
        asked.update(options, job=job)
        return result

    monkeypatch.setattr(hosts, "train", train)
    overrides = {"trainer.num_steps": 50_000, "trainer.target_return": None, "agent.module": "gym_agent"}
    assert brayx.train("cartpole.yaml", overrides, trial="second", tracking=tmp_path) is result
    printed = capsys.readouterr().out
    assert printed == f"{result.summary()}\n"
    assert "champion: cartpole version 2\n" in printed
    job = asked.pop("job")
    assert (job.trainers["trainer"].num_steps, job.trainers["trainer"].target_return) == (50_000, None)  # type: ignore[attr-defined]
    assert asked == {"cluster": None, "trial_name": "second", "resume": True, "tracking": str(tmp_path)}


def test_a_missing_job_is_named() -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        brayx.train("none.yaml")


def test_evaluate_plays_against_a_url() -> None:
    with serving(EchoApp(lambda body: b'{"action":0}')) as address:
        played = brayx.evaluate(f"http://{address}", "CartPole-v1", games=2)
    assert isinstance(played, Evaluation)
    assert repr(played).endswith(f"over 2 games (lowest {min(played.returns):g}, highest {max(played.returns):g})")


def test_serve_opens_the_jobs_doors_for_evaluate_until_its_block_ends(tracking_db: str) -> None:
    free = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": None}
    with brayx.serve("cartpole.yaml", free, tracking=tracking_db) as service:
        url = service.url
        assert len(brayx.evaluate(service, "CartPole-v1", games=2).returns) == 2
    with pytest.raises(ConfigError, match="no actor named 'other'"):
        brayx.serve("cartpole.yaml", free, tracking=tracking_db, actor="other")
    with Client(url, timeout_s=5.0) as client, pytest.raises(ConnectFailed):
        client.start()
