"""A replica's games in a league, with the real league behind calls that get lost, come late, or come twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from brayx.actor.players import LearningPlayer, Seating
from brayx.cluster import league as job_module
from brayx.cluster import league_seats as module
from brayx.cluster.league import Learning, RemoteLeague, _LeagueActor
from brayx.cluster.league_seats import LeagueSeats, check_placement
from brayx.errors import ConfigError, DeadlineExceeded, LeagueError, ModelError, SessionError, TrackingError
from brayx.jobs.config import JobConfig
from brayx.league.config import LeagueConfig
from brayx.league.member import Member
from brayx.league.training import LeagueTraining
from brayx.metrics import Recorder
from tests.unit.jobs.contracts import SMALL
from tests.unit.jobs.contracts import job as game_job
from tests.unit.league.play import sessions_of
from tests.waiting import until_awaited

PLAYERS = {"main": {"role": "main", "against": {"rival": 1.0}}, "rival": {"role": "main", "against": {"main": 1.0}}}
CONFIG = LeagueConfig.model_validate({"model": "model", "players": PLAYERS, "gate": {"share": 0.0}})
LEARNING = {name: Learning({"games": f"{name}/games"}, f"{name}/hub") for name in PLAYERS}
ANEW = Learning({"games": "main/games/2"}, "main/hub/2", life=1)


class Method:
    """A method of the actor, as Ray's handle has it."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._actor.answer(self._name, args, kwargs))


class Actor:
    """The league's actor in this process.

    Attributes:
        league: the league; replaced by a restart.
        calls: names of all calls.
        unheard: calls by name that the actor does not get.
        unanswered: calls by name that it carries out, but whose answers are lost.
        gate: calls wait until it is set.
    """

    def __init__(self, make: Callable[[], _LeagueActor]) -> None:
        self._make = make
        self.league = make()
        self.calls: list[str] = []
        self.unheard: list[str] = []
        self.unanswered: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def restart(self) -> None:
        self.league = self._make()

    async def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(name)
        await self.gate.wait()
        if name in self.unheard:
            self.unheard.remove(name)
            raise ActorUnavailableError("away", None)
        answer = getattr(self.league, name)(*args, **kwargs)
        if name in self.unanswered:
            self.unanswered.remove(name)
            raise ActorUnavailableError("away", None)
        return answer


class Replica:
    """A replica's seats.

    Attributes:
        followed: players whose parts were opened, in order.
        gone: hubs that have ended.
        numbers: its recorder.
    """

    def __init__(self, actor: Actor, timeout_s: float = 5.0) -> None:
        self.numbers = Recorder()
        self.followed: list[tuple[str, Learning]] = []
        self.gone: set[str] = set()
        seating = Seating("model", lambda version: f"model at {version}", {}, {}, self.numbers, {"games": "nothing"})
        for name in LEARNING:
            seating.act(name, f"model of {name}")
        self.seats = LeagueSeats(actor, CONFIG, seating, self._follow, self.numbers, timeout_s=timeout_s)

    async def _follow(self, player: str, parts: Learning) -> LearningPlayer:
        if parts.hub in self.gone:
            raise TrackingError(f"no hub {parts.hub!r}")
        self.followed.append((player, parts))
        return LearningPlayer(f"model of {player}", parts.buffers, Recorder())

    async def pushed(self, *games: str) -> set[str]:
        """Where the sessions of games push."""
        seated = [await self.seats.seat(session) for game in games for session in sessions_of(game)]
        return {str(player.services.buffers["games"]) for player in seated}

    async def play(self, game: str, results: tuple[Any, ...] = ("win", "loss")) -> None:
        seated = [await self.seats.seat(session) for session in sessions_of(game)]
        for player, result in zip(seated, results, strict=True):
            if result is not None:
                player.report(result)
        for player in seated:
            player.leave("stop")

    def games(self) -> dict[str, float]:
        return {name.partition(".")[2]: count for name, count in self.numbers.summary().items()}


@pytest.fixture
def actor(tmp_path: Any) -> Actor:
    return Actor(lambda: _LeagueActor(CONFIG, str(tmp_path / "books"), str(tmp_path / "weights"), 0, LEARNING))


async def test_games_are_drawn_by_the_league_played_here_and_counted_by_it(actor: Actor) -> None:
    replica = Replica(actor)
    for game, results in enumerate([("win", "loss"), ("draw", "draw"), ("win", None), ("win", "win")]):
        await replica.play(f"g{game}", results)
    await replica.seats.close(5.0)
    assert replica.games() == {"counted": 2.0, "broken_off": 1.0, "contradictory": 1.0}
    assert actor.league.counters() == {"counted": 2, "broken_off": 1, "contradictory": 1, "refused": 0}


