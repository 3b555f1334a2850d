"""A gamecore killed with -9 in mid-game: its ticks are in the replay buffer, truncated but not terminated.

The real door, session table, agents and buffer run in one process, without Ray; the gamecore runs in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import SessionConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.doors.ws1 import WebSockets
from brayx.actor.table import SessionTable
from brayx.algorithms import returns
from brayx.components import load
from brayx.metrics import Recorder
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.types import Forward, Fragment
from tests.clocks import Clock
from tests.waiting import until

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
TICKS = 7
CUT = 4
"""Transitions of a fragment: the game's last one is shorter."""

GAMECORE = f"""
import json, sys
from brayx.gamecore.client import Client

client = Client(sys.argv[1])
client.start(session="killed")
for number in range({TICKS} + 1):
    if number == {TICKS}:
        print("played", flush=True)
        sys.stdin.readline()
    client.tick(json.dumps({{"obs": [float(number)], "reward": float(number)}}).encode())
"""


class Policy:
    """A model that blocks in tick number `TICKS` until it is released."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.let_go = threading.Event()

    async def forward(self, *args: Any) -> Forward:
        if args[0][0] == TICKS:
            self.asked.set()
            await asyncio.to_thread(self.let_go.wait, WAIT_S)
        return Forward({"logits": np.zeros(2, np.float32), "value": np.float32(0)}, 3)


class Kept:
    """The replay buffer as an agent's handle; also keeps what was pushed."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []
        self.buffer = ReplayBuffer(BufferConfig(size=4, batch_size=1, unroll_length=16))

    def push(self, *fragments: Fragment) -> None:
        for fragment in fragments:
            self.buffer.push(fragment)
            self.fragments.append(fragment)


class Served:
    """One session table behind a native HTTP and WebSocket port and a TCP port, on a loop in a separate thread."""

    def __init__(self, idle_timeout_s: float) -> None:
        self.policy, self.kept, self.recorder = Policy(), Kept(), Recorder()
        services = Services(models={"model": self.policy}, buffers={"buffer": self.kept}, recorder=self.recorder)
        agent = load("gym_agent", "GymAgent", str(ROOT / "pipelines" / "templates"))
        config = {"mode": "train", "seed": 0, "agent": {"options": {}}}
        self._make_actor = AgentActorFactory({"agent": agent}, config, services, episode_length=CUT)
        self._idle_timeout_s = idle_timeout_s
        self.urls: dict[str, str] = {}

    async def open(self) -> None:
        self.table = SessionTable(self._make_actor, SessionConfig(idle_timeout_s=self._idle_timeout_s), self.recorder)
        bounds = DoorLimits()
        websockets = WebSockets(DoorApp(self.table), bounds)
        http = Listener(self.table, lambda listener: HttpConnection(listener, websockets), bounds)
        self._listeners = (http, Listener(self.table, TcpConnection, bounds))
        for listener in self._listeners:
            await listener.open("127.0.0.1", 0)
        (_, number), (_, framing) = (listener.address for listener in self._listeners)
        self.urls = {
            "http": f"http://127.0.0.1:{number}",
            "ws": f"ws://127.0.0.1:{number}",
            "tcp": f"tcp://127.0.0.1:{framing}",
        }

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()
        await self.table.close()


@contextlib.contextmanager
def served(idle_timeout_s: float) -> Iterator[Served]:
    made = Served(idle_timeout_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(made.open(), loop).result(WAIT_S)
        yield made
        asyncio.run_coroutine_threadsafe(made.close(), loop).result(WAIT_S)
    finally:
        made.policy.let_go.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@pytest.mark.parametrize("in_a_tick", [False, True], ids=["between two ticks", "while a tick is under way"])
@pytest.mark.parametrize(("door", "reason"), [("ws", "disconnect"), ("http", "idle"), ("tcp", "idle")])
def test_the_last_fragment_of_a_killed_gamecore_is_truncated_and_bootstrapped(
    door: str, reason: str, in_a_tick: bool, seconds: Clock
) -> None:
    """A broken connection ends only the WebSocket's session; the others end after no request arrives any more."""
    with served(idle_timeout_s=60.0 if reason == "disconnect" else 1.5) as service:
        words = [sys.executable, "-c", GAMECORE, service.urls[door]]
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gamecore:
            try:
                assert gamecore.stdin is not None
                assert gamecore.stdout is not None
                assert gamecore.stdout.readline() == "played\n"
                if in_a_tick:
                    print(file=gamecore.stdin, flush=True)
                    assert service.policy.asked.wait(WAIT_S)
            finally:
                gamecore.kill()
        service.policy.let_go.set()

        def is_complete() -> bool:
            seconds.now += 0.012  # about as fast as real ones: a leap is forgiven, as of a process that was suspended
            return len(service.kept.fragments) == 2

        until(is_complete, "both fragments")
        ended = service.recorder.summary()
    assert {name for name in ended if name.startswith("sessions_ended")} == {f"sessions_ended.{reason}"}
    assert "episode_return" not in ended, "an interrupted game says nothing about the policy"

    seen = TICKS + 1 if in_a_tick else TICKS
    cut, last = service.kept.fragments
    assert (cut.terminated, cut.truncated) == (False, False)
    assert (last.terminated, last.truncated) == (False, True)
    assert last.obs[:, 0].tolist() == list(range(CUT, seen))
    assert last.reward.tolist() == list(range(CUT + 1, seen))

    service.kept.buffer.flush()
    batch = service.kept.buffer.pop()
    assert batch is not None
    end = int(np.flatnonzero(batch["mask"][0])[-1])
    assert int(batch["mask"].sum()) == seen - 1, "each action that had an outcome, once"
    assert batch["truncated"][0, end]
    assert not batch["terminated"].any()
    assert batch["obs"][0, end + 1].tolist() == [seen - 1], "what followed the last action"

    gamma, value = 0.5, 100.0  # of every observation
    columns = {name: torch.tensor(batch[name][0, :-1]) for name in ("reward", "terminated", "truncated")}
    discount_t, lambda_t = returns.discounts(columns["terminated"], columns["truncated"], gamma=gamma, lam=1.0)
    values = torch.full((len(discount_t) + 1,), value)
    advantage = returns.gae(columns["reward"], discount_t, lambda_t, values)
    assert advantage[end].item() == pytest.approx((seen - 1) + gamma * value - value)
