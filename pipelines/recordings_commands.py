"""`brayx recordings`: the verbs, their options and output.

Each verb imports its modules when it runs, see `pipelines.cli`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from brayx.errors import ConfigError


def recordings_verbs(recordings: argparse.ArgumentParser) -> None:
    """Adds the verbs to the command's parser."""
    verbs = recordings.add_subparsers(title="verbs", required=True, metavar="VERB")
    export = verbs.add_parser("export", help="as a Minari dataset, as files for Rerun's viewer, or as videos")
    export.add_argument("folder", help="the recordings: a folder, or an address such as s3://bucket/folder")
    export.add_argument("--format", required=True, choices=["minari", "rerun", "mp4"], help="minari, rerun or mp4")
    export.add_argument("--out", required=True, type=Path, help="folder to write")
    export.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE",
        help="sessions to export, as in a source: player=main, min_result=400; if repeated, all must hold",
    )  # fmt: skip
    export.add_argument(
        "--field", dest="fields", action="append", default=[], metavar="NAME=ORIGIN",
        help="for minari, where a field comes from, as in a source: reward=input/score",
    )  # fmt: skip
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from brayx.recording.source import reader

    found = reader(arguments.folder, _pairs("--only", arguments.only))
    if arguments.format == "minari":
        from brayx.recording.minari import write_minari

        fields = _pairs("--field", arguments.fields)
        episodes, steps = write_minari(found.episodes(Path(arguments.folder), fields, most=None), arguments.out)
        print(f"{episodes} episodes of {steps} steps: {arguments.out}")
        return 0
    if arguments.fields:
        raise ConfigError("--field is for --format minari: other formats have no fields", key="--field")
    if arguments.format == "mp4":
        from brayx.recording.copying import write_videos

        sessions, frames = write_videos(found.selected(), arguments.out)
        print(f"{sessions} sessions of {frames} frames: {arguments.out}")
        return 0
    from brayx.recording.rerun import write_rerun

    sessions, ticks = write_rerun(found.selected(), arguments.out)
    print(f"{sessions} sessions of {ticks} ticks: {arguments.out}")
    print(f"watch them: rerun {arguments.out}/*.rrd", file=sys.stderr)
    return 0


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` words as a dict. Raises ConfigError for a word without ``=``."""
    found = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{option} is {word!r}, expected KEY=VALUE", key=option)
        found[key] = value
    return found
