"""Arguments that several commands share. Imports nothing slow."""

from __future__ import annotations

import argparse

from brayx.command_line import SWITCH
from brayx.jobs.shipped import job_file

SHIPPED_JOBS = "cartpole.yaml, game.yaml, godot.yaml, unity.yaml"
RECORDINGS = (
    "the recordings: a folder, one of its files, an address such as s3://bucket/folder, or runs:/TRIAL/recordings"
)
SESSION = "only sessions with this id (* stands for any text), or of this game: the part of an id before -agent-"
TRUST = "run the code that the checkpoint names, even if it comes from a folder or a server (default: no)"


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the path of a job, as ``config``."""
    parser.add_argument("config", type=job_file, help=f"the job's YAML, or the name of a shipped one: {SHIPPED_JOBS}")


def add_set(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, as ``overrides`` of the job."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="override an option: --set trainer.learning_rate=1e-3",
    )  # fmt: skip


def add_actor(parser: argparse.ArgumentParser) -> None:
    """Adds ``--actor``, which chooses among the actors of a job."""
    parser.add_argument("--actor", default="", help="name of the job's actor (default: the only one)")


def add_tracking(parser: argparse.ArgumentParser, default: str = "./mlflow.db") -> None:
    """Adds ``--tracking``; ``default`` is for the help text."""
    parser.add_argument("--tracking", help=f"MLflow's URI, or the path of its sqlite file (default: {default})")


def add_league_trial(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses among the leagues of a project, see `brayx.league.finding.newest_league`."""
    parser.add_argument(
        "--trial", default="", metavar="NAME",
        help="trial of the league, by name or id (default: the one with the newest snapshot)",
    )  # fmt: skip


def add_trust(parser: argparse.ArgumentParser, condition: str = "") -> None:
    """Adds ``--trust``; ``condition`` begins its help text."""
    parser.add_argument("--trust", help=f"{condition}{TRUST}", **SWITCH)


def add_games(parser: argparse.ArgumentParser) -> None:
    """Adds ``--seed`` and ``--timeout-s`` of games that the command plays with a job's agents."""
    parser.add_argument("--seed", type=int, help="seed of the agents and the seats (default: the job's)")
    parser.add_argument(
        "--timeout-s", type=float, default=180.0, help="deadline for the next game to end (default: 180)"
    )
