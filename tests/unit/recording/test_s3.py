"""Recordings at an address ``s3://``, on moto's server in this process. Skipped without the packages s3fs and moto."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import brayx
from brayx.actor.agent import State
from brayx.commands import cli
from brayx.errors import BadRecording
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.recording import index, writer
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.index import SessionPart
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from brayx.tracking import Trial
from tests.recorded import ended
from tests.unit.recording.pictures import image, is_close, play
from tests.unit.recording.written import ticks
from tests.waiting import until

pytest.importorskip("s3fs", reason="for S3 tests: pip install s3fs 'moto[server]'")
moto_server = pytest.importorskip("moto.server", reason="for S3 tests: pip install s3fs 'moto[server]'")

WAIT_S = 60.0
JOB = TEMPLATES / "cartpole.yaml"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An empty bucket, which the environment leads to."""
    import s3fs

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name, value in {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def names(address: str) -> list[str]:
    """All files at an address; none: it has no folder either."""
    import s3fs

    try:
        return sorted(path.rpartition("/")[2] for path in s3fs.S3FileSystem().ls(address, detail=False, refresh=True))
    except FileNotFoundError:
        return []


def test_a_served_game_is_recorded_listed_and_replayed(
    bucket: str, tmp_path: Path, tracking_db: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"{bucket}/served/games"
    options = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": None, "console_port": None}
    options |= {"recording": {"kind": "recording", "folder": folder}}
    game = f"{sys.executable} -m brayx gamecore gym CartPole-v1 --url {{url}} --games 2 --json"
    with brayx.serve(JOB, options, tracking=tracking_db) as service:
        brayx.evaluate(service, gamecore=game, games=2, at_once=1)
    until(lambda: bool(names(folder)) and ended(folder) >= 2, "they are written", WAIT_S)
    first, *_ = open_recordings(folder)
    assert first.read(1, 1).number.tolist() == [1]
    assert first["obs"].shape == (len(first), 4)
    assert cli.main(["recordings", "list", folder]) == 0
    assert first.session in capsys.readouterr().out
    words = ["--format", "minari", "--out", str(tmp_path / "minari"), "--session", first.session]
    assert cli.main(["recordings", "export", folder, *words]) == 0
    trial = Trial.open("game", "kept", tracking_db)
    words = ["--session", first.session, "--trial", "kept", "--tracking", tracking_db]
    assert cli.main(["recordings", "log", folder, *words]) == 0
    (copied,) = open_recordings(f"runs:/{trial.run_id}/recordings", tracking=tracking_db)
    assert copied.inputs() == first.inputs()


def test_a_killed_writer_leaves_what_can_be_read_and_another_one_goes_on(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.recording.process._RESTART_S", 0.0)
    folder, metrics = f"{bucket}/killed", Recorder()
    recorder = SessionRecorder(RecordingConfig(folder=folder, flush_s=0.1), metrics)

    def session(name: str) -> bool:
        log = recorder.open(name, b"")
        assert log is not None
        for number in range(200):
            log.tick(State(name, tick=number), os.urandom(5000), b"y", 0.0, 0.0)
        log.end("stop", None)
        return any(file.endswith(".parquet") for file in names(folder))

    until(lambda: session("before"), "a file is written", WAIT_S)
    session("lost")
    for process in Path("/proc").glob("[0-9]*"):
        if (process / "cmdline").exists() and folder.encode() in (process / "cmdline").read_bytes():
            os.kill(int(process.name), signal.SIGKILL)

    def again() -> bool:
        session("after")
        return any(episode.session == "after" for episode in open_recordings(folder))

    until(again, "another process writes", WAIT_S)
    recorder.close(WAIT_S)
    recordings = open_recordings(folder)
    assert not recordings.unreadable
    assert metrics.summary()["recording_lost.writer"] > 0
    for episode in recordings:
        numbers = episode.read().number
        assert (np.diff(numbers) > 0).all(), "no tick is there twice; the killed writer's are lost"
        assert len(episode.inputs()) == len(numbers)


def test_the_oldest_files_go_with_their_videos_and_their_index(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    address = f"{bucket}/trimmed"
    recorder = SessionRecorder(RecordingConfig(folder=address, frames="screen"), Recorder())
    play(recorder, "old", [image(number) for number in range(20)])
    recorder.close(WAIT_S)
    (episode,) = open_recordings(address)
    assert episode.frames == 20
    assert is_close(episode.image(13), image(13))
    assert all(is_close(frame, image(number)) for number, frame in enumerate(episode.images()))
    old = names(address)
    assert {name.rpartition(".")[2] for name in old} == {"parquet", "mp4", "index"}

    most = 4000
    folder = Folder(address, most)
    for number in range(index.CHUNKS + 1):
        folder.write([SessionPart(f"{number}", f"{number}", 0.0, 0, 2, end="stop")], ticks(2, x=float(number)))
    assert folder.trim() > 0
    assert not set(old) & set(names(address))
    recordings = open_recordings(address)
    assert 0 < len(recordings) < index.CHUNKS
    assert recordings[-1].session == f"{index.CHUNKS}"
    s3fs.S3FileSystem().pipe(f"{address}/.unfinished-of-a-killed-one.parquet", b"PAR1")
    Folder(address, 10**9).trim()
    assert ".unfinished-of-a-killed-one.parquet" in names(address), "its writer may still write it"
    monkeypatch.setattr(writer, "_ABANDONED_S", -WAIT_S)
    Folder(address, 0).trim()
    assert names(address) == []


def test_what_another_process_wrote_or_deleted_meanwhile_is_seen(bucket: str) -> None:
    import s3fs

    address, other = f"{bucket}/meanwhile", s3fs.S3FileSystem(skip_instance_cache=True)
    folder = Folder(address, 10**9)
    first, _ = (
        folder.write([SessionPart(name, name, 0.0, 0, 2, end="stop")], ticks(2, x=1.0)) for name in ("first", "second")
    )
    other.mv(f"{address}/{first}", f"{bucket}/aside")
    assert [episode.session for episode in open_recordings(address)] == ["second"]
    other.mv(f"{bucket}/aside", f"{address}/{first}")
    assert [episode.session for episode in open_recordings(address)] == ["first", "second"]


@pytest.mark.parametrize(
    ("address", "environment", "says"),
    [
        ("s3://no-such-bucket/folder", {}, "no recording at"),
        ("s3://bucket/nothing", {}, "no recording at"),
        (
            "s3://elsewhere/folder",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"},
            "cannot be listed",
        ),
        ("s3://bucket/folder", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "cannot be listed"),
    ],
    ids=["bucket", "folder", "server", "keys"],
)
def test_what_cannot_be_read_is_said_in_a_line(
    bucket: str, address: str, environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import s3fs

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(BadRecording, match=says):
        open_recordings(address)
    s3fs.S3FileSystem.clear_instance_cache()
    assert cli.main(["recordings", "list", address]) == 2
    assert says in capsys.readouterr().err
    s3fs.S3FileSystem.clear_instance_cache()


def test_ticks_that_cannot_be_written_at_the_end_are_told(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    metrics = Recorder()
    recorder = SessionRecorder(RecordingConfig(folder="s3://bucket/away"), metrics)
    play(recorder, "a", [None] * 10)
    recorder.close(WAIT_S)
    assert metrics.summary()["recording_lost.disk"] == 10
    assert "cannot write recordings: EndpointConnectionError" in caplog.text
