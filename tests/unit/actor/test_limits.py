"""A designer's limits: what is recorded is what was played, and those of a job hold for each of its sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.errors import BadBody, BadLimits, ConfigError
from brayx.metrics import Recorder
from brayx.recording import dataset
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.regression.game import RecordedGame
from brayx.regression.resimulate import _ReplayedActor
from brayx.types import Forward, Fragment
from tests.unit.actor.test_contract_agent import CONTINUOUS as REWARDED
from tests.unit.actor.test_contract_agent import DISCRETE, HYBRID, Fixed, Game, logits
from tests.unit.actor.test_contract_agent_rows import start_rows, tick_rows

DENSITY = -0.5 * math.log(2 * math.pi)
"""Logarithm of a standard Gaussian's density at its mean."""
BEST_OF = -math.log(1 + math.exp(-4) + math.exp(-9))
"""Log-probability of the best choice of logits 9, 5, 0."""
CONTINUOUS = {key: part for key, part in REWARDED.items() if key != "rewards"}
MEAN = logits(0.5, 0.25, -0.5)
HEADS = (logits(0, 9), logits(9, 5, 0))
GAUSSIAN = {"mean": MEAN, "log_std": logits(0, 0, 0)}
POLICIES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], list[float], float]] = {
    "hybrid": (
        HYBRID,
        {"logits": HEADS, "mean": logits(0.5), "log_std": logits(0)},
        {"steer": [-1.2], "dash": 0},
        [0, 0, -0.6],
        BEST_OF,
    ),
    "hybrid, only a choice": (
        HYBRID,
        {"logits": HEADS, "mean": logits(0.5), "log_std": logits(0)},
        {"dash": 0},
        [0, 0, 0.5],
        BEST_OF + DENSITY,
    ),
    "one of two": (CONTINUOUS, GAUSSIAN, {"throttle": 0.1}, [-0.8, 0.25, -0.5], 2 * DENSITY),
    "both": (CONTINUOUS, GAUSSIAN, {"throttle": 0.1, "steer": [1, 0.3]}, [-0.8, 1, 0.3], 0.0),
    "the second": (CONTINUOUS, GAUSSIAN, {"steer": [-1, 0.7]}, [0.5, -1, 0.7], DENSITY),
    "squashed": (
        CONTINUOUS,
        {"tanh_mean": MEAN, "tanh_log_std": logits(0, 0, 0)},
        {"steer": [0.1, 1]},
        [math.tanh(0.5), 0.1, 1],
        DENSITY - math.log(1 - math.tanh(0.5) ** 2),
    ),
    "noise of the state": (
        CONTINUOUS,
        {**GAUSSIAN, "latent": logits(1, 0), "sde_std": np.ones((2, 3), np.float32)},
        {"steer": [0.1, 1]},
        [0.5, 0.1, 1],
        DENSITY,
    ),
}


class FixedRows(Fixed):
    """The same outputs for each row."""

    async def forward_rows(self, obs: Any) -> Forward:
        count = len(obs["side"])

        def of_all(output: Any) -> Any:
            return tuple(map(of_all, output)) if isinstance(output, tuple) else np.stack([output] * count)

        return Forward({name: of_all(output) for name, output in self.outputs.items()}, np.full(count, self.version))


@pytest.mark.parametrize("has_rows", [False, True])
async def test_what_is_recorded_is_what_was_played(tmp_path: Path, has_rows: bool) -> None:
    recorder, agents = SessionRecorder(RecordingConfig(folder=str(tmp_path)), Recorder()), 1 + has_rows
    pushed, games = list[Fragment](), list[Game]()
    for contract, outputs, forced, _, _ in POLICIES.values():
        game = Game(contract, FixedRows(**outputs), "serve")
        game.actor = replace(game.make_actor, recorders=[recorder])()
        for tick in range(3):
            limits = {"forced": forced if tick else {}}
            if not tick:
                await (start_rows(game) if has_rows else game.start())
            if has_rows:
                reply = await tick_rows(game, [(1, [1, 2], 0.0, ""), (2, [1, 2], 1.0, "")], **limits)
            else:
                reply = await game.tick(**limits)
        await game.actor.stop(b"")
        await game.actor.on_end("stop")
        pushed += game.buffer.fragments
        games.append(game)
        for name, given in forced.items():
            number = given if name == "dash" else np.atleast_1d(np.float32(given)).tolist()
            assert reply[name] == ([number] * 2 if has_rows else number), "the very number"
    await asyncio.to_thread(recorder.close, 60.0)
    recorded = open_recordings(str(tmp_path))
    for (*_, played, log_prob), episode in zip(POLICIES.values(), recorded, strict=True):
        shape = (2, 2) if has_rows else (2,)
        np.testing.assert_allclose(episode["action"][1:], np.broadcast_to(played, (*shape, len(played))), rtol=1e-6)
        np.testing.assert_allclose(episode["log_prob"][1:], np.full(shape, log_prob), atol=1e-6)
        assert not np.array_equal(episode["action"][0], episode["action"][1]), "a tick's limits end with it"
    expected = [played for *_, played, _ in POLICIES.values() for _ in range(agents)]
    for of_source in (pushed, list(dataset(tmp_path))):  # the second is what a policy is cloned from
        for played, fragment in zip(expected, of_source, strict=True):
            np.testing.assert_allclose(fragment.action[1:], [played] * (len(fragment) - 1), rtol=1e-6)
            assert len(fragment) > 1
    for game, episode in zip(games, recorded, strict=True):
        again = RecordedGame([episode], {episode.session}, from_tick=0)
        actor = _ReplayedActor(game.make_actor, again, None)
        await actor.start(episode.session, episode.start.encode())
        for body in episode.inputs():
            await actor.tick(body)
        assert [(seat.ticks, seat.first) for seat in again.seats] == [(3, None)], "it acts as it was recorded"


