"""`brayx league`: the verbs, their options and output.

Each verb imports its modules when it runs, see `brayx.commands.cli`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from brayx.command_line import SWITCH, count
from brayx.jobs.shipped import job_file

JOB = "the job's YAML, or the name of a shipped one: cartpole.yaml"
SET = "override an option: --set trainer.learning_rate=1e-3"
TRACKING_OF_JOB = "MLflow's URI, or the path of its sqlite file (default: the job's, or ./mlflow.db)"

_BOOKS = {
    "show": "standings, counters and the newest snapshots",
    "ratings": "the standings as CSV, or --json",
    "export": "payoff, ratings, snapshots and counters as one JSON file",
}
_NEWEST = "the one with the newest snapshot"
_LEVELS = "beginner,easy,normal,hard,expert"


def league_verbs(league: argparse.ArgumentParser) -> None:
    """Adds the verbs to the command's parser."""
    verbs = league.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb, what in _BOOKS.items():
        shown = verbs.add_parser(verb, help=what)
        if verb == "export":
            shown.add_argument("file", type=Path, metavar="FILE", help="JSON file to write")
        shown.add_argument(
            "where", nargs="?", default="", metavar="PROJECT|JOB.yaml",
            help="a project's name, or its job (default: the newest league's)",
        )  # fmt: skip
        trial_option(shown)
        shown.add_argument("--tracking", help=TRACKING_OF_JOB)
        if verb == "ratings":
            shown.add_argument("--json", help="print one JSON document", **SWITCH)
        shown.set_defaults(run=_books, verb=verb)
    _calibrate_options(verbs.add_parser("calibrate", help="measure levels of difficulty by matches, for brayx serve"))


def trial_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses among the leagues of a project, see `brayx.league.finding.newest_league`."""
    parser.add_argument(
        "--trial", default="", metavar="NAME", help=f"trial of the league, by name or id (default: {_NEWEST})"
    )


def _calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("config", type=job_file, help=JOB)
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
    calibrate.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=SET)
    calibrate.add_argument("--actor", default="", help="name of the job's actor (default: the only one)")
    calibrate.add_argument("--seed", type=int, help="seed of the agents and the seats (default: the job's)")
    calibrate.add_argument(
        "--timeout-s", type=float, default=180.0, help="deadline for the next game to end (default: 180)"
    )
    trial_option(calibrate)
    calibrate.add_argument("--tracking", help=TRACKING_OF_JOB)
    calibrate.set_defaults(run=_calibrate)


def _books(arguments: argparse.Namespace) -> int:
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
    print(f"{arguments.config}: checking the job ...", file=sys.stderr, flush=True)
    from brayx.jobs.config import JobConfig, only
    from brayx.league.calibrate import calibrate
    from brayx.league.files import levels_file
    from brayx.tracking import tracking_uri

    job = JobConfig.load(arguments.config, arguments.overrides)
    file = arguments.out
    if file is None and job.leagues:
        file = levels_file(job.folder, job.leagues[only("league", job.leagues)])
    try:
        found = calibrate(
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
    except KeyboardInterrupt:
        print("brayx: interrupted before all games were played; no levels were written", file=sys.stderr, flush=True)
        raise
    print(found)
    name = list(found.levels.levels)[1]
    print(f'written to {file}; `brayx serve {arguments.config}` takes {{"opponent": {{"level": "{name}"}}}} now')
    return 0
