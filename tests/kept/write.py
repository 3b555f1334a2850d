"""Writes the files of this version that later versions must read: ``python -m tests.kept.write``.

Run it once for a version that changes a format, and commit the new folder; never write an old one anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import brayx
from brayx.gamecore.contract import Contract
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.payoff import Pair
from brayx.league.ratings import Rating
from brayx.metrics import Recorder
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.trainer.checkpoint import Counters, save
from tests.unit.recording.test_recorder import play

FOLDER = Path(__file__).parent
MAIN, FIRST = Member("main"), Member("main", 1)
CONTRACT = {
    "contract": 1,
    "observations": {"walk": {"shape": [2], "low": -1, "high": 1}, "card": {"kind": "category", "size": 52}},
    "actions": {"go": {"kind": "discrete", "size": 2, "mask": True}, "turn": {"kind": "continuous", "size": 1}},
}


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its optimiser, which has learned once."""
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def main() -> None:
    """Writes one file of each format."""
    folder = FOLDER / brayx.__version__
    (folder / "checkpoint").mkdir(parents=True)
    save(folder / "checkpoint", *parts(), Counters(1000, 20, 7, 1.5, 12.25), {"job": {"project": "walk"}})
    recorder = SessionRecorder(RecordingConfig(kind="recording", folder=str(folder / "recordings")), Recorder())
    play(recorder, "walk", 5)
    recorder.close()
    ledger = Ledger(folder / "league.db")
    ratings = {MAIN: Rating(26.0, 8.0, 1201.0, 1), FIRST: Rating(24.0, 8.0, 1199.0, 1)}
    ledger.count_game("one", {(MAIN, FIRST): Pair(1, 0, 0, 1.0, 1.0)}, ratings, {MAIN: 1, FIRST: 1}, {"counted": 1})
    ledger.close()
    (folder / "contract.json").write_text(json.dumps({"start": CONTRACT, "id": Contract.parse(CONTRACT).id}, indent=1))


if __name__ == "__main__":
    main()
