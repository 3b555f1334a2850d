"""A game that speaks the wire of Godot's add-on godot_rl, as an unmodified project does: for tests and benchmarks.

    python -m tests.godot_game --port=11008 --agents=8 --picture

Each agent chases a point on a square. It observes where the point is (``obs``, and with ``--picture`` an 84 x 84
picture), steers by two numbers, and may dash. An episode ends when the point is caught, or after ``--limit`` steps.
Flags of Godot itself are ignored. Standard library only, like a game of its own.
"""

from __future__ import annotations

import json
import math
import random
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

SIDE = 84
"""Height and width of the picture."""
Document = dict[str, Any]


class Chaser:
    """One agent: a point that it steers, and one that it is to catch, both within [-1, 1]."""

    def __init__(self, rng: random.Random, limit: int, *, picture: bool) -> None:
        self._rng, self._limit, self._has_picture = rng, limit, picture
        self.reset()

    def reset(self) -> None:
        """Begins an episode."""
        self.x, self.y, self.target_x, self.target_y = (self._rng.uniform(-1, 1) for _ in range(4))
        self.length = 0

    def step(self, action: Document) -> tuple[float, bool]:
        """Moves; the reward, and whether the episode has ended."""
        steer = [max(-1.0, min(1.0, float(number))) for number in action["steer"]]
        speed = 0.2 if action.get("dash") else 0.1
        before = self._distance
        self.x = max(-1.0, min(1.0, self.x + speed * steer[0]))
        self.y = max(-1.0, min(1.0, self.y + speed * steer[1]))
        self.length += 1
        caught = self._distance < 0.15
        return before - self._distance + caught, caught or self.length >= self._limit

    @property
    def _distance(self) -> float:
        return math.hypot(self.target_x - self.x, self.target_y - self.y)

    def observed(self) -> Document:
        """What the agent sees now."""
        obs: Document = {"obs": [self.target_x - self.x, self.target_y - self.y, self.x, self.y]}
        if self._has_picture:
            pixels = bytearray(SIDE * SIDE * 3)
            for x, y, colour in ((self.x, self.y, 0), (self.target_x, self.target_y, 1)):
                row, column = (min(SIDE - 1, int((value + 1) / 2 * SIDE)) for value in (y, x))
                pixels[(row * SIDE + column) * 3 + colour] = 255
            obs["camera_2d"] = pixels.hex()
        return obs


class GodotStandIn:
    """The game's side of the wire.

    Args:
        port: where the trainer listens.
        agents: number of agents.
        picture: whether they see a picture, too.
        dashes: whether they have the discrete action ``dash``.
        limit: steps of the longest episode.
        seed: of all random numbers.
        spoil: changes a message before it is sent, as a faulty game would; None: the game quits instead.

    Attributes:
        steps: number of steps so far.
    """

    def __init__(
        self,
        port: int,
        *,
        agents: int = 8,
        picture: bool = False,
        dashes: bool = True,
        limit: int = 100,
        seed: int = 1,
        spoil: Callable[[Document], Document | None] = lambda message: message,
    ) -> None:
        rng = random.Random(seed)
        self.agents = [Chaser(rng, limit, picture=picture) for _ in range(agents)]
        self.steps = 0
        self._spoil = spoil
        obs: Document = {"obs": {"size": [4], "space": "box"}}
        if picture:
            obs["camera_2d"] = {"size": [SIDE, SIDE, 3], "space": "box"}
        actions: Document = {"steer": {"size": 2, "action_type": "continuous"}}
        if dashes:
            actions["dash"] = {"size": 2, "action_type": "discrete"}
        self.env_info: Document = {
            "type": "env_info",
            "observation_space": [obs] * agents,
            "action_space": [actions] * agents,
            "n_agents": agents,
            "agent_policy_names": ["shared_policy"] * agents,
        }
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> str:
        """Plays until the trainer ends it; returns why it ended: ``close``, ``disconnected`` or ``quit``."""
        try:
            greeting = self._receive()
            if greeting is None:
                return "disconnected"
            assert greeting["type"] == "handshake"
            while (message := self._receive()) is not None:
                if message["type"] == "close":
                    return "close"
                answer = self._spoil(self._answer(message))
                if answer is None:
                    return "quit"
                self._send(answer)
            return "disconnected"
        except ConnectionError:
            return "disconnected"
        finally:
            self._sock.close()

    def _answer(self, message: Document) -> Document:
        if message["type"] == "env_info":
            return dict(self.env_info)
        if message["type"] == "call":
            return {"type": "call", "returns": [None] * len(self.agents)}
        if message["type"] == "reset":
            for agent in self.agents:
                agent.reset()
            return {"type": "reset", "obs": self._observed(), "info": [{}] * len(self.agents)}
        assert message["type"] == "action"
        results = [agent.step(action) for agent, action in zip(self.agents, message["action"], strict=True)]
        self.steps += 1
        for agent, (_, done) in zip(self.agents, results, strict=True):
            if done:  # as most projects do: what is observed next is the new episode's
                agent.reset()
        return {
            "type": "step",
            "obs": self._observed(),
            "reward": [reward for reward, _ in results],
            "done": [done for _, done in results],
            "info": [{}] * len(self.agents),
        }

    def _observed(self) -> list[Document]:
        return [agent.observed() for agent in self.agents]

    def _send(self, message: Document) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self._sock.sendall(len(data).to_bytes(4, "little") + data)

    def _receive(self) -> Document | None:
        head = self._read(4)
        data = None if head is None else self._read(int.from_bytes(head, "little"))
        return None if data is None else json.loads(data)

    def _read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            received = self._sock.recv(size - len(data))
            if not received:
                return None
            data += received
        return data


def expert_demos(episodes: int = 5) -> list[list[list[list[float]]]]:
    """What the add-on records of an agent that goes straight to its point, for a file in JSON."""
    rng, recorded = random.Random(1), []
    for _ in range(episodes):
        chaser = Chaser(rng, 60, picture=False)
        observed, actions, done = [chaser.observed()["obs"]], [], False
        while not done:
            steer = [max(-1.0, min(1.0, 5 * way)) for way in observed[-1][:2]]
            _, done = chaser.step({"steer": steer, "dash": 1})
            observed.append(chaser.observed()["obs"])
            actions.append([*steer, 1.0])
        recorded.append([observed, actions])
    return recorded


def main(words: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Plays with the options of the command line, ``--name=value``; ``--quit-after=N`` ends it after N answers."""
    options = dict(word.lstrip("-").partition("=")[::2] for word in words)
    left = int(options.get("quit-after", -1))

    def spoil(message: Document) -> Document | None:
        nonlocal left
        left -= 1
        return None if left == 0 else message

    ended = GodotStandIn(
        int(options.get("port", 11008)),
        agents=int(options.get("agents", 8)),
        picture="picture" in options,
        dashes="no-dash" not in options,
        limit=int(options.get("limit", 100)),
        seed=int(options.get("env_seed", 1)),
        spoil=spoil,
    ).run()
    print(f"the stand-in ended: {ended}", flush=True)
    return 3 if ended == "quit" else 0


if __name__ == "__main__":
    sys.exit(main())
