"""`brayx.recording.session`: what is recorded of each tick, from a real actor to the files and back."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brayx
import brayx.clock as clock
from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.players import SeatedPlayer
from brayx.errors import AgentError, BadBody
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.types import Forward, Step

SLOW_S = 0.02
WAIT_S = 60.0


class Policy:
    """A model that takes a while."""

    async def forward(self, *args: Any, deadline_s: float | None = None) -> Forward:
        await asyncio.sleep(SLOW_S)
        return Forward({"logits": np.array([0.25, 0.75], np.float32), "value": np.float32(9.0)}, 5)


class Player(Agent):
    async def on_tick(self, state: State) -> None:
        if state.input.get("wait"):
            time.sleep(SLOW_S)  # noqa: ASYNC251
        if state.input.get("raise"):
            raise ValueError("a bug")
        if state.input.get("keep"):
            brayx.keep_recording("it fell")
        if state.input.get("forward", True):
            outputs, version = await brayx.forward("model", np.zeros(3, np.float32))
            state.step = Step(np.full(3, state.tick, np.float32), np.asarray(1), -0.5, version)
            state.value = float(outputs["value"]) + 1
        state.output["action"] = 1

    async def on_episode(self, episode: list[State], done: bool) -> None:
        await brayx.forward("model", np.zeros(3, np.float32))  # no tick's


def actor(folder: Path, metrics: Recorder | None = None, **options: Any) -> tuple[AgentActor, SessionRecorder]:
    metrics = metrics or Recorder()
    recorder = SessionRecorder(RecordingConfig(folder=str(folder), **options), metrics)
    services = Services({"model": Policy()}, {}, metrics)
    return AgentActorFactory({"player": Player}, {}, services, episode_length=2, recorders=[recorder])(), recorder


async def play(actor: AgentActor, *bodies: dict[str, Any]) -> None:
    await actor.start("s", b"{}")
    for body in bodies:
        actor.arrived = clock.now() - 0.5
        await actor.tick(json.dumps(body).encode())


def only(folder: Path) -> Recording:
    (episode,) = open_recordings(str(folder))
    return episode


async def test_forwards_and_the_latency_of_each_phase_are_recorded(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path)
    await play(agent_actor, *[{"wait": True}] * 5)
    await agent_actor.on_end("stop")
    await asyncio.to_thread(recorder.close, WAIT_S)
    episode = only(tmp_path)
    assert (episode.start, episode.start_reply) == ("{}", "Game Started")
    assert episode["logits"].tolist() == [[0.25, 0.75]] * 5
    assert episode["value"].tolist() == [10.0] * 5, "what the agent sets, not what the model says"
    assert episode["policy_version"].tolist() == [5] * 5
    ticks = episode.read()
    assert (ticks.queue_us >= 500_000).all()
    slow_us = SLOW_S * 1e6 * 0.9  # clocks differ a little
    assert (ticks.forward_us >= slow_us).all()
    assert (ticks.duration_us - ticks.forward_us >= slow_us).all(), "the agent's own time"
    frame = episode.frame()
    assert np.allclose(frame["forward_s"], ticks.forward_us / 1e6)
    assert (frame["queue_s"] >= 0.5).all()


async def test_a_failed_tick_is_recorded_with_all_columns_of_the_others(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path, every=0)
    with pytest.raises(AgentError):
        await play(agent_actor, {}, {}, {"raise": True})
    await agent_actor.on_end("error")
    await asyncio.to_thread(recorder.close, WAIT_S)
    episode = only(tmp_path)
    line = Player.on_tick.__code__.co_firstlineno + 4
    why = f"error: agent 'player': ValueError: a bug ({__file__}:{line})"
    assert (episode.why, episode.end, episode.read().event) == ("error", "error", ["", "", why])
    assert episode["obs"].tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3]
    assert episode["logits"].tolist() == [[0.25, 0.75]] * 2 + [[0.0, 0.0]]
    assert episode.outputs() == [b'{"action":1}', b'{"action":1}', b""]


@pytest.mark.parametrize(
    ("before", "ticks", "left"), [(1000, [0, 1, 2], "disconnect"), (0, [2], "disconnect"), (0, [2], "stop")]
)
async def test_a_refused_tick_that_ends_a_game_is_recorded_with_its_body(
    tmp_path: Path, before: int, ticks: list[int], left: str
) -> None:
    agent_actor, recorder = actor(tmp_path, every=0, before=before)
    with pytest.raises(BadBody) as refusal:
        await play(agent_actor, {}, {}, {"ball": [1.0, math.nan]})
    await agent_actor.on_end(left)  # the game raises the refusal, and leaves
    await asyncio.to_thread(recorder.close, WAIT_S)
    episode = only(tmp_path)
    assert (episode.end, episode.why, episode.events) == ("refused", "error", 1)
    assert (episode.read().number.tolist(), episode.read().event[-1]) == (ticks, f"error: {refusal.value.message}")
    assert "ball[1] is nan" in refusal.value.message
    assert episode.inputs()[-1] == b'{"ball": [1.0, NaN]}'


async def test_a_refused_stop_is_an_event_of_the_last_tick(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path, every=0)
    await play(agent_actor, {}, {})
    with pytest.raises(BadBody) as refusal:
        await agent_actor.stop(b'{"reward": NaN}')
    await agent_actor.on_end("disconnect")
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert only(tmp_path).end == "refused"
    assert only(tmp_path).read().event == ["", f"stop refused: {refusal.value.message}"]
    assert only(tmp_path)["obs"].tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(("before", "ticks"), [(1000, [0, 1, 2, 3]), (1, [1, 2, 3]), (0, [2, 3])])
async def test_a_session_that_its_agent_keeps_has_the_ticks_before(
    tmp_path: Path, before: int, ticks: list[int]
) -> None:
    agent_actor, recorder = actor(tmp_path, every=0, before=before)
    await play(agent_actor, {}, {}, {"keep": True}, {})
    await agent_actor.on_end("stop")
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert only(tmp_path).read().number.tolist() == ticks


async def test_without_a_log_that_takes_ticks_nothing_watches_them(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path, every=0, before=0)
    await play(agent_actor, {}, {})
    assert agent_actor._logs.taking == ()
    assert agent_actor._agents.services.seen is None
    assert (recorder.taken, recorder.freed) == (0, 0)
    await agent_actor.on_end("stop")
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert not open_recordings(str(tmp_path))


async def test_an_error_is_recorded_even_if_no_tick_before_it_was_kept(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path, every=0, before=0)
    with pytest.raises(AgentError):
        await play(agent_actor, {}, {"raise": True})
    await agent_actor.on_end("error")
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert (only(tmp_path).read().number.tolist(), only(tmp_path).inputs()) == ([1], [b'{"raise": true}'])


async def test_events_of_one_tick_are_recorded_together(tmp_path: Path) -> None:
    agent_actor, recorder = actor(tmp_path)
    await agent_actor.start("s", b"{}")
    await agent_actor.skipped(2)
    agent_actor.forwarded()
    await agent_actor.tick(b"{}")
    await agent_actor.missed()
    await agent_actor.tick(b"{}")
    await agent_actor.on_end("stop")
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert only(tmp_path).read().event == ["skipped 2, forwarded, fallback", ""]


async def test_the_result_of_a_seat_is_recorded(tmp_path: Path) -> None:
    class Seats:
        async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
            services = Services({"model": Policy()}, {}, Recorder())
            return SeatedPlayer("main:3", services, None, lambda value: None, lambda reason: None)

    recorder = SessionRecorder(RecordingConfig(folder=str(tmp_path)), Recorder())
    agent_actor = AgentActorFactory({"player": Player}, {}, Services(), recorders=[recorder], players=Seats())()
    await play(agent_actor, {})
    await agent_actor.stop(b'{"result": "win"}')
    await agent_actor.on_end("stop")
    await asyncio.to_thread(recorder.close, WAIT_S)
    episode = only(tmp_path)
    assert (episode.player, episode.reported, episode.end) == ("main:3", "win", "stop")
    assert open_recordings(str(tmp_path)).table()["reported"].tolist() == ["win"]


@pytest.mark.parametrize(
    ("body", "reason", "end"),
    [
        (b'{"reward": -1, "terminated": true}', "stop", "terminated"),
        (b'{"truncated": true}', "stop", "truncated"),
        (b'{"terminated": 2, "truncated": false}', "stop", "stop"),
        (b"[]", "stop", "stop"),
        (b'{"terminated": true}', "error", "error"),
    ],
)
async def test_the_recorded_end_is_what_the_stop_says(tmp_path: Path, body: bytes, reason: str, end: str) -> None:
    agent_actor, recorder = actor(tmp_path)
    await play(agent_actor, {})
    await agent_actor.stop(body)
    await agent_actor.on_end(reason)
    await asyncio.to_thread(recorder.close, WAIT_S)
    assert only(tmp_path).end == end
