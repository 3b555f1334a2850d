"""Sessions of one game share their states: boards, waits, ends and bounds, without a cluster."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.games import Games, Seat, SharedState
from brayx.actor.ownership import SessionSnapshot
from brayx.actor.table import SessionTable
from brayx.bridges import pettingzoo
from brayx.errors import AgentError, DeadlineExceeded
from brayx.gamecore import AsyncClient, StepKind
from brayx.gamecore.protocol import StepRequest
from tests.unit.bridges.zoo import Secrets, Whispers
from tests.unit.gamecore.echo_server import serving

LONG_S = 60.0


def joined(games: Games, *names: str, agents: int = 1) -> list[Seat]:
    seats = [games.join(name, agents=agents) for name in names]
    assert all(seats)
    return seats  # type: ignore[return-value]


def at(seat: Seat, tick: int) -> SharedState:
    return seat.state(tick=tick, input=None, output=None)


async def waiting(state: State, name: str) -> asyncio.Task[Any]:
    """A wait that has begun."""
    task = asyncio.create_task(state.wait(name, LONG_S))
    await asyncio.sleep(0)
    assert not task.done()
    return task


class TestBoard:
    def test_a_value_is_visible_to_other_sessions_of_the_game_at_the_same_tick_only(self) -> None:
        games = Games()
        a, b, other = joined(games, "g-agent-a", "g-agent-b", "h-agent-b")
        at(a, 0).plan = "attack"
        assert at(b, 0).plan == "attack"
        for nothing in (at(b, 1), at(other, 0)):
            with pytest.raises(AttributeError, match="no 'plan' yet"):
                _ = nothing.plan

    def test_fields_of_the_tick_are_each_sessions_own(self) -> None:
        a, b = joined(Games(), "g-agent-a", "g-agent-b")
        mine = a.state(tick=3, input={"obs": 1}, output={})
        mine.output, mine.end, mine.kind = {"action": 1}, "stop", "stop"
        theirs = b.state(tick=3, input={"obs": 2}, output={})
        fields = (theirs.session, theirs.game, theirs.agent, theirs.tick, theirs.kind, theirs.input, theirs.output)
        assert fields == ("g-agent-b", "g", "b", 3, "tick", {"obs": 2}, {})
        assert theirs.end == ""
        assert "end" not in a.state(tick=3, input=None, output=None)._board.values

    def test_a_session_reads_its_own_value_first(self) -> None:
        """Agents keep ``state.step`` for `on_episode`, and must not learn from another agent's."""
        a, b = joined(Games(), "g-agent-a", "g-agent-b")
        mine, theirs = at(a, 0), at(b, 0)
        mine.step = "a's"
        theirs.step = "b's"
        assert (mine.step, theirs.step) == ("a's", "b's")

    @pytest.mark.parametrize("copied", [lambda state: pickle.loads(pickle.dumps(state)), copy.copy])
    async def test_it_pickles_as_a_plain_state_with_the_visible_values_while_an_agent_waits(self, copied: Any) -> None:
        a, b = joined(Games(), "g-agent-a", "g-agent-b")
        mine, theirs = at(a, 0), at(b, 0)
        mine.step, theirs.step, theirs.plan = 1, 2, "attack"
        task = await waiting(mine, "never")
        alone = copied(mine)
        assert type(alone) is State
        assert (alone.session, alone.step, alone.plan) == ("g-agent-a", 1, "attack")
        alone.late = True
        assert not hasattr(theirs, "late")
        assert repr(alone.plan) in repr(mine)
        task.cancel()


