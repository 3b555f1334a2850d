"""TensorBoard's event files: a trial's scalars, histograms and graph.

TensorBoard reads the event files of a folder one after another, and never returns to one that it has left. So each
process writes to its own folder, or to one file after another. Needs the package ``tensorboard``, which is
imported when the first file is opened; TensorFlow is not needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.errors import ConfigError
from brayx.metrics import Bars
from brayx.tracking.store import telling

if TYPE_CHECKING:
    import onnx

    from brayx.tracking.trial import Trial

LAYERS_FILE, ONNX_FILE = "model/layers.txt", "model/model.onnx"
"""Artifacts: the table of the model's layers, written when training starts, and the registered version's graph."""

_FILE_VERSION = "brain.Event:2"


def check_installed() -> None:
    """Raises `ConfigError` if the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard needs the package tensorboard: pip install 'brayx[tensorboard]'", key="tracking"
        )


class Events:
    """One event file. Everything is on the disk when a method returns. Thread safe; a context manager, which closes.

    Args:
        folder: its folder, made if absent; TensorBoard shows the folder's path as the name of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        self._file = open(Path(folder, f"events.out.tfevents.{time.time_ns():020d}"), "xb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._lock = threading.Lock()
        self._write(0, file_version=_FILE_VERSION)

    def scalars(self, values: Mapping[str, float], step: int, at_s: float) -> None:
        """Adds a point, measured at Unix time ``at_s``, to the curves of these names."""
        self._values(step, [{"tag": name, "simple_value": value} for name, value in values.items()], at_s)

    def histograms(self, shapes: Mapping[str, Bars], step: int) -> None:
        """Adds distributions by name."""
        self._values(step, [{"tag": name, "histo": _histogram(bars)} for name, bars in shapes.items()])

    def graph(self, model: bytes) -> None:
        """Adds the graph of a model, an ONNX file."""
        self._write(0, graph_def=_graph(model).SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _values(self, step: int, values: list[dict[str, Any]], at_s: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step, at_s, summary=Summary(value=[Summary.Value(**fields) for fields in values]))

    def _write(self, step: int, at_s: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        record = Event(wall_time=at_s or time.time(), step=step, **content).SerializeToString()
        with self._lock:
            self._records.write(record)
            self._file.flush()


@functools.lru_cache(maxsize=64)
def events_of(folder: str) -> Events:
    """The event file of a folder that this process appends to, opened once."""
    return Events(folder)


def log_onnx(trial: Trial, model: bytes) -> None:
    """Saves a model's ONNX file among the trial's artifacts, and its graph as an event.

    Raises:
        TrackingError: it cannot be saved.
    """
    trial.log_bytes(model, ONNX_FILE)
    if trial.tensorboard:
        with writing_events(trial), Events(Path(trial.tensorboard, "model")) as events:
            events.graph(model)


def writing_events(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Converts errors to a `TrackingError` that names the trial."""
    return telling(f"cannot write TensorBoard's events of trial {trial.name!r}")


def _histogram(bars: Bars) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    return HistogramProto(
        min=bars.edges[0],
        max=bars.edges[-1],
        num=sum(bars.counts),
        sum=sum(count * x for count, x in zip(bars.counts, bars.middles, strict=True)),
        sum_squares=sum(count * x * x for count, x in zip(bars.counts, bars.middles, strict=True)),
        bucket_limit=bars.edges,  # a bucket without samples ends at the first edge
        bucket=(0.0, *bars.counts),
    )


def _graph(model: bytes) -> Any:
    """TensorBoard's form of an ONNX graph: weights are left out, and shapes are attributes of their nodes."""
    import onnx
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.node_def_pb2 import NodeDef

    graph = onnx.load_model_from_string(model).graph
    makers = {output: _name(node) for node in graph.node for output in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [tensor for tensor in graph.input if tensor.name not in weights]
    nodes = [NodeDef(name=tensor.name, op="Input", attr=_shapes([tensor])) for tensor in inputs]
    makers |= {tensor.name: tensor.name for tensor in inputs}
    shapes = {tensor.name: tensor for tensor in (*graph.value_info, *graph.output)}
    for node in graph.node:
        sources = [makers[name] for name in node.input if name in makers]
        outputs = [shapes[name] for name in node.output if name in shapes]
        nodes.append(NodeDef(name=_name(node), op=node.op_type, input=sources, attr=_shapes(outputs)))
    ends = [
        NodeDef(name=f"output/{tensor.name}", op="Output", input=[makers[tensor.name]], attr=_shapes([tensor]))
        for tensor in graph.output
    ]
    return GraphDef(node=[*nodes, *ends])


def _name(node: onnx.NodeProto) -> str:
    """A node's name, whose slashes make a tree; TensorBoard's page fails on an empty part, as before a first slash."""
    name = node.name or f"{node.op_type}_{node.output[0]}"
    return "/".join(part for part in name.split("/") if part)


def _shapes(values: list[onnx.ValueInfoProto]) -> dict[str, Any]:
    from tensorboard.compat.proto.attr_value_pb2 import AttrValue
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shapes = [
        TensorShapeProto(
            dim=[TensorShapeProto.Dim(size=dim.dim_value or -1) for dim in tensor.type.tensor_type.shape.dim]
        )
        for tensor in values
    ]
    return {"_output_shapes": AttrValue(list=AttrValue.ListValue(shape=shapes))} if shapes else {}
