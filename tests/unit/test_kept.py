"""Files of earlier versions (tests/kept) are read as they were written; those of later ones are refused in words."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from brayx.errors import BadBody, BadRecording, LeagueError, TrackingError
from brayx.gamecore.contract import Contract
from brayx.league.ledger import Ledger
from brayx.league.payoff import Pair
from brayx.recording import open as open_recordings
from brayx.trainer.checkpoint import Counters, restore
from tests.kept.write import CONTRACT, FIRST, FOLDER, MAIN, parts

VERSIONS = sorted(path.name for path in FOLDER.iterdir() if path.name[0].isdigit())


@pytest.fixture(params=VERSIONS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a version's files."""
    return Path(shutil.copytree(FOLDER / request.param, tmp_path / "kept"))


def test_a_checkpoint(kept: Path) -> None:
    module, optimizer = parts()
    expected = {name: array.clone() for name, array in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert restore(kept / "checkpoint", module, optimizer).counters == Counters(1000, 20, 7, 1.5, 12.25)
    for name, array in module.state_dict().items():
        assert torch.allclose(array, expected[name]), name


def test_a_recording(kept: Path) -> None:
    (episode,) = open_recordings(str(kept / "recordings"))
    assert (episode.session, len(episode), episode.end, episode.result) == ("walk", 5, "stop", 12.0)
    bodies: list[dict[str, Any]] = [json.loads(text) for text in episode.inputs()]
    assert [body["obs"] for body in bodies] == [(np.arange(4) + number).tolist() for number in range(5)]
    assert episode["obs/x"].tolist() == [body["obs"] for body in bodies]


def test_books_of_a_league(kept: Path) -> None:
    ledger = Ledger(kept / "league.db")
    assert ledger.has("one")
    assert ledger.pairs() == {(MAIN, FIRST): Pair(1, 0, 0, 1.0, 1.0)}
    ledger.close()


def test_a_contract_has_the_same_id(kept: Path) -> None:
    document = json.loads((kept / "contract.json").read_text())
    assert Contract.parse(document["start"]).id == document["id"]


def test_later_formats_are_refused_in_words(kept: Path) -> None:
    meta = kept / "checkpoint" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(TrackingError, match="format 99"):
        restore(kept / "checkpoint", *parts())
    with sqlite3.connect(kept / "league.db") as books:
        books.execute("PRAGMA user_version=99")
    books.close()
    with pytest.raises(LeagueError, match="format is 99"):
        Ledger(kept / "league.db")
    (chunk,) = (kept / "recordings").glob("*.parquet")
    about = {**json.loads(pq.read_metadata(chunk).metadata[b"brayx.recording"]), "format": 99}
    pq.write_table(pq.read_table(chunk).replace_schema_metadata({b"brayx.recording": json.dumps(about)}), chunk)
    with pytest.raises(BadRecording, match="format 99"):
        open_recordings(str(chunk))
    with pytest.raises(BadBody, match="contract is 99"):
        Contract.parse({**CONTRACT, "contract": 99})
