"""The former path of `brayx.bridges.pettingzoo`; works for one release."""

import sys
import warnings

from brayx.bridges.pettingzoo import Clients as Clients
from brayx.bridges.pettingzoo import MultiAgentResult as MultiAgentResult
from brayx.bridges.pettingzoo import main as main
from brayx.bridges.pettingzoo import make_env as make_env
from brayx.bridges.pettingzoo import parser as parser
from brayx.bridges.pettingzoo import play_game as play_game
from brayx.bridges.pettingzoo import run_games as run_games
from brayx.bridges.pettingzoo import session_id as session_id

warnings.warn("brayx.gamecore.pettingzoo is brayx.bridges.pettingzoo now", FutureWarning, stacklevel=2)

if __name__ == "__main__":
    sys.exit(main())
