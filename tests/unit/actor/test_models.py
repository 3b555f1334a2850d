"""The state of a session: the version of its arm, and the state of a recurrent policy, here a real LSTM."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
import torch

from brayx.actor.agent import Agent, Services, forward, pinned, push, record
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.games import Games
from brayx.engines import build_engine
from brayx.errors import ShapeMismatch, VersionUnknown
from brayx.metrics import Recorder
from brayx.model.arms import Arm
from brayx.model.local import LocalModel
from brayx.types import Fragment, Step, flatten


class Memory(torch.nn.Module):
    """An LSTM cell; its state is a pair."""

    is_recurrent = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = torch.nn.LSTMCell(2, 4)

    def forward(self, obs, state):
        h, c = self.cell(obs, state)
        return {"logits": h, "state": (h, c)}


EXAMPLE = (np.zeros((1, 2), np.float32), (np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)))
GAME = [[float(t), 1.0 - t] for t in range(6)]


def expected(observations):
    """Torch's own outputs, step by step."""
    module, state, logits = Memory(), tuple(torch.zeros(1, 4) for _ in range(2)), []
    for obs in observations:
        with torch.inference_mode():
            outputs = module(torch.tensor([obs]), state)
        state = outputs["state"]
        logits.append(outputs["logits"][0].numpy())
    return np.array(logits)


class Player(Agent):
    """Does not handle the recurrent state."""

    async def on_tick(self, state):
        outputs, _ = await forward("policy", np.array(state.input, np.float32))
        state.before = outputs["state"]
        state.output.setdefault("logits", {})[self.name] = outputs["logits"].tolist()

    def snapshot(self):
        return b""

    def restore(self, snapshot):
        pass


@pytest.fixture(params=["onnx", "torch"])
async def model(request):
    made = LocalModel(build_engine(request.param, Memory(), EXAMPLE))
    yield made
    await made.close()


def factory(model, agents=None, **options):
    return AgentActorFactory(agents or {"a": Player}, {}, Services(models={"policy": model}), **options)


async def ticks(actor, observations, name="a"):
    return [json.loads(await actor.tick(json.dumps(obs).encode()))["logits"][name] for obs in observations]


async def test_a_recurrent_models_state_is_kept_for_its_agent(model):
    make = factory(model)
    observed, other = make(), make()
    for name, actor in (("one", observed), ("other", other)):
        await actor.start(name, b"")
    got = []
    for obs in GAME:  # two sessions in turn: neither sees the other's state
        got += await ticks(observed, [obs])
        await ticks(other, [[9.0, 9.0]])
    np.testing.assert_allclose(got, expected(GAME), rtol=1e-4, atol=1e-5)


async def test_several_agents_of_a_session_have_a_state_each(model):
    actor = factory(model, {"a": Player, "b": Player})()
    await actor.start("s", b"")
    got = [json.loads(await actor.tick(json.dumps(obs).encode()))["logits"] for obs in GAME]
    for name in ("a", "b"):
        np.testing.assert_allclose([logits[name] for logits in got], expected(GAME), rtol=1e-4, atol=1e-5)


async def test_the_state_moves_with_its_session(model):
    make = factory(model)
    first = make()
    await first.start("s", b"")
    got = await ticks(first, GAME[:3])
    snapshot = await first.snapshot()
    second = make()
    await second.restore("s", snapshot)
    got += await ticks(second, GAME[3:])
    np.testing.assert_allclose(got, expected(GAME), rtol=1e-4, atol=1e-5)


async def test_the_state_before_each_step_is_among_the_outputs(model):
    states = []

    class Learner(Player):
        async def on_episode(self, episode, done):
            states.extend(state.before for state in episode[:-1])

    actor = factory(model, {"a": Learner})()
    await actor.start("s", b"")
    got = await ticks(actor, GAME)
    await actor.stop(b"{}")
    await actor.on_end("stop")
    assert all((leaf == 0).all() for leaf in states[0])
    # The LSTM's output is half of its state, so each step starts with the output of the one before.
    np.testing.assert_allclose([h for h, _ in states[1:]], got[:-1], rtol=1e-6)
    assert len(states) == len(GAME)


