"""Plays Godot projects with the add-on godot_rl as a gamecore: listens for the game, as the add-on's own trainer does.

    brayx gamecore godot --url tcp://127.0.0.1:8101                                   then press Play in Godot
    brayx gamecore godot --url tcp://127.0.0.1:8101 --command ./game.x86_64 --num 4   starts exported builds itself

The agents of a game with one contract become a session, each a row of its ticks (`brayx.bridges.godot_wire` makes the
contracts of what the game announces). On ``done`` an agent's episode is terminated; with ``truncated`` as well, or
after ``--time-limit`` steps, truncated. A game that leaves in mid-episode breaks its agents' episodes off. A fault of a
game ends its connection and is said in one line; the bridge goes on listening. Knows nothing of learning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from brayx.bridges import builds as starting
from brayx.bridges import engine
from brayx.bridges.builds import Builds, add_options, after_fault, say_unused, words_of
from brayx.bridges.engine import AgentStep, EngineAgents, EngineRun, described
from brayx.bridges.godot_wire import PORT, GodotGame, GodotStep
from brayx.errors import BadBody, BrayxError, ConfigError
from brayx.gamecore import games as playing
from brayx.gamecore.contract import Contract
from brayx.restarts import RestartLimits

_HOST = "127.0.0.1"
"""The add-on dials no other address."""
_LOOK_S = 0.2
_END_S = 3.0
"""Time for the games to end when the bridge does."""


class GodotBridge:
    """Plays all games that dial.

    Args:
        run: the service, and how to play.
        ports: where to listen, 0 for a free port.
        command: makes the command line of a build of a port's number and the port; None: games are started by hand.
        limits: how often a build may start again.
        time_limit: an agent's episode that ends with this many steps, or more, was cut by the game's clock.
        game_timeout_s: time limit of an answer of a game.
        on_listen: called with the ports when all are open.
    """

    def __init__(
        self,
        run: EngineRun,
        ports: Sequence[int],
        *,
        command: Callable[[int, int], Sequence[str]] | None = None,
        limits: RestartLimits = RestartLimits(),
        time_limit: int | None = None,
        game_timeout_s: float = 300.0,
        on_listen: Callable[[list[int]], None] = lambda ports: None,
    ) -> None:
        self._run = run
        self._ports, self._command, self._limits, self._on_listen = ports, command, limits, on_listen
        self._time_limit, self._game_timeout_s = time_limit, game_timeout_s
        self._games: dict[asyncio.Task[None], GodotGame] = {}

    async def play(self) -> None:
        """Plays until there are enough episodes, or until it must stop.

        Raises:
            ConfigError: a port is taken, or a build cannot be started.
            StartupError: a build ends too often.
            BrayxError: the service's error that ended all play.
        """
        run = self._run
        async with contextlib.AsyncExitStack() as stack:
            listeners = [stack.enter_context(_listen(port)) for port in self._ports]
            ports = [listener.getsockname()[1] for listener in listeners]
            for number, listener in enumerate(listeners):
                begin = functools.partial(self._begin, number if self._command else None)
                game = functools.partial(GodotGame, self._game_timeout_s, begin)
                server = await asyncio.get_running_loop().create_server(game, sock=listener)
                stack.callback(server.close)
            commands = [self._command(number, port) for number, port in enumerate(ports)] if self._command else []
            if not commands:
                port = ports[0]
                run.say(f"listens at {_HOST}:{port}: press Play in Godot, or start the game with --port={port}")
            builds = await stack.enter_async_context(Builds(commands, run.say, run.builds, self._limits))
            stack.push_async_callback(self._end)
            self._on_listen(ports)
            while not await run.wait(_LOOK_S):
                builds.watch()

    async def _end(self) -> None:
        """Ends the games; those whose service does not answer are cancelled."""
        self._run.end()
        for game in self._games.values():
            game.interrupt()
        tasks = [*self._games]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_END_S)
            for task in late:
                task.cancel()

    def _begin(self, number: int | None, game: GodotGame) -> None:
        """Plays a game that has connected."""
        name = f"the game at {game.peer}" if number is None else f"build {number}"
        game.say = lambda line: self._run.say(f"{name} {line}")
        task = asyncio.create_task(self._play(game, name))
        self._games[task] = game
        task.add_done_callback(self._games.pop)

    async def _play(self, game: GodotGame, name: str) -> None:
        """Plays a game to its end."""
        agents = EngineAgents(self._run)
        try:
            await self._play_episodes(game, name, agents)
            await agents.break_off()
        except BrayxError as error:
            game.say(f"was closed: {error.message}{after_fault(by_hand=self._command is None)}")
            await agents.break_off()
        finally:
            game.close()

    async def _play_episodes(self, game: GodotGame, name: str, agents: EngineAgents) -> None:
        contracts = await game.announce()
        step = None if contracts is None else await game.reset()
        if contracts is None or step is None:
            return self._say_left(name, 0)
        kinds = "; ".join(dict.fromkeys(map(described, contracts)))
        self._run.say(f"{name} plays with {len(contracts)} agents: {kinds}")
        lengths = [0] * len(contracts)
        last = step.obs
        steps = 0
        while step is not None:
            actions = await self._exchange(agents, self._steps(step, contracts, lengths, last))
            if actions is None:
                return None
            last = step.obs
            step = await game.act([actions[agent] for agent in range(len(contracts))])
            steps += step is not None
        return self._say_left(name, steps)

    async def _exchange(
        self, agents: EngineAgents, steps: Iterable[tuple[Contract, list[AgentStep]]]
    ) -> dict[int, dict[str, Any]] | None:
        """The agents' actions; None if the bridge ends."""
        try:
            return None if self._run.is_over() else await agents.exchange(steps)
        except BadBody:  # the game's fault
            raise
        except BrayxError as error:
            if not self._run.is_over():
                self._run.fail(error)
            return None

    def _say_left(self, name: str, steps: int) -> None:
        if not self._run.is_over():
            again = "" if self._command else "; press Play to go on"
            self._run.say(f"{name} has left after {steps} steps{again}")

    def _steps(
        self, step: GodotStep, contracts: Sequence[Contract], lengths: list[int], last: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Contract, list[AgentStep]]]:
        """What the agents' sessions get: the end of an episode that is done, and what the agent observes now.

        What an agent observed at an end is not known, since ``step`` may show its next episode. So the value after a
        cut is that of what it observed before, ``last``.
        """
        steps: dict[int, tuple[Contract, list[AgentStep]]] = {id(contract): (contract, []) for contract in contracts}
        for agent, contract in enumerate(contracts):
            reward, info, of_contract = step.rewards[agent], step.infos[agent], steps[id(contract)][1]
            if step.dones[agent]:
                is_cut = step.truncated[agent] or (self._time_limit is not None and lengths[agent] >= self._time_limit)
                ended: Literal["terminated", "truncated"] = "truncated" if is_cut else "terminated"
                of_contract.append(AgentStep(agent, last[agent], reward, ended=ended, info=info))
                lengths[agent], reward, info = 0, 0.0, {}
            of_contract.append(AgentStep(agent, step.obs[agent], reward, info=info))
            lengths[agent] += 1
        return [*steps.values()]


