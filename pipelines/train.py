"""`python -m pipelines.train` is ``brayx train``: trains a job."""

import sys

from brayx.commands.cli import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
