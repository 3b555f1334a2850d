"""Plays Godot projects with the add-on godot_rl as a gamecore: listens for the game, as the add-on's own trainer does.

    brayx gamecore godot --url tcp://127.0.0.1:8101                                   then press Play in Godot
    brayx gamecore godot --url tcp://127.0.0.1:8101 --command ./game.x86_64 --num 4   starts exported builds itself

The agents of a game with one contract become a session, each a row of its ticks (`brayx.bridges.godot_wire` makes the
contracts of what the game announces). On ``done`` an agent's episode is terminated; with ``truncated`` beside it, or
after ``--time-limit`` steps, truncated. A game that leaves in mid-episode breaks its agents' episodes off. A fault of a
game ends its connection and is said in one line; the bridge goes on listening. Knows nothing of learning.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from brayx.bridges.builds import Builds, add_options, words_of
from brayx.bridges.engine import AgentStep, EngineAgents, EngineRun, described
from brayx.bridges.godot_wire import PORT, GodotGame, GodotStep
from brayx.errors import BadBody, BrayxError, ConfigError
from brayx.gamecore import games as playing
from brayx.gamecore.contract import Contract
from brayx.gamecore.games import GameResult, GamesRun, say

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
        time_limit: an agent's episode that ends with this many steps, or more, was cut by the game's clock.
        game_timeout_s: time limit of an answer of a game.

    Attributes:
        ports: where it listens, while it plays.
    """

    def __init__(
        self,
        run: GamesRun[GameResult],
        ports: Sequence[int],
        *,
        command: Callable[[int, int], Sequence[str]] | None = None,
        time_limit: int | None = None,
        game_timeout_s: float = 300.0,
    ) -> None:
        self._run = EngineRun(run)
        self._wanted_ports, self._command = ports, command
        self._time_limit, self._game_timeout_s = time_limit, game_timeout_s
        self.ports: list[int] = []
        self._threads: list[threading.Thread] = []

    def play(self) -> list[GameResult]:
        """Plays until there are enough episodes, or until it must stop; returns their results.

        Raises:
            ConfigError: a port is taken, or a build cannot be started.
            BrayxError: the service's error that ended all play.
        """
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(_listen(port)) for port in self._wanted_ports]
            self.ports = [listener.getsockname()[1] for listener in listeners]
            commands = [self._command(number, port) for number, port in enumerate(self.ports)] if self._command else []
            if not commands:
                port = self.ports[0]
                say(f"listens at {_HOST}:{port}: press Play in Godot, or start the game with --port={port}")
            builds = stack.enter_context(Builds(commands, say))
            stack.callback(self._end)
            while not self._run.is_over():
                for listener in select.select(listeners, [], [], _LOOK_S)[0]:
                    self._accept(listener, listeners.index(listener) if commands else None)
                builds.watch()
        return self._run.results()

    def _end(self) -> None:
        """Ends the games; their threads are left to the process's end if the service does not answer."""
        self._run.end()
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket, number: int | None) -> None:
        sock, address = listener.accept()
        name = f"the game at {address[0]}:{address[1]}" if number is None else f"build {number}"
        game = GodotGame(sock, self._game_timeout_s, self._run.is_over, lambda line: say(f"{name} {line}"))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._play, args=(game, name), name="brayx-godot", daemon=True))
        self._threads[-1].start()

    def _play(self, game: GodotGame, name: str) -> None:
        """Plays a game to its end."""
        agents = EngineAgents(self._run.games_run)
        try:
            self._play_episodes(game, name, agents)
        except BrayxError as error:
            say(f"{name} was closed: {error.message}")
        finally:
            agents.break_off()
            game.close()

    def _play_episodes(self, game: GodotGame, name: str, agents: EngineAgents) -> None:
        contracts = game.announce()
        step = None if contracts is None else game.reset()
        if contracts is None or step is None:
            return self._say_left(name, 0)
        kinds = "; ".join(dict.fromkeys(map(described, contracts)))
        say(f"{name} plays with {len(contracts)} agents: {kinds}")
        lengths = [0] * len(contracts)
        last = step.obs
        steps = 0
        while step is not None:
            actions = self._exchange(agents, self._steps(step, contracts, lengths, last))
            if actions is None:
                return None
            last = step.obs
            step = game.act([actions[agent] for agent in range(len(contracts))])
            steps += step is not None
        return self._say_left(name, steps)

    def _exchange(
        self, agents: EngineAgents, steps: Iterable[tuple[Contract, list[AgentStep]]]
    ) -> dict[int, dict[str, Any]] | None:
        """The agents' actions; None if the bridge ends."""
        try:
            return None if self._run.is_over() else agents.exchange(steps)
        except BadBody:  # the game's fault
            raise
        except BrayxError as error:
            if not self._run.is_over():
                self._run.fail(error)
            return None

    def _say_left(self, name: str, steps: int) -> None:
        if not self._run.is_over():
            again = "" if self._command else "; press Play to go on"
            say(f"{name} has left after {steps} steps{again}")

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


