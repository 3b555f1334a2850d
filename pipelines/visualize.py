"""`python -m pipelines.visualize` is ``brayx visualize``: draws the curves of trials."""

import sys

from brayx.commands.cli import run

if __name__ == "__main__":
    run(["visualize", *sys.argv[1:]])
