"""``brayx recordings``: lists, exports, copies and forgets recorded sessions; `brayx.recording` does the work."""

from __future__ import annotations

import argparse
import functools
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from brayx.command_line import print_result
from brayx.commands.arguments import RECORDINGS, SESSION, add_tracking
from brayx.errors import ConfigError

if TYPE_CHECKING:
    from brayx.recording.source import RecordingsReader

HELP = "list, export (Minari, Rerun, videos), log to a trial, or forget recorded sessions"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs."""
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="list sessions, one a line, oldest first")
    listing.add_argument("folder", help=RECORDINGS)
    _choice(listing)
    listing.set_defaults(verb=_list)
    export = verbs.add_parser(
        "export", help="export sessions as a Minari dataset, as files for Rerun's viewer, as videos, or as recordings"
    )
    export.add_argument("folder", help=RECORDINGS)
    export.add_argument(
        "--format", required=True, choices=["minari", "rerun", "mp4", "parquet"], help="minari, rerun, mp4 or parquet"
    )
    export.add_argument("--out", required=True, type=Path, help="folder to write")
    _choice(export)
    export.add_argument(
        "--field", dest="fields", action="append", default=[], metavar="NAME=ORIGIN",
        help="with --format minari: where a field comes from, as in a source: reward=input/score",
    )  # fmt: skip
    export.set_defaults(verb=_export)
    log = verbs.add_parser("log", help="copy chosen sessions to the artifacts of a trial in MLflow")
    log.add_argument("folder", help=RECORDINGS)
    log.add_argument("--trial", required=True, metavar="TRIAL", help="id or name of the trial")
    _choice(log)
    log.set_defaults(verb=_log)
    forget = verbs.add_parser("forget", help="remove sessions from folders of recordings and from all trials")
    forget.add_argument("folders", nargs="+", metavar="FOLDER", help="every folder or address that may have them")
    forget.add_argument(
        "--session", required=True, action="append", metavar="ID", help="sessions with this id, or of this game; repeat"
    )
    add_tracking(forget)
    forget.set_defaults(verb=_forget)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb."""
    code: int = arguments.verb(arguments)
    return code


def _choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", metavar="ID", help=f"{SESSION}; short for --only session=ID")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE",
        help="select sessions as in a source: player=main, min_result=400; if repeated, all conditions must hold",
    )  # fmt: skip
    add_tracking(parser)


def _reader(arguments: argparse.Namespace) -> RecordingsReader:
    from brayx.recording.source import reader
    from brayx.recording.trials import open as open_recordings

    # Once, since those of a trial may have to be downloaded.
    opener = functools.cache(functools.partial(open_recordings, tracking=arguments.tracking))
    return reader(arguments.folder, _only(arguments), opener)


def _only(arguments: argparse.Namespace) -> dict[str, str]:
    """The options of `brayx.recording.config.Selection` that were given."""
    session = {} if arguments.session is None else {"session": arguments.session}
    return _pairs("--only", arguments.only) | session


def _selected(arguments: argparse.Namespace) -> RecordingsReader:
    """As `_reader`; raises ConfigError if no session is selected."""
    from brayx.recording.config import pattern_hint
    from brayx.recording.source import selects

    reader = _reader(arguments)
    assert reader.opener is not None
    sessions = reader.opener(reader.address)  # no warning about unreadable files here: reading them warns
    if not any(selects(reader.only, session) for session in sessions):
        by_result = reader.only.min_result is not None or reader.only.max_result is not None
        none = by_result and all(session.result is None for session in sessions)
        why = ", whose agents recorded no return" if none else pattern_hint(reader.only.session or "")
        broken = next((f"; {reason}" for reason in sessions.unreadable.values()), "")
        stored = f"{reader.address} has {len(sessions)}{why}{broken}"
        raise ConfigError(f"no recorded session is selected: {stored}", path=reader.address)
    return reader


