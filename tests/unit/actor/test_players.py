"""Sessions of a job with a league: who plays them, where their data go, and when their result is kept."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from brayx.actor.agent import Agent, Services, State, push, record, result
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.logs import SessionLog
from brayx.actor.players import Delay, SeatedPlayer, scripted
from brayx.errors import AgentError, BadBody, BadResult, ConfigError, SessionError
from brayx.league.config import LeagueConfig
from brayx.league.ledger import Ledger
from brayx.metrics import Recorder
from tests.unit.league.play import Playing
from tests.unit.replay.made import Box


class Player(Agent):
    async def on_tick(self, state: State) -> None:
        state.output = {"by": "agent"}

    async def on_episode(self, episode: list[State], done: bool) -> None:
        push("games", object())  # type: ignore[arg-type]
        record("episode_return", 1.0)
        said = (episode[-1].input or {}).get("agent_says")
        if said is not None:
            result(said)


class Seats:
    """A league whose seats are numbered, as a host joins it to sessions."""

    def __init__(self, league: Playing) -> None:
        self.league = league
        self.buffers = {label: Box() for label in ("main", "random")}
        self.recorders = {label: Recorder() for label in self.buffers}
        self.left: list[str] = []

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        game = session.partition("-agent-")[0]
        member = self.league.assign(game, session)
        return SeatedPlayer(
            member.label,
            Services({}, {"games": self.buffers[member.player]}, self.recorders[member.player]),
            scripted(by_script) if member.player == "random" else None,
            lambda value: self.league.result(session, value),
            lambda reason: self._leave(session, reason),
        )

    def _leave(self, session: str, reason: str) -> None:
        self.left.append(session)
        self.league.ended(session, reason)


async def by_script(state: State) -> None:
    state.output = {"by": "script", "tick": state.tick}


@pytest.fixture
def seats() -> Seats:
    players: dict[str, Any] = {
        "main": {"role": "main", "against": {"random": 1.0}},
        "random": {"role": "script", "script": "module.function"},
    }
    config = LeagueConfig.model_validate({"model": "model", "players": players})
    return Seats(Playing(config, Ledger(":memory:")))


def two(seats: Seats, **agents: type[Agent]) -> dict[str, AgentActor]:
    """Two actors, which the players of one game will act in."""
    make = AgentActorFactory(agents or {"agent": Player}, {"mode": "train"}, Services(), players=seats)
    return {"g-agent-a": make(), "g-agent-b": make()}


async def start(actors: dict[str, AgentActor]) -> None:
    for session, actor in actors.items():
        await actor.start(session, b"")


async def started(seats: Seats, **agents: type[Agent]) -> tuple[dict[str, AgentActor], dict[str, str]]:
    """`two` that play, and the session of each player."""
    actors = two(seats, **agents)
    await start(actors)
    return actors, by_player(actors, seats)


def by_player(actors: dict[str, AgentActor], seats: Seats) -> dict[str, str]:
    """The session of each player."""
    return {seats.league.assign("g", session).player: session for session in actors}


async def test_each_session_is_played_by_its_player_and_only_the_learners_data_are_learned_from(seats: Seats) -> None:
    actors, sessions = await started(seats)
    for player, session in sessions.items():
        replies = [json.loads(await actors[session].tick(b"{}")) for _ in range(2)]
        script = [{"by": "script", "tick": tick} for tick in range(2)]
        assert replies == (script if player == "random" else [{"by": "agent"}] * 2)
        await actors[session].stop(b'{"result": "draw"}')
        await actors[session].on_end("stop")
    assert len(seats.buffers["main"].fragments) == 1
    assert not seats.buffers["random"].fragments
    assert seats.recorders["main"].drain()[0]["episode_return", ""].count == 1
    assert seats.recorders["random"].empty


async def test_a_result_in_the_stop_is_kept_before_the_stop_is_answered(seats: Seats) -> None:
    actors, sessions = await started(seats)
    await actors[sessions["main"]].stop(b'{"result": "win"}')
    assert seats.league.counters()["counted"] == 0
    await actors[sessions["random"]].stop(b'{"result": "loss"}')
    assert seats.league.counters()["counted"] == 1
    assert seats.league.standings()[0].member.player == "main"


async def test_an_agent_may_report_the_result_instead(seats: Seats) -> None:
    class Own(Player):
        """Its game's stop says nothing that the league reads."""

    actors, sessions = await started(seats, agent=Own)
    await actors[sessions["main"]].tick(b"{}")
    await actors[sessions["main"]].stop(b'{"agent_says": "loss"}')
    await actors[sessions["main"]].on_end("stop")
    await actors[sessions["random"]].stop(b'{"result": "win"}')
    await actors[sessions["random"]].on_end("stop")
    assert seats.league.counters()["counted"] == 1
    assert seats.league.standings()[0].member.player == "random"


