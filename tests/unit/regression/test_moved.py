"""Sessions that move between actors of two processes' recorders, and their recordings, which become one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brayx import Agent, Step
from brayx.actor.agent import Services, State
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.comparison import Comparison, compare
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.recording.version import Version
from brayx.regression.game import whole_sessions
from tests.unit.recording.test_comparison import module_of, steps_of, tick_by_tick

TICKS = 12


class Scripted(Agent):
    """Plays given steps; a class attribute of a subclass has them."""

    steps: Sequence[Step] = ()

    async def on_tick(self, state: State) -> None:
        state.step = self.steps[state.tick]
        state.output["tick"] = state.tick

    def snapshot(self) -> bytes:
        return b""

    def restore(self, snapshot: bytes) -> None:
        """It has no state."""


class Process:
    """One of several processes that record into a folder."""

    def __init__(self, folder: Path, agent: type[Agent]) -> None:
        self.recorder = SessionRecorder(RecordingConfig(folder=str(folder)), Recorder())
        self._factory = AgentActorFactory({"agent": agent}, {}, Services(), recorders=[self.recorder])

    async def start(self, session: str, body: bytes = b"{}") -> AgentActor:
        actor = self._factory()
        await actor.start(session, body)
        return actor

    async def take_over(self, session: str, actor: AgentActor, *, died: bool = False) -> AgentActor:
        """Continues a session of another process, which hands it over, or died since its snapshot."""
        snapshot = await actor.snapshot()
        assert snapshot is not None
        if died:
            await tick(actor, TICKS - 1)
        else:
            actor.on_moved()
        continued = self._factory()
        await continued.restore(session, snapshot)
        return continued


async def tick(actor: AgentActor, *numbers: int) -> None:
    for number in numbers:
        await actor.tick(json.dumps({"body": number}).encode())


async def record(folder: Path, steps: Sequence[Step]) -> Any:
    """Records a session that stays, one that moves twice, one whose process dies, and one that has a moved one's id."""
    agent = type("Plays", (Scripted,), {"steps": steps})
    first, second = Process(folder, agent), Process(folder, agent)
    dead: list[AgentActor] = []

    async def play(session: str, *, moves: bool = False, dies: bool = False) -> None:
        actor = await first.start(session)
        await tick(actor, *range(5))
        if moves:
            actor = await second.take_over(session, actor)
            await tick(actor, 5, 6)
            actor = await first.take_over(session, actor)
            await tick(actor, *range(7, TICKS))
        elif dies:
            dead.append(actor)
            actor = await second.take_over(session, actor, died=True)
            await tick(actor, *range(5, TICKS))
        else:
            await tick(actor, *range(5, TICKS))
        await actor.on_end("stop")

    await play("stays")
    await play("moves", moves=True)
    await play("dies", dies=True)
    await play("moves")
    for process in (second, first):
        await asyncio.to_thread(process.recorder.close, 60.0)
    return open_recordings(str(folder))


def step(number: int) -> Step:
    return Step(np.full(3, number, np.float32), np.asarray(0), 0.0, 1)


async def test_the_recordings_of_a_session_that_moved_become_one(tmp_path: Path) -> None:
    episodes = await record(tmp_path, [step(number) for number in range(TICKS)])
    assert sorted((episode.session, len(episode), episode.end) for episode in episodes) == [
        ("dies", TICKS - 5, "stop"), ("moves", 2, "moved"), ("moves", 5, "moved"), ("moves", 5, "stop"),
        ("moves", TICKS, "stop"), ("stays", TICKS, "stop"),
    ]  # fmt: skip
    whole = whole_sessions(episodes)
    assert sorted((episode.session, len(episode), episode.end) for episode in whole) == [
        ("dies", TICKS - 5, "stop"), ("moves", TICKS, "stop"), ("moves", TICKS, "stop"), ("stays", TICKS, "stop"),
    ]  # fmt: skip
    for episode in whole:
        if len(episode) == TICKS:
            assert episode.read().number.tolist() == list(range(TICKS))
            assert episode["obs"][:, 0].tolist() == list(range(TICKS))
            assert [json.loads(body)["body"] for body in episode.inputs()] == list(range(TICKS))
            assert episode.read(4, 4, []).number.tolist() == [4, 5, 6, 7]
    (joined,) = (episode for episode in whole if episode.events == 2)
    assert joined.read().event[5] == joined.read().event[7] == "resumed"
    assert whole_sessions([episode for episode in episodes if episode.session == "stays"])[0].session == "stays"


async def test_a_version_remembers_what_was_before_a_move(tmp_path: Path) -> None:
    module, example = module_of(1, lstm=6)
    seen = list(np.random.default_rng(0).standard_normal((TICKS, 3)).astype(np.float32))
    outputs = tick_by_tick(module, example, seen)
    episodes = await record(tmp_path, steps_of(seen, outputs, 0))

    def compared(episodes: Any) -> dict[str, list[np.ndarray]]:
        kl_of: dict[str, list[np.ndarray]] = {}
        for comparison in compare(episodes, Version("same", module, example)):
            assert isinstance(comparison, Comparison)
            kl_of.setdefault(comparison.session, []).append(comparison.kl)
        return kl_of

    # Without the policy's outputs, the divergence is estimated: 0 if the probability is that of the recording.
    assert all(np.abs(kl).max() < 1e-6 for kl in compared(whole_sessions(episodes))["moves"])
    assert any(np.abs(kl).max() > 1e-6 for kl in compared(episodes)["moves"]), "each part would begin anew"
