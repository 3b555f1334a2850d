"""A trial's event files: written by its hub into a real store, read back by TensorBoard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from mlflow.tracking import MlflowClient
from onnx import TensorProto, helper
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from brayx.engines.onnx import standalone
from brayx.metrics import Recorder
from brayx.nets.mlp import ActorCritic
from brayx.tracking import Trial
from brayx.tracking.hub import Hub
from brayx.tracking.tensorboard import ONNX_FILE, Events, log_onnx
from tests.unit.tracking.pushed import BARS, written


def test_tensorboard_reads_curves_and_distributions_at_their_steps(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("p", "t", tracking_db, tensorboard=str(tmp_path / "board"))
    written(trial)
    read = EventAccumulator(trial.tensorboard).Reload()
    assert [(event.step, event.value) for event in read.Scalars("learner/loss")] == [
        (100, 0.5),
        (200, -0.5),
        (300, -1.5),
    ]
    assert read.Tags()["histograms"] == ["actions", "weights/a.weight", "weights/b.weight"]
    last = read.Histograms("weights/b.weight")[-1]
    shape = last.histogram_value
    assert (last.step, shape.min, shape.max, shape.num) == (300, 0.0, 4.0, 4.0)
    assert list(shape.bucket_limit)[1:] == list(BARS.edges)[1:]
    assert list(shape.bucket)[1:] == list(BARS.counts)
    assert (shape.sum, shape.sum_squares) == (3 * 0.5 + 3.0, 3 * 0.25 + 9.0)


def test_intervals_that_mlflow_takes_late_reach_tensorboard(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("p", "t", tracking_db, tensorboard=str(tmp_path / "board"))
    hub, recorder = Hub(trial, interval_s=600.0), Recorder()
    for step in (100, 200, 300):
        if step == 100:
            trial.delete()  # writing to a deleted run is refused
        if step == 300:
            MlflowClient(tracking_db).restore_run(trial.run_id)
        recorder.add("env_steps", 100)
        recorder.add("loss", float(step))
        hub.push(recorder.drain())
        hub.flush()
    hub.close()
    events = EventAccumulator(trial.tensorboard).Reload().Scalars("learner/loss")
    assert [(event.step, event.value) for event in events] == [(step, step) for step in (100, 200, 300)]
    logged = MlflowClient(tracking_db).get_metric_history(trial.run_id, "learner/loss")
    assert [event.wall_time for event in events] == pytest.approx([point.timestamp / 1e3 for point in logged], abs=1e-3)


def test_a_resumed_trial_goes_on_in_its_folder_and_children_are_in_their_parents(
    tracking_db: str, tmp_path: Path
) -> None:
    board = str(tmp_path / "board")
    trial = Trial.open("p", "t", tracking_db, tensorboard=board)
    written(trial, 1)
    again = Trial.open("p", "t", tracking_db, tensorboard=board)
    assert again.resumed
    assert again.tensorboard == trial.tensorboard
    written(again, 1)
    assert [event.step for event in EventAccumulator(trial.tensorboard).Reload().Scalars("learner/loss")] == [100, 200]
    child = Trial.open("p", "left", tracking_db, parent=again)
    assert Path(child.tensorboard).parent == Path(trial.tensorboard)
    assert Path(trial.tensorboard).parent == tmp_path / "board" / "p"


def test_event_files_that_cannot_be_written_cost_no_metric(tracking_db: str, tmp_path: Path) -> None:
    (tmp_path / "board").write_text("a file, not a folder")
    trial = Trial.open("p", "t", tracking_db, tensorboard=str(tmp_path / "board"))
    written(trial)
    assert trial.metrics()["learner/loss"] == -1.5


@pytest.mark.slow  # exports a model
def test_the_graph_that_tensorboard_shows_is_the_onnx_files(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("p", "t", tracking_db, tensorboard=str(tmp_path / "board"))
    torch.manual_seed(0)
    model = standalone(ActorCritic(3, 2, hidden=(16,)), (np.zeros((1, 3), np.float32),))
    log_onnx(trial, model)
    (file,) = tmp_path.rglob(ONNX_FILE)
    assert file.read_bytes() == model
    graph = EventAccumulator(f"{trial.tensorboard}/model").Reload().Graph()
    operations = {node.op_type for node in onnx.load_model_from_string(model).graph.node}
    assert {node.op for node in graph.node} == {*operations, "Input", "Output"}
    names = {node.name for node in graph.node}
    assert len(names) == len(graph.node)
    assert all(all(name.split("/")) for name in names), "TensorBoard's page draws nothing if a part is empty"
    assert any(name.count("/") > 1 for name in names), "layers are a tree"
    assert all(source in names for node in graph.node for source in node.input)
    (start,) = (node for node in graph.node if node.op == "Input")
    (shape,) = start.attr["_output_shapes"].list.shape
    assert [dim.size for dim in shape.dim] == [-1, 3]


def test_a_graph_that_gives_its_input_back_can_be_shown(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [x],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3]), x],
    )
    with Events(tmp_path) as events:
        events.graph(helper.make_model(graph).SerializeToString())
    shown = EventAccumulator(str(tmp_path)).Reload().Graph()
    assert {node.name: list(node.input) for node in shown.node} == {
        "x": [],
        "Neg_y": ["x"],
        "output/y": ["Neg_y"],
        "output/x": ["x"],
    }
