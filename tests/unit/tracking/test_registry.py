"""`brayx.tracking.registry`, against a real sqlite database: versions, aliases and their files."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from brayx.engines.base import save_weights
from brayx.engines.torch import describe
from brayx.errors import BadWeights, ConfigError, ModelNotFound, TrackingError
from brayx.tracking import (
    Checkpoint,
    PoolEntry,
    Trial,
    aliases,
    files_of,
    find,
    local_files,
    promote,
    register,
    registered_models,
    roll_back,
    tracking_uri,
)
from brayx.types import Weights
from tests.unit.tracking.folders import folder_with, text_at, text_of


@pytest.fixture
def trained(tracking_db: str, tmp_path: Path) -> tuple[Trial, Checkpoint]:
    trial = Trial.open("project", "trial", tracking_db)
    return trial, trial.save_checkpoint(folder_with(tmp_path, "best"), 100, {"score": 1.0})


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []


def logged(trial: Trial, folder: Path, name: str) -> PoolEntry:
    """A version that is one of MLflow's logged models: below the run's URI, but outside the run's folder."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(trial.uri)
    experiment = client.get_run(trial.run_id).info.experiment_id
    model = client.create_logged_model(experiment, name, source_run_id=trial.run_id)
    client.log_model_artifacts(model.model_id, str(folder))
    client.create_registered_model(name)
    client.create_model_version(name, source=f"runs:/{trial.run_id}/{name}", run_id=trial.run_id)
    return find(f"models:/{name}", trial.uri)


