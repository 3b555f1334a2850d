"""Weights that a training starts from: each way to name them, and what is refused before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx.engines.base import save_weights
from brayx.engines.torch import module_weights
from brayx.errors import BadWeights, BrayxError, ConfigError, ModelNotFound
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.jobs.stored_models import INITIAL_TAG, check_initial_weights, initial_weights, stored_model
from brayx.nets.mlp import ActorCritic
from brayx.tracking import Trial, register
from brayx.tracking.trials import trials
from brayx.trainer.config import TrainerConfig
from brayx.types import Weights
from tests.unit.conftest import Run

WIDTH = 8


class Stored:
    """A checkpoint in a folder, in a trial and in the registry, and a new trial that may start from it.

    Attributes:
        weights: its weights.
        source, trial: the trials.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.weights = self.add("good", module_weights(ActorCritic(4, 2, hidden=(WIDTH,))))
        self.source = Trial.open("sources", "clone", uri)
        register(self.source, self.source.save_checkpoint(folder / "good", 1), "clone")
        self.trial = Trial.open("p", "new", uri)

    def add(self, name: str, weights: Weights) -> Weights:
        """Writes a folder of the job's with these weights."""
        (self.folder / name).mkdir()
        save_weights(self.folder / name / "weights.npz", weights)
        return weights

    def start(self, reference: str | None) -> Weights | None:
        """The weights that the new trial starts from."""
        config = TrainerConfig(model="model", buffers=["buffer"], initial_weights=reference)

        def call(function: Any, *args: Any) -> Any:
            return function(self.trial, *args)

        return initial_weights(config, str(self.folder), call, lambda: ActorCritic(4, 2, hidden=(WIDTH,)))

    def refusal(self, reference: str) -> BrayxError:
        with pytest.raises(BrayxError) as caught:
            self.start(reference)
        assert caught.value.message.startswith("trainer.initial_weights: ")
        assert caught.value.details["key"] == "trainer.initial_weights"
        assert INITIAL_TAG not in self.trial.tags()
        return caught.value


@pytest.fixture
def stored(tmp_path: Path, tracking_db: str) -> Stored:
    return Stored(tmp_path, tracking_db)


def test_each_way_to_name_them(stored: Stored) -> None:
    assert stored.start(None) is None
    by_id = f"runs:/{stored.source.run_id}"
    for reference, label in (
        ("models:/clone/1", "models:/clone/1"),
        ("models:/clone@champion", "models:/clone/1"),
        ("runs:/clone", by_id),
        (by_id, by_id),
        ("good", str(stored.folder / "good")),
    ):
        weights = stored.start(reference)
        assert weights is not None
        assert weights.keys() == stored.weights.keys()
        for name, array in stored.weights.items():
            np.testing.assert_array_equal(weights[name], array)
        assert stored.trial.tags()[INITIAL_TAG] == label


def test_a_trial_with_a_checkpoint_has_its_own(stored: Stored) -> None:
    stored.trial.save_checkpoint(stored.folder / "good", 1)
    assert stored.start("models:/gone/1") is None


def test_weights_of_another_model_are_refused(stored: Stored) -> None:
    stored.add("wide", module_weights(ActorCritic(4, 2, hidden=(2 * WIDTH,))))
    error = stored.refusal("wide")
    assert isinstance(error, BadWeights)
    assert "wide does not fit this job's model, which needs the same layers: weights: expected " in error.message
    assert f"[{WIDTH}, 4] float32, got [{2 * WIDTH}, 4] float32" in error.message
    stored.add("deep", module_weights(ActorCritic(4, 2, hidden=(WIDTH, WIDTH))))
    assert "which the model does not have" in stored.refusal("deep").message
    stored.add("other", module_weights(torch.nn.Linear(4, 2)))
    assert "weights lack " in stored.refusal("other").message
    name = next(iter(stored.weights))
    stored.add("broken", {**stored.weights, name: np.full_like(stored.weights[name], np.nan)})
    assert "NaN" in stored.refusal("broken").message


def test_what_does_not_exist_or_cannot_be_read_is_refused(stored: Stored) -> None:
    for reference in ("models:/none/1", "models:/clone/2", "models:/clone@candidate"):
        assert isinstance(stored.refusal(reference), ModelNotFound), reference
    for reference, said in (
        ("runs:/none", "none"),
        ("runs:/new", "has no checkpoint yet"),
        ("nowhere", "is neither models:/NAME@ALIAS, runs:/TRIAL nor a folder"),
    ):
        error = stored.refusal(reference)
        assert isinstance(error, ConfigError), reference
        assert said in error.message
    (stored.folder / "good" / "weights.npz").write_bytes(b"none")
    assert isinstance(stored.refusal("good"), BadWeights)