async def test_the_state_is_recorded_in_fragments_for_learning(model):
    class Recording(Player):
        async def on_tick(self, state):
            obs = np.array(state.input, np.float32)
            outputs, version = await forward("policy", obs)
            state.step = Step(obs, np.asarray(0), 0.0, version, flatten(outputs["state"], "state"))

        async def on_episode(self, episode, done):
            steps = [state.step for state in episode[:-1]]
            rewards = [0.0] * len(steps)
            push("buffer", Fragment.from_steps(steps, rewards, steps[-1].obs, terminated=True, truncated=False))

    class Buffer:
        def push(self, *fragments):
            pushed.extend(fragments)

    pushed = []
    services = Services(models={"policy": model}, buffers={"buffer": Buffer()})
    actor = AgentActorFactory({"a": Recording}, {}, services, episode_length=None)()
    await actor.start("s", b"")
    for obs in GAME:
        await actor.tick(json.dumps(obs).encode())
    await actor.stop(b"{}")
    await actor.on_end("stop")
    [fragment] = pushed
    assert {name: array.shape for name, array in fragment.extras.items()} == {"state/0": (6, 4), "state/1": (6, 4)}
    np.testing.assert_array_equal(fragment.extras["state/0"][0], 0)
    # A step from a recorded state gives the same as all steps from the start.
    module = Memory()
    for t in range(6):
        state = tuple(torch.from_numpy(fragment.extras[f"state/{i}"][t : t + 1]) for i in range(2))
        with torch.inference_mode():
            logits = module(torch.from_numpy(fragment.obs[t : t + 1]), state)["logits"][0]
        np.testing.assert_allclose(logits, expected(GAME)[t], rtol=1e-4, atol=1e-5)


async def test_a_forward_that_fails_or_passes_its_own_state_leaves_the_sessions_state(model):
    class Careless(Player):
        async def on_tick(self, state):
            with pytest.raises(ShapeMismatch):
                await forward("policy", np.zeros(7))
            zero = np.zeros(4, np.float32)
            result = await forward("policy", np.ones(2), (zero, zero))
            assert result.outputs["state"][0].any(), "the new state is among the outputs"
            await super().on_tick(state)

    actor = factory(model, {"a": Careless})()
    await actor.start("s", b"")
    np.testing.assert_allclose(await ticks(actor, GAME), expected(GAME), rtol=1e-4, atol=1e-5)


async def test_a_pinned_version_has_the_same_state(model):
    class Loyal(Player):
        def __init__(self, *args):
            super().__init__(*args)
            self.mine = pinned("policy")

        async def on_tick(self, state):
            result = await self.mine.forward(np.array(state.input, np.float32))
            state.output["logits"] = {"a": result.outputs["logits"].tolist()}
            assert result.policy_version == 0

    make = factory(model, {"a": Loyal})
    actor = make()
    await actor.start("s", b"")
    model.load(1, {name: array * 0 for name, array in model._versions._engine.initial.items()})
    np.testing.assert_allclose(await ticks(actor, GAME), expected(GAME), rtol=1e-4, atol=1e-5)


class WithDeadline(Agent):
    """Calls forward with a deadline in every possible way, and answers with the type of each result."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = pinned("policy")

    async def on_tick(self, state):
        obs, given = np.zeros(state.input["width"], np.float32), self.config["state"]
        forwards = [forward("policy", obs, deadline_s=state.input["deadline_s"])]
        forwards += [self.mine.forward(obs, deadline_s=state.input["deadline_s"])]
        forwards += [forward("policy", obs, model_state, deadline_s=state.input["deadline_s"]) for model_state in given]
        results = await asyncio.gather(*forwards, return_exceptions=True)
        state.output = [type(result).__name__ for result in results]


async def forwards_with_deadline(model, width, *, arms=None, given=()):
    """The results of forwards with a deadline, first while the engine is blocked, then while it is free."""
    free = threading.Event()
    for ready in list(model._versions._alive.values()):
        ready.run = lambda inputs, run=ready.run: (free.wait(30), run(inputs))[1]
    make = AgentActorFactory({"a": WithDeadline}, {"state": given}, Services(models={"policy": model}), arms=arms)
    actor = make()
    await actor.start("s", b"")
    blocked = json.loads(await actor.tick(json.dumps({"width": width, "deadline_s": 0.05}).encode()))
    free.set()
    return blocked, json.loads(await actor.tick(json.dumps({"width": width, "deadline_s": 30.0}).encode()))


async def test_a_recurrent_models_forward_may_have_a_deadline(model):
    """One of the first two waits for the other, and its deadline includes that wait."""
    zero = np.zeros(4, np.float32)
    assert await forwards_with_deadline(model, 2, given=[(zero, zero)]) == (["DeadlineExceeded"] * 3, ["Forward"] * 3)


async def test_each_stateless_call_starts_with_a_fresh_state(model):
    actor = factory(model)()
    for _ in range(2):
        got = json.loads(await actor.call(json.dumps(GAME[1]).encode()))["logits"]["a"]
        np.testing.assert_allclose(got, expected(GAME[1:2])[0], rtol=1e-4, atol=1e-5)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return obs * self.factor


class Versioned(Agent):
    """Answers with the model's output and version."""

    async def on_tick(self, state):
        if state.input == "bad":
            await forward("policy", np.zeros(3))
        outputs, version = await forward("policy", np.ones(1))
        state.output = [float(outputs[0]), version]

    async def on_episode(self, episode, done):
        record("episode_return", 7.0)

    def snapshot(self):
        return b""

    def restore(self, snapshot):
        pass