async def play(
    run: EngineRun,
    *,
    listen: int = PORT,
    command: str = "",
    num: int = 1,
    speedup: float | None = None,
    action_repeat: int | None = None,
    fixed_fps: int | None = None,
    headless: bool = True,
    time_limit: int | None = None,
    game_timeout_s: float = 300.0,
    on_listen: Callable[[list[int]], None] = lambda ports: None,
    **limits: Any,
) -> None:
    """Plays games of a Godot project.

    Args:
        run: the service, and how to play.
        listen: port for games that are started by hand; 0: a free one.
        command: command line of an exported build; empty: games are started by hand.
        num: number of builds. Each has its own port, and the seeds follow each other.
        speedup, action_repeat, fixed_fps: flags of the builds; None: as exported.
        headless: the builds draw nothing; not for agents that see.
        time_limit, game_timeout_s, on_listen: as for `GodotBridge`.
        **limits: as for `brayx.restarts.RestartLimits`.

    Raises:
        ConfigError: a port is taken, a build cannot be started, or the service takes no contracts.
        StartupError: a build ends too often.
        BrayxError: the service's last error.
    """
    flags = ["--disable-render-loop", "--headless"] if headless else []
    flags += [] if fixed_fps is None else ["--fixed-fps", f"{fixed_fps}"]
    named = {"action_repeat": action_repeat, "speedup": speedup}
    flags += [f"--{name}={value:g}" for name, value in named.items() if value is not None]
    words, first_seed = words_of(command) if command else [], run.run.seed
    if not words:
        of_builds = {**named, "fixed_fps": fixed_fps, "restarts": limits.get("restarts")}
        given = {name: value is not None for name, value in of_builds.items()}
        say_unused(run.say, num=num > 1, headless=not headless, **given)

    def build(number: int, port: int) -> list[str]:
        seed = [] if first_seed is None else [f"--env_seed={first_seed + number}"]
        return [*words, f"--port={port}", *seed, *flags]

    await GodotBridge(
        run,
        [0] * num if command else [listen],
        command=build if command else None,
        limits=RestartLimits(**limits),
        time_limit=time_limit,
        game_timeout_s=game_timeout_s,
        on_listen=on_listen,
    ).play()


run_games = functools.partial(engine.run_games, play)
"""Plays games of a Godot project at a service elsewhere: `brayx.bridges.engine.run_games`."""


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError:
        raise ConfigError(
            f"port {port} is taken: does another training wait for Godot? Stop it; or give --listen PORT (`brayx "
            "train`: --set game.listen=PORT), and start the game with --port=PORT",
            port=port,
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = playing.command_parser(
        "godot", "Play Godot projects that use the add-on godot_rl, unmodified.", is_engine=True
    )
    add_options(made, listen=PORT, ports="; 0: a free one (default: %(default)s)", headless=True)
    made.add_argument("--speedup", type=float, default=None, help="how much faster builds run (default: as exported)")
    made.add_argument(
        "--action-repeat", type=int, default=None, help="frames for each action of builds (default: as exported)"
    )
    made.add_argument(
        "--fixed-fps", type=int, default=None, help="frames per second of builds' own time (default: real time)"
    )
    made.add_argument(
        "--time-limit", type=int, default=None, metavar="STEPS",
        help="an episode that is done after this many steps or more was cut by the game's clock (reset_after)",
    )  # fmt: skip
    made.add_argument(
        "--game-timeout-s", type=float, default=300.0, help="time limit of a game's answer (default: %(default)g)"
    )
    return made


OPTIONS = (*starting.OPTIONS, "speedup", "action_repeat", "fixed_fps", "time_limit", "game_timeout_s")
"""Options of the command line that `play` takes."""


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore godot``; exit codes as for `brayx.gamecore.games.run_command`."""
    return playing.run_command(parser(), argv, run_games, *OPTIONS)


if __name__ == "__main__":
    sys.exit(main())
