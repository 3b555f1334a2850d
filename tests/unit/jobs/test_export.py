"""`brayx export` of the pool's champion and of a checkpoint's folder: its exit codes, and its artifacts in MLflow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from brayx.commands import cli
from brayx.engines.base import Tolerance
from brayx.engines.frozen import Int8Engine, OnnxSession
from brayx.jobs import export as module_under_test
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.model.build import build_model
from brayx.tracking import Trial, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters

JOB = TEMPLATES / "cartpole.yaml"
SEEN = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)


def make_checkpoint(folder, *, job=True, samples=None, config=None):
    config = config or JobConfig.load(JOB)
    torch.manual_seed(0)  # int8 exceeds its tolerance for some initial weights
    module, _ = build_model(config.folder, config.models["model"].module, "model", config.as_dict())
    about = {"job": config.as_dict(), "folder": config.folder} if job else {}
    folder.mkdir()
    counters = Counters(env_steps=1000, policy_version=7)
    checkpoint.save(folder, module, torch.optim.Adam(module.parameters()), counters, about, samples)
    return folder


def run(*words):
    return cli.main(["export", *map(str, words), "--batch-sizes", "1", "2"])


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_champion_is_exported_and_the_bundle_is_in_its_trial(tmp_path, tracking_db, capsys):
    trial = Trial.open("cartpole", "made", tracking_db)
    saved = make_checkpoint(tmp_path / "saved", samples={"obs": SEEN})
    register(trial, trial.save_checkpoint(saved, 1000, {}), "cartpole", alias="champion")
    out = tmp_path / "out"
    out.mkdir()
    (out / "secrets.env").write_text("not the bundle's")
    assert run("models:/cartpole@champion", "--to", "onnx", "int8", "--out", out, "--tracking", tracking_db) == 0
    report = report_of(out)
    assert (report["model"], report["version"], report["policy_version"]) == ("cartpole", 1, 7)
    assert report["samples"] == {"source": "observations that the checkpoint was learned from", "compared": 128}
    shown = capsys.readouterr().out
    assert "model.int8.onnx" in shown
    assert "observations that the checkpoint was learned from" in shown
    from mlflow.artifacts import download_artifacts

    bundle = Path(download_artifacts(run_id=trial.run_id, artifact_path="export/cartpole-1", tracking_uri=tracking_db))
    ours = {path.relative_to(out) for path in out.rglob("*.*")} - {Path("secrets.env")}
    assert {path.relative_to(bundle) for path in bundle.rglob("*.*")} == ours
    assert Path("samples/in-0-obs.bin") in ours
    assert (bundle / "report.json").read_bytes() == (out / "report.json").read_bytes()


def test_a_second_export_replaces_the_trials_bundle(tmp_path, tracking_db):
    trial = Trial.open("cartpole", "made", tracking_db)
    register(trial, trial.save_checkpoint(make_checkpoint(tmp_path / "saved"), 1000, {}), "cartpole")
    trial.log_dict({"other": 1}, "export/other.json")
    for number, runtimes in enumerate((["onnx", "int8"], ["onnx"])):
        out = tmp_path / str(number)
        assert run("models:/cartpole/1", "--to", *runtimes, "--out", out, "--tracking", tracking_db) == 0
        from mlflow.artifacts import download_artifacts

        bundle = Path(download_artifacts(run_id=trial.run_id, artifact_path="export", tracking_uri=tracking_db))
        there = {path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
        ours = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert there.pop("other.json")
        assert there == {f"cartpole-1/{name}": content for name, content in ours.items()}
        assert set(json.loads(ours["report.json"])["runtimes"]) == set(runtimes)


def test_a_checkpoint_without_samples_says_that_its_inputs_are_made_up(tmp_path):
    folder = make_checkpoint(tmp_path / "saved", samples={"obs": SEEN[:, :3]})  # of another model
    assert run(folder, "--trust", "--to", "onnx", "--out", tmp_path / "out") == 0
    assert report_of(tmp_path / "out")["samples"]["source"] == "the model's example arguments with noise"


def test_a_missed_tolerance_is_an_exit_code(tmp_path, monkeypatch, capsys):
    folder = make_checkpoint(tmp_path / "saved")
    whole = module_under_test.export
    strict = {"int8": Tolerance(rtol=0.0, atol=1e-9)}
    monkeypatch.setattr(
        module_under_test, "export", lambda *args, **options: whole(*args, **options, tolerances=strict)
    )
    assert run(folder, "--trust", "--to", "onnx", "int8", "--out", tmp_path / "out") == 1
    said = capsys.readouterr()
    assert "beyond the tolerance: int8 (|got - want| <= 1e-09); the report has the errors" in said.err
    assert "NO" in said.out


@pytest.mark.parametrize(
    ("tolerance", "measures", "message"),
    [
        (Tolerance(), ["absolute", "relative"], "|got - want| <= 1e-05 + 0.0001 * max(1, |want|)"),
        (Int8Engine.tolerance, ["absolute"], "|got - want| <= 1e-05 + 0.1 * the output's peak"),
        (Int8Engine.tolerance, ["differing"], "rows that differ <= 0.1"),
        (
            Tolerance(rtol=0.0),
            ["absolute", "differing"],
            "|got - want| <= 1e-05, rows that differ <= 0",
        ),
    ],
)
def test_the_tolerance_is_shown_for_the_errors_in_the_report(tolerance, measures, message):
    errors = {f"output {measure}": {"1": {measure: 0.5}} for measure in measures}
    assert module_under_test.allowed({"tolerance": asdict(tolerance), "errors": errors}) == message


def test_a_runtime_that_fails_is_an_exit_code_beside_the_others(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "saved", samples={"obs": np.full_like(SEEN, np.nan)})
    assert run(folder, "--trust", "--to", "int8", "onnx", "--out", tmp_path / "out") == 1
    said = capsys.readouterr()
    assert "failed: int8;" in said.err
    assert "beyond" not in said.err
    assert "int8 failed: the model cannot be quantised" in said.out
    assert report_of(tmp_path / "out")["runtimes"]["onnx"]["within"]
    assert run(folder, "--trust", "--to", "int8", "--out", tmp_path / "none") == 2
    assert not (tmp_path / "none" / "report.json").exists()


@pytest.mark.parametrize("out", ["file", "file/below", "/dev/null/below", "/proc/below", "dangling"])
def test_a_folder_that_cannot_be_written_is_reported_before_the_work(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert run("no-checkpoint-either", "--to", "onnx", "--out", out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"brayx: cannot write a bundle into {out}: ")
    assert (tmp_path / "file").read_text() == "mine"


def test_no_folder_is_made_if_the_model_is_not_found(tmp_path):
    assert run("nowhere", "--to", "onnx", "--out", tmp_path / "new" / "out") == 2
    assert not (tmp_path / "new").exists()


def test_an_obstacle_inside_the_folder_is_reported(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "samples").write_text("mine")
    assert run(make_checkpoint(tmp_path / "saved"), "--trust", "--to", "onnx", "--out", out) == 2
    assert f"cannot write a bundle into {out}: " in capsys.readouterr().err
    assert (out / "samples").read_text() == "mine"


def test_an_infinite_error_is_shown(tmp_path, monkeypatch, capsys):
    folder = make_checkpoint(tmp_path / "saved")
    run_finite = OnnxSession.run
    monkeypatch.setattr(OnnxSession, "run", lambda self, inputs: [leaf + np.inf for leaf in run_finite(self, inputs)])
    assert run(folder, "--trust", "--to", "onnx", "--out", tmp_path / "out") == 1
    assert "inf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--to", "onnx"], "neither models:/NAME@ALIAS, runs:/TRIAL nor a folder"),
        (["saved", "--to", "onnx", "--model", "other"], "there is no model 'other': the job has model"),
        (["bare", "--to", "onnx"], "--job"),
        (["saved", "--to", "tensorrt"], "brayx[tensorrt]"),
    ],
)
def test_an_impossible_export_is_reported(tmp_path, monkeypatch, capsys, words, message):
    make_checkpoint(tmp_path / "saved")
    make_checkpoint(tmp_path / "bare", job=False)
    monkeypatch.chdir(tmp_path)
    assert run(*words, "--trust", "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_a_job_can_be_named(tmp_path):
    folder = make_checkpoint(tmp_path / "bare", job=False)
    assert run(folder, "--job", JOB, "--to", "onnx", "--out", tmp_path / "out") == 0


def test_a_contracts_model_is_exported_for_unity_and_the_file_is_in_its_trial(tmp_path, tracking_db, capsys):
    words = json.dumps({
        "contract": 1, "observations": {"sensor": {"shape": [3]}}, "actions": {"jump": {"kind": "discrete", "size": 2}},
    })  # fmt: skip
    job = JobConfig.load(TEMPLATES / "unity.yaml", [f"contract={words}"])
    trial = Trial.open("unity", "made", tracking_db)
    saved = make_checkpoint(tmp_path / "saved", config=job)
    register(trial, trial.save_checkpoint(saved, 1000, {}), "unity", alias="champion")
    words = ["export", "models:/unity@champion", "--layout", "unity", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--tracking", tracking_db]) == 0
    assert "obs_0, action_masks -> version_number, memory_size, discrete_actions" in capsys.readouterr().out
    from mlflow.artifacts import download_artifacts

    kept = download_artifacts(run_id=trial.run_id, artifact_path="export/unity-1-unity", tracking_uri=tracking_db)
    assert Path(kept, "model.unity.onnx").read_bytes() == (tmp_path / "out/model.unity.onnx").read_bytes()


def test_a_trial_is_exported_that_has_no_registered_version(tmp_path, tracking_db):
    trial = Trial.open("cartpole", "made", tracking_db)
    trial.save_checkpoint(make_checkpoint(tmp_path / "saved"), 1000, {})
    assert run("runs:/made", "--to", "onnx", "--out", tmp_path / "out", "--tracking", tracking_db) == 0
    from mlflow.artifacts import download_artifacts

    kept = download_artifacts(run_id=trial.run_id, artifact_path="export/made-7", tracking_uri=tracking_db)
    assert Path(kept, "model.onnx").read_bytes() == (tmp_path / "out/model.onnx").read_bytes()


def test_a_model_without_a_contract_has_no_layout(tmp_path, capsys):
    saved = make_checkpoint(tmp_path / "saved")
    assert cli.main(["export", str(saved), "--layout", "godot", "--out", str(tmp_path / "out"), "--trust"]) == 2
    assert "layout godot: " in (said := capsys.readouterr().err)
    assert "is of a job without a contract" in said
