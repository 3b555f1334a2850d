"""Agents behind an actor: states, episodes, bodies, errors."""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from brayx.actor.agent import Agent, Services, State, record
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.codec import Codec
from brayx.actor.logs import SessionLog
from brayx.actor.players import SeatedPlayer
from brayx.errors import AgentError, BadBody, BrayxError, DeadlineExceeded, LeagueError, ModelError, QueueFull
from brayx.metrics import Kind
from brayx.metrics import Recorder as MetricsRecorder


class Recorder(Agent):
    """Echoes its input and adds every call to a log that the test reads."""

    log: list[Any]

    async def on_tick(self, state: State) -> None:
        state.output = {"echo": state.input, "tick": state.tick}

    async def on_episode(self, episode: list[State], done: bool) -> None:
        self.log.append(([s.tick for s in episode], [s.kind for s in episode], done, episode[-1].end))

    async def on_session_end(self, reason: str) -> None:
        self.log.append(reason)


def make(
    *agents: type[Agent], codec: Codec = Codec(), episode_length: int | None = None
) -> tuple[AgentActor, list[Any]]:
    log: list[Any] = []
    classes = {f"agent{i}": type(cls.__name__, (cls,), {"log": log}) for i, cls in enumerate(agents)}
    factory = AgentActorFactory(classes, {"mode": "train"}, Services(), codec, episode_length)
    return factory(), log


async def play(
    actor: AgentActor, ticks: int, *, stop: bytes | None = b'{"terminated": true}', reason: str = "stop"
) -> None:
    await actor.start("g-agent-a", b"")
    for tick in range(ticks):
        reply = json.loads(await actor.tick(b"%d" % tick))
        assert reply == {"echo": tick, "tick": tick}
    if stop is not None:
        await actor.stop(stop)
    await actor.on_end(reason)


def recorder_of(actor: AgentActor) -> MetricsRecorder:
    assert isinstance(actor._services.recorder, MetricsRecorder)
    return actor._services.recorder


async def test_an_uncut_game_is_one_episode_with_the_stop_as_its_last_state() -> None:
    actor, log = make(Recorder)
    await play(actor, 3)
    assert log == [([0, 1, 2, 3], ["tick", "tick", "tick", "stop"], True, "stop"), "stop"]


async def test_episodes_are_cut_and_share_their_border_state() -> None:
    actor, log = make(Recorder, episode_length=2)
    await play(actor, 5)
    assert [entry[0] for entry in log[:-1]] == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert [entry[2] for entry in log[:-1]] == [False, False, True]
    transitions = sum(len(entry[0]) - 1 for entry in log[:-1])
    assert transitions == 5


async def test_a_lost_client_leaves_its_partial_episode_with_the_reason() -> None:
    actor, log = make(Recorder)
    await play(actor, 2, stop=None, reason="disconnect")
    assert log == [([0, 1], ["tick", "tick"], True, "disconnect"), "disconnect"]


async def test_agents_share_the_state_of_a_tick() -> None:
    class Planner(Agent):
        async def on_tick(self, state: State) -> None:
            await asyncio.sleep(0)
            state.plan = state.input * 2

    class Doer(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = {"plan": await state.wait("plan")}

    actor, _ = make(Doer, Planner)
    await actor.start("s", b"")
    assert json.loads(await actor.tick(b"21")) == {"plan": 42}


async def test_one_agents_error_cancels_the_others_and_names_it() -> None:
    cancelled = asyncio.Event()

    class Waits(Agent):
        async def on_tick(self, state: State) -> None:
            try:
                await state.wait("never")
            except asyncio.CancelledError:
                cancelled.set()
                raise

    class Raises(Agent):
        async def on_tick(self, state: State) -> None:
            raise ZeroDivisionError("in here")

    actor, _ = make(Waits, Raises)
    await actor.start("s", b"")
    with pytest.raises(AgentError, match="'agent1' raised in on_tick at tick 0") as raised:
        await actor.tick(b"1")
    assert repr(raised.value.__cause__) == "ZeroDivisionError('in here')"
    assert cancelled.is_set()


async def test_a_typed_error_of_an_agent_keeps_its_type() -> None:
    class Waits(Agent):
        async def on_tick(self, state: State) -> None:
            await state.wait("never", timeout_s=0.01)

    for agents in ([Waits], [Waits, Recorder]):
        actor, _ = make(*agents)
        await actor.start("s", b"")
        with pytest.raises(DeadlineExceeded, match="'never'"):
            await actor.tick(b"1")


async def test_a_body_that_is_not_json_reaches_no_agent() -> None:
    actor, _ = make(Recorder, episode_length=None)
    await actor.start("s", b"")
    with pytest.raises(BadBody, match=r"not JSON.*b'\{oops'"):
        await actor.tick(b"{oops")
    assert json.loads(await actor.tick(b"0"))["tick"] == 0


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"a": 1, "b": [{"c": [0, NaN]}]}', r"b\[0\]\.c\[1\] is nan"),
        (b'{"a": 1e999}', "a is inf"),
        (b"[-1E+400]", r"\[0\] is -inf"),
        (b"-Infinity", "the body is -inf"),
    ],
)
async def test_a_body_with_a_number_that_is_not_finite_names_its_place(body: bytes, place: str) -> None:
    actor, _ = make(Recorder, episode_length=None)
    await actor.start("s", b"")
    with pytest.raises(BadBody, match=f"{place}, expected a finite number"):
        await actor.tick(body)
    assert json.loads(await actor.tick(b'{"a": 1e300, "e999": "1e999", "b": [1E+100, 1e-999]}'))["tick"] == 0


