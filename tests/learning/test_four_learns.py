"""Connect four by the league template as it is, against a random player and OpenSpiel's tree search."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.jobs import FREE_PORTS, TEMPLATES, brayx, setting
from tests.learning.rows import Rows, printed

pytestmark = pytest.mark.learning
SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "3"))))
rows = pytest.fixture(scope="module")(printed)


@SEEDS
def test_connect_four(rows: Rows, seed: int, tmp_path: Path) -> None:
    for file in (TEMPLATES / "league").glob("four*"):
        shutil.copy(file, tmp_path)
    shutil.copy(Path(__file__).with_name("four_mcts.py"), tmp_path)
    with brayx(tmp_path, "train", "four.yaml", *setting(f"seed={seed}", *FREE_PORTS)) as training:
        assert training.process.wait(4 * 3600) == 0, training.err
    against = {}
    for opponent in ("random", "four_mcts.move"):
        words = ("match", "four.yaml", "models:/four@champion", opponent, "--games", "200", "--json")
        with brayx(tmp_path, *words, *setting(*FREE_PORTS)) as match:
            assert match.process.wait(1200) == 0, match.err
        against[opponent] = json.loads(match.out)
    with brayx(tmp_path, "league", "export", "books.json") as exported:
        assert exported.process.wait(240) == 0, exported.err
    ratings = json.loads((tmp_path / "books.json").read_text())["ratings"]
    snapshots = sorted(
        (row["version"], row["fitted"]) for row in ratings if row["member"].startswith("main:") and row["fitted"]
    )
    points = [points for _, points in snapshots]
    correlation = float(np.corrcoef(np.argsort(np.argsort(points)), np.arange(len(points)))[0, 1])
    played = {name: f"{of['wins']}, {of['draws']}, {of['losses']}" for name, of in against.items()}
    rate = {name: (of["wins"] + of["draws"] / 2) / of["games"] for name, of in against.items()}
    title = "Connect four: champion's wins, draws and losses; rank correlation of the snapshots' ratings with their age"
    rows.add(title, seed=seed, random=played["random"], mcts=played["four_mcts.move"], correlation=f"{correlation:.2f}")
    assert rate["random"] >= 0.97
    assert rate["four_mcts.move"] >= 0.6
    assert correlation >= 0.8
