"""Plays any PettingZoo environment as a gamecore: games of several agents, one session for each agent of a game.

The sessions of a game have ids ``GAME-agent-AGENT`` (Bray's form; other characters are percent-encoded), so that a
service knows which sessions belong together. Starts have the contract of the agent's spaces, as those of
`brayx.bridges.gym`. Without contracts bodies are those of the gym profile, with a few more fields:

    start  {"env_id": "...", "seed": 7, "num_actions": 2,          of this agent
            "agent": "red", "agents": ["red", "blue"]}             the game's agents when the session starts
    tick   {"obs": [0.1, ...], "reward": 0.0}                      the agent's reward since its previous tick
    reply  {"action": 1}
    stop   {"obs": [...], "reward": 1.0, "terminated": true, "truncated": false}        of this agent

An ``action_mask`` inside an observation is sent unchanged; one in the agent's info is sent as ``action_mask`` next to
``obs``. By contract either is the mask of the actions, and agents of different spaces have different behaviours. With
``--state``, ticks and stops also have the environment's ``state()`` as ``state``, for a value that sees the whole game;
there is no contract then. In an AEC environment only the agent on turn ticks; in a parallel one all agents tick at the
same time. An agent that dies gets its stop while the others play on; one that enters later gets its session then. If
the service ends one session of a game, the others are stopped without a body and the next game starts. Needs the
package ``pettingzoo``; knows nothing of the agents, of Ray or of torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import os
import re
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from brayx.arrays import jsonable
from brayx.bridges.env_bodies import EnvBodies, TickBodies
from brayx.command_line import SWITCH, EnvOptions
from brayx.components import load_module
from brayx.errors import BrayxError, ConfigError
from brayx.gamecore import games as playing
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.games import Ended, GamesRun, send_async
from brayx.gamecore.protocol import AGENT_MARK
from brayx.spaces import MASK

Api = Literal["aec", "parallel"]
AgentId = Any
"""PettingZoo allows any hashable value as an agent's name; usually it is a string."""

_FAREWELL_S = 2.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class MultiAgentResult:
    """One game.

    Attributes:
        returns: sum of rewards by the agent's name.
        length: ticks of all its agents together.
        ended: ``truncated`` if any agent was truncated, ``terminated`` if the rules ended the game for all.
    """

    returns: Mapping[str, float]
    length: int
    ended: Ended


def make_env(env_id: str, api: Api | None = None, **kwargs: Any) -> Any:
    """The environment.

    Args:
        env_id: an id of PettingZoo's registry (``butterfly/pistonball_v6``), a module with ``env`` or
            ``parallel_env`` (``pettingzoo.butterfly.pistonball_v6``), or ``module:factory``. The working directory
            comes first in the search for modules.
        api: the API to use, if it has both; None: parallel.
        **kwargs: for the environment.

    Raises:
        ConfigError: unknown environment (the message names the nearest), missing packages, or it cannot be made.
    """
    pettingzoo = _package()
    try:
        env = _factory(pettingzoo, env_id, api)(**kwargs)
    except ConfigError:
        raise
    except Exception as error:  # user code: it may raise anything
        raise ConfigError(
            f"cannot make the environment {env_id!r}: {type(error).__name__}: {error}", env_id=env_id
        ) from error
    kinds = {"aec": pettingzoo.AECEnv, "parallel": pettingzoo.ParallelEnv}
    if not isinstance(env, tuple(kinds.values()) if api is None else kinds[api]):
        wanted = "AECEnv or ParallelEnv" if api is None else kinds[api].__name__
        raise ConfigError(f"{env_id!r} made a {type(env).__name__}, expected PettingZoo's {wanted}", env_id=env_id)
    return env


def session_id(game: str, agent: AgentId) -> str:
    """The id of an agent's session: ``GAME-agent-AGENT``; ``-agent-`` occurs only once, so the id can be split
    there."""
    return f"{game}{AGENT_MARK}{quote(str(agent), safe='').replace('agent-', 'agent%2D')}"


