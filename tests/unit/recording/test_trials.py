"""Chosen sessions among the artifacts of a trial, in a real MLflow store."""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brayx.recording
from brayx.actor.agent import State
from brayx.commands import cli
from brayx.errors import BadRecording, ConfigError, TrackingError
from brayx.jobs.config import JobConfig
from brayx.jobs.result import keep_recordings
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.tracking import Trial, initialise, tracking_uri
from tests.unit.recording.pictures import config, image, is_close, play


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sessions of ten ticks with frames."""
    path = tmp_path_factory.mktemp("recorded")
    recorder = SessionRecorder(config(path), Recorder())
    for session in ("red", "blue", "green"):
        play(recorder, session, [image(number) for number in range(10)])
    recorder.close(60.0)
    return path


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    uri = initialise(tracking_uri(tmp_path_factory.mktemp("store")))
    opened = Trial.open("game", "first", uri)
    opened.finish()
    return opened


def sessions(trial: Trial) -> list[str]:
    return sorted(
        episode.session for episode in brayx.recording.open(f"runs:/{trial.run_id}/recordings", tracking=trial.uri)
    )


def test_chosen_sessions_go_to_a_trial_once_and_are_read_from_there(
    folder: Path, trial: Trial, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["recordings", "log", str(folder), "--trial", "first", "--tracking", trial.uri]
    assert cli.main([*words, "--session", "red"]) == 0
    assert capsys.readouterr().out == f"1 sessions of 10 ticks: runs:/{trial.run_id}/recordings\n"
    assert sessions(trial) == ["red"]
    assert cli.main([*words, "--only", "session=*e*"]) == 0
    assert capsys.readouterr().out.startswith("2 sessions of 20 ticks")
    assert cli.main([*words, "--session", "red"]) == 0
    assert capsys.readouterr().out == f"the trial has them already: runs:/{trial.run_id}/recordings\n"
    assert sessions(trial) == ["blue", "green", "red"]
    assert cli.main(["recordings", "list", "runs:/first/recordings", "--session", "r*", "--tracking", trial.uri]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["session", "red"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trial.uri)
    for episode in brayx.recording.open(f"runs:/{trial.run_id}/recordings"):
        assert episode["score"].tolist() == list(range(10))
        assert all(is_close(frame, image(number)) for number, frame in enumerate(episode.images()))


def test_a_training_keeps_its_best_and_worst_sessions_and_those_with_errors(tmp_path: Path, trial: Trial) -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml")
    said: list[str] = []

    def keep(to_trial: int, since_s: float, folder: str, until_s: float = math.inf) -> None:
        options = RecordingConfig(folder=folder, to_trial=to_trial)
        recorded_job = job.model_copy(update={"recordings": {"recording": options}})
        keep_recordings(recorded_job, since_s, said.append, lambda function, *args: function(other, *args), until_s)

    other = Trial.open("game", "extremes", trial.uri)
    recorder = SessionRecorder(RecordingConfig(folder=str(tmp_path)), Recorder())
    began = []
    results = (9.0, 1.0, 5.0, 3.0, None, None, None)
    ends = ("stop", "stop", "stop", "stop", "error", "error", "drained")
    for number, (result, end) in enumerate(zip(results, ends, strict=True)):
        began.append(time.time())
        log = recorder.open(f"{number}" if number % 2 else f"game-agent-{number}", b"")
        assert log is not None
        log.tick(State("s", tick=0), b"x", b"y", 0.0, 0.0)
        log.end(end, result)
    recorder.close(60.0)
    keep(0, 0.0, str(tmp_path))
    keep(1, time.time(), str(tmp_path))
    keep(1, 0.0, str(tmp_path / "nothing"))
    keep(1, began[1], str(tmp_path), until_s=time.time())
    assert sessions(other) == ["game-agent-2"], "the best one"
    keep(1, began[1], str(tmp_path))
    game = ["game-agent-2", "game-agent-4", "game-agent-6"]
    assert sessions(other) == ["1", "5", *game], "session 0 began earlier"
    keep(1, 0.0, str(tmp_path))
    assert sessions(other) == ["1", "5", "game-agent-0", *game]
    address = f"runs:/{other.run_id}/recordings"
    assert said == [
        "no recorded session is copied to the trial: no recorded session is selected",
        f"no recorded session is copied to the trial: there is no recording at {tmp_path / 'nothing'}",
        f"1 recorded sessions are artifacts of the trial: {address}; there was no time for 4 more",
        f"4 recorded sessions are artifacts of the trial: {address}",
        f"1 recorded sessions are artifacts of the trial: {address}",
    ]
    other.finish()


def test_what_cannot_be_logged_or_read_is_said(folder: Path, trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recordings", "log", str(folder), "--tracking", trial.uri]
    assert cli.main([*words, "--trial", "first"]) == 2
    assert "choose them with --session or --only" in capsys.readouterr().err
    assert cli.main([*words, "--trial", "first", "--session", "nobody"]) == 2
    assert "no recorded session is selected" in capsys.readouterr().err
    assert cli.main([*words, "--trial", "second", "--session", "red"]) == 2
    assert "no trial has the id or the name 'second'" in capsys.readouterr().err
    other = Trial.open("game", "other", trial.uri)
    with pytest.raises(TrackingError, match=f"runs:/{other.run_id}/recordings"):
        brayx.recording.open("runs:/other/recordings", tracking=trial.uri)
    with pytest.raises(ConfigError, match=r"'nothing' .*`brayx trials`"):
        brayx.recording.open("runs:/nothing/recordings", tracking=trial.uri)
    with pytest.raises(BadRecording, match="there is no recording at"):
        brayx.recording.open(str(folder / "nothing"))


def test_a_download_lives_as_long_as_its_episodes(folder: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store that is not local, which is its files' own repository here."""
    brayx.recording.log(brayx.recording.open(str(folder)), trial)
    monkeypatch.setattr("brayx.tracking.artifacts.local_folder", lambda reference, uri: None)
    recordings: Any = brayx.recording.open(f"runs:/{trial.run_id}/recordings", tracking=trial.uri)
    episode = recordings[0]
    (copied,) = {Path(path).parent for path, *_ in recordings._chunks}
    del recordings
    assert is_close(episode.image(9), image(9))
    assert np.array_equal(episode["score"], np.arange(10, dtype=np.float32))
    del episode
    gc.collect()
    assert not copied.exists()
