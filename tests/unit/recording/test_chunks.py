"""`brayx.recording.chunks`: files that are broken or made to do harm are named, and the others are read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from brayx.errors import BadRecording
from brayx.recording import open as open_recordings
from brayx.recording.chunks import write_chunk
from brayx.recording.columns import packed
from brayx.recording.index import SessionPart
from tests.recorded import Tick, columns_of

TICKS = 40
KEY = "brayx.recording"


def chunk(folder: Path, name: str, ticks: int = TICKS) -> Path:
    path = folder / f"{name}.parquet"
    ticks_made = [
        Tick(n, 0.1 * n, 0.0, b'{"obs": [%d.5, 1.0], "reward": 1.0}' % n, b'{"action": 1}', attributes(n))
        for n in range(ticks)
    ]
    with path.open("wb") as file:
        write_chunk(file, [SessionPart(name, name, 0.0, 0, ticks)], packed(columns_of(ticks_made)))
    return path


def attributes(number: int) -> dict[str, Any]:
    return {"obs": np.array([number + 0.5, 1.0], np.float32), "action": np.int64(1), "probs": np.ones(2, np.float64)}


def column(name: str, values: Any) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    """Replaces a column of the file."""
    return lambda table, _: table.set_column(table.schema.names.index(name), name, values)


def input_as(values: Any) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    def change(table: pa.Table, about: dict[str, Any]) -> pa.Table:
        del about["columns"]["obs"]  # its values are the input's numbers
        table = table.drop_columns([name for name in table.schema.names if name.startswith("tick.input")])
        return table if values is None else table.append_column("tick.input", values)

    return change


def part(**fields: Any) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    """Replaces fields of the file's parts."""

    def change(table: pa.Table, about: dict[str, Any]) -> pa.Table:
        about["parts"].update({name: [value] for name, value in fields.items()})
        return table

    return change


def stored(name: str, **fields: Any) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    """Changes how the file says that it stores an array."""

    def change(table: pa.Table, about: dict[str, Any]) -> pa.Table:
        about["columns"][name].update(fields)
        return table

    return change


def text(*skeletons: bytes | str | None, index: int | None = 0) -> pa.Array:
    kind = pa.string() if isinstance(skeletons[0], str) else pa.binary()
    return pa.DictionaryArray.from_arrays(pa.array([index] * TICKS, pa.int32()), pa.array(skeletons, kind))


def renamed(table: pa.Table, about: dict[str, Any]) -> pa.Table:
    about["columns"]["tick.event"] = about["columns"].pop("action")
    return table


def numbers(value: float) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.full(3 * TICKS, value, np.float32)), 3)


