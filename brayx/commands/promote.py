"""``brayx promote``: checks a version by recordings or its league's gate on request, and sets the alias."""

from __future__ import annotations

import argparse

from brayx.command_line import SWITCH, count
from brayx.commands.arguments import add_league_trial, add_tracking, add_trust
from brayx.errors import ConfigError
from brayx.jobs.shipped import job_file

HELP = "point an alias of the registry at a version: services follow it"
_SHOWN = 5
"""Maximum sessions in the table of a promoted version."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "reference", metavar="MODEL", help="version to promote: models:/NAME@candidate, or models:/NAME/3"
    )
    parser.add_argument("--to", default="champion", metavar="ALIAS", help="the alias (default: %(default)s)")
    parser.add_argument(
        "--league",
        help="make a snapshot, also named main:7, champion of its league, if the league's gate lets it",
        **SWITCH,
    )
    parser.add_argument("--project", default="", help="with --league and main:7: only leagues of this project")
    add_league_trial(parser)
    parser.add_argument("--version", type=count, help="this version, of models:/NAME")
    parser.add_argument(
        "--recordings", default="", metavar="FOLDER",
        help="promote only a version that meets --min-agreement and --max-kl on these recordings",
    )  # fmt: skip
    parser.add_argument(
        "--min-agreement", type=float, metavar="X", help="with --recordings: minimum share of equal actions, 0 to 1"
    )
    parser.add_argument(
        "--max-kl", type=float, metavar="Y", help="with --recordings: maximum mean KL divergence, in nats"
    )
    parser.add_argument(
        "--job",
        type=job_file,
        metavar="YAML",
        help="with --recordings: the job that made the model (default: the one in its checkpoint)",
    )
    add_trust(parser, "with --recordings: ")
    add_tracking(parser)


def run(arguments: argparse.Namespace) -> int:
    """Promotes the version, and prints what the alias was before."""
    from brayx.tracking import promote, tracking_uri

    uri = tracking_uri(arguments.tracking)
    if arguments.league and (arguments.to != "champion" or arguments.version is not None):
        raise ConfigError("--league cannot be combined with --to or --version: a league has one champion")
    reference = _checked(arguments, uri)
    if arguments.league:
        from brayx.league.promote import promote_in_league

        entry, before, reason = promote_in_league(reference, uri, project=arguments.project, trial=arguments.trial)
        print(reason)
    else:
        entry, before = promote(reference, uri, to=arguments.to, version=arguments.version)
    was = "before it was none" if before is None else f"before it was version {before}"
    changed = f"is {arguments.to} now; {was}" if before != entry.version else f"is {arguments.to} already"
    print(f"{entry.name} version {entry.version} {changed}")
    return 0


def _checked(arguments: argparse.Namespace, uri: str) -> str:
    """The version to promote; with ``--recordings`` it has passed, and an alias is replaced by its version.

    Raises:
        PromotionRefused: the version does not pass.
        ConfigError: the options cannot be combined.
    """
    reference: str = arguments.reference
    if not arguments.recordings:
        if arguments.min_agreement is not None or arguments.max_kl is not None:
            raise ConfigError("--min-agreement and --max-kl need --recordings")
        return reference
    from brayx.regression.gate import RecordingsGate, check_recordings
    from brayx.tracking import find

    if not reference.startswith("models:/"):
        raise ConfigError(f"with --recordings, name the version as models:/NAME/VERSION, got {reference!r}")
    gate = RecordingsGate(arguments.min_agreement, arguments.max_kl)
    name = reference.removeprefix("models:/").partition("@")[0].partition("/")[0]
    entry = find(reference if arguments.version is None else f"models:/{name}/{arguments.version}", uri)
    version = f"models:/{entry.name}/{entry.version}"  # an alias may move during the check
    report, reason = check_recordings(
        version, arguments.recordings, gate, uri, job=arguments.job, trust=arguments.trust
    )
    print(report.text(_SHOWN))
    print(f"it passes: {reason}")
    return version
