"""A shipped game is recorded, cloned and learned on from, by the commands of docs/guide-recordings.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import shipped_game
from tests.end_to_end.jobs import FREE_PORTS
from tests.learning.rows import Rows, printed

pytestmark = pytest.mark.learning
SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "3"))))


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    yield from printed(request)


@SEEDS
def test_ppo_from_the_clone_of_a_shipped_game_reaches_475(rows: Rows, seed: int, tmp_path: Path) -> None:
    shipped_game.example(tmp_path)
    recorded = float(np.mean(shipped_game.record(tmp_path, games=40, seed=1000 * seed)))
    cloned = shipped_game.greedy_return(shipped_game.train(tmp_path, "clone.yaml", f"seed={seed}"))
    options = (*FREE_PORTS, f"seed={seed}", "trainer.initial_weights=runs:/clone")
    main = shipped_game.train(tmp_path, "cartpole.yaml", *options)
    returns = main.history("return/last_100_games")
    learned = shipped_game.greedy_return(main)
    rows.add(
        "CartPole-v1: a scripted agent is recorded for 40 games, cloned, and PPO starts from the clone",
        seed=seed,
        recorded=f"{recorded:.1f}",
        clone=f"{cloned:.1f}",
        first_training_returns=f"{returns[0][1]:.1f}",
        env_steps=f"{returns[-1][0]:,}",
        last_training_returns=f"{returns[-1][1]:.1f}",
        greedy_return=f"{learned:.1f} (50 episodes)",
    )
    assert cloned >= 150
    assert learned >= 475 > cloned