def run_games(
    url: str,
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
    **options: Any,
) -> list[GameResult]:
    """Plays games of a Godot project and returns the results of their agents' episodes.

    Args:
        listen: port for games that are started by hand; 0: a free one.
        command: command line of an exported build; empty: games are started by hand.
        num: number of builds. Each has a port of its own, and the seeds follow each other.
        speedup, action_repeat, fixed_fps: flags of the builds; None: as exported.
        headless: the builds draw nothing; not for agents that see.
        time_limit, game_timeout_s: as for `GodotBridge`.
        **options: as for `brayx.gamecore.games.GamesRun`.

    Raises:
        ConfigError: a port is taken, a build cannot be started, or the service takes no contracts.
        BrayxError: the service's last error.
    """
    run: GamesRun[GameResult] = GamesRun(url=url, **options)

    flags = ["--disable-render-loop", "--headless"] if headless else []
    flags += [] if fixed_fps is None else ["--fixed-fps", f"{fixed_fps}"]
    named = {"action_repeat": action_repeat, "speedup": speedup}
    flags += [f"--{name}={value:g}" for name, value in named.items() if value is not None]

    words = words_of(command) if command else []

    def build(number: int, port: int) -> list[str]:
        seed = [] if run.seed is None else [f"--env_seed={run.seed + number}"]
        return [*words, f"--port={port}", *seed, *flags]

    return GodotBridge(
        run,
        [0] * num if command else [listen],
        command=build if command else None,
        time_limit=time_limit,
        game_timeout_s=game_timeout_s,
    ).play()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise ConfigError(
            f"port {port} is taken ({error.strerror}): does another training wait for Godot? Stop it, or give --listen "
            "PORT and start the game with --port=PORT",
            port=port,
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = playing.command_parser("godot", "Play Godot projects that use the add-on godot_rl, unmodified.")
    add_options(made, listen=PORT, ports="; 0: a free one (default: %(default)s)", headless=True)
    made.add_argument("--speedup", type=float, default=None, help="of the builds: how much faster physics runs")
    made.add_argument("--action-repeat", type=int, default=None, help="of the builds: frames for each action")
    made.add_argument("--fixed-fps", type=int, default=None, help="of the builds: frames per second of the game's time")
    made.add_argument(
        "--time-limit", type=int, default=None, metavar="STEPS",
        help="an episode that is done after this many steps or more was cut by the game's clock (reset_after)",
    )  # fmt: skip
    made.add_argument(
        "--game-timeout-s", type=float, default=300.0, help="time limit of a game's answer (default: %(default)g)"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore godot``; exit codes as for `brayx.gamecore.games.run_command`."""
    builds = ("command", "num", "speedup", "action_repeat", "fixed_fps", "headless")
    return playing.run_command(parser(), argv, run_games, "listen", *builds, "time_limit", "game_timeout_s")


if __name__ == "__main__":
    sys.exit(main())
