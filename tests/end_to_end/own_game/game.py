"""The game: a ship of some colour comes, the lookout signals, the keeper opens a gate; a point if it has that colour.

python game.py http://127.0.0.1:8000 --games 10
"""

import argparse
import itertools
import random

from signals_pb2 import Choice, Sight

from brayx import Client

COLOURS = 3
ROUNDS = 10


def play(client: Client, rng: random.Random) -> int:
    """Plays a game as one session, and gives the points that were made."""
    points, reward = 0, 0
    client.start()
    for _ in range(ROUNDS):
        colour = rng.randrange(COLOURS)
        reply = client.tick(Sight(colour=colour, reward=reward).SerializeToString())
        reward = int(Choice.FromString(reply).gate == colour)
        points += reward
    client.stop(Sight(reward=reward, over=True).SerializeToString())
    return points


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--games", type=int, help="default: until stopped")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with Client(arguments.url) as client:
        for _ in range(arguments.games) if arguments.games else itertools.count():
            print(play(client, rng), flush=True)