HOSTILE = {
    "event null": column("tick.event", pa.nulls(TICKS, pa.string())),
    "event int": column("tick.event", pa.array([1] * TICKS)),
    "number float": column("tick.number", pa.array([0.5] * TICKS)),
    "number text": column("tick.number", pa.array(["x"] * TICKS)),
    "number null": column("tick.number", pa.nulls(TICKS, pa.int64())),
    "time text": column("tick.time_us", pa.array(["x"] * TICKS)),
    "time null": column("tick.time_us", pa.nulls(TICKS, pa.int64())),
    "stop int": column("tick.stop", pa.array([7] * TICKS)),
    "input text": input_as(pa.array(["{}"] * TICKS)),
    "input null": input_as(pa.nulls(TICKS, pa.binary())),
    "input int": input_as(pa.array([1] * TICKS)),
    "input missing": input_as(None),
    "output list": column("tick.output.text", pa.array([[1, 2]] * TICKS)),
    "more numbers than there are": column("tick.input.text", text(b"\x00" * 99)),
    "text without a dictionary": column("tick.input.text", pa.array([b"{}"] * TICKS)),
    "text of another type": column("tick.input.text", text("{}")),
    "text null": column("tick.input.text", text(b"{}", index=None)),
    "numbers nan": column("tick.input.numbers", numbers(float("nan"))),
    "numbers inf": column("tick.input.numbers", numbers(float("inf"))),
    "numbers text": column("tick.input.numbers", pa.array(["1"] * TICKS)),
    "array text": column("action", pa.array(["1"] * TICKS)),
    "array null": column("action", pa.nulls(TICKS, pa.int64())),
    "array nested": column("action", pa.array([[[1]]] * TICKS)),
    "array missing": lambda table, _: table.drop_columns(["action"]),
    "array of a null": column(
        "probs", pa.FixedSizeListArray.from_arrays(pa.array([None] * 2 * TICKS, pa.float64()), 2)
    ),
    "shape large": stored("action", shape=[2**40]),
    "shape empty": stored("action", shape=[0]),
    "shape of others": stored("probs", shape=[3]),
    "offset outside": stored("obs", at=10**6),
    "offset near the end": stored("obs", at=2),
    "offset dtype": stored("obs", dtype="<i8"),
    "dtype of arrays": stored("action", dtype="(100000,)f8"),
    "dtype of records": stored("action", dtype="f4,f4"),
    "name of another column": renamed,
    "session surrogate": part(session="\ud800"),
    "player surrogate": part(player="\ud800"),
    "left out surrogate": part(left_out={"\ud800": "why"}),
    "left out int": part(left_out={"a": 5}),
    "left out list": part(left_out=[1]),
    "result large": part(result=10**400),
    "began large": part(began=10**400),
    "ticks large": part(ticks=2**70),
    "video endless": lambda table, about: about.update(video={"fps": 0, "sizes": [[64, 64]]}) or table,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_with_other_contents_is_named_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    file = parquet.ParquetFile(chunk(tmp_path, "good"))
    about = json.loads(file.metadata.metadata[KEY.encode()])
    about["parts"]["episode"] = ["bad"]
    table = HOSTILE[name](file.read(), about)
    with parquet.ParquetWriter(tmp_path / "bad.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: json.dumps(about)})
    with pytest.raises(BadRecording, match=r"bad\.parquet"):
        open_recordings(str(tmp_path / "bad.parquet"))[0].frame()
    recordings = open_recordings(str(tmp_path))
    recordings.table().to_json(date_format="iso")
    good = recordings.find("good")
    assert good is not None
    assert len(good.frame()) == len(good.inputs()) == TICKS


def test_broken_and_hostile_files_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    good = chunk(tmp_path, "good", ticks=3)
    whole = good.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "text.parquet").write_text("no parquet")
    for number, (was, now) in enumerate(
        [
            (b'"ticks": [3]', b'"ticks": [9]'),
            (b'"ticks": [3]', b'"ticks":[-3]'),
            (b'"ticks": [3]', b'"ticks": "3"'),
            (b'"ticks": [3]', b'"ticks": [ ]'),
            (b'"ticks": [3]', b'"tocks": [3]'),
            (b'"row": [0]', b'"row":[0,0]'),
            (b'"session": ["good"]', b'"session": [123456]'),
            (b'"dtype": "<f4"', b'"dtype": "|O8"'),
            (b'"format": 2', b'"format": 1'),
            (b'"format": 2', b'"format": 3'),
        ]
    ):
        assert whole.count(was) == 1
        (tmp_path / f"hostile-{number}.parquet").write_bytes(whole.replace(was, now))
    episodes = open_recordings(str(tmp_path))
    assert [episode.session for episode in episodes] == ["good"]
    assert len(episodes.unreadable) == 13
    with pytest.raises(BadRecording, match="is not a file of a recording"):
        open_recordings(str(tmp_path / "cut.parquet"))
    with pytest.raises(BadRecording, match="there is no recording at"):
        open_recordings(str(tmp_path / "nowhere"))
    good.unlink()
    assert episodes[0].session == "good"


def test_a_file_whose_data_are_broken_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = chunk(tmp_path, "a", ticks=2000)
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    (episode,) = open_recordings(str(path))
    with pytest.raises(BadRecording, match="cannot be read"):
        episode.inputs()


def test_a_chunk_with_changed_bytes_is_read_or_named(tmp_path: Path) -> None:
    path = chunk(tmp_path, "a")
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            for episode in open_recordings(str(path)):
                episode.frame()
        except BadRecording:
            refused += 1
    assert refused > 20