async def test_a_body_nested_too_deep_to_parse_is_a_bad_body() -> None:
    actor, _ = make(Recorder)
    await actor.start("s", b"")
    with pytest.raises(BadBody, match=r"not JSON.*b'\[\[\["):
        await actor.tick(b"[" * 200_000 + b"]" * 200_000)
    assert json.loads(await actor.tick(b"0"))["tick"] == 0


async def test_an_agent_that_cannot_be_built_is_named() -> None:
    class Broken(Agent):
        def __init__(self, name: str, config: Any, state: State) -> None:
            raise KeyError("weights")

    actor, _ = make(Broken)
    with pytest.raises(AgentError, match="'agent0' raised in the constructor") as raised:
        await actor.start("s", b"")
    assert repr(raised.value.__cause__) == "KeyError('weights')"


def nested(depth: int) -> list[Any]:
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


@pytest.mark.parametrize("output", [{"action": {1, 2}}, nested(100_000)], ids=["a set", "nested too deeply"])
async def test_an_output_that_does_not_encode_is_the_agents_error(output: Any) -> None:
    class Bad(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = output

    actor, _ = make(Bad)
    await actor.start("s", b"")
    with pytest.raises(AgentError, match="cannot be sent as json"):
        await actor.tick(b"1")


async def test_on_episode_runs_beside_ticks_one_at_a_time() -> None:
    gate = asyncio.Event()
    running, most = 0, 0

    class Slow(Agent):
        async def on_tick(self, state: State) -> None:
            pass

        async def on_episode(self, episode: list[State], done: bool) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1

    actor, _ = make(Slow, episode_length=1)
    await actor.start("s", b"")
    await actor.tick(b"1")
    async with asyncio.timeout(60):
        await actor.tick(b"2")  # cuts an episode and does not wait for it
    behind = asyncio.ensure_future(actor.tick(b"3"))  # a second cut while the first is being handled
    await asyncio.sleep(0.01)
    assert not behind.done()
    gate.set()
    await behind
    await actor.on_end("stop")
    assert most == 1


async def test_an_episode_handler_that_raises_is_counted_and_the_session_goes_on() -> None:
    class Raises(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            raise RuntimeError("reward")

    actor, log = make(Raises, episode_length=1)
    await play(actor, 3)
    assert log == ["stop"]
    recorder = recorder_of(actor)
    assert recorder.summary()["fragments_dropped.agent_error"] == 3
    assert recorder.summary()["agent_errors.on_episode"] == 3
    line = Raises.on_episode.__code__.co_firstlineno + 1
    assert recorder.notes()["agent_errors.on_episode"] == f"agent 'agent0': RuntimeError: reward ({__file__}:{line})"


@pytest.mark.parametrize("method", ["constructor", "on_tick", "on_session_end"])
async def test_exceptions_of_every_agent_method_are_counted_with_their_location(method: str) -> None:
    class Raises(Recorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.fail("constructor")

        async def on_tick(self, state: State) -> None:
            self.fail("on_tick")
            await super().on_tick(state)

        async def on_session_end(self, reason: str) -> None:
            self.fail("on_session_end")

        def fail(self, here: str) -> None:
            if here == method:
                int("five")

    actor, _ = make(Raises)
    with (
        contextlib.nullcontext()
        if method == "on_session_end"
        else pytest.raises(AgentError, match=f"raised in (the )?{method}")
    ):
        await play(actor, 1)
    recorder = recorder_of(actor)
    assert recorder.summary()[f"agent_errors.{method}"] == 1
    line = Raises.fail.__code__.co_firstlineno + 2
    assert recorder.notes()[f"agent_errors.{method}"].endswith(f"'five' ({__file__}:{line})")


async def test_exceptions_of_hooks_outside_a_tick_are_counted() -> None:
    class Raises(Recorder):
        def on_deadline(self, state: State) -> None:
            raise RuntimeError("late")

        def snapshot(self) -> bytes:
            raise RuntimeError("whole")

    actor, _ = make(Raises)
    await actor.start("s", b"{}")
    with pytest.raises(RuntimeError):
        actor.fallback(0, b"{}")
    with pytest.raises(RuntimeError):
        await actor.snapshot()
    recorder = actor._services.recorder
    numbers = recorder.summary()
    assert (numbers["agent_errors.on_deadline"], numbers["agent_errors.snapshot"]) == (1, 1)
    assert "RuntimeError: whole" in recorder.notes()["agent_errors.snapshot"]


class Events(SessionLog):
    """A log of the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, what: str, *, last: bool = False) -> None:
        self.events.append(what)


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (KeyError("obs"), "on_tick"),
        (BadBody("no obs"), "on_tick"),
        (ModelError("no finite logits"), "on_tick"),
        (QueueFull("full"), "overloaded"),
        (DeadlineExceeded("late"), "overloaded"),
    ],
    ids=["own", "of its input", "the model's", "no room", "too late"],
)
async def test_a_game_with_a_failing_hook_is_counted_once(error: Exception, label: str) -> None:
    class Raises(Recorder):
        async def on_tick(self, state: State) -> None:
            raise error

        async def on_session_end(self, reason: str) -> None:
            raise RuntimeError("again")

    actor, _ = make(Raises)
    await actor.start("s", b"{}")
    actor.attach(log := Events())
    with pytest.raises(BrayxError):
        await actor.tick(b"{}")
    await actor.on_end("error")
    recorder = recorder_of(actor)
    numbers, notes = recorder.summary(), recorder.notes()
    assert {name: value for name, value in numbers.items() if "games_failed" in name} == {f"games_failed.{label}": 1}
    assert numbers.get("agent_errors.on_tick", 0) == (label == "on_tick"), "overload is not an error of the hook"
    (name,) = [name for name in ("agent_errors.on_tick", "games_failed.overloaded") if name in notes]
    why = f"agent 'agent0': {type(error).__name__}: {error} ({line_of(Raises.on_tick, 'raise')})"
    assert notes[name] == why
    assert log.events == [f"error: {why}"]


async def test_a_game_that_ends_in_an_error_outside_of_its_agents_has_failed() -> None:
    actor, _ = make(Recorder)
    await actor.start("s", b"{}")
    await actor.on_end("error")
    assert actor._services.recorder.summary()["games_failed.session"] == 1


def line_of(hook: Any, text: str) -> str:
    """``FILE:LINE`` of the line in a hook that contains a text."""
    lines, first = inspect.getsourcelines(hook)
    return f"{__file__}:{first + next(index for index, line in enumerate(lines) if text in line)}"


async def timed_out(call: Coroutine[Any, Any, object]) -> None:
    """Runs a call of the actor until its time limit, as `brayx.actor.deadlines.Sweeper` sets it."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await call


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize(("reason", "counted"), [("error", 1), ("drained", 0)])
async def test_a_game_whose_on_tick_hangs_has_failed_with_its_location(agents: int, reason: str, counted: int) -> None:
    class Hangs(Recorder):
        async def on_tick(self, state: State) -> None:
            await asyncio.sleep(60)

    actor, _ = make(*[Hangs] * agents)
    await actor.start("s", b"{}")
    actor.attach(log := Events())
    await timed_out(actor.tick(b"{}"))
    await actor.on_end(reason)
    recorder = recorder_of(actor)
    numbers = recorder.summary()
    assert numbers.get("games_failed.on_tick", 0) == numbers.get("agent_errors.on_tick", 0) == counted
    place = line_of(Hangs.on_tick, "sleep")
    late = f": on_tick was cut off by actor.tick_timeout_s, or by the end of the service ({place})"
    [event] = log.events
    assert event.startswith("error: agent 'agent")
    assert event.endswith(late)
    if counted:
        assert recorder.notes()["agent_errors.on_tick"].endswith(late)


async def test_an_agent_that_is_cancelled_because_another_raised_is_not_the_one_that_failed() -> None:
    class Waits(Recorder):
        async def on_tick(self, state: State) -> None:
            await asyncio.sleep(60)

    class Raises(Recorder):
        async def on_tick(self, state: State) -> None:
            await asyncio.sleep(0)
            raise KeyError("obs")

    actor, _ = make(Waits, Raises)
    await actor.start("s", b"{}")
    actor.attach(log := Events())
    with pytest.raises(AgentError):
        await actor.tick(b"{}")
    await actor.on_end("error")
    recorder = recorder_of(actor)
    assert recorder.summary()["agent_errors.on_tick"] == 1
    why = recorder.notes()["agent_errors.on_tick"]
    assert "agent 'agent1': KeyError: 'obs'" in why
    assert log.events == [f"error: {why}"]


async def test_a_game_whose_tick_waits_for_a_hanging_on_episode_has_failed_with_its_location() -> None:
    class Hangs(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            await asyncio.sleep(60)

    actor, _ = make(Hangs, episode_length=1)
    await actor.start("s", b"{}")
    await actor.tick(b"0")
    await actor.tick(b"1")
    await timed_out(actor.tick(b"2"))
    await timed_out(actor.on_end("error"))
    recorder = recorder_of(actor)
    assert recorder.summary()["games_failed.on_episode"] == 1
    late = "on_episode was cut off by actor.tick_timeout_s, or by the end of the service, and a tick waited for it"
    assert recorder.notes()["agent_errors.on_episode"] == late


async def test_a_game_whose_return_was_recorded_has_not_failed() -> None:
    class Raises(Recorder):
        async def on_session_end(self, reason: str) -> None:
            record("episode_return", 3.0)
            raise RuntimeError("afterwards")

    actor, _ = make(Raises)
    await play(actor, 1)
    numbers = actor._services.recorder.summary()
    assert numbers["agent_errors.on_session_end"] == 1
    assert "games_failed.on_session_end" not in numbers


class Sums(Agent):
    """Records the sum of its inputs as the return; ``error`` loses its first episode."""

    error: BaseException
    total = 0

    async def on_tick(self, state: State) -> None:
        pass

    async def on_episode(self, episode: list[State], done: bool) -> None:
        if episode[0].tick == 0:
            raise self.error
        self.total += sum(state.input for state in episode[1:])
        if done:
            record("episode_return", self.total)
            record("episode_length", len(episode))
            record("rounds", 1.0)

    def snapshot(self) -> bytes:
        return b"%d" % self.total

    def restore(self, snapshot: bytes) -> None:
        self.total = int(snapshot)


class Results(SessionLog):
    """A recorder whose logs add their session's result to a list."""

    on_request = False

    def __init__(self, results: list[float | None]) -> None:
        self.kept = results

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog:
        return self

    def end(self, reason: str, result: float | None) -> None:
        self.kept.append(result)


@pytest.mark.parametrize("moved", [False, True], ids=["stays", "moves"])
@pytest.mark.parametrize(
    ("error", "label"),
    [
        (KeyError("reward"), "on_episode"),
        (DeadlineExceeded("late"), "overloaded"),
        (asyncio.CancelledError(), "on_episode"),
    ],
    ids=["own", "load", "cancelled"],
)
async def test_a_game_with_a_lost_episode_has_failed_even_if_it_records_a_return_later(
    error: BaseException, label: str, moved: bool
) -> None:
    results: list[float | None] = []
    counted = MetricsRecorder()
    factory = AgentActorFactory(
        {"agent": type("Failing", (Sums,), {"error": error})},
        {},
        Services(recorder=counted),
        episode_length=2,
        recorders=[Results(results)],
    )
    actor = factory()
    await actor.start("s", b"")
    for tick in range(4):
        await actor.tick(b"%d" % tick)
    if moved:
        data = await actor.snapshot()
        assert data is not None
        actor = factory()
        await actor.restore("s", data)
    await actor.tick(b"4")
    await actor.stop(b"5")
    await actor.on_end("stop")
    numbers = counted.summary()
    assert {name: value for name, value in numbers.items() if "games_failed" in name} == {f"games_failed.{label}": 1}
    assert not {"episode_return", "episode_length"} & set(numbers)
    assert numbers["rounds"] == 1
    assert results == [None]


async def test_protobuf_bodies() -> None:
    class Proto(Agent):
        async def on_tick(self, state: State) -> None:
            state.output["twice"] = state.input["x"] * 2

    actor, _ = make(Proto, codec=Codec("proto", Struct, Struct))
    await actor.start("s", b"")
    question = Struct()
    question["x"] = 4
    answer = Struct()
    answer.ParseFromString(await actor.tick(question.SerializeToString()))
    assert answer["twice"] == 8
    with pytest.raises(BadBody, match=r"google.protobuf.Struct"):
        await actor.tick(b"\xff\xff")


async def test_raw_bodies() -> None:
    class Raw(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = state.input[::-1]

    actor, _ = make(Raw, codec=Codec(None))
    await actor.start("s", b"")
    assert await actor.tick(b"\x00abc") == b"cba\x00"


async def test_stateless_calls_share_the_agents_and_make_no_episode() -> None:
    actor, log = make(Recorder, episode_length=1)
    replies = await asyncio.gather(*(actor.call(b"%d" % i) for i in range(5)))
    assert [json.loads(r)["echo"] for r in replies] == list(range(5))
    assert log == []


async def test_a_cut_whose_wait_is_cancelled_loses_no_episode() -> None:
    gate = asyncio.Event()

    class Slow(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            await gate.wait()
            await super().on_episode(episode, done)

    actor, log = make(Slow, episode_length=1)
    await actor.start("s", b"")
    await actor.tick(b"0")
    await actor.tick(b"1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await actor.tick(b"2")
    gate.set()
    await actor.on_end("error")
    assert [entry[0] for entry in log[:-1]] == [[0, 1], [1, 2]]
    assert [entry[2] for entry in log[:-1]] == [False, True]
    assert log[-1] == "error"


async def test_an_episode_handler_whose_own_wait_is_cancelled_loses_only_its_episode() -> None:
    class Cancelled(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            waiting = asyncio.get_running_loop().create_future()
            waiting.cancel()
            await waiting

    actor, log = make(Cancelled, Recorder, episode_length=1)
    await play(actor, 2, stop=None)
    assert [entry[0] for entry in log[:-2]] == [[0, 1], [1]]
    assert log[-2:] == ["stop", "stop"]
    recorder = recorder_of(actor)
    assert recorder.summary()["fragments_dropped.cancelled"] == 2
    place = line_of(Cancelled.on_episode, "await waiting")
    assert recorder.notes()["fragments_dropped.cancelled"].endswith(f"CancelledError: without a message ({place})")
    assert recorder.summary()["games_failed.on_episode"] == 1


async def test_an_episode_dropped_by_overload_is_lost_without_an_error() -> None:
    class Late(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            raise DeadlineExceeded("a forward waited 2 s")

    actor, _ = make(Late)
    await play(actor, 1)
    recorder = recorder_of(actor)
    numbers = recorder.summary()
    assert (numbers["fragments_dropped.overloaded"], numbers["games_failed.overloaded"]) == (1, 1)
    assert "agent_errors.on_episode" not in numbers
    note = recorder.notes()["fragments_dropped.overloaded"]
    assert note == f"agent 'agent0': DeadlineExceeded: a forward waited 2 s ({line_of(Late.on_episode, 'raise')})"


@pytest.mark.parametrize("agents", [1, 2])
async def test_an_end_that_times_out_still_notifies_the_agents_and_counts_lost_episodes(agents: int) -> None:
    class Stuck(Recorder):
        async def on_episode(self, episode: list[State], done: bool) -> None:
            await asyncio.sleep(60)

    actor, log = make(*[Stuck] * agents, episode_length=1)
    await actor.start("s", b"")
    await actor.tick(b"0")
    await actor.tick(b"1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await actor.on_end("stop")
    assert log == ["stop"] * agents
    await asyncio.sleep(0)
    recorder = recorder_of(actor)
    numbers = recorder.summary()
    assert numbers["fragments_dropped.cancelled"] == agents
    assert numbers["fragments_dropped.deadline"] == agents
    assert numbers["games_failed.on_episode"] == 1
    late = "on_episode was cut off by actor.tick_timeout_s, or by the end of the service"
    place = line_of(Stuck.on_episode, "sleep")
    assert recorder.notes()["fragments_dropped.cancelled"] == f"agent 'agent0': {late} ({place})"
    assert recorder.notes()["fragments_dropped.deadline"] == f"{late}, and the last episode waited for it"


async def test_a_last_episode_that_an_end_has_no_time_for_fails_the_game_also_if_earlier_ones_arrived() -> None:
    class Returns(Recorder):
        async def on_session_end(self, reason: str) -> None:
            record("episode_return", 1.0)

    actor, _ = make(Returns, episode_length=1)
    await actor.start("s", b"")
    await actor.tick(b"0")
    await actor.tick(b"1")
    await actor._episodes.settle()
    end = asyncio.create_task(actor.on_end("stop"))
    await asyncio.sleep(0)  # it has begun to hand over the last episode
    end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await end
    recorder = recorder_of(actor)
    numbers = recorder.summary()
    assert numbers["fragments_dropped.deadline"] == numbers["games_failed.on_episode"] == 1
    assert not [name for name in numbers if name.startswith("episode_return")], "it lacks the last episode"


async def test_an_on_session_end_that_hangs_is_an_error_with_its_location() -> None:
    class Hangs(Recorder):
        async def on_session_end(self, reason: str) -> None:
            await asyncio.sleep(60)

    actor, _ = make(Hangs)
    await actor.start("s", b"{}")
    await timed_out(actor.on_end("stop"))
    recorder = recorder_of(actor)
    assert recorder.summary()["games_failed.on_session_end"] == 1
    assert line_of(Hangs.on_session_end, "sleep") in recorder.notes()["agent_errors.on_session_end"]


class Counts(Recorder):
    """Counts its ticks, and can be moved."""

    def __init__(self, name: str, config: Any, state: State) -> None:
        super().__init__(name, config, state)
        self.started_with = state.input
        self.count = 0

    async def on_tick(self, state: State) -> None:
        self.count += 1
        state.output = {"count": self.count, "tick": state.tick, "start": self.started_with}

    def snapshot(self) -> bytes:
        return str(self.count).encode()

    def restore(self, snapshot: bytes) -> None:
        self.count = int(snapshot)


async def test_an_actor_continues_from_anothers_snapshot_with_its_start() -> None:
    first, log = make(Counts, Counts)
    await first.start("s", b'{"level": 3}')
    for tick in range(3):
        await first.tick(b"%d" % tick)
    data = await first.snapshot()
    assert data is not None
    assert [entry[0] for entry in log] == [[0, 1, 2], [0, 1, 2]], "the episode so far is handed over first"
    second, _ = make(Counts, Counts)
    await second.restore("s", data)
    assert json.loads(await second.tick(b"3")) == {"count": 4, "tick": 3, "start": {"level": 3}}


async def test_a_game_whose_agent_cannot_be_restored_has_failed() -> None:
    first, _ = make(Counts)
    await first.start("s", b"")
    data = await first.snapshot()
    assert data is not None

    class Forgets(Counts):
        def restore(self, snapshot: bytes) -> None:
            raise ValueError("no memory of that")

    counted = MetricsRecorder()
    second = AgentActorFactory({"agent0": type("Forgets", (Forgets,), {"log": []})}, {}, Services(recorder=counted))()
    with pytest.raises(ValueError, match="no memory"):
        await second.restore("s", data)
    assert counted.summary() == {"agent_errors.restore": 1.0, "games_failed.restore": 1.0}


async def test_one_agent_that_cannot_move_keeps_its_actor_in_place() -> None:
    actor, log = make(Counts, Recorder)
    await actor.start("s", b"")
    await actor.tick(b"1")
    assert await actor.snapshot() is None
    assert not log


class Choosy(Recorder):
    def on_deadline(self, state: State) -> None:
        state.output = {"instead of": state.input}


async def test_a_missed_tick_is_in_no_episode_and_the_agents_choice_is_encoded() -> None:
    actor, log = make(Choosy)
    await actor.start("s", b"")
    for tick in range(3):
        await actor.tick(b"%d" % tick)
    assert json.loads(actor.fallback(2, b"2") or b"") == {"instead of": 2}
    await actor.missed()
    for tick in (3, 4):
        await actor.tick(b"%d" % tick)
    await actor.on_end("idle")
    assert log == [([0, 1], ["tick", "tick"], False, ""), ([3, 4], ["tick", "tick"], True, "idle"), "idle"]


async def test_an_episode_ends_at_skipped_ticks_and_the_next_one_has_the_games_number() -> None:
    actor, log = make(Choosy)
    await actor.start("s", b"")
    for tick in (0, 1):
        await actor.tick(b"%d" % tick)
    await actor.skipped(3)
    seen: list[int] = []
    next(iter(actor._agents)).on_deadline = lambda state: seen.append(state.tick)  # type: ignore[method-assign]
    for tick in (5, 6):
        await actor.tick(b"%d" % tick)
    assert actor.fallback(7, b"7") is not None
    assert seen == [7]
    assert [state.tick for state in actor._episodes.states] == [5, 6]
    await actor.on_end("idle")
    assert log == [([0, 1], ["tick", "tick"], False, ""), ([5, 6], ["tick", "tick"], True, "idle"), "idle"]


async def test_a_choice_at_the_deadline_may_be_counted() -> None:
    class Counted(Choosy):
        def on_deadline(self, state: State) -> None:
            record("choices", 1.0, kind=Kind.SUM)
            super().on_deadline(state)

    counted = MetricsRecorder()
    actor = AgentActorFactory({"a": Counted}, {}, Services(recorder=counted))()
    await actor.start("s", b"")
    await actor.tick(b"1")
    assert json.loads(actor.fallback(0, b"1") or b"") == {"instead of": 1}
    assert counted.summary() == {"choices": 1.0}


async def test_an_unsendable_choice_at_the_deadline_is_its_agents_error() -> None:
    class Unsendable(Agent):
        async def on_tick(self, state: State) -> None:
            state.output["move"] = {1, 2}

        def on_deadline(self, state: State) -> None:
            state.output["move"] = {1, 2}

    actor, _ = make(Unsendable)
    await actor.start("s", b"")
    with pytest.raises(AgentError, match="cannot be sent as json"):
        await actor.tick(b"1")
    with pytest.raises(AgentError, match="cannot be sent as json"):
        actor.fallback(0, b"1")
    recorder = actor._services.recorder
    numbers, notes = recorder.summary(), recorder.notes()
    assert (numbers["agent_errors.on_tick"], numbers["agent_errors.on_deadline"]) == (1, 1)
    assert notes["agent_errors.on_tick"].startswith("agent 'agent0': AgentError: state.output cannot be sent as json")
    assert notes["agent_errors.on_deadline"].partition(" (")[0] == notes["agent_errors.on_tick"].partition(" (")[0]


async def test_agents_without_a_choice_of_their_own_have_no_fallback() -> None:
    actor, _ = make(Choosy, Recorder)
    await actor.start("s", b"")
    await actor.tick(b"1")
    assert actor.fallback(0, b"1") is None


class Ends(SessionLog):
    """Notes the end of its session."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def end(self, reason: str, result: float | None) -> None:
        self.log.append(("log", reason))


class Breaks:
    """A league that cannot let a session go; it is also the recorder of its sessions."""

    on_request = False

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        def leave(reason: str) -> None:
            raise LeagueError("the books are broken")

        def release() -> None:
            self.log.append("released")

        return SeatedPlayer("main", Services(), None, None, leave, release=release)

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog:
        return Ends(self.log)


@pytest.mark.parametrize("end", ["stop", "moved"])
async def test_a_session_is_released_and_its_logs_end_whatever_the_league_raises(end: str) -> None:
    league, agent = Breaks(), type("Agent", (Recorder,), {"log": []})
    actor = AgentActorFactory({"agent": agent}, {}, Services(), players=league, recorders=[league])()
    await actor.start("session", b"")

    async def ended() -> None:
        if end == "moved":
            actor.on_moved()
        else:
            await actor.on_end(end)

    with pytest.raises(LeagueError, match="broken"):
        await ended()
    assert league.log == ["released", ("log", end)]
