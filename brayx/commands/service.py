"""Commands for a running service: `brayx evaluate`, `brayx doctor`, and `brayx keys` for the keys that it asks for.

Each imports its modules when it runs, see `brayx.commands.cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from brayx.command_line import SWITCH, count
from brayx.commands.recordings import TRUST
from brayx.errors import ConfigError, StartupError


def evaluate_options(evaluate: argparse.ArgumentParser) -> None:
    """Adds the options of `brayx evaluate`."""
    from brayx.gamecore.auth import add_options

    evaluate.add_argument("env_id", nargs="?", default="", help="Gymnasium id; without it, --gamecore plays")
    evaluate.add_argument(
        "--gamecore", default="", metavar="COMMAND",
        help="any game: {http_url}, {ws_url}, {tcp_url}, {grpc_url} become the doors' URLs; it writes each "
        "game's return as a line of its standard output",
    )  # fmt: skip
    evaluate.add_argument("--at-once", type=count, default=4, metavar="N", help="games at once (default: 4)")
    evaluate.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    evaluate.add_argument("--games", type=count, default=20, help="number of games (default: 20)")
    evaluate.add_argument("--door", choices=["http", "ws"], help="protocol, with a Gymnasium id (default: the URL's)")
    evaluate.add_argument("--seed", type=int, default=0, help="seed of the games (default: 0)")
    evaluate.add_argument(
        "--timeout-s", type=float, default=180.0, help="deadline for the next game to end (default: 180)"
    )
    evaluate.add_argument(
        "--rate",
        help="write the mean return to the served version's tags in the registry: rating, rating_games, rating_env",
        **SWITCH,
    )  # fmt: skip
    evaluate.add_argument(
        "--tracking", help="with --rate: MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)"
    )
    add_options(evaluate)
    evaluate.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from brayx.jobs.evaluate import evaluate

    if arguments.rate:
        from brayx.jobs.rating import rate, registered_versions, served
        from brayx.tracking import tracking_uri

        uri = tracking_uri(arguments.tracking)
        rated = served(arguments.url, uri)  # fails before the games if the service cannot be rated
        seen = {f"models:/{rated.name}/{rated.version}"}

    def on_game(number: int, game_return: float) -> None:
        print(f"game {number} of {arguments.games}: {game_return:g}", file=sys.stderr, flush=True)
        if arguments.rate:
            with contextlib.suppress(StartupError):  # of one of several requests
                # Each game and each request may reach another replica, whose version may be older or newer.
                seen.update(*registered_versions(arguments.url).values())

    result = evaluate(
        arguments.url,
        arguments.env_id,
        gamecore=arguments.gamecore,
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


def doctor_options(doctor: argparse.ArgumentParser) -> None:
    """Adds the options of `brayx doctor`."""
    from brayx.gamecore.auth import add_options

    doctor.add_argument("url", help="URL of a door: http://, ws://, tcp:// or grpc://host:port")
    doctor.add_argument("--body", default="{}", help="body of the tried tick; @FILE: the file's content (default: {})")
    doctor.add_argument("--timeout-s", type=float, default=5.0, help="deadline of each layer (default: %(default)s)")
    doctor.add_argument("--json", help="print one JSON document", **SWITCH)
    add_options(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from brayx.gamecore.auth import credentials
    from brayx.gamecore.doctor import examine, report

    body = arguments.body.encode()
    if body.startswith(b"@"):
        try:
            body = Path(arguments.body[1:]).read_bytes()
        except OSError as error:
            raise ConfigError(f"--body: {arguments.body[1:]} cannot be read: {error.strerror}") from error
    findings = examine(
        arguments.url,
        body=body,
        timeout_s=arguments.timeout_s,
        **credentials(arguments.keys_file, arguments.key),
    )
    return report(findings, arguments.url, as_json=arguments.json)


def keys_options(keys: argparse.ArgumentParser) -> None:
    """Adds the verbs of `brayx keys`."""
    verbs = keys.add_subparsers(title="verbs", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="append a key with a fresh secret to a file, and print its id")
    new.add_argument("--file", default="keys.txt", help="created if it is missing (default: %(default)s)")
    new.add_argument("--id", default=None, help="id of the key (default: a generated one)")
    new.add_argument(
        "--scope",
        choices=["read", "control"],
        default="",
        help="make a key for the console: may only read, or also control",
    )
    new.set_defaults(run=_new_key)


def _new_key(arguments: argparse.Namespace) -> int:
    from brayx.gamecore.auth import new_key

    print(new_key(arguments.file, arguments.id, arguments.scope))
    return 0


def console_options(console: argparse.ArgumentParser) -> None:
    """Adds the options of `brayx console`."""
    from brayx.gamecore.auth import add_options

    console.add_argument(
        "url",
        nargs="?",
        default="",
        help="URL of a job's console, as the job prints it (default: the tracking store alone)",
    )
    console.add_argument("--port", type=int, default=0, help="port of the page on this machine (default: a free one)")
    console.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    console.add_argument("--trust", help=TRUST, **SWITCH)
    console.add_argument(
        "--recordings", default="recordings", help="without a URL: folder of recordings (default: %(default)s)"
    )
    add_options(console)
    console.set_defaults(run=_console)


def _console(arguments: argparse.Namespace) -> int:
    from brayx.console.serve import console
    from brayx.tracking import tracking_uri

    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        console(
            arguments.url,
            uri=tracking_uri(arguments.tracking),
            recordings=arguments.recordings,
            port=arguments.port,
            keys_file=arguments.keys_file,
            key=arguments.key,
            trust=arguments.trust,
        )
    return 0