class TestWait:
    async def test_it_ends_with_what_another_session_sets_later(self) -> None:
        a, b, c = joined(Games(), "g-agent-a", "g-agent-b", "g-agent-c")
        task, second = await waiting(at(a, 5), "plan"), await waiting(at(c, 5), "plan")
        at(b, 4).plan = "of another tick"
        await asyncio.sleep(0)
        assert not task.done()
        at(b, 5).plan = "attack"
        assert (await task, await second) == ("attack", "attack")
        assert await at(a, 5).wait("plan") == "attack"

    async def test_agents_of_one_session_wait_for_each_other(self) -> None:
        (a,) = joined(Games(), "g-agent-a", agents=2)
        state = at(a, 0)
        task = await waiting(state, "plan")
        state.plan = 1
        assert await task == 1

    async def test_it_has_a_deadline_that_names_the_attribute_and_leaves_nothing_behind(self) -> None:
        a, _ = joined(Games(), "g-agent-a", "g-agent-b")
        state = at(a, 7)
        with pytest.raises(DeadlineExceeded, match=r"'plan'.*tick 7") as late:
            await state.wait("plan", timeout_s=0.001)
        assert late.value.details == {"attribute": "plan"}
        assert not a.waiters
        assert not any(state._board.waiters.values())

    async def test_a_cancelled_waiter_leaves_the_others_waiting(self) -> None:
        a, b, c = joined(Games(), "g-agent-a", "g-agent-b", "g-agent-c")
        first, second = await waiting(at(a, 0), "plan"), await waiting(at(b, 0), "plan")
        first.cancel()
        await asyncio.sleep(0)
        at(c, 0).plan = 1
        assert await second == 1

    async def test_it_fails_at_once_when_the_last_other_session_ends_and_not_before(self) -> None:
        a, b, c = joined(Games(), "g-agent-a", "g-agent-b", "g-agent-c")
        state = at(a, 7)
        task = await waiting(state, "plan")
        b.leave()
        await asyncio.sleep(0)
        assert not task.done()
        c.leave()
        with pytest.raises(DeadlineExceeded, match=r"'plan'.*game 'g'.*tick 7") as alone:
            await task
        assert alone.value.details == {"attribute": "plan", "reason": "alone"}
        with pytest.raises(DeadlineExceeded, match="'plan'"):
            await at(a, 8).wait("plan", LONG_S)

    async def test_a_value_set_before_the_end_is_still_visible(self) -> None:
        a, b = joined(Games(), "g-agent-a", "g-agent-b")
        at(b, 0).plan = "attack"
        b.leave()
        assert await at(a, 0).wait("plan", LONG_S) == "attack"

    async def test_the_first_session_of_a_game_waits_for_sessions_yet_to_start(self) -> None:
        games = Games()
        (a,) = joined(games, "g-agent-a")
        task = await waiting(at(a, 0), "plan")
        (b,) = joined(games, "g-agent-b")
        at(b, 0).plan = 1
        assert await task == 1

    async def test_a_session_that_comes_after_the_end_of_another_is_waited_for(self) -> None:
        games = Games()
        a, b = joined(games, "g-agent-a", "g-agent-b")
        b.leave()
        (c,) = joined(games, "g-agent-c")
        task = await waiting(at(a, 0), "plan")
        at(c, 0).plan = 1
        assert await task == 1

    async def test_agents_of_the_last_session_still_wait_for_each_other(self) -> None:
        a, b = joined(Games(), "g-agent-a", "g-agent-b", agents=2)
        state = at(a, 0)
        task = await waiting(state, "plan")
        b.leave()
        await asyncio.sleep(0)
        assert not task.done()
        state.plan = 1
        assert await task == 1