class Clients:
    """A pool of clients of one service, reused from game to game. Belongs to one event loop.

    Args:
        make: makes a client.
    """

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._make = make
        self._idle: list[AsyncClient] = []

    def take(self) -> AsyncClient:
        """A client without a session; makes one if all are in use."""
        return self._idle.pop() if self._idle else self._make()

    def give_back(self, client: AsyncClient) -> None:
        """Returns a client whose session has ended."""
        self._idle.append(client)

    async def close(self) -> None:
        """Closes the unused clients."""
        while self._idle:
            await self._idle.pop().close()


async def play_game(
    env: Any,
    clients: Clients,
    *,
    env_id: str = "",
    seed: int | None = None,
    max_ticks: int | None = None,
    state: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> MultiAgentResult:
    """Plays one game of ``env``, with one session and one client for each agent.

    Args:
        env_id: sent in the start's body.
        seed: passed to the environment's reset and sent in the start's body.
        max_ticks: truncate the game once an agent has had this many ticks.
        state: send the game's state with every tick and stop.
        should_stop: called after each step; true ends the game with the result ``stopped``.

    Raises:
        BadBody: a reply holds no action of the agent's action space, or an observation or a state is not finite.
        ConfigError: ``state`` is set, but the environment has no state.
        BrayxError: any error of the service; the game's other sessions are stopped where possible.
    """
    play = _play_together if isinstance(env, _package().ParallelEnv) else _play_turns
    sessions = _Sessions(env, clients, {"env_id": env_id, "seed": seed}, max_ticks, state, should_stop)
    try:
        await play(env, sessions, seed)
    finally:
        await sessions.abandon()
    return sessions.result()


def run_games(
    env_id: str,
    url: str,
    *,
    api: Api | None = None,
    state: bool = False,
    env_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> list[MultiAgentResult]:
    """Plays games of an environment and returns their results; errors as for `brayx.bridges.gym.run_games`.

    Args:
        api: as for `make_env`.
        state: as for `play_game`.
        env_kwargs: keyword arguments of the environment.
        **options: as for `brayx.gamecore.games.GamesRun`.
    """
    run: GamesRun[MultiAgentResult] = GamesRun(url=url, **options)
    endpoint = run.endpoint
    with contextlib.closing(make_env(env_id, api, **(env_kwargs or {}))) as env, asyncio.Runner() as runner:
        clients = Clients(lambda: AsyncClient(endpoint, **run.connection))

        def play(seed: int | None) -> MultiAgentResult:
            game = play_game(
                env,
                clients,
                env_id=env_id,
                seed=seed,
                max_ticks=run.max_ticks,
                state=state,
                should_stop=run.should_stop,
            )
            return runner.run(game)

        try:
            return run.play(play, lambda: runner.run(clients.close()))
        finally:
            runner.run(clients.close())


@dataclass
class _AgentSession:
    client: AsyncClient
    bodies: EnvBodies
    playing: TickBodies | None = None
    ticks: int = 0


class _Sessions:
    """The sessions of one game by agent, and their results."""

    def __init__(
        self,
        env: Any,
        clients: Clients,
        about: dict[str, Any],
        max_ticks: int | None,
        state: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        self._env = env
        self._clients = clients
        self._about = about
        self._max_ticks = max_ticks
        self._with_state = state
        self._should_stop = should_stop
        self._game = uuid.uuid4().hex
        self._players: dict[AgentId, _AgentSession] = {}
        self._returns: dict[str, float] = {}
        self._length = 0
        self._most_ticks = 0
        self._truncated = False
        self._are_alike = True
        self._has_mask = False
        self.stopped = False

    async def start(self, agents: Iterable[AgentId], infos: Mapping[AgentId, Mapping[str, Any]]) -> None:
        """Starts sessions for agents that have none yet."""
        new = [agent for agent in agents if agent not in self._players]
        if not new:
            return
        env = self._env
        if not self._players:
            spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in env.agents]
            self._are_alike = all(pair == spaces[0] for pair in spaces)
            self._has_mask = any(MASK in info for info in infos.values())
        for agent in new:
            bodies = EnvBodies(
                env.observation_space(agent),
                env.action_space(agent),
                has_mask=self._has_mask,
                behaviour="agent" if self._are_alike else _kind_of(agent),
                by_contract=not self._with_state,
            )
            self._players[agent] = _AgentSession(self._clients.take(), bodies)
            self._returns.setdefault(str(agent), 0.0)
        names = [str(agent) for agent in env.agents]
        await _together(self._start(agent, {**self._about, "agent": str(agent), "agents": names}) for agent in new)

    async def _start(self, agent: AgentId, about: dict[str, Any]) -> None:
        player = self._players[agent]
        reply = await player.client.start(
            player.bodies.start(about), session_id(self._game, agent), timeout_s=playing.START_S
        )
        player.playing = player.bodies.started(reply)

    async def tick(self, agent: AgentId, obs: Any, reward: float, info: Mapping[str, Any]) -> Any:
        """The agent's action."""
        player = self._players[agent]
        assert player.playing is not None
        body = player.playing.tick(obs, float(reward), info, **self._state())
        action = player.playing.action(await send_async(player.client.tick, body))
        self._returns[str(agent)] += float(reward)
        self._length += 1
        player.ticks += 1
        self._most_ticks = max(self._most_ticks, player.ticks)
        return action

    async def stop(self, agent: AgentId, obs: Any, reward: float, *, terminated: bool, truncated: bool) -> None:
        """Ends the agent's session, with the result of its last action."""
        player = self._players[agent]
        assert player.playing is not None
        ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
        await send_async(player.client.stop, player.playing.stop(obs, float(reward), **ended, **self._state()))
        self._returns[str(agent)] += float(reward)
        self._truncated |= bool(truncated)
        self._clients.give_back(self._players.pop(agent).client)

    def _state(self) -> dict[str, Any]:
        if not self._with_state:
            return {}
        try:
            return {"state": jsonable(self._env.state())}
        except NotImplementedError:  # PettingZoo's default
            raise ConfigError(f"{self._env} has no state(), which --state needs") from None

    def enough(self) -> bool:
        """Whether to end the game now; called after each step with an agent left."""
        self.stopped = self._should_stop()
        return self.stopped or (self._max_ticks is not None and self._most_ticks >= self._max_ticks)

    async def abandon(self) -> None:
        """Stops the remaining sessions without a body, since the game did not end."""
        players = list(self._players.values())
        self._players.clear()
        await asyncio.gather(*(_part(player.client) for player in players))

    def result(self) -> MultiAgentResult:
        """The result of the game."""
        ended: Ended = "stopped" if self.stopped else "truncated" if self._truncated else "terminated"
        return MultiAgentResult(self._returns, self._length, ended)


async def _play_turns(env: Any, sessions: _Sessions, seed: int | None) -> None:
    """Plays an AEC environment: one agent at a time, in the environment's order."""
    env.reset(seed=seed)
    await sessions.start(env.agents, env.infos)
    while env.agents:
        agent = env.agent_selection
        obs, reward, terminated, truncated, info = env.last()
        if terminated or truncated:
            await sessions.start([agent], env.infos)  # it may die before its first turn
            await sessions.stop(agent, obs, reward, terminated=terminated, truncated=truncated)
            env.step(None)
            continue
        await sessions.start([agent], env.infos)
        env.step(await sessions.tick(agent, obs, reward, info))
        if _alive(env) and sessions.enough():
            cut = not sessions.stopped
            await sessions.start(env.agents, env.infos)
            await _together(
                sessions.stop(
                    agent,
                    env.observe(agent),
                    env._cumulative_rewards[agent],
                    terminated=env.terminations[agent],
                    truncated=env.truncations[agent] or (cut and not env.terminations[agent]),
                )
                for agent in list(env.agents)
            )
            return


def _kind_of(agent: AgentId) -> str:
    """An agent's name without its number: ``wolf`` of ``wolf_3``."""
    return re.sub(r"[_-]?\d+$", "", str(agent)) or "agent"


def _alive(env: Any) -> bool:
    return any(not (env.terminations[agent] or env.truncations[agent]) for agent in env.agents)


async def _play_together(env: Any, sessions: _Sessions, seed: int | None) -> None:
    """Plays a parallel environment: all agents tick at the same time; the environment steps once all have answered."""
    observations, infos = env.reset(seed=seed)
    rewards: Mapping[AgentId, float] = {}
    cut = False
    while env.agents and not cut:
        agents = list(env.agents)
        await sessions.start(agents, infos)
        actions = await _together(
            sessions.tick(agent, observations[agent], rewards.get(agent, 0.0), infos.get(agent, {})) for agent in agents
        )
        observations, rewards, terminations, truncations, infos = env.step(dict(zip(agents, actions, strict=True)))
        cut = bool(env.agents) and sessions.enough()
        ends = []
        for agent in agents:
            terminated = bool(terminations.get(agent, False))
            # An agent removed without a flag was not terminated by the rules.
            truncated = bool(truncations.get(agent, False)) or (agent not in env.agents and not terminated)
            if terminated or truncated or cut:
                truncated = truncated or (not terminated and not sessions.stopped)
                obs, reward = observations.get(agent), rewards.get(agent, 0.0)
                ends.append(sessions.stop(agent, obs, reward, terminated=terminated, truncated=truncated))
        await _together(ends)


async def _together(work: Iterable[Coroutine[Any, Any, _Answer]]) -> list[_Answer]:
    """The results in order. Waits for all, so that no request is cut off, then raises the first error if there is
    one."""
    done = await asyncio.gather(*work, return_exceptions=True)
    answers = []
    for answer in done:
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def _part(client: AsyncClient) -> None:
    try:
        if client.session is not None:
            async with asyncio.timeout(_FAREWELL_S):
                await client.stop()
    except (BrayxError, TimeoutError):
        pass  # the service ends an idle session by itself
    finally:
        await client.close()


def _package() -> Any:
    try:
        import pettingzoo
    except ImportError:
        raise ConfigError(
            "the package 'pettingzoo' is not installed: pip install 'brayx[pettingzoo]'", package="pettingzoo"
        ) from None
    return pettingzoo


def _factory(pettingzoo: Any, env_id: str, api: Api | None) -> Callable[..., Any]:
    """The function that makes the environment."""
    if ":" not in env_id and "/" in env_id:
        return _registered(pettingzoo, env_id, api)
    module, _, name = env_id.partition(":")
    loaded = load_module(module, os.getcwd())
    usual = {"parallel": "parallel_env", "aec": "env"}
    names = [name] if name else [usual[kind] for kind in usual if api in (None, kind)]
    for candidate in names:
        if callable(factory := getattr(loaded, candidate, None)):
            made: Callable[..., Any] = factory
            return made
    raise ConfigError(
        f"module {module!r} has no function {' or '.join(names)}: expected module:factory, or a module with "
        "env or parallel_env in it",
        env_id=env_id,
    )


def _registered(pettingzoo: Any, env_id: str, api: Api | None) -> Callable[..., Any]:
    from pettingzoo.env_registry.exceptions import PettingZooRegistryError

    registries = {"parallel": pettingzoo.parallel_registry, "aec": pettingzoo.aec_registry}
    kinds = [kind for kind in registries if api in (None, kind)]
    for kind in kinds:
        try:
            pettingzoo.spec(kind, env_id)
        except PettingZooRegistryError:
            continue
        return lambda **kwargs: pettingzoo.make(kind, env_id, **kwargs)
    known = [known for kind in kinds for known in registries[kind]]
    near = difflib.get_close_matches(env_id.replace("_v", "-v"), dict.fromkeys(known), n=3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ConfigError(f"PettingZoo has no {api or 'environment'} {env_id!r}{hint}", env_id=env_id)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = playing.command_parser("pettingzoo", "Play a PettingZoo environment, one session for each agent.")
    made.add_argument("env_id", help="butterfly/pistonball_v6, a module with env or parallel_env, or module:factory")
    made.add_argument(
        "--api",
        choices=["aec", "parallel"],
        default=None,
        help="API to use if the environment has both (default: parallel)",
    )
    made.add_argument("--state", help="send the environment's state() with every tick and stop", **SWITCH)
    EnvOptions.add(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore pettingzoo``; exit codes as for `brayx.gamecore.games.run_command`."""
    return playing.run_command(parser(), argv, run_games, "env_id", "api", "state", "env_kwargs")


if __name__ == "__main__":
    sys.exit(main())
