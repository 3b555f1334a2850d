"""`brayx.recording.recorder` with its real process: from ticks to files and back, its limits, what can break."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pyarrow import parquet

import brayx.clock as clock
from brayx.actor.agent import State
from brayx.errors import BadRecording
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.chunks import write_chunk
from brayx.recording.columns import packed
from brayx.recording.config import RecordingConfig
from brayx.recording.group import PACK_TICKS
from brayx.recording.index import SessionPart
from brayx.recording.packer import CHUNK_BYTES, ChunkPacker
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from brayx.types import Step
from tests.recorded import Tick, columns_of, ended
from tests.waiting import until

WAIT_S = 60.0


def config(folder: Path, **options: Any) -> RecordingConfig:
    return RecordingConfig(kind="recording", folder=str(folder), **options)


def step(number: int) -> Step:
    obs = np.arange(4, dtype=np.float32) + number
    mask = np.ones(2, np.int8)
    return Step({"x": obs, "action_mask": mask}, np.asarray(number % 2), -0.5, 7, {"state/h": np.zeros(3, np.float32)})


def body(number: int) -> bytes:
    return json.dumps({"obs": (np.arange(4) + number).astype(float).tolist(), "reward": 1.0}).encode()


def play(recorder: SessionRecorder, session: str, ticks: int, end: str = "stop", **more: Any) -> None:
    log = recorder.open(session, b'{"seed": 1}', "main:3", reply=b"\xff started")
    assert log is not None
    for number in range(ticks):
        state = State(session, tick=number)
        state.step, state.value = step(number), 0.5
        vars(state).update(more)
        log.tick(state, body(number), b'{"action": %d}' % (number % 2), 0.0, 0.0)
    log.end(end, 12.0)


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path / "new"), metrics)
    play(recorder, "a", 3 * PACK_TICKS, note=object())
    play(recorder, "b", 1)
    recorder.close(60.0)
    episodes = open_recordings(str(tmp_path / "new"))
    a, b = episodes
    assert [episode.session for episode in episodes] == ["a", "b"]
    assert a.start_reply.encode(errors="surrogateescape") == b"\xff started"
    assert (len(a), a.end, a.result, a.player, a.start, a.why) == (
        3 * PACK_TICKS,
        "stop",
        12.0,
        "main:3",
        '{"seed": 1}',
        "every",
    )
    assert a.inputs() == [body(number) for number in range(3 * PACK_TICKS)]
    assert a.outputs()[:2] == [b'{"action": 0}', b'{"action": 1}']
    assert a.left_out == {"note": "it is not an array, or its shape varies"}
    assert {name: (a[name].dtype.name, a[name].shape[1:]) for name in a.columns} == {
        "obs/action_mask": ("int8", (2,)),
        "obs/x": ("float32", (4,)),
        "action": ("int64", ()),
        "log_prob": ("float32", ()),
        "policy_version": ("int64", ()),
        "state/h": ("float32", (3,)),
        "value": ("float32", ()),
    }
    for number in (0, PACK_TICKS, 3 * PACK_TICKS - 1):
        assert a["obs/x"][number].tolist() == step(number).obs["x"].tolist()
        assert a["action"][number] == number % 2
    part = a.read(PACK_TICKS - 1, 2, ["value"])
    assert part.number.tolist() == [PACK_TICKS - 1, PACK_TICKS]
    assert list(part.arrays) == ["value"]
    assert len(a.read(5, 0).number) == 0
    frame = a.frame()
    assert (len(frame), frame["input"][3], frame["tick"][3]) == (3 * PACK_TICKS, body(3), 3)
    assert episodes.table()["ticks"].tolist() == [3 * PACK_TICKS, 1]
    assert len(b) == 1
    assert metrics.summary()["recordings.every"] == 2
    with pytest.raises(BadRecording, match=r"'obs'; .* obs/action_mask, obs/x"):
        a["obs"]


def test_every_nth_session_and_those_with_an_error_are_recorded(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path, every=3), Recorder())
    for number in range(7):
        play(recorder, f"{number}", 2, "error" if number == 4 else "stop")
    log = recorder.open("kept by its agent", b"")
    assert log is not None
    log.tick(State("s", tick=0), b"x", b"y", 0.0, 0.0)
    log.event("fallback", last=True)
    log.event("skipped 2")
    log.tick(State("s", tick=3), b"x", b"y", 0.0, 0.0)
    log.keep("it fell into a wall")
    log.end("stop", None)
    recorder.close(60.0)
    episodes = open_recordings(str(tmp_path))
    assert {episode.session: episode.why for episode in episodes} == {
        "0": "every",
        "3": "every",
        "6": "every",
        "4": "error",
        "kept by its agent": "it fell into a wall",
    }
    by_agent = next(episode for episode in episodes if episode.session == "kept by its agent")
    assert (by_agent.read().event, by_agent.events, by_agent.result) == (["fallback", "skipped 2"], 2, None)
    assert by_agent.read().number.tolist() == [0, 3]


def test_the_sessions_of_a_game_count_as_one_and_are_recorded_together(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path, every=2, before=0), Recorder())
    for game in range(4):
        for agent in ("red", "blue"):
            play(recorder, f"{game}-agent-{agent}", 2)
    play(recorder, "alone", 2)
    recorder.close(60.0)
    sessions = [episode.session for episode in open_recordings(str(tmp_path))]
    assert sessions == ["0-agent-red", "0-agent-blue", "2-agent-red", "2-agent-blue", "alone"]


def test_without_room_new_ticks_of_a_recorded_session_and_old_ones_of_others_are_lost(tmp_path: Path) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path, every=2, memory_mb=0.01), metrics)
    recorded, undecided = recorder.open("recorded", b""), recorder.open("undecided", b"")
    assert recorded is not None
    assert undecided is not None
    for number in range(40):
        undecided.tick(State("s", tick=number), b"x", b"y", 0.0, 0.0)
    undecided.end("error", None)
    for number in range(40):
        recorded.tick(State("s", tick=number), b"x", b"y", 0.0, 0.0)
    recorded.end("stop", None)
    recorder.close(60.0)
    first, second = sorted(open_recordings(str(tmp_path)), key=lambda episode: episode.session)
    assert first.read().number.tolist() == list(range(len(first)))
    assert second.read().number.tolist() == list(range(40 - len(second), 40))
    assert 0 < len(second) < 40
    assert 0 < len(first) < 40
    assert (first.lost, second.lost) == (40 - len(first), 40 - len(second))
    assert metrics.summary()["recording_lost.memory"] == first.lost + second.lost


def test_ticks_of_a_slow_session_do_not_wait_for_a_pack(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path, flush_s=0.05), Recorder())
    log = recorder.open("slow", b"", "")
    assert log is not None
    ticks = itertools.count()

    def written() -> bool:
        log.tick(State("slow", tick=next(ticks)), b"x", b"y", clock.now(), clock.now())
        time.sleep(0.1)
        return bool(open_recordings(str(tmp_path)))

    try:
        until(written, "some of it is in a file", WAIT_S)
    finally:
        log.end("stop", None)
        recorder.close(60.0)


def writer_of(folder: Path) -> int:
    """Id of the writer's process."""
    (child,) = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (process / "cmdline").exists() and str(folder).encode() in (process / "cmdline").read_bytes()
    ]
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_host_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path, flush_s=0.1), metrics)
    play(recorder, "before", 5)
    until(lambda: len(open_recordings(str(tmp_path))) == 1, "the writer runs", WAIT_S)
    os.kill(writer_of(tmp_path), number)
    play(recorder, "after", 5)
    recorder.close(60.0)
    assert [(episode.session, len(episode)) for episode in open_recordings(str(tmp_path))] == [
        ("before", 5),
        ("after", 5),
    ]
    assert "recording_lost.writer" not in metrics.summary()


