"""``brayx check``: the checks are in `brayx.jobs.checks`, the printed options in `brayx.jobs.options`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from brayx.command_line import print_result
from brayx.commands.arguments import add_job, add_set
from brayx.errors import ConfigError

HELP = "validate a job's YAML and print it with every option, its default and its meaning"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_job(parser)
    add_set(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--contract", metavar="FILE", help="print what is built for the contracts in this file instead")
    given.add_argument(
        "--env", metavar="ID", help="print the contract of a Gymnasium environment, and what is built for it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Checks the job, and prints it."""
    from brayx.jobs.checks import check_before_games, check_files, check_learning
    from brayx.jobs.code import check_code
    from brayx.jobs.config import JobConfig
    from brayx.jobs.contracts import built, by_contract, check_limits, check_served_limits
    from brayx.jobs.options import documented
    from brayx.jobs.sources import Opened

    overrides = arguments.overrides
    if arguments.contract is not None:
        overrides = [*overrides, f"contract={json.dumps(str(Path(arguments.contract).absolute()))}"]
    elif arguments.env is not None:
        from brayx.bridges.gym import contract_of

        contract = json.dumps(contract_of(arguments.env).as_dict())
        overrides = [*overrides, f"contract={contract}"]
        print(contract)
    job = JobConfig.load(arguments.config, overrides)
    check_code(job, job.actors, mode="train")
    behaviours = by_contract(job)
    check_served_limits(behaviours)
    for own in behaviours:
        try:
            check_limits(own, learns=True)
        except ConfigError as error:
            print(f"brayx: note: for `brayx serve` only: {error.message}", file=sys.stderr)
    opened: Opened = {}
    check_files(job, opened)
    if job.needs_contract:
        check_before_games(job)
    elif len(job.trainers) == 1:
        for own in behaviours or [job]:
            check_learning(own, opened)
    is_plain = arguments.contract is None and arguments.env is None
    print_result(documented(job) if is_plain else built(job), end="")
    if job.rollouts:
        from brayx.jobs.environments import lag_notes

        for note in lag_notes(job):
            print(f"brayx: note: {note}", file=sys.stderr)
    print(f"{arguments.config}: ok", file=sys.stderr)
    return 0