async def test_the_players_buffers_are_open_before_the_first_game_unless_the_league_is_away(actor: Actor) -> None:
    replica = Replica(actor)
    await replica.seats.open()
    assert replica.followed == [*LEARNING.items()]
    away = Replica(actor, timeout_s=0.05)
    actor.gate.clear()
    await away.seats.open()
    actor.gate.set()
    assert away.followed == []
    await away.play("g")
    assert away.followed == [*LEARNING.items()]


async def test_sessions_that_start_at_once_share_one_draw(actor: Actor) -> None:
    replica = Replica(actor)
    seated = await asyncio.gather(*(replica.seats.seat(session) for session in sessions_of("g")))
    assert actor.calls == ["drawn"]
    assert {player.label for player in seated} == {"main", "rival"}
    with pytest.raises(SessionError, match="2 seats"):
        await replica.seats.seat("g-agent-2")
    learned = [player.services.buffers["games"] for player in seated]
    assert sum(buffer != "nothing" for buffer in learned) == 1, "one player learns from it"


async def test_a_session_does_not_wait_for_its_game_to_be_counted(actor: Actor) -> None:
    replica = Replica(actor)
    seated = [await replica.seats.seat(session) for session in sessions_of("g")]
    actor.gate.clear()
    for player, result in zip(seated, ("win", "loss"), strict=True):
        player.report(result)
        player.leave("stop")
    assert replica.games() == {}
    actor.gate.set()
    await until_awaited(lambda: replica.games() == {"counted": 1.0})


@pytest.mark.parametrize("lost", ["unheard", "unanswered"])
async def test_a_game_whose_answer_is_lost_is_counted_once(actor: Actor, lost: str) -> None:
    replica = Replica(actor)
    getattr(actor, lost).extend(["finish", "finish", "drawn"])
    await replica.play("g")
    await replica.seats.close(10.0)
    assert replica.games() == {"counted": 1.0}
    assert actor.league.counters()["counted"] == 1
    assert actor.calls.count("finish") == 3


async def test_an_id_that_was_there_before_is_named_as_repeated(actor: Actor) -> None:
    replica = Replica(actor)
    await replica.play("g")
    await replica.play("g")
    await replica.seats.close(5.0)
    assert replica.games() == {"counted": 1.0, "repeated": 1.0}


async def test_games_go_on_over_a_restart_of_the_league(actor: Actor) -> None:
    replica = Replica(actor)
    seated = [await replica.seats.seat(session) for session in sessions_of("before")]
    await replica.play("g")
    await until_awaited(lambda: replica.games() == {"counted": 1.0})
    actor.restart()
    for player in seated:
        player.report("draw")
        player.leave("stop")
    await replica.play("after")
    await replica.seats.close(5.0)
    assert actor.league.counters()["counted"] == 3


async def test_a_league_that_does_not_answer_refuses_starts_in_time_and_keeps_what_has_ended(actor: Actor) -> None:
    replica = Replica(actor, timeout_s=0.05)
    seated = [await replica.seats.seat(session) for session in sessions_of("g")]
    actor.gate.clear()
    with pytest.raises(DeadlineExceeded, match="the league did not answer"):
        await replica.seats.seat("h-agent-0")
    for player in seated:
        player.report("draw")
        player.leave("stop")
    await asyncio.sleep(0.2)  # several deadlines
    actor.gate.set()
    await until_awaited(lambda: replica.games() == {"counted": 1.0})
    assert actor.league.counters()["counted"] == 1


