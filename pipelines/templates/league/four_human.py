"""A human player in the terminal, for ``four_game.py --human``. Knows nothing of services."""

import sys

from four_rules import WIDTH

STONES = {0: ".", 1: "o", -1: "x"}
COLOURED = {0: ".", 1: "\033[33m●\033[0m", -1: "\033[31m●\033[0m"}
"""The human's stones are yellow, the opponent's red."""


def drawn(board):
    """The board as text, from the human's view; coloured in a terminal."""
    stones = COLOURED if sys.stdout.isatty() else STONES
    rows = [board[start : start + WIDTH] for start in range(0, len(board), WIDTH)]
    numbers = " ".join(str(column + 1) for column in range(WIDTH))
    legend = f"{stones[1]} you, {stones[-1]} your opponent"
    return "\n".join([*(" ".join(stones[stone] for stone in row) for row in rows), numbers, legend])


def ask(board):
    """Asks the human for a column, from 0; None: they quit."""
    print(drawn(board))
    columns = [str(column + 1) for column in range(WIDTH) if not board[column]]
    while True:
        try:
            text = input(f"your column ({' '.join(columns)}; q quits): ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            return None
        if text == "q":
            return None
        if text in columns:
            return int(text) - 1
        print(f"{text!r} is not a column with room")