def test_a_tick_is_written_in_time_and_a_killed_writer_is_started_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("brayx.recording.process._RESTART_S", 0.0)
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path, flush_s=0.1), metrics)
    play(recorder, "before", 5)
    until(lambda: ended(tmp_path) == 1, "it is in a file", WAIT_S)
    (tmp_path / ".unfinished-of-a-killed-one.parquet").write_bytes(b"PAR1")
    os.kill(writer_of(tmp_path), signal.SIGKILL)

    sent = itertools.count(1)

    def again() -> bool:
        play(recorder, f"after{next(sent)}", 5)
        return any(episode.session != "before" for episode in open_recordings(str(tmp_path)))

    until(again, "another process writes", WAIT_S)
    recorder.close(60.0)
    written = {episode.session: len(episode) for episode in open_recordings(str(tmp_path))}
    assert written["before"] == 5
    # Whether ticks or the recorder's idle message find the dead writer is chance: then none are lost.
    lost = metrics.summary().get("recording_lost.writer", 0)
    assert sum(written.values()) + lost == 5 * next(sent)
    assert recorder.open("late", b"") is None


def test_a_wrong_address_ends_the_start() -> None:
    with pytest.raises(BadRecording, match="Protocol not known"):
        SessionRecorder(RecordingConfig(folder="foo://bucket/folder"), Recorder())