@pytest.mark.parametrize("host", [(), ("--cluster",)], ids=["local", "ray"])
def test_a_host_refuses_them_before_there_is_a_trial(command: Run, stored: Stored, host: tuple[str, ...]) -> None:
    """Nor does it start Ray."""
    stored.add("wide", module_weights(ActorCritic(4, 2, hidden=(2 * WIDTH,))))
    options = (f"trainer.initial_weights={stored.folder / 'wide'}", "console_port=null")
    words = [word for option in options for word in ("--set", option)]
    ended = command("train", str(TEMPLATES / "ppo_env.yaml"), "--tracking", stored.uri, *words, *host)
    assert ended.returncode == 2
    assert "trainer.initial_weights: " in ended.stderr
    assert "does not fit this job's model" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {row.project for row in trials(stored.uri)} == {"p", "sources"}


def test_weights_are_not_checked_if_a_trial_is_resumed(stored: Stored) -> None:
    job = JobConfig.load(TEMPLATES / "ppo_env.yaml", ["trainer.initial_weights=nowhere"])

    def check(resume: bool = True) -> None:
        check_initial_weights(job, "main", stored.uri, resume, lambda function, *args: function(*args))

    with pytest.raises(ConfigError, match="nowhere is neither"):
        check()
    trial = Trial.open("ppo_env", "main", stored.uri)
    trial.finish("KILLED")
    check()
    with pytest.raises(ConfigError, match="nowhere is neither"):
        check(resume=False)
    trial.finish()
    with pytest.raises(ConfigError, match="nowhere is neither"):
        check()


def test_a_job_that_waits_for_a_game_says_at_once_that_there_are_none(command: Run, stored: Stored) -> None:
    words = ("--tracking", stored.uri, "--set", "trainer.initial_weights=runs:/nowhere")
    ended = command("train", str(TEMPLATES / "game.yaml"), *words)
    assert ended.returncode == 2
    assert "trainer.initial_weights: no trial has the id or the name 'nowhere'" in ended.stderr
    assert "waiting for a game" not in ended.stdout + ended.stderr


def test_weights_for_an_unknown_contract_need_not_fit(stored: Stored) -> None:
    job = JobConfig.load(TEMPLATES / "game.yaml", [f"trainer.initial_weights={stored.folder / 'good'}"])
    check_initial_weights(job, "main", stored.uri, True, lambda function, *args: function(*args))


def stranger(folder: Path) -> Path:
    """A checkpoint whose job is beside it, with a model and an algorithm that leave a file when they are imported."""
    folder.mkdir()
    leaves_a_mark = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
    build = "import torch\ndef build_model(name, config):\n    return torch.nn.Linear(4, 2), (torch.zeros(1, 4),)\n"
    (folder / "strangers_model.py").write_text(leaves_a_mark + build)
    (folder / "strangers_algorithm.py").write_text(leaves_a_mark)
    save_weights(folder / "weights.npz", module_weights(torch.nn.Linear(4, 2)))
    job = JobConfig.load(TEMPLATES / "cartpole.yaml").as_dict()
    job["model"]["module"] = "strangers_model"
    job["trainer"]["algorithm"] = {"module": "strangers_algorithm"}
    (folder / "meta.json").write_text(json.dumps({"job": job, "folder": str(folder)}))
    return folder


def test_a_checkpoints_code_runs_only_if_it_is_trusted(
    tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, uri = stranger(tmp_path / "got"), f"sqlite:///{tmp_path}/mlflow.db"
    refused = command("export", str(folder), "--to", "onnx", "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert f"names code to run, in {folder}, chosen by" in refused.stderr
    assert "--job" in refused.stderr
    assert "--trust" in refused.stderr
    for trust in (False, "", str(tmp_path)):
        with stored_model(str(folder), uri, trust) as model:
            for load in (model.job, model.build):
                with pytest.raises(ConfigError, match="names code to run"):
                    load()
    assert not list(folder.glob("*.ran"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading puts the folder there
    for trust in (True, str(folder)):
        with stored_model(str(folder), uri, trust) as model:
            assert isinstance(model.build()[0], torch.nn.Linear)
    assert [path.stem for path in folder.glob("*.ran")] == ["strangers_model"]


def test_a_registry_is_trusted_only_if_it_is_a_database_file(
    tmp_path: Path, tracking_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # stands for a server: another kind of store
    folder, elsewhere = stranger(tmp_path / "got"), f"file://{tmp_path}/mlruns"
    for uri, trust, trusted in ((tracking_db, False, True), (elsewhere, False, False), (elsewhere, True, True)):
        trial = Trial.open("theirs", "clone", uri)
        register(trial, trial.save_checkpoint(folder, 1), "theirs")
        for reference in ("models:/theirs/1", f"runs:/{trial.run_id}"):
            with stored_model(reference, uri, trust) as model:
                assert model.trust is trusted
