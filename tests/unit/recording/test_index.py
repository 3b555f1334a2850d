"""`brayx.recording.index`: sessions are listed by it, unless it is broken or out of date."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from brayx.errors import BadRecording
from brayx.recording import index
from brayx.recording import open as open_recordings
from brayx.recording.writer import Folder
from tests.unit.recording.written import indices, long_session


def test_a_long_session_is_listed_by_the_index_and_opens_only_the_chunks_that_are_read(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS + 3)
    chunks = sorted(tmp_path.glob("*.parquet"))
    assert len(indices(tmp_path)) == 1
    broken = chunks[5]
    broken.write_bytes(bytes(broken.stat().st_size))  # as large as before, so that the index still counts
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.end, episode.columns) == (2 * len(chunks), "stop", ["x"])
    listed = open_recordings(str(tmp_path))
    listed_episode = listed.find("e")
    assert listed_episode is listed[0]
    assert listed.find("long") is None, "that is the session's id"
    assert episode.read(12, 3).number.tolist() == [12, 13, 14]
    assert episode.read(len(episode) - 1, 1).number.tolist() == [len(episode) - 1]
    with pytest.raises(BadRecording, match="is not a file of a recording"):
        episode.read(10, 1)


def test_an_index_that_is_broken_or_out_of_date_is_not_believed(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS)
    (listed,) = indices(tmp_path)
    whole = listed.read_bytes()
    about = json.loads(gzip.decompress(whole))
    name = next(iter(about["chunks"]))
    _, columns, parts = about["chunks"][name]
    size = (tmp_path / name).stat().st_size

    def entry(**changed: Any) -> dict[str, Any]:
        return {name: [size, columns, {**parts, **{field: [value] for field, value in changed.items()}}]}

    for hostile in (
        b"", b"no gzip", whole[:-20], gzip.compress(b"[]"),
        *(
            gzip.compress(json.dumps({**about, **changed}).encode())
            for changed in (
                {"format": 9}, {"chunks": []}, {"chunks": {name: 1}}, {"chunks": {name: [size, columns, [[1]]]}},
                {"chunks": {name: [size, columns, {field: parts[field] for field in parts if field != "ticks"}]}},
                *({"chunks": {name: [size, columns, {**parts, "ticks": ticks}]}} for ticks in ([], 1, "1", [1, 1])),
                {"chunks": entry(episode=1)}, {"chunks": entry(ticks=-1)}, {"chunks": entry(ticks=True)},
                {"chunks": entry(ticks=0)}, {"chunks": entry(ticks=2**63)}, {"chunks": entry(first=2**63)},
                {"chunks": entry(began=float("inf"))}, {"chunks": entry(began=float("nan"))},
                {"chunks": entry(began=-1e300)}, {"chunks": entry(), "more": "x" * 2**28},
                {"chunks": {f"../{tmp_path.name}/{name}": [size, columns, parts]}},
                {"chunks": {name: [size + 1, columns, parts]}},
            )
        ),
    ):  # fmt: skip
        listed.write_bytes(hostile)
        (episode,) = open_recordings(str(tmp_path))
        assert (len(episode), episode.session) == (2 * index.CHUNKS, "long")
    for changed in ({"ticks": 9}, {"row": 99}):  # it may only lie about what a chunk has: reading finds out
        listed.write_bytes(gzip.compress(json.dumps({**about, "chunks": entry(**changed)}).encode()))
        with pytest.raises(BadRecording, match="cannot be read"):
            next(iter(open_recordings(str(tmp_path)))).read()
    listed.write_bytes(gzip.compress(json.dumps({**about, "chunks": {name: [size, ["y"], parts]}}).encode()))
    with pytest.raises(BadRecording, match="has no array 'y'"):
        next(iter(open_recordings(str(tmp_path)))).read(0, 1, ["y"])


def test_a_folder_of_an_older_version_lacks_the_replies_to_starts(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS)
    (listed,) = indices(tmp_path)
    field, unknown = b'"start_reply"', b'"unknown_one"'
    whole = gzip.decompress(listed.read_bytes())
    assert field in whole
    listed.write_bytes(gzip.compress(whole.replace(field, unknown)))
    chunks = sorted(tmp_path.glob("*.parquet"))
    for path in chunks:
        path.write_bytes(path.read_bytes().replace(field, unknown))
    whole = chunks[5].read_bytes()
    chunks[5].write_bytes(bytes(len(whole)))
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.start_reply) == (2 * len(chunks), ""), "its index is believed"
    chunks[5].write_bytes(whole)
    listed.unlink()
    (episode,) = open_recordings(str(tmp_path))
    assert (episode.read().number.tolist(), episode.start_reply) == (list(range(2 * len(chunks))), "")
