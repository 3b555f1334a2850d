"""Cost of a league: draws a second over a pool, bytes of a game in the books, acting with many snapshots at once.

    python -m benchmarks.league
    python -m benchmarks.league --strength four/four.yaml   # the accuracy of served ratings instead

``draw`` is the matchmaker alone, ``draw, result`` with a new result between two draws, which changes a win rate.
A game in the books is a whole game of two seats in the league.

Sessions of agents that act with a 64x64 MLP are ticked in closed loops, without a network: all with one snapshot, then
each with another. In the last row, every forward is with a snapshot of 1 MB that is not in memory, while eight are.

The job of ``--strength`` comes from ``brayx new NAME --template league``, and is trained and calibrated. This process
serves it, and its game plays through the TCP door; both seats of a game request an opponent, each by another rating.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import tables
from benchmarks.forward import large, loops, mlp
from benchmarks.tables import Table, machine, median, median_ratio, show
from brayx.actor.agent import Agent, Services, State, forward
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import SessionConfig
from brayx.actor.players import SeatedPlayer
from brayx.actor.service import into
from brayx.actor.table import SessionTable
from brayx.components import load_module
from brayx.engines import build_engine
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.jobs.config import JobConfig
from brayx.league.config import LeagueConfig
from brayx.league.files import levels_file
from brayx.league.fit import expected, fit
from brayx.league.gates import wilson
from brayx.league.in_progress import GamesInProgress
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.levels import Levels, read_levels
from brayx.league.matchmaking import Matchmaker
from brayx.league.member import Member
from brayx.league.payoff import Payoff
from brayx.league.playing import on_free_ports
from brayx.local.serving import Serving
from brayx.metrics import Recorder
from brayx.model.handles import PinnedVersion
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotFiles
from brayx.tracking import tracking_uri

MAIN = Member("main")
PAIRS = ((0, 1), (1, 2), (2, 3), (3, 4), (1, 3))


def config(pool: int) -> LeagueConfig:
    """A main player that draws nearly all its opponents from the pool."""
    main = {"role": "main", "against": {"pfsp": 0.85, "past": 0.15}}
    return LeagueConfig.model_validate({"model": "policy", "pool_size": pool, "players": {"main": main}})


def a_second(call: Callable[[int], object], seconds: float) -> float:
    """Calls of ``call`` per second; each gets its number."""
    calls = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for _ in range(100):
            call(calls)
            calls += 1
    return calls / spent


def draw_rates(pool: int, seconds: float) -> tuple[float, float]:
    """Draws per second: without results, and with one between two draws."""
    rng = random.Random(0)
    payoff = Payoff()
    members = [Member("main", version) for version in range(1, pool + 1)]
    matchmaker = Matchmaker(config(pool).players, payoff)
    matchmaker.fill(members, members[0])
    for member in members:
        payoff.add(MAIN, member, 0.5 if rng.random() < 0.2 else float(rng.random() < 0.6))

    def draw_and_play(call: int) -> None:
        opponent = matchmaker.draw("main", rng)
        payoff.add(MAIN, opponent, float(call % 2))
        matchmaker.played(MAIN, opponent)

    return a_second(lambda call: matchmaker.draw("main", rng), seconds), a_second(draw_and_play, seconds)


def play_games(path: Path, pool: int, games: int) -> None:
    """Plays games in a league whose books are at ``path``."""
    ledger = Ledger(path)
    league, running = League(config(pool), ledger), GamesInProgress(config(pool))
    for version in range(1, pool + 1):
        league.freeze("main", version, f"digest {version}", version)
    for game in range(games):
        sessions = [f"{game:032x}-agent-{seat}" for seat in range(2)]
        for session in sessions:
            running.assign(f"{game:032x}", session, league.draw)
        for session, result in zip(sessions, ("win", "loss"), strict=True):
            running.result(session, result)
        for session in sessions:
            ended = running.ended(session, "stop")
        assert ended is not None
        league.finish(ended)
    ledger.close()


class Acts(Agent):
    """Acts with the best of two actions."""

    async def on_tick(self, state: State) -> None:
        outputs, _ = await forward("model", np.array(state.input["obs"], np.float32))
        state.output = {"action": int(outputs.argmax())}


class Seats:
    """Gives each session the snapshot of its number, of the first ``snapshots``."""

    def __init__(self, model: LocalModel, snapshots: int) -> None:
        self._versions = itertools.cycle(range(1, snapshots + 1))
        self._model = model

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        version = next(self._versions)
        services = Services({"model": PinnedVersion(self._model, version)}, {}, Recorder())
        return SeatedPlayer(f"main:{version}", services, None, lambda value: None, lambda reason: None)


async def acting(model: LocalModel, snapshots: int, sessions: int, seconds: float) -> float:
    """Ticks per second of ``sessions`` closed loops over ``snapshots`` snapshots."""
    make = AgentActorFactory({"agent": Acts}, {"mode": "serve"}, Services(), players=Seats(model, snapshots))
    table = SessionTable(make, SessionConfig(actors_per_worker=sessions))

    async def ask(kind: StepKind, session: str, body: bytes) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        table.submit(StepRequest(kind, session, body), into(answer))
        return await answer

    for session in range(sessions):
        await ask(StepKind.START, str(session), b"")
    body = b'{"obs": [0.1, 0.2, 0.3, 0.4]}'
    each = [loops(functools.partial(ask, StepKind.TICK, str(session), body), 1, seconds) for session in range(sessions)]
    rates = await asyncio.gather(*each)
    await table.close("stop", 5.0)
    return sum(rate for rate, _ in rates)


async def many_opponents(snapshots: int, sessions: int, rounds: int, seconds: float) -> list[list[float]]:
    """Ticks per second with one snapshot, and with many at once."""
    module, example = mlp()
    engine = build_engine("onnx", module, example)
    model = LocalModel(engine, max_versions=snapshots + 1, weights=engine.initial)
    for version in range(1, snapshots + 1):
        model.load(version, engine.initial)
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for into_, count in zip(found, (1, snapshots), strict=True):
            into_.append(await acting(model, count, sessions, seconds))
    await model.close()
    return found


async def misses(folder: Path, rounds: int, seconds: float) -> list[float]:
    """Milliseconds of a forward whose snapshot is not in memory."""
    module, example = large(1)
    engine = build_engine("onnx", module, example)
    files = SnapshotFiles(folder)
    for version in range(1, 17):
        files.put(version, {name: array + version for name, array in engine.initial.items()})
    model = LocalModel(engine, max_versions=8, fetch=files.get)
    obs: Any = example[0][0]
    turns = itertools.cycle(range(1, 17))  # sixteen in turn, of which eight stay: each is a miss
    found = []
    for _ in range(rounds):
        missed = await paced(lambda: model.forward(obs, version=next(turns)), 0.003, seconds)
        found.append(1e3 * (median(missed) or 0.0))
    await model.close()
    return found


async def paced(forward: Callable[[], Awaitable[object]], pause_s: float, seconds: float) -> list[float]:
    """Seconds of each forward of a session whose game takes ``pause_s`` between two: whole milliseconds, since uvloop
    rounds a shorter pause to none."""
    latencies = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        await forward()
        latencies.append(time.perf_counter() - began)
        await asyncio.sleep(pause_s)
    return latencies


def ratings_of(levels: Levels) -> list[int]:
    """Five evenly spread ratings inside the range of the levels."""
    points = [each.points for each in levels.levels.values()]
    return [round(each) for each in np.linspace(min(points), max(points), 7)[1:-1]]


def asking(game: Any, opponents: dict[int, Any], first_is: int) -> Generator[Any, Any, tuple[Any, int]]:
    """Adds an opponent to each seat's start; returns the game, and the seat of the pair's first rating."""
    reply = None
    while True:
        try:
            kind, seat, body = game.send(reply)
        except StopIteration as end:
            return end.value, first_is
        reply = yield kind, seat, {**body, "opponent": opponents[seat]} if kind == "start" else body


def games_of(rules: Any, pair: tuple[int, int], count: int) -> Iterator[Any]:
    """Games between two ratings; seats and the beginning seat alternate."""
    red, yellow = rules.RED, rules.YELLOW
    for (first, begins), _ in zip(
        itertools.cycle(itertools.product((red, yellow), repeat=2)), range(count), strict=False
    ):
        ask = {first: {"rating": pair[0]}, -first: {"rating": pair[1]}}
        yield asking(rules.play(begins), ask, first)


def fail(error: Exception) -> None:
    """Ends the benchmark when a request is refused."""
    raise SystemExit(str(error))


def strength(path: str, games: int, at_once: int, markdown: bool) -> None:
    """Do opponents that clients request by rating play at that rating?

    Five ratings between the easiest and the hardest level make five pairs. The *predicted* win rate of a pair follows
    from the requested ratings. *Measured* points are fitted to the games of this benchmark alone, with the mean of the
    requested ones.
    """
    job = JobConfig.load(path)
    ((name, config),), (league,) = job.actors.items(), job.leagues.values()
    levels = read_levels(levels_file(job.folder, league))
    if levels is None:
        raise SystemExit(f"no levels yet: brayx league calibrate {path}")
    job = job.model_copy(update={"actors": {name: on_free_ports(config)}})
    rules = load_module("four_game", job.folder)
    ratings = ratings_of(levels)
    results = {}
    with Serving(
        job, tracking_uri(job.tracking.uri) if job.tracking.uri else _beside(job), say=lambda line: None
    ) as serving:
        for a, b in PAIRS:
            pair_games = games_of(rules, (ratings[a], ratings[b]), games)
            won = [0, 0, 0]
            for game, first in rules.side_by_side(serving.urls["tcp"], pair_games, at_once, fail):
                won[1 - game.winner * first] += 1
            results[a, b] = (won[0], won[1], won[2])
    table = Table(["rating", "against", ">games", ">predicted", ">measured", "95 % interval", ">off by"])
    for (a, b), tally in results.items():
        rate, predicted = (tally[0] + tally[1] / 2) / sum(tally), expected(ratings[a], ratings[b])
        low, high = wilson(*tally)
        table.add(
            str(ratings[a]), str(ratings[b]), sum(tally), f"{predicted:.3f}", f"{rate:.3f}",
            f"{low:.3f} to {high:.3f}", f"{rate - predicted:+.3f}",
        )  # fmt: skip
    measured = Table(["promised", ">measured", "95 % interval", ">off by"])
    fitted = fit(len(ratings), results, dict(enumerate(map(float, ratings))))
    for promised, each in zip(ratings, fitted, strict=True):
        interval = f"{each.low:.0f} to {each.high:.0f}"
        measured.add(str(promised), f"{each.points:.0f}", interval, f"{each.points - promised:+.0f}")
    about = f"{machine()}; {games} games of each pair"
    show(about, f"{table.markdown()}\n\n{measured.markdown()}", markdown=markdown)


def _beside(job: JobConfig) -> str:
    return tracking_uri(str(Path(job.folder, "mlflow.db")))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=3, seconds=1.0)
    parser.add_argument("--pool", type=int, default=1000, help="snapshots (default: %(default)s)")
    parser.add_argument("--games", type=int, help="in the books (default: 20000), or of each pair (default: 400)")
    parser.add_argument("--strength", metavar="JOB", help="the YAML of a calibrated job: 400 games of each pair")
    parser.add_argument("--at-once", type=int, default=32, help="its concurrent games (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.strength:
        strength(options.strength, options.games or 400, options.at_once, options.markdown)
        return 0
    options.games = options.games or 20_000
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s, medians; {options.games:,} games"
    draws: list[float | None] = []
    with_results: list[float | None] = []
    sizes: list[float | None] = []
    for _ in range(options.rounds):
        alone, between = draw_rates(options.pool, options.seconds)
        draws.append(alone)
        with_results.append(between)
        with tempfile.TemporaryDirectory(prefix="brayx-league-") as folder:
            empty = Path(folder, "empty.db")
            play_games(empty, options.pool, 0)
            play_games(Path(folder, "league.db"), options.pool, options.games)
            grown = Path(folder, "league.db").stat().st_size - empty.stat().st_size
            sizes.append(grown / options.games)
    table = Table(["what", ">value"])
    table.add(f"pool of {options.pool:,}: draw, a second", median(draws))
    table.add("draw, result, a second", median(with_results))
    table.add("bytes of a game in the books", median(sizes))
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        tempfile.TemporaryDirectory(prefix="brayx-league-") as folder,
    ):
        one, many = runner.run(many_opponents(50, 64, options.rounds, options.seconds))
        table.add("64 sessions, one snapshot: ticks/s", median(one))
        table.add("... 50 snapshots at once: to that", median_ratio(many, one))
        missed = runner.run(misses(Path(folder), options.rounds, options.seconds))
        table.add("a snapshot not in memory: ms of a forward", median(missed))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
