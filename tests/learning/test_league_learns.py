"""A league on the local host, learning games of OpenSpiel through the door: `kind: league`, snapshots, pool, magnet.

OpenSpiel has the rules and evaluates. What is evaluated is the mixture of the pool's newer half, which draws one of
these snapshots for each game: single policies still move around the equilibrium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from open_spiel.python.algorithms.exploitability import nash_conv
from open_spiel.python.algorithms.policy_aggregator import PolicyAggregator
from open_spiel.python.policy import TabularPolicy

from brayx.components import load_module
from brayx.engines.base import load_weights
from brayx.engines.torch import with_weights
from brayx.jobs.config import JobConfig
from tests.end_to_end.jobs import brayx
from tests.learning.poker.exploitability import tabular
from tests.learning.rows import Rows, printed

pytestmark = pytest.mark.learning
SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "3"))))
PARTS = Path(__file__).parent / "poker"
ROCK_PAPER_SCISSORS = "turn_based_simultaneous_game(game=matrix_rps())"
QUICK = {"MAGNET": 0.5, "DECAY": 0.9, "COLUMNS": 128, "EVERY": 20_000}
SLOW = {"MAGNET": 1.0, "DECAY": 0.95, "COLUMNS": 160, "EVERY": 25_000}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    yield from printed(request)


def trained(folder: Path, game: str, seed: int, steps: int, bias: list[float], options: dict[str, Any]) -> Any:
    """Trains; returns the policies of the pool's snapshots, the oldest first."""
    for file in PARTS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    job = folder / "poker.yaml"
    text = job.read_text()
    for name, value in {**options, "GAME": game, "SEED": seed, "STEPS": steps, "BIAS": bias}.items():
        text = text.replace(name, str(value))
    job.write_text(text)
    with brayx(folder, "train", "poker.yaml") as training:
        assert training.process.wait(3600) == 0, training.err
    parts = load_module("poker_parts", str(PARTS))
    module, _ = parts.build_model("model", JobConfig.load(job).as_dict())
    files = sorted(folder.glob("leagues/*/weights/[0-9]*.npz"), key=lambda file: int(file.stem))
    return [tabular(with_weights(module, load_weights(file)).eval(), game, parts.encode) for file in files]


def mixture(policies: list[TabularPolicy]) -> Any:
    """The policy that draws one of the newer half for each game, each seat its own."""
    newer = policies[len(policies) // 2 :]
    shares = np.full(len(newer), 1 / len(newer))
    game = newer[0].game
    return PolicyAggregator(game).aggregate([0, 1], [newer] * 2, [shares] * 2)


def exploited(policies: list[TabularPolicy]) -> tuple[float, float]:
    """NashConv of the mixture and of the newest."""
    game = policies[0].game
    return nash_conv(game, mixture(policies)), nash_conv(game, policies[-1])


@SEEDS
def test_rock_paper_scissors(rows: Rows, seed: int, tmp_path: Path) -> None:
    """From a policy that prefers rock: (.79, .18, .04)."""
    policies = trained(tmp_path, ROCK_PAPER_SCISSORS, seed, 200_000, [1.5, 0.0, -1.5], QUICK)
    each = np.array([policy.action_probability_array[0] for policy in policies])
    mixed = each[len(each) // 2 :].mean(0)
    title = "Rock-paper-scissors by a league: probabilities of the mixture of the pool's newer half, and of the newest"
    rows.add(title, seed=seed, env_steps="200,000", mixture=mixed.round(2).tolist(), newest=each[-1].round(2).tolist())
    assert np.abs(mixed - 1 / 3).max() <= 0.1


@SEEDS
@pytest.mark.parametrize(
    ("game", "steps", "actions", "options", "at_most"),
    [("kuhn_poker", 320_000, 2, QUICK, 0.1), ("leduc_poker", 600_000, 3, SLOW, 1.0)],
)
def test_poker(
    rows: Rows, seed: int, tmp_path: Path, game: str, steps: int, actions: int, options: dict[str, Any], at_most: float
) -> None:
    policies = trained(tmp_path, game, seed, steps, [0.0] * actions, options)
    mixed, newest = exploited(policies)
    title = f"{game} by a league: NashConv of the mixture of the pool's newer half, and of the newest snapshot"
    rows.add(title, seed=seed, env_steps=f"{steps:,}", mixture=f"{mixed:.3f}", newest=f"{newest:.3f}")
    assert mixed <= at_most
