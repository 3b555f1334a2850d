"""Model options: defaults, ranges, unknown keys, and a line of documentation for each."""

from __future__ import annotations

import ast
import inspect

import pytest
from pydantic import ValidationError

from brayx.model import config
from brayx.model.config import ModelConfig


def test_defaults():
    options = ModelConfig(module="model")
    assert (options.engine, options.placement, options.max_batch_size, options.max_wait_ms) == ("onnx", "local", 64, 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_batch_size": 0},
        {"max_wait_ms": -1},
        {"max_queue": 0},
        {"deadline_s": 0},
        {"engine": "tensorflow"},
        {"placement": "moon"},
        {"max_batchsize": 3},
        {"num_workers": 0},
        {"gpus_per_worker": -1},
        {"device": "tpu"},
        {"device": "cuda"},  # of the ONNX engine
        {"compile": True},
        {"follow_s": 0},
        {"canary": {"share": 1.5}},
        {"canary": {"alias": "a b"}},
        {"canary": {}, "follow_s": None},
        {"canary": {}, "engine": "int8"},
        {"gpus_per_worker": 1, "engine": "onnx", "placement": "remote"},
        {"gpus_per_worker": 1, "engine": "torch", "placement": "remote"},
        {"gpus_per_worker": 0, "engine": "tensorrt", "placement": "remote"},
        {"gpus_per_worker": 0, "device": "cuda", "engine": "torch", "placement": "remote"},
    ],
)
def test_values_out_of_range_and_unknown_keys_name_the_field(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        ModelConfig(module="model", **bad)


def test_every_field_has_a_line_of_documentation():
    for body in [node.body for node in ast.parse(inspect.getsource(config)).body if isinstance(node, ast.ClassDef)]:
        for field, line in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and field.target.id != "kind":
                assert isinstance(line, ast.Expr), f"{field.target.id} has no line of documentation"
