"""Exports: what they refuse, and Rerun's files, read back by Rerun. The export to Minari: tests/end_to_end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.commands import cli
from brayx.errors import ConfigError
from brayx.recording.copying import file_name
from brayx.recording.index import SessionPart
from brayx.recording.minari import write_minari
from brayx.recording.source import reader
from brayx.recording.writer import Folder
from tests.recorded import columns_of
from tests.unit.recording.test_source import STOP, save, tick


def test_minaris_spaces_are_those_of_the_data(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    save(tmp_path, "a", [tick(0), tick(1), tick(2, stop=STOP)])
    data = reader(tmp_path)
    assert write_minari(data.episodes(tmp_path, {"obs/x": "obs", "obs/y": "value"}), tmp_path / "out") == (1, 3)
    facts = json.loads((tmp_path / "out" / "data" / "metadata.json").read_text())
    assert json.loads(facts["action_space"]) == {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}
    assert json.loads(facts["observation_space"])["subspaces"]["x"] == {
        "type": "Box", "dtype": "float32", "shape": [2], "low": [-2.0, -2.0], "high": [2.0, 2.0],
    }  # fmt: skip
    assert (facts["total_episodes"], facts["total_steps"]) == (1, 3)


def test_sessions_of_several_games_make_no_dataset(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    save(tmp_path, "a", [tick(0), tick(1)])
    save(tmp_path, "b", [tick(0, body={"obs": [1.0]}), tick(1, body={"obs": [1.0]})])
    episodes = reader(tmp_path).episodes(tmp_path, {"obs": "input/obs"})
    with pytest.raises(ConfigError, match=r"float32 of shape \(1,\), .* of \("):
        write_minari(episodes, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir()), "nothing is left"


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a", [tick(0), tick(1)])
    words = ["recordings", "export", str(tmp_path), "--out", str(tmp_path / "out"), "--format"]
    assert cli.main([*words, "minari", "--only", "player"]) == 2
    assert "--only is 'player', expected KEY=VALUE" in capsys.readouterr().err
    assert cli.main([*words, "minari", "--only", "player=nobody"]) == 2
    assert "no recorded session is selected" in capsys.readouterr().err
    assert cli.main([*words, "rerun", "--field", "reward=input/score"]) == 2
    assert "--field is for --format minari" in capsys.readouterr().err


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


@pytest.mark.parametrize("session", ["x" * 3000, "\U0001f600" * 3000, "../../etc/passwd", "a\x00b\n"])
def test_any_session_has_a_name_for_its_file(tmp_path: Path, session: str) -> None:
    Folder(str(tmp_path), 10**9).write([SessionPart("e", session, 0.0, 0, 1)], columns_of([tick(0)]))
    name = file_name(reader(tmp_path).recordings()[0])
    (tmp_path / f"{name}.mp4").touch()
    assert (tmp_path / f"{name}.mp4").parent.samefile(tmp_path)
