"""A league whose books and versions are in a real store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brayx.engines.base import save_weights
from brayx.league.config import LeagueConfig
from brayx.league.files import PLAYER_TAG, books_file
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.tracking import Trial
from brayx.tracking.options import Options
from brayx.tracking.registry import register_files
from tests.unit.league.play import Playing

PLAYERS: dict[str, Any] = {
    "main": {"role": "main", "against": {"champion": 1.0}, "trainer": {"algorithm": {"name": "ppo"}}},
    "random": {"role": "script", "script": "somewhere.random_move"},
}
CONFIG = LeagueConfig(model="model", players=PLAYERS, gate={"min_games": 20})


@dataclass
class Written:
    """A league in a store.

    Attributes:
        trial: its trial.
        player: the trial of its player ``main``.
        league: writes its books.
        ledger: the books.
    """

    trial: Trial
    player: Trial
    league: Playing
    ledger: Ledger

    def freeze(self, folder: Path, value: float, env_steps: int) -> Member:
        """Registers a snapshot and adds it to the pool."""
        folder.mkdir(exist_ok=True)
        save_weights(folder / "weights.npz", {"w": np.full(3, value, np.float32)})
        entry = register_files(self.player, folder, "four", env_steps, tags={PLAYER_TAG: "main"})
        return self.league.freeze("main", entry.version, f"digest of {value}", env_steps)

    def play(self, first: int, count: int, result: str) -> None:
        """Plays games of the live player against the champion."""
        for number in range(first, first + count):
            sessions = {seat: self.league.assign(f"g{number}", f"g{number}-agent-{seat}") for seat in "xy"}
            for seat, member in sessions.items():
                other = {"win": "loss", "loss": "win", "draw": "draw"}[result]
                self.league.result(f"g{number}-agent-{seat}", other if member.version else result)
            for seat in sessions:
                self.league.ended(f"g{number}-agent-{seat}", "stop")


def new_league(uri: str, name: str = "league") -> Written:
    """A league without a snapshot."""
    trial = Trial.open("four", name, uri)
    options = {"model": {"kind": "model"}, "league": CONFIG.model_dump(mode="json"), "seed": 0}
    trial.log_options(Options(options, {}))
    books_file(trial).parent.mkdir(parents=True)
    ledger = Ledger(books_file(trial))
    return Written(trial, Trial.open("four", "main", uri, parent=trial), Playing(CONFIG, ledger), ledger)


def finish(written: Written) -> None:
    written.ledger.close()
    written.trial.finish()
