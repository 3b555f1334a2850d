"""``python -m brayx`` is the command ``brayx``."""

from brayx.commands.cli import run

if __name__ == "__main__":
    run()
