"""The former path of `brayx.bridges.gym`; works for one release."""

import sys
import warnings

from brayx.bridges.gym import game_of as game_of
from brayx.bridges.gym import main as main
from brayx.bridges.gym import make_env as make_env
from brayx.bridges.gym import parser as parser
from brayx.bridges.gym import play_game as play_game
from brayx.bridges.gym import run_games as run_games
from brayx.gamecore.games import GameResult as GameResult

warnings.warn("brayx.gamecore.gym is brayx.bridges.gym now", FutureWarning, stacklevel=2)

if __name__ == "__main__":
    sys.exit(main())
