"""The game, in its own process: a ball falls, a paddle catches it. Ten balls a game, +1 or -1 for each.

    python catch_game.py http://127.0.0.1:8000 [--seed N] [--games N]

It knows nothing of agents: it sends observations and carries out actions. Yours may be written in any language.
"""

import argparse
import json
import random

from brayx import BrayxError, Client
from brayx.gamecore.auth import credentials

HEIGHT, WIDTH, BALLS = 8, 5, 10


class Catch:
    """The rules. ``see()`` is one tick's observation; ``move`` takes -1, 0 or +1 and gives the reward."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.balls = 0
        self.paddle = WIDTH // 2
        self._drop()

    def _drop(self) -> None:
        self.row, self.column = 0, self.rng.randrange(WIDTH)

    def see(self) -> dict[str, int]:
        return {"row": self.row, "column": self.column, "paddle": self.paddle}

    @property
    def over(self) -> bool:
        return self.balls == BALLS

    def move(self, by: int) -> float:
        self.paddle = min(max(self.paddle + by, 0), WIDTH - 1)
        self.row += 1
        if self.row < HEIGHT - 1:
            return 0.0
        reward = 1.0 if self.column == self.paddle else -1.0
        self.balls += 1
        self._drop()
        return reward


def play(client: Client, rng: random.Random) -> float:
    """One game through the door; its return."""
    game, reward, total = Catch(rng), 0.0, 0.0
    client.start()
    while not game.over:
        reply = json.loads(client.tick(json.dumps({**game.see(), "reward": reward})))
        reward = game.move(reply["move"])
        total += reward
    client.stop(json.dumps({**game.see(), "reward": reward}))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the service: http://, ws:// or tcp://")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, default=None, help="then stop (default: play on)")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    played = 0
    while arguments.games is None or played < arguments.games:
        try:
            with Client(arguments.url, reconnect_s=30.0, **credentials()) as client:
                while arguments.games is None or played < arguments.games:
                    total = play(client, rng)
                    played += 1
                    if arguments.games is not None:
                        print(f"game {played}: {total:+g}", flush=True)
        except BrayxError as error:
            if arguments.games is not None:
                raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
