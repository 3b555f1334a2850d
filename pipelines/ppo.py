"""`python -m pipelines.ppo` is ``brayx ppo``: PPO for an environment in Python."""

import sys

from brayx.commands.cli import run

if __name__ == "__main__":
    run(["ppo", *sys.argv[1:]])