@pytest.mark.parametrize(("with_logits", "most_bytes"), [(False, 230_000), (True, 300_000)])
def test_ten_thousand_ticks_of_cartpole_are_small(tmp_path: Path, with_logits: bool, most_bytes: int) -> None:
    env = gymnasium.make("CartPole-v1")
    rng, ticks = np.random.default_rng(0), []
    # A random policy of CartPole's size, whose outputs are as hard to compress as a trained one's.
    hidden, out = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=(64, 3)).astype(np.float32) / 8
    obs, _ = env.reset(seed=0)
    for number in range(10_000):
        text = json.dumps({"obs": obs.tolist(), "reward": 1.0}).encode()
        action = int(obs[2] + 0.3 * obs[3] + rng.normal() * 0.02 > 0)
        *logits, value = np.tanh(obs @ hidden) @ out
        log_prob = float(logits[action] - np.logaddexp(*logits))
        attributes = {"step": Step(obs, np.asarray(action), log_prob, 7), "value": float(value)}
        outputs = {"logits": np.array(logits), "value": value}
        forwards = [("model", outputs, 7, rng.uniform(5e-5, 1e-4))] if with_logits else []
        time_s, queue_s = number * 0.001 + rng.uniform(0, 1e-4), rng.uniform(0, 1e-4)
        reply = b'{"action": %d}' % action
        ticks.append(
            Tick(number, time_s, rng.uniform(1e-4, 2e-4), text, reply, attributes, queue_s=queue_s, forwards=forwards)
        )
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
    columns = packed(columns_of(ticks))
    path = tmp_path / "a.parquet"
    with path.open("wb") as file:
        write_chunk(file, [SessionPart("e", "s", 0.0, 0, len(ticks))], columns)
    assert path.stat().st_size <= most_bytes
    (episode,) = open_recordings(str(path))
    assert episode.inputs() == [tick.input for tick in ticks]
    assert episode.outputs() == [tick.output for tick in ticks]
    read = episode.read()
    assert (read.time_us.tolist(), read.queue_us.tolist()) == (columns.time_us.tolist(), columns.queue_us.tolist())
    assert read.arrays.keys() == columns.arrays.keys()
    for name, array in columns.arrays.items():
        assert read.arrays[name].dtype == array.dtype
        assert np.array_equal(read.arrays[name], array)


def chunk(folder: Path, name: str, ticks: int = 3) -> Path:
    path = folder / f"{name}.parquet"
    with path.open("wb") as file:
        columns = columns_of([Tick(number, 0.0, 0.0, body(number), b"", {"x": 1.5}) for number in range(ticks)])
        write_chunk(file, [SessionPart(name, name, 0.0, 0, ticks)], columns)
    return path


