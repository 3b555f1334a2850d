"""``brayx tune``, also ``python -m pipelines.tune``: `brayx.search.tune` runs the trials."""

from __future__ import annotations

import argparse

from brayx.command_line import say

HELP = "search options of a training: many trials, one table"
_OLD_FLAGS = {
    "--trials": "num_trials",
    "--timesteps": "num_steps",
    "--total-steps": "num_steps",
    "--interval": "interval_steps",
}
"""Flags of earlier versions, which still work; `--help` and completion have the new ones only."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.description = (
        "Searches for good training options: many trials, each a nested run in MLflow, and a final table."
    )
    parser.add_argument("--env", required=True, help="Gymnasium id")
    parser.add_argument(
        "--search", action="append", default=[], metavar="OPTION=DOMAIN", dest="lines",
        help="loguniform(a, b), uniform(a, b), randint(a, b), choice(a, b, ...), or one value; once for each option",
    )  # fmt: skip
    parser.add_argument(
        "--algorithm", default="ppo", help="name of the algorithm, or a module of your own (default: %(default)s)"
    )
    parser.add_argument(
        "--demonstrations", default=None, metavar="FILES",
        help="recorded episodes that every trial of mixed or bc imitates: a file, a pattern in quotes, "
        "or a folder of recordings",
    )  # fmt: skip
    parser.add_argument(
        "--actions", choices=["environment", "policy"], default=None,
        help="whose actions the demonstrations have: the environment's, or a policy's (default: as the files say)",
    )  # fmt: skip
    parser.add_argument("--method", choices=["asha", "pbt"], default="asha", help="(default: %(default)s)")
    parser.add_argument("--num-trials", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--num-steps",
        type=int,
        default=60_000,
        help="env steps of a trial; of bc, transitions of its batches (default: %(default)s)",
    )
    parser.add_argument(
        "--interval-steps", type=int, default=None, help="env steps between two comparisons (default: a twelfth)"
    )
    for old, name in _OLD_FLAGS.items():
        parser.add_argument(old, type=int, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--target-return", type=float, default=None, help="stop a trial that reaches it")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--project", default="tuning", help="MLflow experiment (default: %(default)s)")
    parser.add_argument("--tracking", default=None, help="MLflow's URI, or its sqlite file (default: ./mlflow.db)")
    parser.add_argument(
        "--cluster", nargs="?", const="", metavar="ADDRESS",
        help="run the trials on Ray: join the cluster at ADDRESS, or start one",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Runs the search, and prints the table."""
    from brayx.search.space import parse
    from brayx.search.tune import table, tune

    result = tune(
        arguments.env,
        parse(arguments.lines),
        algorithm=arguments.algorithm,
        demonstrations=arguments.demonstrations,
        actions=arguments.actions,
        method=arguments.method,
        num_trials=arguments.num_trials,
        num_steps=arguments.num_steps,
        interval_steps=arguments.interval_steps,
        target_return=arguments.target_return,
        seed=arguments.seed,
        project=arguments.project,
        tracking=arguments.tracking,
        cluster=arguments.cluster,
        say=say,
    )
    print(table(result.trials, result.steps))
    print(
        f"the table, its picture and the best checkpoint are in run {result.trial.name!r} of {result.trial.project!r}"
    )
    return 0
