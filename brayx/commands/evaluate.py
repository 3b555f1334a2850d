"""``brayx evaluate``: `brayx.jobs.evaluate` plays the games, `brayx.jobs.rating` writes the rating."""

from __future__ import annotations

import argparse
import contextlib
import sys

from brayx.command_line import SWITCH, EnvOptions, count
from brayx.errors import ConfigError, StartupError
from brayx.gamecore.auth import add_options
from brayx.gamecore.doors import ON_HTTP_PORT

HELP = "play games against a running service"
_LINES = 10
"""Number of lines of progress, about."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("env_id", nargs="?", default="", help="Gymnasium id; without it, --gamecore plays")
    parser.add_argument(
        "--gamecore", default="", metavar="COMMAND",
        help="any game: {http_url}, {ws_url}, {tcp_url}, {grpc_url} become the doors' URLs; it writes each "
        "game's return as a line of its standard output",
    )  # fmt: skip
    EnvOptions.add(parser)
    parser.add_argument("--at-once", type=count, default=4, metavar="N", help="games at once (default: 4)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    parser.add_argument("--games", type=count, default=20, help="number of games (default: 20)")
    parser.add_argument("--door", choices=ON_HTTP_PORT, help="protocol, with a Gymnasium id (default: the URL's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the games (default: 0)")
    parser.add_argument(
        "--timeout-s", type=float, default=180.0, help="deadline for the next game to end (default: 180)"
    )
    parser.add_argument(
        "--rate",
        help="write the mean return to the served version's tags in the registry: rating, rating_games, rating_env",
        **SWITCH,
    )  # fmt: skip
    parser.add_argument(
        "--tracking", help="with --rate: MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)"
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plays the games; returns 1 if some are missing."""
    from brayx.jobs.evaluate import evaluate

    if arguments.rate:
        from brayx.jobs.rating import rate, registered_versions, served
        from brayx.tracking import tracking_uri

        uri = tracking_uri(arguments.tracking)
        rated = served(arguments.url, uri)  # fails before the games if the service cannot be rated
        seen = {f"models:/{rated.name}/{rated.version}"}

    every = max(1, arguments.games // _LINES)

    def on_game(number: int, game_return: float) -> None:
        if number % every == 0:
            print(f"game {number} of {arguments.games}: {game_return:g}", file=sys.stderr, flush=True)
        if arguments.rate:
            with contextlib.suppress(StartupError):  # of one of several requests
                # Each game and each request may reach another replica, whose version may be older or newer.
                seen.update(*registered_versions(arguments.url).values())

    result = evaluate(
        arguments.url,
        arguments.env_id,
        gamecore=arguments.gamecore,
        env_options=arguments.env_kwargs,
        games=arguments.games,
        at_once=arguments.at_once,
        door=arguments.door,
        seed=arguments.seed,
        timeout_s=arguments.timeout_s,
        keys_file=arguments.keys_file,
        key=arguments.key,
        on_game=on_game,
    )
    print(result)
    if arguments.rate:
        now = served(arguments.url, uri)
        if now.version != rated.version:
            games = f"the first games were of {rated.name} version {rated.version}, the last of {now.version}"
            raise ConfigError(f"{games}: neither is rated")
        if len(seen) > 1:
            raise ConfigError(f"during the games sessions got {', '.join(sorted(seen))}: none is rated")
        rate(rated.name, rated.version, arguments.env_id or arguments.gamecore, result, uri)
        print(f"{rated.name} version {rated.version} has the rating {result.mean:g} now")
    return 1 if result.missing else 0
