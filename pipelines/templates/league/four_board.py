"""The game on the console's page, where a human plays yellow against the agent. Knows nothing of pages or services."""

import random

from four_game import NAMES, RESULTS, play
from four_rules import LINES, RED, WIDTH, YELLOW, landing

CELLS = {
    0: {},
    1: {"text": "●", "colour": "#e0a800", "label": "yellow"},
    -1: {"text": "●", "colour": "#d03030", "label": "red"},
}
"""The human's stones are yellow, the opponent's red."""


def board(opponent):
    """One game: a generator of requests ``(kind, agent, body)`` and of boards ``("ask", "", board)``.

    It takes the replies, and the human's moves: None gives up. It returns the last board.
    """
    game, answer = play(random.choice((RED, YELLOW)), "human", opponent=opponent), None
    while True:
        try:
            kind, seat, body = game.send(answer)
        except StopIteration as end:
            return shown(end.value.see(YELLOW), over=True) | {"result": RESULTS[end.value.winner * YELLOW]}
        answer = yield kind, NAMES[seat], shown(body) if kind == "ask" else body


def recorded(state):
    """The board of a recorded tick or stop. Its agent's seat is the end of the session's id."""
    seat = next(seat for seat, name in NAMES.items() if name == state.agent)
    seen = [stone * seat * YELLOW for stone in state.input["board"]]
    return shown(seen, over=True) | {"text": f"The agent plays {state.agent}.", "result": state.input.get("result")}


def shown(seen, over=False):
    """The board for the page. A move is a button in the cell where its stone lands."""
    moves = []
    for column in range(WIDTH):
        cell = landing(seen, column)
        if cell is not None and not over:
            moves.append({"move": column, "at": divmod(cell, WIDTH), "label": f"column {column + 1}"})
    rows = [[CELLS[stone] for stone in seen[start : start + WIDTH]] for start in range(0, len(seen), WIDTH)]
    four = next((line for line in LINES if abs(sum(seen[cell] for cell in line)) == len(line)), [])
    line = [divmod(cell, WIDTH) for cell in four]
    return {"text": "You play yellow.", "rows": rows, "moves": moves, "line": line}