def served(mode: str = "serve", **options: Any) -> Game:
    return Game(HYBRID, Fixed(logits=HEADS, mean=logits(0.5), log_std=logits(0)), mode, **options)


async def test_those_of_a_job_hold_for_each_session_below_its_own() -> None:
    game = served(forbidden={"go": [1]}, forced={"steer": [0.5], "dash": 0})
    for limits, expected in (
        ({}, {"steer": [0.5], "dash": 0, "go": 2}),
        ({"forbidden": {"go": [2]}, "forced": {"dash": 1}}, {"steer": [0.5], "dash": 1, "go": 3}),
        ({}, {"steer": [0.5], "dash": 0, "go": 2}),
    ):
        game.actor = game.make_actor()
        await game.start(**limits)
        assert await game.tick() == expected
        assert await game.tick(forced={"steer": [2], "go": 1}) == {**expected, "steer": [2.0], "go": 1}
    game.actor = game.make_actor()
    with pytest.raises(BadLimits, match=r"^forbidden\.go leaves no choice"):
        await game.start(forbidden={"go": [2, 3]})


async def test_those_of_a_job_are_of_a_game_s_own_numbers() -> None:
    game = served(forced={"steer": [2]})
    game.contract = {**HYBRID, "actions": {**HYBRID["actions"], "steer": {"kind": "continuous", "low": -1, "high": 1}}}
    with pytest.raises(ConfigError, match=r"^actor\.forced\.steer\[0\] is 2\.0, expected -1 to 1"):
        await game.start()


async def test_a_model_that_learns_sees_those_of_its_job() -> None:
    model = Fixed(logits=logits(0, 9, 0))
    game = Game(DISCRETE, model, forbidden={"go": [2]})
    await game.start()
    await game.tick()
    assert model.seen[-1]["action_mask"].tolist() == [1, 0, 1]
    with pytest.raises(BadLimits, match=r"^actor\.forbidden\.go and mask leave no choice"):
        await game.tick(mask={"go": [0, 1, 0]})
    with pytest.raises(BadLimits, match=r"^forbidden\.go and mask leave no choice"):
        await game.tick(mask={"go": [0, 1, 1]}, forbidden={"go": [3]})


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        ({"forced": {"dash": 2}}, "serve", r"^actor\.forced\.dash is 2, expected a whole number from 0 to 1"),
        ({"forced": {"steer": [0, 0]}}, "serve", r"^actor\.forced\.steer is shape \[2\], expected"),
        ({"forbidden": {"go": [1, 2, 3]}}, "serve", r"^actor\.forbidden\.go leaves no choice"),
        ({"forbidden": {"steer": [1]}}, "serve", r"^actor\.forbidden\.steer is \[1\], expected a list of choices of a"),
        ({"forbidden": {"go": [1]}}, "train", r"^actor\.forbidden\.go limits an action while the model learns"),
        ({"forced": {"steer": 0.5}}, "train", r"^actor\.forced\.steer .*: numbers can be forced only while a model is"),
    ],
)
def test_those_of_a_job_are_checked_against_its_contract(options: dict[str, Any], mode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served(mode, **options)


async def test_a_wrong_start_is_the_session_s_own_fault() -> None:
    game = served(forced={"dash": 1})
    with pytest.raises(BadBody, match=r"^forced\.dash is 2"):
        await game.start(forced={"dash": 2})
    game.actor = game.make_actor()
    assert (await game.start())["forced"] == {"dash": 1}, "so that the game and its recording know"
    assert (await game.tick())["dash"] == 1
