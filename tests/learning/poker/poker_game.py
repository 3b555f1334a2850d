"""A two-player game of OpenSpiel in its own process; each of its seats is a session. It knows nothing of agents.

python poker_game.py tcp://127.0.0.1:8101 kuhn_poker [--seed N] [--at-once N]
"""

import argparse
import itertools
import json
import random
import time

import pyspiel

from brayx import BrayxError
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.tcp import TcpSessions

SEATS = (0, 1)


def play(game, rng):
    """One game, as the requests it sends: yields ``(kind, seat, body)``, gets the reply."""
    state = game.new_initial_state()
    for seat in SEATS:
        yield "start", seat, {}
    while not state.is_terminal():
        if state.is_chance_node():
            actions, likely = zip(*state.chance_outcomes(), strict=True)
            state.apply_action(rng.choices(actions, likely)[0])
            continue
        seat = state.current_player()
        seen = {"x": state.information_state_tensor(seat), "legal": state.legal_actions_mask(seat)}
        state.apply_action(json.loads((yield "tick", seat, seen))["action"])
    for seat, reward in zip(SEATS, state.returns(), strict=True):
        yield "stop", seat, {"reward": reward, "result": reward}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("game")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=64)
    arguments = parser.parse_args()
    game, rng = pyspiel.load_game(arguments.game), random.Random(arguments.seed)
    names, running = itertools.count(time.time_ns()), {}

    with TcpSessions(Endpoint.parse(arguments.url), timeout_s=60.0) as sessions:

        def send(name, kind, seat, body):
            sessions.submit(StepRequest(StepKind(kind), f"{name}-agent-{seat}", json.dumps(body).encode()))

        def begin():
            name = str(next(names))
            running[name] = play(game, rng)
            send(name, *next(running[name]))

        for _ in range(arguments.at_once):
            begin()
        while True:
            for session, reply in sessions.exchange():
                name = session.partition("-agent-")[0]
                if isinstance(reply, BrayxError):
                    raise SystemExit(str(reply))
                try:
                    send(name, *running[name].send(reply))
                except StopIteration:
                    del running[name]
                    begin()


if __name__ == "__main__":
    main()