def _list(arguments: argparse.Namespace) -> int:
    from brayx.recording.config import pattern_hint
    from brayx.tables import aligned

    rows = [("session", "began", "ticks", "end", "result", "player", "why", "unusual", "lost")]
    for session in _reader(arguments).selected():
        began = datetime.fromtimestamp(session.began, UTC).strftime("%Y-%m-%d %H:%M:%S")
        result = "-" if session.result is None else f"{session.result:g}"
        words = (session.end or "runs", session.reported or result, session.player or "-", session.why or "-")
        rows.append((session.session, began, f"{len(session):,}", *words, str(session.events), str(session.lost)))
    print_result("\n".join(aligned(rows)))
    if len(rows) == 1 and arguments.session is not None:
        print(f"no session is selected{pattern_hint(arguments.session)}", file=sys.stderr)
    return 0


def _log(arguments: argparse.Namespace) -> int:
    from brayx.recording.trials import log
    from brayx.tracking import find_trial, tracking_uri

    if not _only(arguments):
        raise ConfigError(
            "only chosen sessions can be copied to a trial: choose them with --session or --only", key="--session"
        )
    trial = find_trial(arguments.trial, tracking_uri(arguments.tracking))
    sessions, ticks, address = log(_selected(arguments).selected(), trial)
    print(f"{sessions} sessions of {ticks} ticks: {address}" if sessions else f"the trial has them already: {address}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    reader = _selected(arguments)
    if arguments.format == "minari":
        from brayx.recording.minari import write_minari

        fields = _pairs("--field", arguments.fields)
        episodes, steps = write_minari(reader.episodes(Path(arguments.folder), fields, most=None), arguments.out)
        print(f"{episodes} episodes of {steps} steps: {arguments.out}")
        return 0
    if arguments.fields:
        raise ConfigError("--field is for --format minari: other formats have no fields", key="--field")
    if arguments.format == "mp4":
        from brayx.recording.copying import write_videos

        sessions, frames = write_videos(reader.selected(), arguments.out)
        print(f"{sessions} sessions of {frames} frames: {arguments.out}")
        return 0
    if arguments.format == "parquet":
        from brayx.recording.copying import copy

        sessions, ticks = copy(reader.selected(), str(arguments.out))
        print(f"{sessions} sessions of {ticks} ticks: {arguments.out}")
        return 0
    from brayx.recording.rerun import write_rerun

    sessions, ticks = write_rerun(reader.selected(), arguments.out)
    print(f"{sessions} sessions of {ticks} ticks: {arguments.out}")
    print(f"watch them: rerun {arguments.out}/*.rrd", file=sys.stderr)
    return 0


def _forget(arguments: argparse.Namespace) -> int:
    from brayx.recording import forgetting, trials
    from brayx.recording.config import is_named
    from brayx.tracking import tracking_uri
    from brayx.tracking.registry import registered_models
    from brayx.urls import missing_database

    names, uri = arguments.session, tracking_uri(arguments.tracking)
    removed = {folder: forgetting.forget(folder, names) for folder in arguments.folders}
    left: list[str] = []
    if (database := missing_database(uri)) is None:
        of_trials, left = trials.forget(names, uri)
        removed |= of_trials
    else:
        print(f"trials are not searched: there is no MLflow database {database}", file=sys.stderr)
    for address, forgotten in removed.items():
        count = f"{forgotten.sessions} sessions of {forgotten.ticks} ticks"
        print(f"{address}: {count} removed from {forgotten.files} files")
    began = min(forgotten.began for forgotten in removed.values())
    learned = [
        f"models:/{model.name}/{entry.version}"
        for model in registered_models(uri)
        for entry, created in model.versions
        if created >= began
    ]
    if learned:
        print(f"registered since these sessions began, so they may have learned from them: {', '.join(learned)}")
    for address in left:
        print(f"{address} still has such sessions: its store is not a folder of this machine", file=sys.stderr)
    gone = {session for forgotten in removed.values() for session in forgotten.ids}
    if unknown := [name for name in names if not left and not any(is_named(session, name) for session in gone)]:
        raise ConfigError(f"no recorded session is {' or '.join(unknown)}", key="--session")
    return 1 if left else 0


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` words as a dict. Raises ConfigError for a word without ``=``."""
    pairs = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{option} is {word!r}, expected KEY=VALUE", key=option)
        pairs[key] = value
    return pairs
