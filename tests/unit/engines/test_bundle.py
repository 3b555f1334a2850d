"""Bundles: the files, true samples and reports, and a report of a missed tolerance."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnxruntime as ort
import pytest

from brayx.engines.base import Tolerance
from brayx.engines.bundle import Samples, _write_samples, bundle_files, write_bundle
from brayx.engines.export import with_states
from brayx.engines.frozen import OnnxSession
from brayx.engines.torch import TorchEngine, describe, example_leaves
from brayx.errors import ConfigError, ModelError
from tests.unit.engines.models import WithAction, cartpole, observations, recurrent
from tests.unit.nets.kinds import make


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The folder of CartPole's bundle, and its report."""
    folder = tmp_path_factory.mktemp("bundle")
    samples = Samples(observations(100), "a test")
    report = write_bundle(folder, *cartpole(), ["onnx", "int8"], samples, about={"model": "m"}, batch_sizes=(1, 7))
    return folder, report


def test_the_bundle_lists_its_files_and_signature(bundle):
    folder, report = bundle
    assert {path.name for path in folder.iterdir()} == {
        *("bundle.json", "report.json", "model.onnx", "model.int8.onnx", "samples"),
    }
    assert json.loads((folder / "report.json").read_text()) == report
    about = json.loads((folder / "bundle.json").read_text())
    assert about["model"] == report["model"] == "m"
    assert about["files"] == {"onnx": "model.onnx", "int8": "model.int8.onnx"}
    assert [(leaf["name"], leaf["shape"], leaf["dtype"]) for leaf in about["outputs"]] == [
        ("logits", [2], "float32"),
        ("value", [], "float32"),
    ]
    assert about["samples"] == {"rows": 16, "source": "a test"}
    assert "state" not in about


def test_the_limits_of_whole_numbers_are_written(tmp_path):
    module, example = make("nested")
    spec, inputs = describe(module, example), example_leaves(example)
    names = [leaf.path for leaf in spec.inputs], []
    written = _write_samples(tmp_path, dataclasses.replace(spec, outputs=()), names, inputs, [], "a test")["inputs"]
    assert {leaf["name"]: (leaf.get("low"), leaf.get("high")) for leaf in written} == {
        "obs/map": (None, None), "obs/me/kind": (5, 7), "obs/me/seen": ([[7, 250]], [[9, 255]]),
    }  # fmt: skip


def read(folder, leaf, rows):
    array = np.frombuffer((folder / leaf["samples"]).read_bytes(), np.dtype(leaf["dtype"]).newbyteorder("<"))
    return array.reshape(rows, *leaf["shape"])


