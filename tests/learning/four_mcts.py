"""A player of connect four for `brayx match` and leagues: OpenSpiel's Monte Carlo tree search with random rollouts.

100 simulations a move, one rollout for each, UCT with c = 2, and a solver that backs up proven wins and losses.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pyspiel

SIMULATIONS = 100

_GAME = pyspiel.load_game("connect_four")
_seeds = itertools.count()


def move(state: Any) -> None:
    """Plays the column that the search has visited most."""
    state.output["move"] = search(state.input["board"])


def search(board: list[int]) -> int:
    """The column for a board of 42 cells, row by row from the top, on which the player's own stones are 1."""
    seed = next(_seeds)
    bot = pyspiel.MCTSBot(
        _GAME, pyspiel.RandomRolloutEvaluator(1, seed), 2.0, SIMULATIONS, 100, True, seed, False,
        pyspiel.ChildSelectionPolicy.UCT,
    )  # fmt: skip
    return bot.step(_GAME.new_initial_state(json.dumps(_spelt(board))))


def _spelt(board: list[int]) -> dict[str, Any]:
    """The position as OpenSpiel reads it: rows from the bottom, x began."""
    mine, theirs = ("x", "o") if sum(board) == 0 else ("o", "x")
    cells = [{1: mine, -1: theirs, 0: "."}[cell] for cell in board]
    rows = [cells[at : at + 7] for at in range(35, -1, -7)]
    return {"board": rows, "current_player": mine, "is_terminal": False, "winner": ""}
