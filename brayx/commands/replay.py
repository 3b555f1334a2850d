"""``brayx replay``: `brayx.regression.replay` and `brayx.regression.resimulate` play; this file prints the report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from brayx.command_line import SWITCH, count, print_result, say
from brayx.commands.arguments import RECORDINGS, SESSION, add_tracking, add_trust
from brayx.errors import ConfigError
from brayx.jobs.shipped import job_file

HELP = "compare what another version would have done in recorded sessions"
_EVERY = 100
"""Sessions between two lines of progress."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("recording", metavar="RECORDING", help=RECORDINGS)
    parser.add_argument(
        "--model", dest="models", action="append", required=True, metavar="MODEL",
        help="models:/NAME/12, models:/NAME@ALIAS, or a checkpoint's folder; given twice, the second version is "
        "compared with the first instead of with the recording",
    )  # fmt: skip
    parser.add_argument("--session", default="", metavar="ID", help=f"{SESSION} (default: all)")
    parser.add_argument(
        "--job", type=job_file, metavar="YAML",
        help="the job that made the models, or the name of a shipped one (default: the one in their checkpoints)",
    )  # fmt: skip
    add_trust(parser)
    parser.add_argument(
        "--component", metavar="NAME",
        help="the model component, if the job has several and neither the version's name nor the trainer says which",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X",
        help="largest difference of continuous actions that count as equal (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", help="print one JSON document", **SWITCH)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG to write: by tick for one session, by session for several"
    )
    parser.add_argument("--ticks", type=Path, metavar="FILE", help="CSV to write, with a row for each tick")
    parser.add_argument(
        "--resimulate", default="", metavar="COMMAND",
        help="play the game again with this gamecore: it gets the recorded replies, from --from-tick on the version's. "
        "If --session names a game, the version plays all its seats; if a session, only that seat",
    )  # fmt: skip
    parser.add_argument(
        "--from-tick", type=_from_0, default=0, metavar="N",
        help="with --resimulate: the first tick that the version answers (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--out", default="", metavar="FOLDER", help="with --resimulate: record the new game here, from that tick on"
    )
    parser.add_argument(
        "--others", default="", metavar="PLAYER",
        help="with --resimulate of one seat: the player of the other seats once the game no longer follows their "
        "recordings, named as in `brayx match` (default: the version)",
    )  # fmt: skip
    parser.add_argument("--actor", default="", help="with --resimulate: the job's actor (default: the only one)")
    parser.add_argument(
        "--timeout-s", type=float, default=60.0,
        help="with --resimulate: deadline for the game's next tick (default: %(default)g)",
    )  # fmt: skip
    add_tracking(parser)


def _from_0(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else count(text)


def run(arguments: argparse.Namespace) -> int:
    """Replays, and prints the report; returns 1 if sessions could not be replayed."""
    from brayx.tracking import tracking_uri

    uri = tracking_uri(arguments.tracking)
    if arguments.resimulate:
        return _resimulate(arguments, uri)
    if arguments.out or arguments.from_tick or arguments.others:
        raise ConfigError("--from-tick, --others and --out need --resimulate")
    from brayx.regression.replay import replay_recording, write_plot, write_ticks

    def on_session(number: int) -> None:
        if number % _EVERY == 0:
            print(f"{number} sessions", file=sys.stderr, flush=True)

    comparison = replay_recording(
        arguments.recording,
        *arguments.models,
        tracking=uri,
        session=arguments.session,
        job=arguments.job,
        component=arguments.component,
        trust=arguments.trust,
        tolerance=arguments.tolerance,
        on_session=on_session,
    )
    if arguments.plot is not None:
        write_plot(comparison, arguments.plot)
    if arguments.ticks is not None:
        write_ticks(comparison, arguments.ticks)
    print_result(json.dumps(comparison.as_dict()) if arguments.json else comparison)
    return 1 if comparison.failed or comparison.unreadable else 0


def _resimulate(arguments: argparse.Namespace, uri: str) -> int:
    from brayx.engines.base import load_weights
    from brayx.jobs.stored_models import stored_model
    from brayx.league.named import Opponent, Opponents
    from brayx.regression.replay import recorded
    from brayx.regression.resimulate import resimulate, sessions_of

    if arguments.plot is not None or arguments.ticks is not None or len(arguments.models) != 1:
        raise ConfigError("--resimulate plays one version, and cannot be combined with --plot or --ticks")
    episodes, _ = recorded(arguments.recording, tracking=arguments.tracking)
    episodes, played = sessions_of(episodes, arguments.session)
    if arguments.others and len(played) == len(episodes):
        raise ConfigError("--others plays the other seats of a game: name the session of one seat with --session")
    with stored_model(arguments.models[0], uri, arguments.trust) as model:
        side = Opponent(model.label, load_weights(model.folder / "weights.npz"))
        job = model.job(arguments.job)
    result = resimulate(
        episodes,
        played,
        side,
        job,
        arguments.resimulate,
        uri,
        others=Opponents(job, uri).find(arguments.others) if arguments.others else None,
        from_tick=arguments.from_tick,
        actor=arguments.actor,
        model=arguments.component or "",
        folder=arguments.out,
        timeout_s=arguments.timeout_s,
        say=say,
    )
    print_result(json.dumps(result.as_dict()) if arguments.json else result)
    return 0