async def test_what_cannot_be_sent_in_the_end_is_counted_as_lost(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_QUEUED", 2)
    replica = Replica(actor)
    games = [[await replica.seats.seat(session) for session in sessions_of(f"g{game}")] for game in range(3)]
    actor.gate.clear()
    for seated in games:
        for player in seated:
            player.report("draw")
            player.leave("stop")
    assert replica.games() == {"lost": 1.0}, "the queue is full"
    await replica.seats.close(0.1)
    assert replica.games() == {"lost": 3.0}
    assert replica.numbers.notes() == {"league_games.lost": "the replica ends"}


async def test_a_player_that_starts_anew_or_retires_is_followed_with_the_next_game(actor: Actor) -> None:
    replica = Replica(actor)
    await replica.play("g")
    assert replica.followed == [*LEARNING.items()]
    actor.league.due_of("main", 0, {"main": ANEW, "rival": LEARNING["rival"]})
    assert await replica.pushed(*(f"g{game}" for game in range(20))) == {"nothing", "main/games/2", "rival/games"}
    assert replica.followed == [*LEARNING.items(), ("main", ANEW)]
    actor.league.due_of("rival", 0, {"rival": LEARNING["rival"]})
    labels = {(await replica.seats.seat(session)).label for game in range(20) for session in sessions_of(f"h{game}")}
    assert labels == {"rival"}


@pytest.mark.parametrize("restarted", ["the player", "the league's actor"])
async def test_a_game_that_was_drawn_before_a_restarted_player_acts_has_no_result(actor: Actor, restarted: str) -> None:
    replica, now = Replica(actor), {"main": ANEW, "rival": LEARNING["rival"]}
    actor.league.due_of("main", 0, LEARNING if restarted == "the player" else now)
    seated = [await replica.seats.seat(session) for session in sessions_of("g")]
    if restarted == "the league's actor":
        actor.restart()
    actor.league.due_of("main", 0, now)
    for player, result in zip(seated, ("win", "loss"), strict=True):
        player.report(result)
        player.leave("stop")
    await replica.play("h")
    await replica.seats.close(5.0)
    assert actor.league.counters()["counted"] == 2
    games = actor.league.payoff.pair(*map(Member, sorted(PLAYERS))).games
    assert games == (1 if restarted == "the player" else 2)


async def test_a_replica_that_starts_later_opens_what_there_is_now(actor: Actor) -> None:
    actor.league.due_of("main", 0, {"main": ANEW})
    replica = Replica(actor)
    replica.gone = {parts.hub for parts in LEARNING.values()}
    assert await replica.pushed(*(f"g{game}" for game in range(20))) == {"main/games/2"}
    assert replica.followed == [("main", ANEW)]


@pytest.mark.parametrize("begun", [True, False], ids=["a replica from before", "a new replica"])
async def test_a_player_whose_parts_are_gone_only_acts_until_it_has_others(actor: Actor, begun: bool) -> None:
    """Its trial has ended, and the learner of its next one is starting."""
    replica = Replica(actor)
    if begun:
        await replica.play("g")
    replica.gone = {"main/hub", ANEW.hub}
    if begun:
        actor.league.due_of("main", 0, {"main": ANEW, "rival": LEARNING["rival"]})
    old = {"main/games"} if begun else set()
    assert await replica.pushed(*(f"g{game}" for game in range(20))) == {"nothing", "rival/games", *old}
    actor.league.due_of("main", 0, {"main": ANEW, "rival": LEARNING["rival"]})
    replica.gone.remove(ANEW.hub)
    assert await replica.pushed(*(f"h{game}" for game in range(20))) == {"nothing", "rival/games", "main/games/2"}


async def test_a_league_that_has_ended_refuses_starts(actor: Actor) -> None:
    replica = Replica(actor)

    async def ended(*_: Any) -> Any:
        raise ActorDiedError()  # as Ray says it

    actor.answer = ended  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="the league has ended"):
        await replica.seats.seat("g-agent-0")


def test_a_training_waits_for_a_league_that_is_away_but_not_forever(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    now, said = [0.0], []

    def call(*_: Any, timeout_s: float, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, DeadlineExceeded):
            now[0] += timeout_s
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(job_module, "call_with_retry", call)
    monkeypatch.setattr(job_module.time, "monotonic", lambda: now[0])
    away = DeadlineExceeded("the league did not answer in 100 s")
    league = RemoteLeague(actor, LEARNING, said.append, timeout_s=100.0)
    for answer in (True, LeagueError("the same weights")):
        answers += [away, away, away, answer]
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                league.has("digest")
        with contextlib.suppress(LeagueError):
            assert league.has("digest")
    assert said == ["the league did not answer in 100 s: the training goes on, and asks again"] * 2
    answers += [away] * 4
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            league.has("digest")
    with pytest.raises(ModelError, match="the league has not answered for 400 s"):
        league.has("digest")


def test_the_end_of_a_training_waits_for_a_league_that_is_away() -> None:
    answers: list[Any] = [DeadlineExceeded("the league did not answer"), (7, "the table")]

    def register(_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    training: LeagueTraining[Any] = LeagueTraining.__new__(LeagueTraining)
    training._register = register  # type: ignore[method-assign]
    assert training.register(print) == (7, "the table")


def test_calls_of_the_job_may_come_twice(actor: Actor) -> None:
    league = actor.league
    first = league.freeze("main", 1, "digest", 10)
    assert league.freeze("main", 1, "digest", 10) == first
    assert league.crown(first).passed
    assert league.crown(first).passed
    assert (league.has("digest"), league.champion(), len(league.snapshots)) == (True, first, 1)


def test_the_model_of_a_league_acts_in_the_replicas() -> None:
    file = Path(__file__).parents[2] / "end_to_end" / "own_league" / "league.yaml"
    check_placement(JobConfig.load(file))
    with pytest.raises(ConfigError, match=r"placement is remote, .*expected local"):
        check_placement(JobConfig.load(file, ["model.placement=remote"]))
    two = f"contract={json.dumps([SMALL, {**SMALL, 'behaviour': 'other'}])}"
    check_placement(game_job(two))
    for contracts in (two, "contract=null"):
        with pytest.raises(
            ConfigError, match=r"model\.placement is remote, and the models of several behaviours act in"
        ):
            check_placement(game_job(contracts, "model.placement=remote"))
