"""A debugger's prompt stops the clock of deadlines, and leaves another debugger's settings alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

import numpy as np
import pytest
import torch

import brayx
from brayx import clock
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig
from brayx.actor.debugger import Breakpoints
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.engines.torch import TorchEngine
from brayx.errors import SessionLost
from brayx.gamecore.client import Client
from brayx.metrics import Recorder
from brayx.model.local import LocalModel

STOPPED_S = 0.6
LIMIT_S = 0.2


def test_the_clock_stands_still_while_it_is_held() -> None:
    before, real = clock.now(), time.monotonic()
    held_before = clock.held_s()
    with clock.hold():
        assert clock.is_held()
        then = clock.now()
        with clock.hold():
            time.sleep(0.05)
        assert clock.is_held()
        assert clock.now() == then
    assert not clock.is_held()
    assert clock.held_s() - held_before >= 0.05
    assert clock.now() - before <= time.monotonic() - real - 0.05 + 1e-6


class Stops(brayx.Agent):
    """Stops the loop, as a prompt does, while its own forward runs."""

    async def on_tick(self, state: brayx.State) -> None:
        forward = asyncio.ensure_future(brayx.forward("model", np.ones(2, np.float32)))
        await asyncio.sleep(0)
        with clock.hold() if state.input["held"] else contextlib.nullcontext():
            time.sleep(STOPPED_S)  # noqa: ASYNC251, a prompt stops the loop, too
        await asyncio.sleep(0)  # the loop has a turn, in which it looks at its deadlines
        await asyncio.sleep(0.01)
        outputs, _ = await forward
        state.output = {"answer": float(outputs)}


@pytest.mark.parametrize(("held", "answer", "end"), [(True, {"answer": 2.0}, "stop"), (False, {"late": True}, "error")])
@pytest.mark.parametrize("door", ["tcp", "ws"])
def test_a_tick_is_late_by_that_clock(held: bool, answer: dict[str, object], end: str, door: str) -> None:
    class Sum(torch.nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return obs.sum(-1)

    engine = TorchEngine(Sum(), (np.ones((2, 2), np.float32),))
    model = LocalModel(engine, deadline_s=LIMIT_S, max_wait_s=0.1)  # the forward waits all the while
    recorder = Recorder()
    factory = AgentActorFactory(agents={"agent": Stops}, config={}, services=brayx.Services({"model": model}, {}))
    config = ActorConfig(
        agents=["agent"],
        port=0,
        native_port=None,
        tcp_port=0,
        tick_deadline_ms=LIMIT_S * 1000,
        fallback="default",
        fallback_body=json.dumps({"late": True}),
        idle_timeout_s=LIMIT_S,
        tick_timeout_s=10.0,
    )
    host = LocalHost(config, Runtime(factory, recorder, close=[model.close]))
    host.open()
    try:
        with Client(host.urls[door], timeout_s=30.0) as client:
            client.start()
            assert json.loads(client.tick(json.dumps({"held": held}).encode())) == answer
            with contextlib.suppress(SessionLost):  # without a held clock, the forward that waited has failed
                client.stop()
    finally:
        host.close()
    assert recorder.summary()[f"sessions_ended.{end}"] == 1


def test_breakpoint_is_ours_only_where_no_other_debugger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    with Breakpoints(lambda: None):
        assert sys.breakpointhook is not sys.__breakpointhook__
    assert sys.breakpointhook is sys.__breakpointhook__

    monkeypatch.setattr(sys, "breakpointhook", print)
    with Breakpoints(lambda: None):
        assert sys.breakpointhook is print
    assert sys.breakpointhook is print

    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    with Breakpoints(lambda: None):
        assert sys.breakpointhook is sys.__breakpointhook__
