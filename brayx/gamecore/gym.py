"""Any Gymnasium environment as a gamecore: a process that plays games through a door, one session a game.

The gym profile, as JSON bodies:

    start  {"env_id": "CartPole-v1", "seed": 7}                        seed of this game's reset
    tick   {"obs": [0.1, ...], "reward": 0.0}                          reward of the previous action, 0.0 at first
           and {"action_mask": [1, 0, ...]} if the environment's info has one
    reply  {"action": 1}                                               a number, or lists as the action space has them
    stop   {"obs": [...], "reward": 1.0, "terminated": true, "truncated": false}

A stop with neither flag is of a game that was broken off because the gamecore was told to end. Arrays are nested
lists, dictionary and tuple observations objects and lists. A game that an error of the service ends is given up and a
new one is started, with a growing pause while errors follow each other; of those standard error tells each kind once,
and how it came out. With ``--reconnect`` a game outlives its connection, and its session's move to another replica; one
whose session goes on from a snapshot gives the tick again. Knows nothing of the agent, of Ray or of torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium

from brayx.errors import ConfigError
from brayx.gamecore import games as playing
from brayx.gamecore.client import Client
from brayx.gamecore.games import Ended, action_reader, encode, jsonable, send

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True, slots=True)
class GameResult:
    """One game: the sum of its rewards, its number of ticks, and how it ended."""

    total_reward: float
    length: int
    ended: Ended

    @property
    def returns(self) -> Mapping[str, float]:
        return {"": self.total_reward}


def make_env(env_id: str, **kwargs: Any) -> Env:
    """The environment, without Gymnasium's checking wrapper.

    Raises:
        ConfigError: there is none of that id (the nearest ones are named), or it cannot be made.
    """
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, n=3)
        hint = f"; nearest: {', '.join(near)}" if near and env_id not in gymnasium.registry else ""
        raise ConfigError(f"cannot make the environment {env_id!r}: {error}{hint}", env_id=env_id) from error


def play_game(
    env: Env,
    client: Client,
    *,
    seed: int | None = None,
    max_ticks: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GameResult:
    """Play one game of ``env`` as one session of ``client``.

    Args:
        seed: given to the environment's reset and told at start.
        max_ticks: cut the game off, as truncated, after so many ticks.
        should_stop: asked before each tick; true breaks the game off, told as ``stopped``.

    Raises:
        BadBody: a reply holds no action of the action space, or an observation is not finite.
        BrayxError: whatever the service answers; the session is over, or closed with the connection.
    """
    action_of = action_reader(env.action_space)
    obs, info = env.reset(seed=seed)
    client.start(encode({"env_id": env.spec.id if env.spec else "", "seed": seed}))
    tick, step = client.tick, env.step
    reward, total, length = 0.0, 0.0, 0
    terminated = truncated = stopped = False
    while not (terminated or truncated):
        document = {"obs": jsonable(obs), "reward": reward}
        if "action_mask" in info:
            document["action_mask"] = jsonable(info["action_mask"])
        action = action_of(send(tick, encode(document)))
        obs, given, terminated, truncated, info = step(action)
        reward = float(given)
        total += reward
        length += 1
        if not (terminated or truncated):
            stopped = should_stop()
            truncated = stopped or (max_ticks is not None and length >= max_ticks)
    # A game that was broken off ended in neither way, and its return says nothing about the agent.
    cut = bool(truncated) and not stopped
    last = {"obs": jsonable(obs), "reward": reward, "terminated": bool(terminated), "truncated": cut}
    send(client.stop, encode(last))
    return GameResult(total, length, "stopped" if stopped else "terminated" if terminated else "truncated")


def run_games(
    env_id: str,
    url: str,
    *,
    games: int | None,
    door: Literal["http", "ws"] | None = None,
    seed: int | None = None,
    max_ticks: int | None = None,
    on_game: Callable[[GameResult], None] = lambda result: None,
    env_kwargs: dict[str, Any] | None = None,
    timeout_s: float = 30.0,
    reconnect_s: float | None = None,
    give_up_after_s: float = 60.0,
    should_stop: Callable[[], bool] = lambda: False,
    key: str = "",
    secret: bytes = b"",
) -> list[GameResult]:
    """Play ``games`` games (None: until ``should_stop``) and give their results.

    Args:
        door: scheme to use instead of the URL's own.
        seed: makes the games repeatable; each game gets a seed of its own drawn from it.
        max_ticks, should_stop: as of `play_game`; a game that was stopped is not among the results.
        on_game: called after each game.
        timeout_s: of one request.
        give_up_after_s: for how long errors may follow each other without one whole game between them.
        reconnect_s, key, secret: as of `Client`.

    With ``games`` None nothing is kept, as there may be millions: the list is empty, and `on_game` tells them all.

    Raises:
        ConfigError: no such environment, or a URL that cannot be used.
        BrayxError: what the service answered last, when it is given up, or when another game would get it too.
    """
    env = make_env(env_id, **(env_kwargs or {}))
    try:
        url = playing.door_url(url, door)
        with Client(url, timeout_s=timeout_s, reconnect_s=reconnect_s, key=key, secret=secret) as client:
            return playing.play_games(
                lambda seed: play_game(env, client, seed=seed, max_ticks=max_ticks, should_stop=should_stop),
                client.close,
                games=games,
                seed=seed,
                on_game=on_game,
                give_up_after_s=give_up_after_s,
                should_stop=should_stop,
            )
    finally:
        env.close()


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore gym``; exit codes as of `brayx.gamecore.games.run_command`."""
    parser = argparse.ArgumentParser(
        prog="brayx gamecore gym", description="Play a Gymnasium environment as a gamecore."
    )
    parser.add_argument("env_id", help="a registered id (CartPole-v1), or module:id of your own")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a module:id of one's own lies where the game is started

    def play(
        options: argparse.Namespace, on_game: Callable[[playing.Result], None], should_stop: Callable[[], bool]
    ) -> None:
        run_games(
            options.env_id,
            options.url,
            on_game=on_game,
            should_stop=should_stop,
            **playing.wishes(options),
        )

    return playing.run_command("gym", parser, argv, play)


if __name__ == "__main__":
    sys.exit(main())
