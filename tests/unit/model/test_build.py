"""The allowed results of a user's ``build_model``, and the errors for all others."""

from __future__ import annotations

import pickle
import threading
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from brayx.engines import build_engine
from brayx.errors import BadWeights, ConfigError, ModelError
from brayx.model.build import build_model, engine_of, warm_up
from brayx.model.config import ModelConfig


def written(folder: Path, body: str) -> str:
    module = f"built_{uuid.uuid4().hex}"
    (folder / f"{module}.py").write_text(f"import torch\ndef build_model(name, config):\n    {body}\n")
    return module


@pytest.mark.parametrize("example", ["(torch.zeros(1, 2),)", "[torch.zeros(1, 2)]"])
def test_it_receives_the_name_and_the_job_and_returns_module_and_examples(tmp_path: Path, example: str) -> None:
    name = written(tmp_path, f"return torch.nn.Linear(config[name]['in'], 3), {example}")
    module, (given,) = build_model(str(tmp_path), name, "net", {"net": {"in": 2}})
    assert module(given).shape == (1, 3)


def test_it_pickles_by_name(tmp_path: Path) -> None:
    name = written(tmp_path, "return torch.nn.Identity(), (torch.ones(1),)")
    build = pickle.loads(pickle.dumps(partial(build_model, str(tmp_path), name, "net", {})))
    assert isinstance(build()[0], torch.nn.Identity)


@pytest.mark.parametrize(
    "given", ["1", "torch.nn.Linear(2, 3)", "(1, ())", "(torch.nn.Linear(2, 3), torch.zeros(1, 2))"]
)
def test_other_results_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=r"build_model .*\(module, .*, got"):
        build_model(str(tmp_path), written(tmp_path, f"return {given}"), "net", {})


def test_its_exception_becomes_one_line_with_a_cause(tmp_path: Path) -> None:
    name = written(tmp_path, "raise ValueError('first\\nsecond')")
    with pytest.raises(ModelError) as caught:
        build_model(str(tmp_path), name, "net", {})
    assert caught.value.message == "model 'net': build_model raised ValueError: first"
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_typed_error_passes_through(tmp_path: Path) -> None:
    name = written(tmp_path, "from brayx.errors import BadWeights; raise BadWeights('mine')")
    with pytest.raises(BadWeights, match=r"^mine$"):
        build_model(str(tmp_path), name, "net", {})


def test_several_threads_can_build_engines_at_once():
    config = ModelConfig(module="unused", engine="onnx")
    together, built = threading.Barrier(2), []

    def build() -> None:
        together.wait()
        built.append(engine_of(config, torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),)))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 2


@pytest.mark.parametrize(("engine", "built"), [("onnx", 1), ("torch", 0)])
def test_a_warm_up_builds_an_engine_that_is_exported(monkeypatch: pytest.MonkeyPatch, engine: str, built: int) -> None:
    engines = []
    monkeypatch.setattr("brayx.model.build.build_engine", lambda *args, **options: engines.append(build_engine(*args)))
    warm_up(ModelConfig(module="unused", engine=engine))
    assert len(engines) == built


LAZY = """torch.manual_seed(0)
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.unseen = torch.nn.LazyLinear(3), torch.nn.LazyLinear(3)
            self.norm = torch.nn.LazyBatchNorm1d()
        def forward(self, obs):
            return self.norm(self.seen(obs)) + (self.unseen(obs) if USED else 0)
    return Own(), (torch.ones(2, 4),)"""


def test_lazy_layers_get_their_sizes_from_the_example(tmp_path: Path) -> None:
    module, _ = build_model(str(tmp_path), written(tmp_path, LAZY.replace("USED", "True")), "net", {})
    assert {name: tuple(weight.shape) for name, weight in module.named_parameters()} == {
        "seen.weight": (3, 4), "seen.bias": (3,), "norm.weight": (3,), "norm.bias": (3,),
        "unseen.weight": (3, 4), "unseen.bias": (3,),
    }  # fmt: skip
    assert module.norm.running_mean.tolist() == [0, 0, 0], "a run for the sizes is no training"
    assert module.training
    assert module.norm.training
    torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_lazy_layer_that_the_example_does_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unseen\.weight") as refused:
        build_model(str(tmp_path), written(tmp_path, LAZY.replace("USED", "False")), "net", {})
    assert refused.value.details == {"leaf": "unseen.weight"}
