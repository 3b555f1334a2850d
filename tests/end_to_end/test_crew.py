"""MAPPO as a job: a cooperative game of three agents, each a session, a policy for all and a value of the whole game.

The job, the agent and the model are those in the guides; the game is `tests.learning.worlds.Rowers`. Its current is the
larger part of every reward, and only the value observes it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import warnings
from pathlib import Path

import pytest
from pettingzoo.test import parallel_api_test

from brayx.ports import free_port
from brayx.tracking import Trial
from tests.end_to_end.jobs import FREE_PORTS, ROOT, brayx, serves, setting, trials, without_ray
from tests.learning import worlds
from tests.unit.test_docs import FILES, snippets_of

ROWERS = worlds.Rowers.possible_agents
BY_CHANCE = worlds.Rowers.BEST / worlds.Rowers.CALLS

WATCH = """
import dataclasses

import numpy as np

from brayx import record
from crew_agent import Rower

ROWERS = ("bow", "middle", "stroke")


class LabelledRower(Rower):
    async def on_tick(self, state):
        await super().on_tick(state)
        state.step = dataclasses.replace(state.step, extras={"rower": np.asarray(ROWERS.index(state.agent))})


def handle(batch):
    for place, rower in enumerate(ROWERS):
        own = (batch["mask"] > 0) & (batch["rower"] == place)
        called = batch["obs/state"][own][:, 4 * place : 4 * place + 4]
        record("learned", float(own.sum()), kind="sum", label=rower)
        record("astray", float((called != batch["obs/obs"][own]).sum()), kind="sum", label=rower)
    return batch
"""
"""Each transition says whose it is; and what is learned from is counted, and compared with what the state has of it."""
CALM = """
from crew.crew_game import Rowers


def sea():
    return Rowers(current=0.0)
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder, with the game."""
    for snippet in (snippet for file in FILES for snippet in snippets_of(file)):
        if (name := snippet.is_("file")).startswith("crew/"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(snippet.text + "\n")
    shutil.copy(ROOT / "tests" / "learning" / "worlds.py", tmp_path / "crew" / "crew_game.py")
    (tmp_path / "crew" / "watch.py").write_text(WATCH)
    (tmp_path / "calm.py").write_text(CALM)
    return tmp_path


def test_the_game_keeps_pettingzoos_rules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_api_test(worlds.Rowers(), num_cycles=50)


def explained(trial: Trial) -> float:
    """The final share of the games' returns that the value predicts; a call alone predicts little of it."""
    return statistics.fmean(value for _, value in trial.history("learner/explained_variance")[-5:])


@pytest.mark.cluster
def test_agents_of_one_game_learn_together_through_the_door_and_are_served(folder: Path) -> None:
    watched = setting(*FREE_PORTS, "agent.module=watch", "agent.class=LabelledRower", "trainer.hooks=watch")
    with brayx(folder, "train", "crew/crew.yaml", *watched, environment=without_ray(folder)) as training:
        assert training.ended() == 0, training.err
        training.gone()
        assert "champion: crew version 1" in training.out
    (trial,) = trials(folder, "crew")["first"]
    metrics = trial.metrics()
    learned = [metrics[f"game/learned.{rower}"] for rower in ROWERS]
    assert sum(learned) >= 40_000
    assert max(learned) - min(learned) < 0.05 * sum(learned), learned
    assert [metrics[f"game/astray.{rower}"] for rower in ROWERS] == [0, 0, 0]
    assert explained(trial) > 0.6

    port = free_port()
    with brayx(folder, "serve", "crew/crew.yaml", *setting(*FREE_PORTS, f"actor.port={port}")) as serving:
        serving.until(lambda: serves(f"http://127.0.0.1:{port}", "model"), "it served the champion")
        words = f"gamecore pettingzoo calm:sea --url ws://127.0.0.1:{port} --games 20 --seed 1 --json"
        with brayx(folder, *words.split()) as playing:
            assert playing.ended(120.0) == 0, playing.err
            games = [json.loads(line)["return"] for line in playing.out.splitlines()]
        serving.control_c()
        assert serving.ended() == 0
        serving.gone()
    assert len(games) == 20
    assert all(set(game) == set(ROWERS) for game in games)
    assert statistics.fmean(game["bow"] for game in games) > 1.8 * BY_CHANCE, games


@pytest.mark.cluster
def test_agents_as_rows_learn_the_same_without_a_door(folder: Path) -> None:
    with brayx(folder, "train", "crew/crew_rows.yaml", environment=without_ray(folder)) as training:
        assert training.ended() == 0, training.err
        training.gone()
        assert "champion: crew version 1" in training.out
    (trial,) = trials(folder, "crew")["rows"]
    assert trial.metrics()["replay/env_steps"] >= 40_000
    assert explained(trial) > 0.6