def test_the_oldest_chunks_go_first_and_two_writers_share_a_folder(tmp_path: Path) -> None:
    first = chunk(tmp_path, "0-old")
    size = first.stat().st_size
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})])
    for folder in (Folder(str(tmp_path), size), Folder(str(tmp_path), size)):
        folder.write([SessionPart("e", "s", 0.0, 0, 1)], columns)
    assert len(list(tmp_path.iterdir())) == 3
    assert Folder(str(tmp_path), 10**9).trim() == 0
    assert Folder(str(tmp_path), size * 2).trim() == 1
    assert not first.exists()


def test_ticks_are_written_once_although_the_oldest_file_cannot_be_deleted(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "00000000T000000-a-folder.parquet").mkdir()
    packer = ChunkPacker(lambda: Folder(str(tmp_path), 0), flush_s=0.0)
    packer.add([SessionPart("a", "a", 0.0, 0, 1)], columns_of([Tick(0, 0.0, 0.0, b"", b"", {})]))
    packer.write_due()
    assert packer.failure == ""
    assert "are not deleted: ValueError" in caplog.text
    packer.close()
    assert [episode.session for episode in open_recordings(str(tmp_path))] == ["a"]


def test_a_folder_that_is_gone_is_made_again_and_a_broken_one_loses_only_what_does_not_fit(tmp_path: Path) -> None:
    target = tmp_path / "recordings"
    packer = ChunkPacker(lambda: Folder(str(target), 10**9), flush_s=0.0)
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})])
    packer.add([SessionPart("a", "a", 0.0, 0, 1)], columns)
    packer.write_due()
    for file in target.iterdir():
        file.unlink()
    target.rmdir()
    target.write_text("a file in its place")
    packer.add([SessionPart("b", "b", 0.0, 0, 1)], columns)
    packer.write_due()
    assert packer.failure
    assert packer.lost == 0
    large = columns_of([Tick(0, 0.0, 0.0, bytes(5 * CHUNK_BYTES), b"", {})])
    packer.add([SessionPart("c", "c", 0.0, 0, 1)], large)
    assert packer.lost == 2
    target.unlink()
    packer.add([SessionPart("d", "d", 0.0, 0, 1)], columns)
    packer.close()
    assert packer.failure == ""
    assert [episode.session for episode in open_recordings(str(target))] == ["d"]


def test_ticks_of_a_session_that_changes_its_columns_stay_in_order(tmp_path: Path) -> None:
    packer = ChunkPacker(lambda: Folder(str(tmp_path), 10**9), flush_s=60.0)
    for first, attributes in ((0, {"x": 1.0}), (2, {"y": 1}), (4, {"x": 2.0})):
        ticks = [Tick(first + index, 0.0, 0.0, b"%d" % (first + index), b"", attributes) for index in range(2)]
        packer.add([SessionPart("e", "s", 0.0, first, 2, end="stop" if first == 4 else "")], columns_of(ticks))
    packer.close()
    (episode,) = open_recordings(str(tmp_path))
    assert episode.read().number.tolist() == list(range(6))
    assert episode.inputs() == [b"%d" % number for number in range(6)]
    assert (episode.columns, episode.end) == ([], "stop")


def test_a_file_of_the_first_format_is_read(tmp_path: Path) -> None:
    table = parquet.ParquetFile(chunk(tmp_path, "a", ticks=2000))
    key = b"brayx.recording"
    about = json.loads(table.metadata.metadata[key])
    parts = [SessionPart("a", "a", 0.0, 0, 1500), SessionPart("a", "a", 0.0, 1500, 500, end="stop", row=1500)]
    newer = ("reported", "frames")
    rows = [{name: value for name, value in asdict(part).items() if name not in newer} for part in parts]
    with parquet.ParquetWriter(tmp_path / "b.parquet", table.schema_arrow) as writer:
        writer.write_table(table.read())
        writer.add_key_value_metadata({key: json.dumps({**about, "format": 1, "parts": rows})})
    (episode,) = open_recordings(str(tmp_path / "b.parquet"))
    assert (len(episode), episode.end, episode.reported) == (2000, "stop", "")
    assert episode.inputs() == [body(number) for number in range(2000)]
