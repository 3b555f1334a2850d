"""``brayx league``: `brayx.league.report` reads a league, `brayx.league.calibrate` makes levels of difficulty."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from brayx.command_line import SWITCH, announced, count
from brayx.commands.arguments import (
    add_actor,
    add_games,
    add_job,
    add_league_trial,
    add_set,
    add_tracking,
)

HELP = "show, ratings, export: look at a league, also while it trains; calibrate: levels of difficulty"
_BOOKS = {
    "show": "standings, counters and the newest snapshots",
    "ratings": "the standings as CSV, or --json",
    "export": "payoff, ratings, snapshots and counters as one JSON file",
}
_TRACKING = "the job's, or ./mlflow.db"
_LEVELS = "beginner,easy,normal,hard,expert"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs."""
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb, what in _BOOKS.items():
        shown = verbs.add_parser(verb, help=what)
        if verb == "export":
            shown.add_argument("file", type=Path, metavar="FILE", help="JSON file to write")
        shown.add_argument(
            "where", nargs="?", default="", metavar="PROJECT|JOB.yaml",
            help="a project's name, or its job (default: the newest league's)",
        )  # fmt: skip
        add_league_trial(shown)
        add_tracking(shown, _TRACKING)
        if verb == "ratings":
            shown.add_argument("--json", help="print one JSON document", **SWITCH)
        shown.set_defaults(verb=verb)
    _calibrate_options(verbs.add_parser("calibrate", help="measure levels of difficulty by matches, for brayx serve"))


def _calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    add_job(calibrate)
    calibrate.add_argument(
        "--levels",
        default=_LEVELS,
        metavar="NAME,NAME",
        help="names of the levels, the easiest first (default: %(default)s)",
    )
    calibrate.add_argument("--games", type=count, default=400, help="minimum games of each level (default: 400)")
    calibrate.add_argument(
        "--delay", type=count, default=0, metavar="TICKS",
        help="for real-time games: easy levels react late, the easiest by this many ticks (default: no delay)",
    )  # fmt: skip
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: the league's option levels)"
    )
    add_set(calibrate)
    add_actor(calibrate)
    add_games(calibrate)
    add_league_trial(calibrate)
    add_tracking(calibrate, _TRACKING)
    calibrate.set_defaults(verb="calibrate")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb."""
    return _calibrate(arguments) if arguments.verb == "calibrate" else _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from brayx.league.finding import newest_league
    from brayx.league.report import Books, export_books, place_of, ratings_csv, show

    project, uri = place_of(arguments.where, arguments.tracking)
    trial = newest_league(uri, project, arguments.trial)
    books = Books.read(trial)
    if arguments.verb == "export":
        export_books(trial, books, arguments.file)
        print(arguments.file)
    elif arguments.verb == "show":
        print(show(trial, books))
    elif arguments.json:
        print(json.dumps([row.as_dict() for row in books.standings()]))
    else:
        print(ratings_csv(books), end="")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    with announced(arguments.config, "before all games were played; no levels were written"):
        from brayx.jobs.config import JobConfig, only
        from brayx.league.calibrate import calibrate
        from brayx.league.files import levels_file
        from brayx.tracking import tracking_uri

        job = JobConfig.load(arguments.config, arguments.overrides)
        file = arguments.out
        if file is None and job.leagues:
            file = levels_file(job.folder, job.leagues[only("league", job.leagues)])
        calibration = calibrate(
            job,
            [name.strip() for name in arguments.levels.split(",")],
            uri=tracking_uri(arguments.tracking or job.tracking.uri),
            games=arguments.games,
            delay=arguments.delay,
            seed=arguments.seed,
            actor=arguments.actor,
            trial=arguments.trial,
            file=file,
            timeout_s=arguments.timeout_s,
        )
    print(calibration)
    name = list(calibration.levels.levels)[1]
    print(f'written to {file}; `brayx serve {arguments.config}` takes {{"opponent": {{"level": "{name}"}}}} now')
    return 0
