"""A league's registered snapshots, and a job that serves them: each version's only weight is its number."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from brayx.engines.base import save_weights
from brayx.jobs.config import JobConfig
from brayx.league.files import PLAYER_TAG, league_folder
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.ratings import FIRST_POINTS, POINTS_PER_MU, Rating
from brayx.league.snapshots import Snapshot
from brayx.tracking import Trial, promote
from brayx.tracking.registry import register_files
from tests.scale_job import scale_model

PROJECT = "served-league"
MODEL = scale_model('{"value": obs * self.factor, "logits": obs * torch.tensor([2.0, 0.0])}')
AGENT = """
import numpy as np
from brayx import Agent, forward

class VersionAgent(Agent):
    def snapshot(self):
        return b""

    def restore(self, data):
        pass

    async def on_tick(self, state):
        other = {"left": "right", "right": "left"}.get(state.agent)
        if other:  # two seats of one game: each answers with the other's observation
            setattr(state, f"seen_by_{state.agent}", state.input["obs"])
            state.output = {"action": await state.wait(f"seen_by_{other}", 30.0)}
            return
        outputs, version = await forward("model", np.ones(1, np.float32))
        gap = float(outputs["logits"][0] - outputs["logits"][1])
        # 0 ticks late: what is seen now.
        state.output = [float(outputs["value"][0]), version, self.config["mode"], gap, (state.input or {}).get("seen")]

def tactics(state):
    state.output = ["a script"]
"""
LEVELS = """
model: served-league
levels:
  easy: {player: main, version: 1, temperature: 4.0, delay: 2, points: 700.0, low: 690.0, high: 710.0, games: 400}
  hard: {player: main, version: 4, temperature: 1.0, delay: 0, points: 1480.0, low: 1470.0, high: 1490.0, games: 400}
others:
  - {player: exploiter, version: 3, temperature: 1.0, delay: 0, points: 1250.0, low: 1, high: 2, games: 9}
"""
POINTS = {1: 900.0, 2: 1100.0, 4: 1500.0}
"""Points of main's snapshots; version 3 is an exploiter's with 1300, version 5 has left the pool."""
BOOKS = {Member("main", version): points for version, points in POINTS.items()} | {
    Member("exploiter", 3): 1300.0,
    Member("main", 5): 2000.0,
}


FREE_PORTS = dict.fromkeys(("port", "native_port", "tcp_port", "grpc_port"), 0)


class Pool:
    """A league's trials, and snapshots whose only weight is their version's number."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.league = Trial.open(PROJECT, "league", uri)
        self.players = {
            name: Trial.open(PROJECT, name, uri, parent=self.league) for name in ("main", "exploiter")
        }  # fmt: skip

    def add(self, version: int, player: str = "", weights: dict[str, Any] | None = None) -> None:
        """Registers a version; an empty player: it is no snapshot."""
        files = self.folder / f"version-{version}"
        files.mkdir()
        save_weights(files / "weights.npz", weights or {"factor": np.array([version], np.float32)})
        trial = self.players.get(player, self.league)
        entry = register_files(trial, files, PROJECT, version, tags={PLAYER_TAG: player} if player else {})
        assert entry.version == version

    def fill(self) -> None:
        """Registers versions 1 to 6; the sixth is no snapshot, and the second is the champion."""
        for version, player in ((1, "main"), (2, "main"), (3, "exploiter"), (4, "main"), (5, "main"), (6, "")):
            self.add(version, player)
        promote(f"models:/{PROJECT}/2", self.uri)

    def books(self) -> None:
        """Writes the league's books."""
        folder = league_folder(self.league)
        folder.mkdir(parents=True)
        with contextlib.closing(Ledger(folder / "books.sqlite")) as ledger:
            for member, points in BOOKS.items():
                snapshot = Snapshot(member, member.label, None, member.version, 0.0)
                lost = [member] if member.version == 5 else []
                rating = Rating(mu=Rating().mu + (points - FIRST_POINTS) / POINTS_PER_MU)
                script = {Member("tactics"): Rating(mu=Rating().mu + 250.0 / POINTS_PER_MU)}
                ledger.freeze(snapshot, {member: rating, **script}, dropped=lost)


def load(folder: Path, *, league: bool, engine: str = "onnx", **actor: Any) -> JobConfig:
    """The job, whose modules are in a folder; ``actor`` overrides options of its actor.

    The modules' names have the folder's, since a process can load a name from one folder only.
    """
    model, agent = (f"opponents_{part}_{folder.name}" for part in ("model", "agent"))
    (folder / f"{model}.py").write_text(MODEL)
    (folder / f"{agent}.py").write_text(AGENT)
    parts: dict[str, Any] = {
        "project": PROJECT,
        "trial": "league",
        "model": {"kind": "model", "module": model, "engine": engine, "follow_s": 0.2},
        "agent": {"kind": "agent", "module": agent, "class": "VersionAgent"},
        "actor": {"kind": "actor", "agents": ["agent"], **(actor or FREE_PORTS)},
    }
    if league:
        players = {
            "main": {"role": "main"},
            "exploiter": {"role": "exploiter", "of": "main"},
            "tactics": {"role": "script", "script": f"{agent}.tactics"},
        }
        parts["league"] = {"kind": "league", "model": "model", "resident": 2, "players": players}
    (folder / "job.yaml").write_text(yaml.safe_dump(parts))
    return JobConfig.load(folder / "job.yaml")