class TwoArms:
    """Sessions whose name begins with ``c`` get the candidate."""

    def __init__(self, model, champion, candidate):
        self.model, self.champion, self.candidate = model, champion, candidate

    def choose(self, session):
        arm = ("candidate", self.candidate) if session.startswith("c") else ("champion", self.champion)
        return {"policy": Arm("policy", *arm)}

    async def pinned(self, model, arm):
        return await self.model.pin(arm.version)


@pytest.fixture
async def arms():
    async def fetch(version):
        if version > 10:
            raise VersionUnknown(f"there is no version {version}")
        return {"factor": np.array([version], np.float32)}

    model = LocalModel(build_engine("torch", Scale(), (np.zeros((1, 1), np.float32),)), fetch=fetch)
    yield TwoArms(model, 1, 2)
    await model.close()


async def test_a_session_keeps_the_version_of_its_arm_when_it_moves_and_is_counted_for_it(arms):
    recorder = Recorder()
    services = Services(models={"policy": arms.model}, recorder=recorder)
    make = AgentActorFactory({"a": Versioned}, {}, services, arms=arms)
    champion, canary = make(), make()
    await champion.start("s", b"")
    await canary.start("c", b"")
    assert json.loads(await champion.tick(b"{}")) == [1, 1]
    assert json.loads(await canary.tick(b"{}")) == [2, 2]
    arms.champion, arms.candidate = 3, 4  # the aliases move
    arms.model.load(3, {"factor": np.array([3], np.float32)})
    assert json.loads(await champion.tick(b"{}")) == [1, 1]
    later, moved = make(), make()
    await later.start("t", b"")
    assert json.loads(await later.tick(b"{}")) == [3, 3]
    await moved.restore("c", await canary.snapshot())
    assert json.loads(await moved.tick(b"{}")) == [2, 2]
    with pytest.raises(ShapeMismatch):
        await moved.tick(b'"bad"')
    await moved.on_end("error")
    await champion.on_end("stop")
    numbers = recorder.summary()
    by_arm = {key: value for key, value in numbers.items() if key.startswith("arm_") and "seconds" not in key}
    assert by_arm == {
        "arm_sessions.policy/champion/1": 1, "arm_sessions.policy/candidate/2": 1, "arm_sessions.policy/champion/3": 1,
        "arm_ticks.policy/champion/1": 2, "arm_ticks.policy/candidate/2": 2,
        "arm_return.policy/champion/1": 7, "arm_return.policy/candidate/2": 7,
        "arm_return_squared.policy/champion/1": 49, "arm_return_squared.policy/candidate/2": 49,
        "arm_refusals.policy/candidate/2": 1, "arm_errors.policy/candidate/2": 1,
    }  # fmt: skip


async def test_a_forward_of_an_arm_may_have_a_deadline(arms):
    await arms.model.pin(1)
    assert await forwards_with_deadline(arms.model, 1, arms=arms) == (["DeadlineExceeded"] * 2, ["Forward"] * 2)


async def test_sessions_that_meet_in_a_game_get_one_arm(arms):
    class Half(TwoArms):
        def choose(self, session):
            chosen.append(session)
            return super().choose(session)

    chosen: list[str] = []
    half, services = Half(arms.model, 1, 2), Services(models={"policy": arms.model})
    meet = AgentActorFactory({"a": Versioned}, {}, services, games=Games(), arms=half)
    apart = AgentActorFactory({"a": Versioned}, {}, services, arms=half)
    for make in (meet, apart):
        for session in ("g-agent-0", "g-agent-1", "s"):
            actor = make()
            await actor.start(session, b"")
            await actor.on_end("stop")
    assert chosen == ["g", "g", "s", "g-agent-0", "g-agent-1", "s"]


async def test_an_unavailable_version_refuses_the_start(arms):
    make = AgentActorFactory({"a": Versioned}, {}, Services(models={"policy": arms.model}), arms=arms)
    arms.champion = 11
    with pytest.raises(VersionUnknown):
        await make().start("s", b"")


async def test_a_session_with_many_requests_is_refused_before_another():
    class Asks(Agent):
        async def on_tick(self, state):
            many = [forward("policy", np.ones(1)) for _ in range(int(state.input))]
            results = await asyncio.gather(*many, return_exceptions=True)
            state.output = [type(result).__name__ for result in results]

    model = LocalModel(build_engine("torch", Scale(), (np.zeros((1, 1), np.float32),)), max_queue=8)
    make = AgentActorFactory({"a": Asks}, {}, Services(models={"policy": model}))
    hog, other = make(), make()
    await hog.start("hog", b"")
    await other.start("other", b"")
    playing = [asyncio.create_task(actor.tick(body)) for actor, body in ((hog, b"8"), (other, b"2"))]
    greedy, modest = [json.loads(await task) for task in playing]
    assert modest == ["Forward", "Forward"]
    assert sorted(greedy) == ["Forward"] * 6 + ["QueueFull"] * 2
    await model.close()
