"""Connect four: the rules, and two scripted players. Knows nothing of services or agents.

A board is a list of 42 numbers, row by row from the top: 0 is empty, 1 and -1 are the stones of the two seats.
"""

import random

WIDTH, HEIGHT = 7, 6
RED, YELLOW = 1, -1


def _lines():
    for row in range(HEIGHT):
        for column in range(WIDTH):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                if row + 3 * down < HEIGHT and 0 <= column + 3 * right < WIDTH:
                    yield [(row + i * down) * WIDTH + column + i * right for i in range(4)]


LINES = list(_lines())
"""The cells of each line of four."""
LINES_AT = [[line for line in LINES if cell in line] for cell in range(WIDTH * HEIGHT)]
"""For each cell, the lines of four that go through it."""


def landing(board, column):
    """The cell where a stone lands in ``column``; None: the column is full."""
    lowest = column + WIDTH * (HEIGHT - 1)
    return next((cell for cell in range(lowest, -1, -WIDTH) if not board[cell]), None)


def wins(board, cell, seat):
    """Whether a stone of ``seat`` in the empty ``cell`` makes four in a row."""
    return any(board[a] + board[b] + board[c] + board[d] == 3 * seat for a, b, c, d in LINES_AT[cell])


class Four:
    """One game. ``see(seat)`` is the board from a seat's view: its own stones are 1."""

    def __init__(self, first=RED):
        self.board = [0] * (WIDTH * HEIGHT)
        self.turn = first
        self.winner = 0

    def see(self, seat):
        return [seat * stone for stone in self.board]

    @property
    def legal(self):
        """For each column, whether it has room."""
        return [not stone for stone in self.board[:WIDTH]]

    @property
    def over(self):
        return self.winner != 0 or all(self.board[:WIDTH])

    def move(self, column):
        """Drops a stone of the seat whose turn it is."""
        if type(column) is not int or not 0 <= column < WIDTH or not self.legal[column]:
            room = [column for column, free in enumerate(self.legal) if free]
            raise ValueError(f"{column!r} is not a legal column, expected one of {room}")
        cell = landing(self.board, column)
        if wins(self.board, cell, self.turn):
            self.winner = self.turn
        self.board[cell] = self.turn
        self.turn = -self.turn


def random_column(board, rng=random):
    """Any column with room."""
    return rng.choice([column for column in range(WIDTH) if not board[column]])


def tactical_column(board, rng=random):
    """Wins if one move can, else blocks the opponent's win, else plays any column with room."""
    cells = {column: landing(board, column) for column in range(WIDTH) if not board[column]}
    for seat in (1, -1):
        for column, cell in cells.items():
            if wins(board, cell, seat):
                return column
    return rng.choice(list(cells))


SCRIPTS = {"random": random_column, "tactical": tactical_column}
