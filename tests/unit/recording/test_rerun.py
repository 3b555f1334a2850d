"""`brayx.recording.rerun`: its files have every tick and play the frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.commands import cli
from brayx.metrics import Recorder
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from tests.unit.recording.demonstrations import save, tick
from tests.unit.recording.pictures import config, image, play, write


@pytest.mark.filterwarnings("error")  # Rerun leaves out what it cannot write, and warns
def test_reruns_files_have_every_tick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    from rerun.chunk import RrdReader

    board = np.arange(16, dtype=np.uint8).reshape(4, 4)
    mask = board % 2 == 0
    ticks = [
        tick(number, board=board + number, mask=mask, event="skipped 2" if number == 2 else "") for number in range(4)
    ]
    save(tmp_path, "a", ticks, session="../../a", result=3.0)
    out = tmp_path / "out"
    assert cli.main(["recordings", "export", str(tmp_path), "--format", "rerun", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"1 sessions of 4 ticks: {out}\n"
    (file,) = out.iterdir()
    assert file.name == "_.._a-a.rrd", "a session's id names no path"
    rows_of: dict[str, list[Any]] = {}
    timelines = set()
    for chunk in RrdReader(file).stream():
        rows_of.setdefault(chunk.entity_path, []).append(row := chunk.to_record_batch().to_pydict())
        if not chunk.entity_path.startswith("/__properties"):
            timelines.add(frozenset(name for name in row if ":" not in name and not name.startswith("rerun.")))
    assert timelines == {frozenset({"tick", "time"})}, "each entity has these, and none the time of the export"
    facts = {name: values for row in rows_of["/__properties"] for name, values in row.items()}
    assert facts["RecordingInfo:start_time"] == [[0]], "when the session began, in nanoseconds"
    assert [row["result"] for row in rows_of["/__properties/session"]] == [[[3.0]]]
    (obs,) = rows_of["/obs"]
    assert obs["Scalars:scalars"] == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert obs["tick"] == [0, 1, 2, 3]
    (event,) = rows_of["/event"]
    assert (event["TextLog:text"], event["tick"]) == ([["skipped 2"]], [2])
    boards = [buffer for row in rows_of["/board"] for (buffer,) in row["Image:buffer"]]
    assert [bytes(buffer) for buffer in boards] == [(board + number).tobytes() for number in range(4)]
    masks = [tensor for row in rows_of["/mask"] for (tensor,) in row["Tensor:data"]]
    assert [tensor["shape"] for tensor in masks] == [[4, 4]] * 4
    assert [json.loads(text[0])["reward"] for text in rows_of["/input"][0]["TextDocument:text"]] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")  # Rerun leaves out what it cannot write, and warns
def test_rerun_plays_the_frames(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    from rerun.chunk import RrdReader

    write(Folder(str(tmp_path / "from"), 10**9), 2)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "rerun", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    (file,) = (tmp_path / "to").iterdir()
    rows = [chunk.to_record_batch().to_pydict() for chunk in RrdReader(file).stream() if chunk.entity_path == "/frames"]
    ticks = [tick for row in rows for tick in row.get("tick", [])]
    assert ticks == list(range(8))


def test_rerun_gets_a_video_for_each_size(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    from rerun.chunk import RrdReader

    recorder = SessionRecorder(config(tmp_path / "from"), Recorder())
    sizes = [(48, 64), (48, 64), (32, 40), (48, 64)]
    play(recorder, "s", [image(number, *size) for number, size in enumerate(sizes)])
    recorder.close(60.0)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "rerun", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    (file,) = (tmp_path / "to").iterdir()
    ticks_of: dict[str, list[int]] = {}
    for chunk in RrdReader(file).stream():
        if chunk.entity_path.startswith("/frames"):
            ticks_of.setdefault(chunk.entity_path, []).extend(chunk.to_record_batch().to_pydict().get("tick", []))
    assert ticks_of == {"/frames": [0, 1, 3], "/frames/32x40": [2]}
