"""Any Gymnasium environment as a gamecore: a process that plays games through a door, one session a game.

The gym profile, as JSON bodies:

    start  {"env_id": "CartPole-v1", "seed": 7}                        seed of this game's reset
    tick   {"obs": [0.1, ...], "reward": 0.0}                          reward of the previous action, 0.0 at first
    reply  {"action": 1}                                               a number, or lists as the action space has them
    stop   {"obs": [...], "reward": 1.0, "terminated": true, "truncated": false}

A stop with neither flag is of a game that was broken off because the gamecore was told to end. Arrays are nested
lists, dictionary and tuple observations objects and lists. A game that an error of the service ends
is given up, told on standard error in one line, and a new one is started, with a growing pause while errors follow
each other. Knows nothing of the agent, of Ray or of torch.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import gymnasium
import numpy as np

from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    SessionLost,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore.client import Client
from brayx.gamecore.transports import Endpoint

Env = gymnasium.Env[Any, Any]

RETRIED = (SessionLost, SessionUnknown, AgentError, Overloaded, DeadlineExceeded, TransportError)
"""What ends one game only: errors that another session may not meet."""

GRACE_S = 5.0
"""How long the game on may take to stop after a signal, before it is broken off."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_PARENT_CHECK_S = 1.0

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class GameResult:
    """One game: the sum of its rewards, its number of ticks, and how it ended."""

    total_reward: float
    length: int
    ended: Literal["terminated", "truncated", "stopped"]


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
    action_of = _action_reader(env)
    obs, _ = env.reset(seed=seed)
    client.start(_dumps({"env_id": env.spec.id if env.spec else "", "seed": seed}))
    tick, step, loads = client.tick, env.step, json.loads
    reward, total, length = 0.0, 0.0, 0
    terminated = truncated = stopped = False
    while not (terminated or truncated):
        reply = tick(_encode({"obs": _jsonable(obs), "reward": reward}))
        try:
            action = action_of(loads(reply)["action"])
        except (ValueError, KeyError, TypeError) as error:
            raise _bad_action(reply, env, error) from None
        obs, given, terminated, truncated, _ = step(action)
        reward = float(given)
        total += reward
        length += 1
        if not (terminated or truncated):
            stopped = should_stop()
            truncated = stopped or (max_ticks is not None and length >= max_ticks)
    # A game that was broken off ended in neither way, and its return says nothing about the agent.
    cut = bool(truncated) and not stopped
    last = {"obs": _jsonable(obs), "reward": reward, "terminated": bool(terminated), "truncated": cut}
    client.stop(_encode(last))
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
    give_up_after_s: float = 60.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[GameResult]:
    """Play ``games`` games (None: until ``should_stop``) and give their results.

    Args:
        door: scheme to use instead of the URL's own.
        seed: makes the games repeatable; each game gets a seed of its own drawn from it.
        max_ticks, should_stop: as of `play_game`; a game that was stopped is not among the results.
        on_game: called after each game.
        timeout_s: of one request.
        give_up_after_s: for how long errors may follow each other without one reply between them.

    With ``games`` None nothing is kept, as there may be millions: the list is empty, and `on_game` tells them all.

    Raises:
        ConfigError: no such environment, or a URL that cannot be used.
        BrayxError: what the service answered last, when it is given up, or when another game would get it too.
    """
    results: list[GameResult] = []
    env = make_env(env_id, **(env_kwargs or {}))
    try:
        with Client(url if door is None else Endpoint.parse(url).door_url(door), timeout_s=timeout_s) as client:
            seeds = _seeds(seed)
            patience = _Patience(give_up_after_s)
            while (games is None or len(results) < games) and not should_stop():
                try:
                    result = play_game(env, client, seed=next(seeds), max_ticks=max_ticks, should_stop=should_stop)
                except RETRIED as error:
                    client.close()
                    patience.after(error, should_stop)
                    continue
                patience.reset()
                if result.ended == "stopped":
                    break
                on_game(result)
                if games is not None:
                    results.append(result)
    finally:
        env.close()
    return results


