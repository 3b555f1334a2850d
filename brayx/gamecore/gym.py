"""The former path of `brayx.bridges.gym`; works for one release."""

import sys
import warnings

from brayx.bridges.gym import main as main
from brayx.bridges.gym import parser as parser
from brayx.bridges.gym import run_games as run_games

warnings.warn("brayx.gamecore.gym is brayx.bridges.gym now", FutureWarning, stacklevel=2)

if __name__ == "__main__":
    sys.exit(main())
