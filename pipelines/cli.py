"""The former path of ``python -m brayx``; works for one release."""

import warnings

from brayx.commands.cli import run

if __name__ == "__main__":
    warnings.warn("python -m pipelines.cli is python -m brayx now", FutureWarning, stacklevel=1)
    run()