class TestBounds:
    def test_boards_are_kept_from_the_slowest_sessions_tick_on(self) -> None:
        games = Games()
        a, b, c = joined(games, "g-agent-a", "g-agent-b", "g-agent-c")
        for tick in range(5):
            at(a, tick)
        for tick in range(3):
            at(b, tick)
        assert games.boards("g") == [0, 1, 2, 3, 4]
        c.leave()
        assert games.boards("g") == [2, 3, 4]
        at(b, 3)
        assert games.boards("g") == [3, 4]

    def test_a_game_that_plays_in_step_keeps_two_boards_at_most(self) -> None:
        games = Games()
        seats = joined(games, *(f"g-agent-{number}" for number in range(4)))
        most = 0
        for tick in range(100):
            for seat in seats:
                at(seat, tick)
                most = max(most, len(games.boards("g")))
        assert most == 2

    def test_past_the_bound_the_oldest_board_is_dropped_and_a_slow_session_gets_its_own(self) -> None:
        games = Games(most_boards=8)
        a, b = joined(games, "g-agent-a", "g-agent-b")
        for tick in range(20):
            at(a, tick).number = tick
        assert games.boards("g") == list(range(12, 20))
        assert not hasattr(at(b, 0), "number")
        assert [getattr(at(b, tick), "number", None) for tick in (11, 12, 19)] == [None, 12, 19]
        assert games.boards("g") == [19]

    @given(
        st.integers(1, 4),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["tick"] * 9 + ["leave"])), max_size=80),
    )
    def test_boards_match_a_model_that_forgets_nothing(self, count: int, acts: list[tuple[int, str]]) -> None:
        """An agent less than the bound behind sees all values of its tick; others see only their own."""
        bound = 4
        games = Games(most_boards=bound)
        seats = joined(games, *(f"g-agent-{number}" for number in range(count)))
        now = dict.fromkeys(seats, 0)
        following = dict.fromkeys(seats, 0)
        left: dict[int, set[str]] = {}
        for turn, (number, act) in enumerate(acts):
            seat = seats[number % count]
            if seat not in now:
                continue
            if act == "leave":
                seat.leave()
                del now[seat]
            else:
                tick = now[seat] = following[seat]
                following[seat] += 1
                attribute = f"left_{turn}"
                left.setdefault(tick, set()).add(attribute)
                state = at(seat, tick)
                setattr(state, attribute, True)
                seen = {name for name in state.__getstate__() if name.startswith("left_")}
                assert seen == (left[tick] if tick > max(left) - bound else {attribute})
            assert len(games) == bool(now)
            boards = [
                tick for tick in sorted(left) if tick > max(left) - bound and tick >= min(now.values(), default=0)
            ]
            assert games.boards("g") == (boards if now else [])

    def test_a_session_without_a_game_shares_nothing(self) -> None:
        games = Games()
        assert games.join("g") is None
        assert games.join("-agent-a") is None
        assert len(games) == 0


# Through the actor


class Exchanger(Agent):
    """Shares its number and answers with the other's: ``left`` with that of ``right``, and vice versa."""

    async def on_tick(self, state: State) -> None:
        other = {"left": "right", "right": "left"}[state.agent]
        state.step = state.agent
        setattr(state, f"number_of_{state.agent}", state.input["obs"])
        state.output = {"action": await state.wait(f"number_of_{other}", LONG_S)}

    async def on_episode(self, episode: list[State], done: bool) -> None:
        assert {state.step for state in episode if state.kind == "tick"} == {episode[0].agent}

    def snapshot(self) -> bytes:
        return b""

    def restore(self, snapshot: bytes) -> None:
        assert snapshot == b""


class Listener(Agent):
    """Two in turn: ``first`` shares its number, and ``second``, which plays after it, answers with it."""

    async def on_tick(self, state: State) -> None:
        if state.agent == "first":
            state.number = state.input["obs"]
            state.output = {"action": 0}
        else:
            state.output = {"action": state.number}


def factory(agent: type[Agent] = Exchanger, games: Games | None = None) -> AgentActorFactory:
    return AgentActorFactory({"agent": agent}, {"mode": "serve"}, Services(), games=games)


def body(number: int) -> bytes:
    return json.dumps({"obs": number}).encode()


async def started(make: AgentActorFactory, *sessions: str) -> list[AgentActor]:
    actors = [make() for _ in sessions]
    for actor, session in zip(actors, sessions, strict=True):
        await actor.start(session, b"")
    return actors


async def test_agents_of_two_sessions_exchange_values() -> None:
    games = Games()
    left, right = await started(factory(games=games), "g-agent-left", "g-agent-right")
    for number in range(3):
        replies = await asyncio.gather(left.tick(body(number)), right.tick(body(10 + number)))
        assert [json.loads(reply)["action"] for reply in replies] == [10 + number, number]
    for actor in (left, right):
        await actor.stop(b"{}")
        await actor.on_end("stop")
    assert len(games) == 0


async def test_without_games_every_session_has_its_own_state() -> None:
    first, second = await started(factory(Listener), "g-agent-first", "g-agent-second")
    await first.tick(body(7))
    with pytest.raises(AgentError) as raised:
        await second.tick(body(0))
    assert "no 'number' yet" in str(raised.value.__cause__)


