"""`BehaviourTraining` with learners and a lobby that are stand-ins; `tests/end_to_end/test_game.py` trains for real."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.actor.config import AgentConfig
from brayx.errors import Diverged
from brayx.local.behaviours import BehaviourTraining
from tests.unit.jobs.test_trainee import Learner


def training(*, starting: bool) -> Any:
    """A training whose second behaviour has failed while the first one has all its steps."""
    made: Any = BehaviourTraining.__new__(BehaviourTraining)
    learners = {"chaser": Learner("of chaser", running=False), "runner": Learner("", False, Diverged("loss is NaN"))}
    made.closed, made.refused, made._sources = [], {}, {"runner": None}

    async def close() -> None:
        made.closed.append("runner")

    made.trainees = {
        name: SimpleNamespace(learner=learner, acting=SimpleNamespace(close=close), end=made.closed.append)
        for name, learner in learners.items()
    }
    made.mains, made._jobs = [*learners], dict.fromkeys(learners)
    made._starting, made._say = {"runner": 0.0} if starting else {}, lambda line: None
    doors = SimpleNamespace(run=lambda work, timeout_s: asyncio.run(work))
    made._lobby, made._doors = SimpleNamespace(admit=made.refused.__setitem__), doors
    return made


def test_a_behaviour_that_fails_before_it_acts_is_refused_also_if_it_is_the_last_to_learn() -> None:
    ended = training(starting=True)
    assert ended.result(0.0) == "of chaser"
    assert (ended.refused, ended.closed, ended.mains) == ({"runner": "loss is NaN"}, ["runner", "FAILED"], ["chaser"])


def test_a_behaviour_that_fails_later_fails_the_training() -> None:
    with pytest.raises(Diverged, match="loss is NaN"):
        training(starting=False).result(0.0)


@pytest.mark.parametrize("first", ["cloned", "played"])
def test_a_clone_is_over_with_its_demonstrations_and_others_play_on(first: str) -> None:
    """Of two behaviours one is cloned, and its agent fills no buffer; all sources are read."""
    ended = training(starting=False)
    told: dict[str, bool] = {}

    def trainee(name: str) -> Any:
        return SimpleNamespace(is_over=lambda no_more: told.setdefault(name, no_more))

    names = [first, *{"cloned", "played"} - {first}]
    agents = {"cloned": {"buffer": None}, "played": {}}
    ended.trainees = {name: trainee(name) for name in names}
    ended._jobs = {
        name: SimpleNamespace(agents={"agent": AgentConfig(module="m", class_name="A", options=agents[name])})
        for name in names
    }
    ended._sources = {names[1]: SimpleNamespace(done=True)}
    assert not ended.is_over(read=True, games_play=True)
    assert told == {"cloned": True, "played": False}
