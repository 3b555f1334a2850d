"""``brayx match``: `brayx.league.head_to_head` plays the games."""

from __future__ import annotations

import argparse
import json

from brayx.command_line import SWITCH, announced, count
from brayx.commands.arguments import add_actor, add_games, add_job, add_league_trial, add_set, add_tracking

HELP = "play games between two players, each in both seats: win rate and interval"
_PLAYER = "models:/NAME/7, main:7 of the league, a checkpoint's folder, a script of the job's league, module.function"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_job(parser)
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=_PLAYER)
    parser.add_argument("--games", type=count, default=200, help="number of games that count (default: 200)")
    add_set(parser)
    add_actor(parser)
    add_games(parser)
    parser.add_argument(
        "--explore",
        help="both explore, as in training, where ratings come from (default: they play as served)",
        **SWITCH,
    )
    parser.add_argument("--json", help="print one JSON document", **SWITCH)
    add_league_trial(parser)
    add_tracking(parser, "the job's, or ./mlflow.db")


def run(arguments: argparse.Namespace) -> int:
    """Plays the match; returns 130 if it was interrupted, 1 if games are missing."""
    with announced(arguments.config, "before the first game"):
        from brayx.jobs.config import JobConfig
        from brayx.league.head_to_head import match
        from brayx.tracking import tracking_uri

        job = JobConfig.load(arguments.config, arguments.overrides)
        result = match(
            job,
            arguments.a,
            arguments.b,
            uri=tracking_uri(arguments.tracking or job.tracking.uri),
            games=arguments.games,
            seed=arguments.seed,
            actor=arguments.actor,
            explore=arguments.explore,
            trial=arguments.trial,
            timeout_s=arguments.timeout_s,
        )
    print(json.dumps(result.as_dict()) if arguments.json else result)
    return 130 if result.interrupted else int(result.missing > 0)