class TestRegistry:
    def test_the_champion_resolves_to_its_files(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        entry = register(trial, checkpoint, "cartpole", tags={"engine": "onnx"})
        assert (entry.name, entry.version, entry.run_id) == ("cartpole", 1, trial.run_id)
        assert text_at("models:/cartpole@champion", trial.uri) == "best"
        tags = dict(find("models:/cartpole/1", trial.uri).tags)
        assert len(tags.pop("brayx.content")) == 16
        assert tags.pop("brayx.checkpoint") == f"checkpoints/000000000100@{checkpoint.saved_at_s!r}"
        assert tags == {"engine": "onnx", "brayx.step": "100"}

    def test_another_tools_model_may_have_any_name(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "it's")
        (model,) = registered_models(trial.uri)
        assert (model.name, [entry.version for entry, _ in model.versions]) == ("it's", [1])
        assert find("models:/it's/1", trial.uri).name == "it's"

    def test_registering_again_gives_the_same_version(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        assert register(trial, checkpoint, "cartpole").version == 1
        assert register(trial, checkpoint, "cartpole", alias="candidate").version == 1
        assert find("models:/cartpole@candidate", trial.uri).version == 1

    def test_a_registered_checkpoint_is_recognised_without_its_files(self, trained: tuple[Trial, Checkpoint]) -> None:
        """The files may be in a remote store."""
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        shutil.rmtree(trial.local(checkpoint))
        (again,) = trial.checkpoints()
        assert register(trial, again, "cartpole", alias="candidate").version == 1
        with pytest.raises(TrackingError, match="cannot read checkpoint 100"):
            register(trial, again, "other")

    @pytest.mark.parametrize("file", ["weights.npz", "model.txt"])
    def test_a_replaced_checkpoint_of_the_same_step_is_another_version(
        self, tracking_db: str, tmp_path: Path, file: str
    ) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        folder = tmp_path / "saved"
        folder.mkdir()
        for number, (weights, version) in enumerate([("first", 1), ("other", 2), ("other", 2), ("first", 1)]):
            (folder / file).write_text(weights)
            if file == "weights.npz":
                (folder / "meta.json").write_text(f'{{"saved": {number}}}')  # with the same weights, at another time
            entry = register(trial, trial.save_checkpoint(folder, 100), "cartpole")
            assert entry.version == version
            with files_of("models:/cartpole@champion", trial.uri) as files:
                assert (files / file).read_text() == weights
        with files_of("models:/cartpole/1", trial.uri) as files:
            assert (files / file).read_text() == "first"

    def test_an_alias_moves_and_versions_stay(self, trained: tuple[Trial, Checkpoint], tmp_path: Path) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        better = trial.save_checkpoint(folder_with(tmp_path, "better"), 200)
        register(trial, better, "cartpole")
        assert text_at("models:/cartpole@champion", trial.uri) == "better"
        assert text_at("models:/cartpole/1", trial.uri) == "best"
        assert find("models:/cartpole", trial.uri).version == 2

    def test_promoting_moves_an_alias_to_a_known_version(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        register(trial, trial.save_checkpoint(folder_with(tmp_path, "new"), 200), "cartpole", alias="candidate")
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2}
        entry, before = promote("models:/cartpole@candidate", trial.uri)
        assert (entry.version, before) == (2, 1)
        assert aliases("cartpole", trial.uri) == {"champion": 2, "candidate": 2}
        assert promote("models:/cartpole", trial.uri, version=1)[1] == 2
        assert promote("models:/cartpole/1", trial.uri, to="staging")[1] is None
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2, "staging": 1}
        with pytest.raises(ModelNotFound, match="version 9") as refused:
            promote("models:/cartpole", trial.uri, version=9)
        assert (refused.value.details["nearest"], refused.value.details["known"]) == (2, [1, 2])
        with pytest.raises(ModelNotFound, match="nearest is 'candidate'"):
            promote("models:/cartpole@candidat", trial.uri)
        for bad in ("v1", "latest", "a/b", "", "a" * 201):
            with pytest.raises(ConfigError, match="is invalid"):
                promote("models:/cartpole@candidate", trial.uri, to=bad)
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2, "staging": 1}
        assert aliases("other", trial.uri) == {}

    @pytest.mark.parametrize("table", ["registered_model_aliases", "model_version_tags"])
    def test_a_failed_promotion_leaves_the_alias(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path, table: str
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        for step in (200, 300):
            register(trial, trial.save_checkpoint(folder_with(tmp_path, str(step)), step), "cartpole", alias=None)
        long = "a" * 200
        promote("models:/cartpole/1", trial.uri, to=long)
        promote("models:/cartpole/2", trial.uri, to=long)
        promote("models:/cartpole/2", trial.uri)
        with sqlite3.connect(trial.uri.removeprefix("sqlite:///")) as database:
            for change in ("INSERT", "UPDATE"):
                full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
                database.execute(f"CREATE TRIGGER full_{change} BEFORE {change} ON {table} {full}")
        with pytest.raises(TrackingError, match="database or disk is full"):
            promote("models:/cartpole/3", trial.uri)
        assert aliases("cartpole", trial.uri) == {"champion": 2, long: 2}
        with sqlite3.connect(trial.uri.removeprefix("sqlite:///")) as database:
            for change in ("INSERT", "UPDATE"):
                database.execute(f"DROP TRIGGER full_{change}")
        promote("models:/cartpole/3", trial.uri)
        assert [roll_back("cartpole", trial.uri)[0].version for _ in range(2)] == [2, 1]
        assert roll_back("cartpole", trial.uri, alias=long)[0].version == 1

    @pytest.mark.parametrize(
        ("weights", "why"),
        [
            (
                {"bias": np.zeros(1, np.float32), "layer.weight": np.array([1, np.nan], np.float32)},
                "'layer.weight' holds 1",
            ),
            (None, "no weights could be read"),
        ],
        ids=["nan", "absent"],
    )
    def test_a_version_that_services_would_refuse_is_not_promoted(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path, weights: Weights | None, why: str
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        folder = folder_with(tmp_path, "bad")
        (folder / "weights.npz").unlink()
        if weights is not None:
            save_weights(folder / "weights.npz", weights)
        register(trial, trial.save_checkpoint(folder, 200), "cartpole", alias="candidate")
        with pytest.raises(BadWeights, match=f"version 2 .*'cartpole': .*{why}"):
            promote("models:/cartpole@candidate", trial.uri)
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2}

    def test_a_missing_version_is_reported_with_the_nearest_of_any_number(
        self, trained: tuple[Trial, Checkpoint]
    ) -> None:
        from mlflow.tracking import MlflowClient

        trial, checkpoint = trained
        entry = register(trial, checkpoint, "cartpole")
        client = MlflowClient(trial.uri)
        for _ in range(2, 21):
            client.create_model_version("cartpole", source=entry.source, run_id=trial.run_id)
        for deleted in (3, 4):
            client.delete_model_version("cartpole", str(deleted))
        for version, nearest in ((99, 20), (3, 2), (4, 5)):
            with pytest.raises(ModelNotFound) as raised:
                find(f"models:/cartpole/{version}", trial.uri)
            assert raised.value.details["nearest"] == nearest
            assert f"no version {version}, nearest is {nearest}; there are ..., 5, 6, " in raised.value.message
        assert raised.value.details["known"] == [1, 2, *range(5, 21)]
        client.create_registered_model("empty")
        for reference in ("models:/empty", "models:/empty/1"):
            with pytest.raises(ModelNotFound, match="'empty' has no versions"):
                find(reference, trial.uri)

    def test_pruning_never_touches_the_pool(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        trial.prune_checkpoints(keep_last=0)
        assert text_at("models:/cartpole@champion", trial.uri) == "best"

    @pytest.mark.parametrize("name", ["cartpole", "policy (v2) 100%"])
    def test_local_files_are_read_in_place(
        self, trained: tuple[Trial, Checkpoint], no_leftovers: None, name: str
    ) -> None:
        trial, checkpoint = trained
        entry = register(trial, checkpoint, name)
        with files_of(f"models:/{name}@champion", trial.uri) as folder:
            assert text_of(folder) == "best"
            assert folder == local_files(entry, trial.uri)
        assert folder.is_dir()

    def test_a_download_is_deleted_after_use(
        self, trained: tuple[Trial, Checkpoint], no_leftovers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", trained[0].uri)  # where MLflow looks for logged models
        entry = logged(trained[0], folder_with(tmp_path, "logged"), "theirs")
        assert local_files(entry, trained[0].uri) is None
        with files_of("models:/theirs", trained[0].uri) as folder:
            assert text_of(folder) == "logged"
        assert not folder.exists()

    def test_missing_files_are_reported(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        folder = local_files(register(trial, checkpoint, "cartpole"), trial.uri)
        assert folder is not None
        shutil.rmtree(folder)
        with pytest.raises(TrackingError, match=r"models:/cartpole@champion \(version 1\)"):
            text_at("models:/cartpole@champion", trial.uri)

    def test_mlflow_itself_loads_a_version_with_onnx(
        self, trained: tuple[Trial, Checkpoint], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mlflow.onnx
        from onnx import TensorProto, helper

        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 3]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negate", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole", onnx=model.SerializeToString())
        assert text_at("models:/cartpole@champion", trial.uri) == "best"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", trial.uri)
        assert mlflow.onnx.load_model("models:/cartpole@champion").graph.name == "negate"

    def test_errors_name_the_nearest(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        with pytest.raises(ModelNotFound, match=r"'cartpole'.*none.*brayx train"):
            text_at("models:/cartpole@champion", trial.uri)
        register(trial, checkpoint, "cartpole")
        with pytest.raises(ModelNotFound, match=r"'cart-pole'.*nearest is 'cartpole'"):
            text_at("models:/cart-pole@champion", trial.uri)
        with pytest.raises(ModelNotFound, match="'champoin', nearest is 'champion'"):
            text_at("models:/cartpole@champoin", trial.uri)
        with pytest.raises(ModelNotFound, match="version 7") as refused:
            text_at("models:/cartpole/7", trial.uri)
        assert (refused.value.details["nearest"], refused.value.details["known"]) == (1, [1])
        with pytest.raises(ConfigError, match="expected models:/name@alias"):
            text_at("cartpole", trial.uri)

    def test_an_unreadable_store_is_another_error(self, tmp_path: Path) -> None:
        (tmp_path / "mlflow.db").write_text("this is not a database, it is a text " * 100)
        with pytest.raises(TrackingError) as raised:
            text_at("models:/cartpole@champion", tracking_uri(tmp_path))
        assert not isinstance(raised.value, ModelNotFound)

    def test_a_model_past_the_first_page_is_found(self, trained: tuple[Trial, Checkpoint]) -> None:
        from mlflow.tracking import MlflowClient

        trial, checkpoint = trained
        client = MlflowClient(trial.uri)
        for number in range(101):
            client.create_registered_model(f"a{number:03d}")
        register(trial, checkpoint, "cartpole")
        assert find("models:/cartpole@champion", trial.uri).version == 1

    def test_reading_creates_no_database(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"no MLflow database .*make demo"):
            text_at("models:/cartpole@champion", tracking_uri(tmp_path))
        assert list(tmp_path.iterdir()) == []


def test_mlflow_shows_a_version_with_its_signature_source_and_description(
    tracking_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = describe(torch.nn.Linear(4, 2), (np.zeros((1, 4), np.float32),))
    trial = Trial.open("walker", "first", tracking_db)
    checkpoint = trial.save_checkpoint(folder_with(tmp_path, "a"), 100, {"episode_return": 21.5, "games": 100})
    register(trial, checkpoint, "walker", spec=spec, description="mean return 21.5 over 100 games")
    client = MlflowClient(tracking_db)
    (version,) = client.search_model_versions("name = 'walker'")
    assert (version.run_id, version.description) == (trial.run_id, "mean return 21.5 over 100 games")
    assert "walker" in client.get_registered_model("walker").description
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_db)  # `mlflow.set_tracking_uri` would last for other tests
    signature = mlflow.models.get_model_info("models:/walker/1").signature
    assert [(leaf.name, leaf.type, leaf.shape) for leaf in signature.inputs] == [("input", np.dtype("f4"), (-1, 4))]
    assert [(leaf.name, leaf.type, leaf.shape) for leaf in signature.outputs] == [("output", np.dtype("f4"), (-1, 2))]
