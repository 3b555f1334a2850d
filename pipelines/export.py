"""`python -m pipelines.export` is ``brayx export``: writes a model for other runtimes."""

import sys

from brayx.commands.cli import run

if __name__ == "__main__":
    run(["export", *sys.argv[1:]])
