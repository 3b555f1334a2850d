"""`python -m pipelines.tune` is ``brayx tune``: searches for training options."""

import sys

from brayx.commands.cli import run

if __name__ == "__main__":
    run(["tune", *sys.argv[1:]])
