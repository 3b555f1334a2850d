"""The game, in its own process: connect four with a session for each of its two seats.

    python four_game.py tcp://127.0.0.1:8101 [--seed N] [--games N] [--at-once N]
    python four_game.py http://127.0.0.1:8000 --human                 you play against the agent, in this terminal
    python four_game.py http://127.0.0.1:8000 --human --opponent level=easy        you play against a level of it
    python four_game.py http://127.0.0.1:8000 --against tactical --games 100       a script plays against the agent

The sessions of a game have the ids GAME-agent-red and GAME-agent-yellow, which tell the service that they belong
together. A human or a script has no session. The game knows nothing of agents. Write yours in any language.
"""

import argparse
import contextlib
import itertools
import json
import time
import uuid
from collections import Counter

from four_human import ask, drawn
from four_rules import RED, SCRIPTS, YELLOW, Four

from brayx import BrayxError, Client
from brayx.errors import ConfigError
from brayx.gamecore.auth import credentials
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.tcp import TcpSessions

NAMES = {RED: "red", YELLOW: "yellow"}
RESULTS = {1: "win", 0: "draw", -1: "loss"}


def play(first, against="", choose=None, opponent=None):
    """Plays one game: a generator that yields requests ``(kind, seat, body)``, takes replies, and returns the game.

    If ``against`` names a human or a script, it plays yellow without a session: ``choose`` maps its board to a column,
    or to None to give up. Without ``choose`` the generator asks for the column itself, by ``("ask", seat, board)``.
    ``opponent`` is the opponent that red's start requests, such as ``{"level": "easy"}``.
    """
    game = Four(first)
    seats = (RED,) if against else (RED, YELLOW)
    for seat in seats:
        yield "start", seat, {"against": against} | ({"opponent": opponent} if opponent and seat == RED else {})
    while not game.over:
        seat = game.turn
        if seat not in seats:
            seen = game.see(seat)
            column = (yield "ask", seat, seen) if choose is None else choose(seen)
            if column is None:
                yield from give_up(seats)
                raise SystemExit
            game.move(column)
            continue
        reply = yield "tick", seat, {"board": game.see(seat), "legal": game.legal, "reward": 0.0}
        try:
            game.move(json.loads(reply)["move"])
        except (ValueError, KeyError, TypeError) as error:
            yield from give_up(seats)
            said = f'{NAMES[seat]} replied {reply[:80]!r}, expected {{"move": column}} with a legal column'
            raise SystemExit(f"{said}: {type(error).__name__}: {error}") from None
    for seat in seats:
        reward = game.winner * seat
        last = {"board": game.see(seat), "legal": game.legal, "reward": float(reward), "result": RESULTS[reward]}
        yield "stop", seat, last
    return game


def give_up(seats):
    """Stops without a body: the game did not end by its rules."""
    for seat in seats:
        yield "stop", seat, None


def session_id(game, seat):
    return f"{game}-agent-{NAMES[seat]}"


def encode(body):
    return b"" if body is None else json.dumps(body, separators=(",", ":")).encode()


def one_by_one(url, games):
    """Plays games one after the other over any door, with a client for each seat; yields each game when it ends."""
    keys = credentials()
    with Client(url, reconnect_s=30.0, **keys) as red, Client(url, reconnect_s=30.0, **keys) as yellow:
        clients = {RED: red, YELLOW: yellow}
        for game in games:
            name, reply = uuid.uuid4().hex, None
            try:
                while True:
                    kind, seat, body = game.send(reply)
                    if kind == "start":
                        reply = clients[seat].start(encode(body), session_id(name, seat))
                    else:
                        reply = (clients[seat].tick if kind == "tick" else clients[seat].stop)(encode(body))
            except StopIteration as end:
                yield end.value
            except BrayxError:
                for client in clients.values():
                    if client.session is not None:
                        with contextlib.suppress(BrayxError):
                            client.stop()
                raise


def side_by_side(url, games, at_once, on_error):
    """Plays ``at_once`` games on one TCP connection, which needs far less CPU; yields each game when it ends."""
    with TcpSessions(Endpoint.parse(url), timeout_s=30.0, **credentials()) as sessions:
        running = {}

        def send(name, kind, seat, body):
            sessions.submit(StepRequest(StepKind(kind), session_id(name, seat), encode(body)))

        def begin():
            for game in itertools.islice(games, 1):
                name = uuid.uuid4().hex
                running[name] = game
                send(name, *next(game))

        for _ in range(at_once):
            begin()
        while running:
            for session, reply in sessions.exchange():
                name = session.partition("-agent-")[0]
                if name not in running:
                    continue  # an answer to the stops below
                if isinstance(reply, BrayxError):
                    running.pop(name).close()
                    on_error(reply)
                    for seat in NAMES:
                        send(name, "stop", seat, None)
                    begin()
                    continue
                try:
                    send(name, *running[name].send(reply))
                except StopIteration as end:
                    del running[name]
                    yield end.value
                    begin()


def parse_opponent(text):
    """Parses ``level=easy`` to ``{"level": "easy"}``, ``rating=1200`` to ``{"rating": 1200}``."""
    key, _, value = text.partition("=")
    return {key: json.loads(value) if key in ("rating", "version") else value}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the service: http://, ws:// or tcp://")
    parser.add_argument("--seed", type=int, default=0, help="even: red begins the first game; who begins alternates")
    parser.add_argument("--games", type=int, default=None, help="number of games (default: no end)")
    parser.add_argument(
        "--opponent", type=parse_opponent, default=None, metavar="KEY=VALUE",
        help="who plays red: level=easy, rating=1200, player=main or version=3 (default: the champion)",
    )  # fmt: skip
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="concurrent games, over a tcp:// URL")
    yellow = parser.add_mutually_exclusive_group()
    yellow.add_argument("--human", action="store_true", help="you play yellow, in this terminal")
    yellow.add_argument("--against", choices=sorted(SCRIPTS), default="", help="a script plays yellow")
    arguments = parser.parse_args()
    if arguments.at_once > 1 and (arguments.human or not arguments.url.startswith("tcp://")):
        parser.error("--at-once needs a tcp:// URL and no human: only there do sessions share a connection")
    against = "human" if arguments.human else arguments.against
    choose = ask if arguments.human else SCRIPTS.get(against)
    firsts = itertools.cycle((RED, YELLOW) if arguments.seed % 2 == 0 else (YELLOW, RED))
    games = (play(first, against, choose, arguments.opponent) for first in firsts)
    shown = arguments.human or arguments.games is not None
    winners = Counter()

    def on_error(error):
        if shown or isinstance(error, ConfigError):
            raise SystemExit(f"{error}")
        time.sleep(0.1)  # do not flood a service that restarts

    while arguments.games is None or winners.total() < arguments.games:
        left = None if arguments.games is None else arguments.games - winners.total()
        wanted = itertools.islice(games, left)
        try:
            played = (
                side_by_side(arguments.url, wanted, arguments.at_once, on_error)
                if arguments.at_once > 1
                else one_by_one(arguments.url, wanted)
            )
            for game in played:
                winners[game.winner] += 1
                if arguments.human:
                    print(drawn(game.see(YELLOW)))
                if shown:
                    ended = f"{NAMES[game.winner]} wins" if game.winner else "draw"
                    print(f"game {winners.total()}: {ended}", flush=True)
        except BrayxError as error:
            on_error(error)
    print(f"red won {winners[RED]}, yellow won {winners[YELLOW]}, draws {winners[0]}")


if __name__ == "__main__":
    main()