@pytest.mark.parametrize("end", ["stop", "on_end", "moved"])
async def test_the_last_session_does_not_wait_for_one_that_ended_in_any_way(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "moved":  # it continues elsewhere, so the wait lasts until its deadline
        monkeypatch.setattr(f"{__name__}.LONG_S", 0.05)
    games = Games()
    left, right = await started(factory(games=games), "g-agent-left", "g-agent-right")
    ticking = asyncio.create_task(left.tick(body(0)))
    await asyncio.sleep(0)
    if end == "stop":
        await right.stop(b"")
    elif end == "on_end":
        await right.on_end("idle")
    else:
        right.on_moved()
    with pytest.raises(DeadlineExceeded, match="'number_of_right'"):
        await ticking
    await left.on_end("error")
    assert len(games) == 0


async def test_a_session_that_fails_to_start_leaves_no_game() -> None:
    class Refuses(Exchanger):
        def restore(self, snapshot: bytes) -> None:
            raise AgentError("not this one")

    class Broken(Exchanger):
        def __init__(self, *args: Any) -> None:
            raise ValueError("no")

    games = Games()
    (left,) = await started(factory(games=Games()), "g-agent-left")
    data = await left.snapshot()
    assert data is not None
    with pytest.raises(AgentError, match="not this one"):
        await factory(Refuses, games)().restore("g-agent-left", data)
    with pytest.raises(AgentError, match="constructor"):
        await started(factory(Broken, games), "g-agent-left")
    assert len(games) == 0


async def test_a_session_that_started_elsewhere_joins_its_game_at_its_tick() -> None:
    games = Games()
    make = factory(games=games)
    left, right = await started(make, "g-agent-left", "g-agent-right")
    for number in range(3):
        await asyncio.gather(left.tick(body(number)), right.tick(body(number)))
    data = await right.snapshot()
    assert data is not None
    right.on_moved()
    again = make()
    await again.restore("g-agent-right", data)
    replies = await asyncio.gather(left.tick(body(3)), again.tick(body(13)))
    assert [json.loads(reply)["action"] for reply in replies] == [13, 3]
    assert games.boards("g") == [3]


async def test_a_session_that_is_moved_leaves_its_game() -> None:
    games = Games()
    table = SessionTable(factory(games=games))
    gone = asyncio.Event()
    holder = table.holder(lambda reason: gone.set())
    await table.step(StepRequest(StepKind.START, "g-agent-left", b"", holder=holder.name))
    assert len(games) == 1
    parked: list[SessionSnapshot] = []

    async def park(session: str, snapshot: SessionSnapshot) -> None:
        parked.append(snapshot)

    table.move(park)
    async with asyncio.timeout(LONG_S):
        await gone.wait()
    await table.close()
    assert len(parked) == 1
    assert len(games) == 0


# Whole games


@pytest.fixture
def address() -> Iterator[tuple[str, Games]]:
    """A door of one replica, whose agents are `Exchanger` or, in ``Whispers``, `Listener`."""
    games = Games()

    class Either(Agent):
        def __init__(self, name: str, config: Any, state: State) -> None:
            super().__init__(name, config, state)
            chosen = Listener if state.agent in Whispers.possible_agents else Exchanger
            self._does = chosen(name, config, state)

        async def on_tick(self, state: State) -> None:
            await self._does.on_tick(state)

    with serving(DoorApp(SessionTable(factory(Either, games)))) as address:
        yield f"http://{address}", games


@pytest.mark.parametrize("env", [Secrets, Whispers])
async def test_agents_win_a_game_by_sharing_what_they_see(address: tuple[str, Games], env: type[Any]) -> None:
    url, games = address
    clients = pettingzoo.Clients(lambda: AsyncClient(url, timeout_s=LONG_S))
    result = await pettingzoo.play_game(env(), clients, seed=1)
    await clients.close()
    won = {"left": 5.0, "right": 5.0} if env is Secrets else {"first": 0.0, "second": 5.0}
    assert result.returns == won
    assert len(games) == 0
