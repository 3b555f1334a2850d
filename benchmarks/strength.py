"""Accuracy of served ratings: do opponents that clients request by rating play at that rating?

    python -m benchmarks.strength four/four.yaml

The job comes from ``brayx new NAME --template league``, and is trained and calibrated. This process serves it, and its
game plays through the TCP door; both seats of a game request an opponent, each by another rating. Five ratings between
the easiest and the hardest level make five pairs. The *predicted* win rate of a pair follows from the requested
ratings. *Measured* points are fitted to the games of this benchmark alone, with the mean of the requested ones.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import Table, machine, show
from brayx.components import load_module
from brayx.jobs.config import JobConfig
from brayx.league.files import levels_file
from brayx.league.fit import expected, fit
from brayx.league.gates import wilson
from brayx.league.levels import Levels, read_levels
from brayx.league.playing import on_free_ports
from brayx.local.serving import Serving
from brayx.tracking import tracking_uri

PAIRS = ((0, 1), (1, 2), (2, 3), (3, 4), (1, 3))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="the job's YAML")
    parser.add_argument("--games", type=int, default=400, help="of each pair (default: %(default)s)")
    parser.add_argument(
        "--table", action="store_true", help="serve without levels: by the points of the league's table"
    )
    parser.add_argument("--at-once", type=int, default=32, help="concurrent games (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    job = JobConfig.load(options.job)
    ((name, config),), ((of, league),) = job.actors.items(), job.leagues.items()
    levels = read_levels(levels_file(job.folder, league))
    if levels is None:
        raise SystemExit(f"no levels yet: brayx league calibrate {options.job}")
    served = league.model_copy(update={"levels": "none.yaml"}) if options.table else league
    job = job.model_copy(update={"actors": {name: on_free_ports(config)}, "leagues": {of: served}})
    rules = load_module("four_game", job.folder)
    ratings = ratings_of(levels)
    results = {}
    with Serving(
        job, tracking_uri(job.tracking.uri) if job.tracking.uri else _beside(job), say=lambda line: None
    ) as serving:
        for a, b in PAIRS:
            games = games_of(rules, (ratings[a], ratings[b]), options.games)
            won = [0, 0, 0]
            for game, first in rules.side_by_side(serving.urls["tcp"], games, options.at_once, fail):
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
    about = f"{machine()}; {options.games} games of each pair"
    show(about, f"{table.markdown()}\n\n{measured.markdown()}", markdown=options.markdown)
    return 0


def _beside(job: JobConfig) -> str:
    return tracking_uri(str(Path(job.folder, "mlflow.db")))


if __name__ == "__main__":
    sys.exit(main())