def test_samples_equal_torchs_and_the_file_runs_on_its_own(bundle):
    folder, _ = bundle
    about = json.loads((folder / "bundle.json").read_text())
    (obs,) = (read(folder, leaf, 16) for leaf in about["inputs"])
    np.testing.assert_array_equal(obs, observations(100)[0][1::2][:16], "not those that int8 was calibrated on")
    engine = TorchEngine(*cartpole())
    want = engine.run(engine.bind(engine.initial), [obs])
    got = ort.InferenceSession(folder / "model.onnx").run(None, {"obs": obs})
    for leaf, wanted, theirs in zip(about["outputs"], want, got, strict=True):
        np.testing.assert_allclose(read(folder, leaf, 16), wanted, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(theirs, wanted, rtol=1e-4, atol=1e-5)


def test_the_report_has_errors_latencies_and_bytes(bundle):
    folder, report = bundle
    assert report["samples"] == {"source": "a test", "compared": 50}
    assert report["within"]
    for runtime, comparison in report["runtimes"].items():
        assert comparison["bytes"] == (folder / comparison["file"]).stat().st_size
        for sizes in comparison["errors"].values():
            assert set(sizes) == {"1", "7"}
            for error in sizes.values():
                assert 0 < error["relative"] < (1e-4 if runtime == "onnx" else 0.1)
    assert set(report["latency_us"]) == {"torch", "onnx", "int8"}
    for sizes in report["latency_us"].values():
        assert all(0 < latency["p50"] <= latency["p99"] for latency in sizes.values())


def within_of(report):
    return {runtime: comparison["within"] for runtime, comparison in report["runtimes"].items()}


def test_a_missed_tolerance_is_in_the_report(tmp_path):
    strict = {"int8": Tolerance(rtol=0.0, atol=1e-9)}
    report = write_bundle(
        tmp_path, *cartpole(), ["onnx", "int8"], Samples(observations(8), ""), batch_sizes=(1,), tolerances=strict
    )
    assert not report["within"]
    assert within_of(report) == {"onnx": True, "int8": False}


@pytest.mark.parametrize(("gap", "within"), [(1.0, True), (1e-4, False)])
def test_for_actions_the_share_of_differing_rows_is_reported(tmp_path, gap, within):
    example = (np.zeros((1, 4), np.float32),)
    samples = Samples(observations(200), "")
    report = write_bundle(tmp_path, WithAction(gap), example, ["onnx", "int8"], samples, batch_sizes=(1, 8))
    assert within_of(report) == {"onnx": True, "int8": within}
    assert report["runtimes"]["onnx"]["errors"]["action"] == {"1": {"differing": 0.0}, "8": {"differing": 0.0}}
    int8 = report["runtimes"]["int8"]
    assert int8["tolerance"]["differing"] == 0.1
    assert int8["errors"]["logits"]["1"]["relative"] < 0.1, "this error alone would be within tolerance"
    obs = observations(200)[0][1::2]
    (got,) = ort.InferenceSession(tmp_path / "model.int8.onnx").run(["action"], {"obs": obs})
    engine = TorchEngine(WithAction(gap), example)
    want, _ = engine.run(engine.bind(engine.initial), [obs])
    assert int8["errors"]["action"]["1"]["differing"] == np.mean(got != want) > 0


def test_a_failing_runtime_is_reported_and_the_others_are_complete(tmp_path):
    """Calibration has no ranges for NaN, so int8 fails where ONNX computes as torch does."""
    nowhere = Samples([np.full((8, 4), np.nan, np.float32)], "")
    write_bundle(tmp_path, *cartpole(), ["onnx", "int8"], Samples(observations(8), ""), batch_sizes=(1,))
    report = write_bundle(tmp_path, *cartpole(), ["int8", "onnx"], nowhere, batch_sizes=(1,))
    assert report["runtimes"]["int8"] == {"error": "the model cannot be quantised: scale issue", "within": False}
    assert (report["within"], report["runtimes"]["onnx"]["within"]) == (False, True)
    assert "model.int8.onnx" not in bundle_files(tmp_path)
    assert not (tmp_path / "model.int8.onnx").exists()
    about = json.loads((tmp_path / "bundle.json").read_text())
    assert about["files"] == {"onnx": "model.onnx"}
    assert [leaf["name"] for leaf in about["inputs"]] == ["obs"]
    with pytest.raises(ModelError, match="scale issue"):
        write_bundle(tmp_path, *cartpole(), ["int8"], nowhere, batch_sizes=(1,))
    assert strict_json(tmp_path / "report.json") == report, "a failed export keeps the former bundle"


def test_a_recurrent_bundle_names_the_inputs_and_outputs_of_the_state(tmp_path):
    module, example = recurrent()
    write_bundle(tmp_path, module, example, ["onnx"], Samples.of_example(example), batch_sizes=(1,))
    about = json.loads((tmp_path / "bundle.json").read_text())
    assert about["state"] == [
        {"input": "state/h", "output": "state/h_out", "initial": [0.5] * 4},
        {"input": "state/ticks", "output": "state/ticks_out", "initial": [0]},
    ]
    assert about["samples"]["source"] == "the model's example arguments with noise"


def test_a_recurrent_model_is_compared_over_several_steps(tmp_path):
    module, example = recurrent()
    seen = np.random.default_rng(2).standard_normal((64, 3)).astype(np.float32)
    samples = Samples(with_states(module, example, [seen, np.ones(64, np.float32)]), "")
    report = write_bundle(tmp_path, module, example, ["onnx", "int8"], samples, batch_sizes=(1, 32))
    assert report["within"]
    obs, h, ticks, scale = samples.half(1)
    engine, session = TorchEngine(module, example), ort.InferenceSession(tmp_path / "model.int8.onnx")
    ours, theirs = [h, ticks], [h, ticks]
    off = []
    for step in range(5):
        seen = np.roll(obs, -step, axis=0)
        logits, *ours = engine.run(engine.bind(engine.initial), [seen, *ours, np.roll(scale, -step)])
        feed = {"obs": seen, "state/h": theirs[0], "state/ticks": theirs[1], "scale": np.roll(scale, -step)}
        got, *theirs = session.run(["logits", "state/h_out", "state/ticks_out"], feed)
        off.append(np.abs(logits - got).max())
    errors = report["runtimes"]["int8"]["errors"]
    assert errors["logits"]["32"]["absolute"] == pytest.approx(max(off), rel=1e-3)
    assert max(off) > off[0], "otherwise one step would suffice"
    assert errors["state/ticks"]["1"] == {"differing": 0.0}


def strict_json(path):
    """The document as a strict JSON parser reads it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_an_infinite_error_keeps_the_report_valid_json(tmp_path, monkeypatch):
    def run_infinite(self, inputs):
        return [np.full(leaf.shape, np.inf, np.float32) for leaf in run(self, inputs)]

    run = OnnxSession.run
    monkeypatch.setattr(OnnxSession, "run", run_infinite)
    report = write_bundle(tmp_path, *cartpole(), ["onnx"], Samples(observations(8), ""), batch_sizes=(1,))
    assert not report["within"]
    assert strict_json(tmp_path / "report.json") == report
    assert report["runtimes"]["onnx"]["errors"]["logits"]["1"] == {"absolute": "Infinity", "relative": "Infinity"}


def test_an_infinite_initial_state_is_readable(tmp_path):
    module, (obs, state, scale) = recurrent()
    example = (obs, {**state, "h": np.array([[-np.inf, 0, np.inf, 1]], np.float32)}, scale)
    write_bundle(tmp_path, module, example, ["onnx"], Samples.of_example(example), batch_sizes=(1,))
    [h, _] = strict_json(tmp_path / "bundle.json")["state"]
    assert np.array(h["initial"], np.float32).tolist() == [-np.inf, 0, np.inf, 1]


def test_an_old_bundle_is_replaced_completely_and_other_files_stay(tmp_path):
    samples = Samples(observations(8), "")
    (tmp_path / "model.plan").write_text("the user's")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "mine.bin").write_text("the user's")
    module, example = recurrent()
    write_bundle(tmp_path, module, example, ["onnx"], Samples.of_example(example), batch_sizes=(1,))
    write_bundle(tmp_path, *cartpole(), ["onnx", "int8"], samples, batch_sizes=(1,))
    assert "model.int8.onnx" in bundle_files(tmp_path)
    write_bundle(tmp_path, *cartpole(), ["onnx"], samples, batch_sizes=(1,))
    ours = ["model.onnx", "report.json"]
    ours += [f"samples/{name}.bin" for name in ("in-0-obs", "out-0-logits", "out-1-value")]
    ours += ["bundle.json"]
    assert bundle_files(tmp_path) == ours
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {*ours, "model.plan", "samples/mine.bin"}


def test_a_failed_export_leaves_the_old_bundle_untouched(tmp_path):
    def files():
        return {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    write_bundle(tmp_path, *cartpole(), ["onnx", "int8"], Samples(observations(8), ""), batch_sizes=(1,))
    before = files()
    module, example = recurrent()
    samples = Samples.of_example(example)
    with pytest.raises(TypeError):  # the last step that can fail: a document that JSON cannot hold
        write_bundle(tmp_path, module, example, ["onnx"], samples, about={"model": object()}, batch_sizes=(1,))
    assert files() == before


@pytest.mark.parametrize(
    "document",
    [
        "no JSON",
        "[]",
        '{"files": {"app": "app.js"}}',
        '{"files": {"onnx": "../mine.txt"}, "inputs": [{"samples": "samples/../../mine.txt"}], "outputs": []}',
    ],
)
def test_a_bundle_json_of_another_program_deletes_no_files(tmp_path, document):
    mine, out = tmp_path / "mine.txt", tmp_path / "out"
    out.mkdir()
    for path in (mine, out / "app.js"):
        path.write_text("mine")
    (out / "bundle.json").write_text(document)
    assert set(bundle_files(out)) <= {"bundle.json"}
    write_bundle(out, *cartpole(), ["onnx"], Samples(observations(2), ""), batch_sizes=(1,))
    assert mine.read_text() == (out / "app.js").read_text() == "mine"


def test_an_unknown_runtime_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"runtime: .*onnx, .*'coreml'"):
        write_bundle(tmp_path, *cartpole(), ["coreml"], Samples(observations(2), ""))
