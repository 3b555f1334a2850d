"""State and the services that agents call by name."""

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from brayx.actor.agent import Services, State, forward, pinned, push, record
from brayx.errors import ConfigError, DeadlineExceeded
from brayx.metrics import Recorder
from brayx.types import Forward, Fragment
from tests.unit.replay.made import Box


def test_state_knows_the_parts_of_a_bray_session() -> None:
    assert (State("g1-agent-left").game, State("g1-agent-left").agent) == ("g1", "left")
    plain = State("0a-1b-2c")
    assert (plain.game, plain.agent) == ("0a-1b-2c", "")


async def test_wait_returns_what_another_agent_sets_later() -> None:
    state = State("s")

    async def setter() -> None:
        await asyncio.sleep(0)
        state.plan = "attack"

    values = await asyncio.gather(state.wait("plan"), state.wait("plan"), setter())
    assert list(values) == ["attack", "attack", None]
    assert await state.wait("plan") == "attack"


async def test_wait_has_a_deadline_that_names_the_attribute() -> None:
    with pytest.raises(DeadlineExceeded, match=r"'plan'.*tick 7"):
        await State("s", tick=7).wait("plan", timeout_s=0.01)


async def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    state = State("s")
    first, second = asyncio.create_task(state.wait("plan")), asyncio.create_task(state.wait("plan"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    state.plan = 1
    assert await second == 1


async def test_a_state_pickles_while_an_agent_waits() -> None:
    state = State("s", input={"obs": 1})
    waiting = asyncio.create_task(state.wait("plan"))
    await asyncio.sleep(0)
    copy = pickle.loads(pickle.dumps(state))
    assert copy.input == {"obs": 1}
    assert copy.session == "s"
    waiting.cancel()


def test_reading_an_unset_attribute_says_how_to_wait() -> None:
    with pytest.raises(AttributeError, match=r"await state.wait\('plan'\)"):
        _ = State("s").plan


class Doubler:
    """A model handle: twice the observation."""

    async def forward(self, *args: np.ndarray) -> Forward:
        return Forward({"y": args[0] * 2}, 3)


def fragment() -> Fragment:
    return Fragment(
        obs=np.zeros((2, 1), np.float32),
        action=np.zeros(1, np.int64),
        log_prob=np.zeros(1, np.float32),
        reward=np.ones(1, np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.ones(1, np.int64),
    )


async def test_forward_push_and_record_reach_the_services_of_the_block() -> None:
    box = Box()
    recorder = Recorder()
    services = Services(models={"m": Doubler()}, buffers={"b": box}, recorder=recorder)
    with services.use():
        outputs, version = await forward("m", np.asarray([1.0]))
        push("b", fragment())
        record("hp_left", 3.0)
    assert outputs["y"].tolist() == [2.0]
    assert version == 3
    assert len(box.fragments) == 1
    assert recorder.summary()["hp_left"] == 3.0


async def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with Services(models={"policy": Doubler()}).use(), pytest.raises(ConfigError, match=r"'polcy'.*policy"):
        await forward("polcy", np.zeros(1))


def test_push_without_buffers_is_dropped_and_outside_an_agent_is_an_error() -> None:
    with Services().use():
        push("b", fragment())
    with pytest.raises(ConfigError, match="inside an agent"):
        push("b", fragment())


class Pinnable:
    """A model that returns the requested version."""

    version = 3

    def pinned(self, version=None):
        return self if version is None else SimpleNamespace(version=version)


def test_pinned_finds_the_model_by_name() -> None:
    with Services(models={"policy": Pinnable()}).use():
        assert pinned("policy").version == 3
        assert pinned("policy", 1).version == 1
        with pytest.raises(ConfigError, match="no model is named 'other'"):
            pinned("other")