class _Patience:
    """Pauses between failed games: doubling, with jitter, until errors have followed each other for too long."""

    def __init__(self, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self.reset()

    def reset(self) -> None:
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def after(self, error: BrayxError, should_stop: Callable[[], bool]) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if now + pause_s - self._since > self._give_up_after_s:
            raise error
        print(f"gamecore {os.getpid()}: game ended by {error.code}: {error}; next in {pause_s:.1f} s", file=sys.stderr)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        while (left := now + pause_s - time.monotonic()) > 0 and not should_stop():
            time.sleep(min(left, 0.05))


def _seeds(seed: int | None) -> Iterator[int | None]:
    """A seed for each game: far apart for neighbouring ``seed``, unlike seed + 1, which another gamecore may have."""
    game = 0
    while True:
        yield None if seed is None else int(np.random.SeedSequence([seed, game]).generate_state(1)[0])
        game += 1


def _encode(document: dict[str, Any]) -> bytes:
    try:
        return _dumps(document).encode()
    except ValueError:
        raise BadBody(f"the environment gave NaN or infinity, which JSON cannot carry: {document}") from None


def _jsonable(obs: Any) -> Any:
    if isinstance(obs, np.ndarray | np.generic):
        return obs.tolist()
    if isinstance(obs, dict):
        return {str(name): _jsonable(leaf) for name, leaf in obs.items()}
    if isinstance(obs, tuple | list):
        return [_jsonable(leaf) for leaf in obs]
    return obs


def _action_reader(env: Env) -> Callable[[Any], Any]:
    """What turns the JSON of an action into one that ``env.step`` takes; raises ValueError for one it does not."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        first, past = int(space.start), int(space.start + space.n)

        def read_discrete(action: Any) -> int:
            if type(action) is not int or not first <= action < past:
                raise ValueError(f"not an integer from {first} to {past - 1}")
            return action

        return read_discrete

    def read(action: Any) -> Any:
        if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary):
            action = np.asarray(action, dtype=space.dtype)
        elif isinstance(space, gymnasium.spaces.Tuple):
            action = tuple(action)
        if not space.contains(action):
            raise ValueError(f"not in {space}")
        return action

    return read


def _bad_action(reply: bytes, env: Env, error: Exception) -> BadBody:
    quoted = reply[:120].decode("utf-8", "replace")
    reason = "no field 'action'" if isinstance(error, KeyError) else error
    return BadBody(f'the reply {quoted!r} is no {{"action": ...}} of {env.action_space}: {reason}')


class _Stop:
    """Asked by the game loop whether to end: after SIGTERM or SIGINT, or when the parent process has gone."""

    def __init__(self, die_with_parent: bool) -> None:
        self.asked = False
        self._parent = os.getppid() if die_with_parent else None
        self._next_check = 0.0

    def __call__(self) -> bool:
        if self._parent is not None and not self.asked:
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + _PARENT_CHECK_S
                if os.getppid() != self._parent:
                    self._ask()
        return self.asked

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self._ask()

    def on_parent_thread_death(self, number: int, frame: FrameType | None) -> None:
        # The kernel signals the death of the thread that started this process; the process itself may live on.
        if os.getppid() != self._parent and not self.asked:
            self._ask()

    def _ask(self) -> None:
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _signals(stop: _Stop, die_with_parent: bool) -> Iterator[None]:
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: stop.on_signal,
        signal.SIGINT: stop.on_signal,
        signal.SIGALRM: _raise_interrupt,
        signal.SIGUSR1: stop.on_parent_thread_death,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    if die_with_parent and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGUSR1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore gym``; gives the exit code: 0 done or stopped, 1 service failed, 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="brayx gamecore gym", description="Play a Gymnasium environment as a gamecore."
    )
    parser.add_argument("env_id", help="a registered id (CartPole-v1), or module:id of your own")
    parser.add_argument("--url", required=True, help="of the service: http://host:port or ws://host:port")
    parser.add_argument("--games", type=int, default=None, help="how many to play (default: until stopped)")
    parser.add_argument("--door", choices=["http", "ws"], default=None, help="protocol to use (default: the URL's)")
    parser.add_argument("--seed", type=int, default=None, help="makes the games repeatable")
    parser.add_argument("--max-ticks", type=int, default=None, help="cut games off after so many ticks")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="of one request")
    parser.add_argument("--give-up-after-s", type=float, default=60.0, help="how long errors may follow each other")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    parser.add_argument("--json", action="store_true", help="print each game as a line of JSON, and no summary")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started this one ends"
    )
    options = parser.parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a module:id of one's own lies where the game is started

    count, total, ticks = 0, 0.0, 0
    began = time.monotonic()

    def on_game(result: GameResult) -> None:
        nonlocal count, total, ticks
        count, total, ticks = count + 1, total + result.total_reward, ticks + result.length
        if options.json:
            print(_dumps({"return": result.total_reward, "length": result.length, "ended": result.ended}), flush=True)
        elif not options.quiet:
            print(f"game {count}: return {result.total_reward:g}, {result.length} ticks, {result.ended}", flush=True)

    stop = _Stop(options.die_with_parent)
    code = 0
    with _signals(stop, options.die_with_parent):
        try:
            run_games(
                options.env_id,
                options.url,
                games=options.games,
                door=options.door,
                seed=options.seed,
                max_ticks=options.max_ticks,
                on_game=on_game,
                timeout_s=options.timeout_s,
                give_up_after_s=options.give_up_after_s,
                should_stop=stop,
            )
        except KeyboardInterrupt:
            pass  # asked twice, or the service took too long to let the game end
        except BrayxError as error:
            if not stop.asked:
                print(f"brayx gamecore gym: {error}", file=sys.stderr)
                code = 2 if isinstance(error, ConfigError) else 1
    if options.json:
        return code
    rate = ticks / max(time.monotonic() - began, 1e-9)
    mean = f"{total / count:g}" if count else "none"
    print(f"{count} games, mean return {mean}, {ticks} ticks, {rate:.0f} ticks/s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