async def test_a_game_that_is_broken_off_counts_for_nothing(seats: Seats) -> None:
    actors, sessions = await started(seats)
    await actors[sessions["main"]].stop(b'{"result": "win"}')
    await actors[sessions["random"]].on_end("disconnect")
    assert seats.league.counters() == {"counted": 0, "broken_off": 1, "contradictory": 0, "refused": 0}


@pytest.mark.parametrize("bad", ['"victory"', "true", "null", '{"red": "win"}'])
async def test_a_bad_result_is_refused_and_the_stop_may_be_sent_again(seats: Seats, bad: str) -> None:
    actors, sessions = await started(seats)
    with pytest.raises(BadResult, match="'win', 'draw', 'loss'") as refused:
        await actors[sessions["main"]].stop(f'{{"result": {bad}}}'.encode())
    assert isinstance(refused.value, BadBody)  # which does not end the session
    assert refused.value.details["got"] == repr(json.loads(bad))
    await actors[sessions["main"]].stop(b'{"result": 1}')
    await actors[sessions["random"]].stop(b'{"result": -0.5}')
    assert seats.league.counters() == {"counted": 1, "broken_off": 0, "contradictory": 0, "refused": 1}


async def test_a_session_more_than_the_game_has_seats_is_refused(seats: Seats) -> None:
    actors = two(seats)
    await start(actors)
    more = two(seats)["g-agent-a"]
    with pytest.raises(SessionError, match="2 seats"):
        await more.start("g-agent-c", b"")


async def test_a_start_that_fails_breaks_its_game_off(seats: Seats) -> None:
    class Broken(Player):
        def __init__(self, name: str, config: Any, state: State) -> None:
            raise RuntimeError("no map")

    actors = two(seats, agent=Broken)
    failed = 0
    for session, actor in actors.items():
        try:
            await actor.start(session, b"")
        except AgentError:
            failed += 1
    assert failed == 1
    assert len(seats.left) == 1


class Broken:
    """A recorder whose disk is full."""

    on_request = False

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog:
        raise OSError("disk full")


async def test_a_recorder_that_fails_breaks_its_game_off(seats: Seats) -> None:
    make = AgentActorFactory({"agent": Player}, {}, Services(), recorders=[Broken()], players=seats)
    with pytest.raises(OSError, match="disk full"):
        await make().start("g-agent-a", b"")
    assert seats.left == ["g-agent-a"]


class Moves(Player):
    """Has snapshots, and cannot be restored."""

    def snapshot(self) -> bytes:
        return b""


async def test_a_session_of_a_league_does_not_move(seats: Seats) -> None:
    actor = two(seats, agent=Moves)["g-agent-a"]
    await actor.start("g-agent-a", b"")
    assert await actor.snapshot() is None
    outside = AgentActorFactory({"agent": Moves}, {}, Services())()
    await outside.start("s", b"")
    assert await outside.snapshot() is not None


async def test_a_session_that_moves_or_cannot_be_restored_leaves_the_league(seats: Seats) -> None:
    actors = two(seats, agent=Moves)
    await actors["g-agent-a"].start("g-agent-a", b"")
    actors["g-agent-a"].on_moved()
    assert seats.left == ["g-agent-a"]
    with pytest.raises(NotImplementedError):
        await actors["g-agent-b"].restore("g-agent-b", pickle.dumps((b"", None, None, "", 1, [b""], None)))
    assert seats.left == ["g-agent-a", "g-agent-b"]


def test_a_result_outside_a_league_changes_nothing_and_outside_an_agent_is_refused() -> None:
    with Services().use():
        result("win")
    with pytest.raises(ConfigError, match="inside an agent's methods"):
        result("win")


def test_a_delayed_player_sees_the_first_input_until_its_delay_has_passed() -> None:
    delay = Delay(2)
    assert [delay.seen(number) for number in range(5)] == [0, 0, 0, 1, 2]
