"""Plays any Gymnasium environment as a gamecore: a process that plays games through a door, one session per game.

The start has the contract of the environment's spaces (`brayx.bridges.env_bodies`). A service that takes contracts gets
ticks by it. Any other gets the gym profile, as JSON bodies:

    start  {"env_id": "CartPole-v1", "seed": 7, "num_actions": 2}      seed of this game's reset; of a Discrete space
           and {"first_action": 1} if a Discrete space does not start at 0
    tick   {"obs": [0.1, ...], "reward": 0.0}                          reward of the previous action, 0.0 at first
           and {"action_mask": [1, 0, ...]} if the environment's info has one
    reply  {"action": 1}                                               a number, or nested lists, by the action space
    stop   {"obs": [...], "reward": 1.0, "terminated": true, "truncated": false}

A stop with neither flag means that the gamecore was stopped during the game. Arrays become nested lists, dictionary and
tuple observations objects and lists. If an error of the service ends a game, the next one starts after a pause, which
grows with consecutive errors; each kind of error is printed once to standard error. With ``--reconnect`` a game
survives a broken connection and its session's move to another replica; if the session resumes from a snapshot, the tick
is sent again. Knows nothing of the agent, of Ray or of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium

from brayx.bridges.env_bodies import BEHAVIOUR, EnvBodies, SpacesBodies
from brayx.command_line import EnvOptions
from brayx.errors import ConfigError
from brayx.gamecore import games as playing
from brayx.gamecore.at_once import Game, play_at_once
from brayx.gamecore.client import Client
from brayx.gamecore.contract import Contract
from brayx.gamecore.games import START_S, GameResult, GamesRun, send
from brayx.gamecore.protocol import StepKind
from brayx.spaces import MASK

Env = gymnasium.Env[Any, Any]


def make_env(env_id: str, **kwargs: Any) -> Env:
    """The environment, without Gymnasium's checking wrapper.

    Raises:
        ConfigError: unknown id (the message names the nearest), or the environment cannot be made.
    """
    if ":" in env_id and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that module:id finds modules in the working directory
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, n=3)
        hint = f"; nearest: {', '.join(near)}" if near and env_id not in gymnasium.registry else ""
        raise ConfigError(f"cannot make the environment {env_id!r}: {error}{hint}", env_id=env_id) from error


def contract_of(env_id: str) -> Contract:
    """The contract of an environment's spaces, as its games send it.

    Raises:
        ConfigError: there is no such environment, or a space has no contract.
    """
    with contextlib.closing(make_env(env_id)) as env:
        _, info = env.reset()
        return SpacesBodies(env.observation_space, env.action_space, MASK in info, BEHAVIOUR).bodies.contract


def game_of(
    env: Env,
    *,
    seed: int | None = None,
    max_ticks: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Game[GameResult]:
    """One game of ``env`` as the requests of one session: yields each, takes its reply, and returns the result.

    Args:
        seed: passed to the environment's reset and sent in the start's body.
        max_ticks: truncate the game after this many ticks.
        should_stop: called before each tick; true ends the game with the result ``stopped``.

    Raises:
        BadBody: a reply holds no action of the action space, or an observation is not finite.
    """
    obs, info = env.reset(seed=seed)
    about = {"env_id": env.spec.id if env.spec else "", "seed": seed}
    bodies = EnvBodies(env.observation_space, env.action_space, has_mask=MASK in info)
    session = bodies.started((yield StepKind.START, bodies.start(about)))
    step, tick, action_of = env.step, session.tick, session.action
    reward, total, length = 0.0, 0.0, 0
    terminated = truncated = stopped = False
    while not (terminated or truncated):
        reply = yield StepKind.TICK, tick(obs, reward, info)
        obs, given, terminated, truncated, info = step(action_of(reply))
        reward = float(given)
        total += reward
        length += 1
        if not (terminated or truncated):
            stopped = should_stop()
            truncated = stopped or (max_ticks is not None and length >= max_ticks)
    # A stopped game is neither terminated nor truncated, and its return means nothing.
    cut = bool(truncated) and not stopped
    yield StepKind.STOP, session.stop(obs, reward, terminated=bool(terminated), truncated=cut)
    return GameResult(total, length, "stopped" if stopped else "terminated" if terminated else "truncated")


def play_game(
    env: Env,
    client: Client,
    *,
    seed: int | None = None,
    max_ticks: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GameResult:
    """Plays one game of ``env`` as one session of ``client``; arguments as for `game_of`.

    Raises:
        BadBody: a reply holds no action of the action space, or an observation is not finite.
        BrayxError: any error of the service; the session has ended, or is closed with the connection.
    """
    game = game_of(env, seed=seed, max_ticks=max_ticks, should_stop=should_stop)
    try:
        kind, body = next(game)
        while True:
            if kind is StepKind.TICK:
                kind, body = game.send(send(client.tick, body))
            else:
                kind, body = game.send(
                    client.start(body, timeout_s=START_S) if kind is StepKind.START else send(client.stop, body)
                )
    except StopIteration as end:
        result: GameResult = end.value
        return result


def run_games(
    env_id: str, url: str, *, env_kwargs: dict[str, Any] | None = None, at_once: int = 1, **options: Any
) -> list[GameResult]:
    """Plays games of an environment and returns their results.

    Args:
        env_kwargs: keyword arguments of the environment.
        at_once: number of concurrent games in this process, with their sessions on one TCP connection.
        **options: as for `brayx.gamecore.games.GamesRun`.

    Raises:
        ConfigError: no such environment, or a URL that cannot be used: several games at once need ``tcp://``, and their
            ticks have no numbers (``reconnect_s``).
        BrayxError: the service's last error, after the time limit, or one that every game would get.
    """
    run: GamesRun[GameResult] = GamesRun(url=url, **options)
    if at_once > 1 and run.reconnect_s is not None:
        raise ConfigError("several games at once cannot reconnect: give at_once or reconnect_s, not both")
    limits: dict[str, Any] = {"max_ticks": run.max_ticks, "should_stop": run.should_stop}
    with contextlib.ExitStack() as stack:
        envs = [make_env(env_id, **(env_kwargs or {})) for _ in range(max(1, at_once))]
        for env in envs:
            stack.callback(env.close)
        if at_once > 1:
            return play_at_once(lambda index, seed: game_of(envs[index], seed=seed, **limits), run, at_once)
        client = stack.enter_context(Client(run.endpoint, **run.connection))
        return run.play(lambda seed: play_game(envs[0], client, seed=seed, **limits), client.close)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = playing.command_parser("gym", "Play a Gymnasium environment as a gamecore.")
    made.add_argument("env_id", help="a registered id (CartPole-v1), or module:id")
    made.add_argument(
        "--at-once", type=int, default=1, metavar="GAMES",
        help="concurrent games over one tcp:// connection (default: 1)",
    )  # fmt: skip
    EnvOptions.add(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore gym``; exit codes as for `brayx.gamecore.games.run_command`."""
    return playing.run_command(parser(), argv, run_games, "env_id", "at_once", "env_kwargs")


if __name__ == "__main__":
    sys.exit(main())
