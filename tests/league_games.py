"""Clients that play the game of `tests/end_to_end/own_league`, many games at once."""

from __future__ import annotations

import json
import threading
import uuid

from brayx.errors import BrayxError
from brayx.gamecore.client import Client

AT_ONCE = 8


def play(red: Client, blue: Client) -> None:
    """Plays a game whose sessions have been started to its end."""
    numbers = [json.loads(client.tick(b"{}"))["number"] for client in (red, blue)]
    for client, margin in ((red, numbers[0] - numbers[1]), (blue, numbers[1] - numbers[0])):
        reward = float((margin > 0) - (margin < 0))
        client.stop(json.dumps({"reward": reward, "result": ["loss", "draw", "win"][int(reward) + 1]}))


class Players:
    """Plays games side by side until it is stopped, or the service is gone.

    Attributes:
        ended: number of games whose stops were both answered.
        games: ids of these games.
        begun: games of which at least one session was started.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.begun = self.ended = 0
        self.games: list[str] = []
        self._threads = [threading.Thread(target=self._play, daemon=True) for _ in range(AT_ONCE)]

    def __enter__(self) -> Players:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _play(self) -> None:
        while not self._stop.is_set():
            try:
                with Client(self._url) as red, Client(self._url) as blue:
                    while not self._stop.is_set():
                        self._game(red, blue)
            except BrayxError:  # the service was killed, or refused a player that broke
                if self._stop.wait(0.02):
                    return

    def _game(self, red: Client, blue: Client) -> None:
        game = uuid.uuid4().hex
        with self._lock:
            self.begun += 1
        red.start(session=f"{game}-agent-red")
        blue.start(session=f"{game}-agent-blue")
        play(red, blue)
        with self._lock:
            self.ended += 1
            self.games.append(game)
