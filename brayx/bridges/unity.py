"""Plays Unity projects with the package ML-Agents as a gamecore: listens for the game, as ML-Agents' own trainer does.

    brayx gamecore unity --url tcp://127.0.0.1:8101                                   then press Play in the Editor
    brayx gamecore unity --url tcp://127.0.0.1:8101 --command ./game.x86_64 --num 4   starts builds itself

The agents of a behaviour are a session with its contract (`brayx.bridges.unity_wire`), each a row of its ticks. The
episode of an agent that is done is terminated, or truncated if it reached its Max Step. A game that leaves in
mid-episode breaks its agents' episodes off. A fault of a game ends the game and is said in one line; the bridge goes on
listening. Knows nothing of learning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from brayx.bridges import builds as starting
from brayx.bridges import engine
from brayx.bridges.builds import Builds, add_options, after_fault, say_unused, words_of
from brayx.bridges.engine import AgentStep, EngineAgents, EngineRun, described
from brayx.bridges.unity_settings import GameSettings
from brayx.bridges.unity_wire import (
    BUILD_PORT,
    EDITOR_PORT,
    GO_ON,
    MAX_MESSAGE_BYTES,
    PATH,
    UNMODIFIED,
    UnityBehaviour,
    actions_message,
    outdated,
    parse_message,
    quit_message,
    reset_message,
    statistics,
    welcome,
)
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import BadBody, BrayxError, ConfigError, ProtocolError
from brayx.gamecore import games as playing
from brayx.gamecore.contract import Contract
from brayx.restarts import RestartLimits

_LOOK_S = 0.1
_SILENT_S = 60.0
"""A game that has not called for this long is paused, or gone."""
_MAX_STATISTICS = 256
_END_S = 3.0
"""Time for a game to call once more when the bridge ends, and get the command to quit."""


class UnityPort:
    """One port: the game that calls there, and its agents' sessions.

    Args:
        run: the run of the bridge.
        name: what lines on the screen call the game.
        by_hand: a person starts the game; a line on the screen says when to do so again.
        seed: of the game.
        settings: the settings sent to the game.

    Attributes:
        has_left: no game calls here.
    """

    def __init__(
        self, run: EngineRun, name: str, *, by_hand: bool = False, seed: int = 0, settings: GameSettings | None = None
    ) -> None:
        self._run, self._name, self._seed = run, name, seed
        self._to_go_on, self._again = "; press Play to go on" if by_hand else "", after_fault(by_hand=by_hand)
        self._settings = settings or GameSettings()
        self._agents = EngineAgents(run)
        self._lock = asyncio.Lock()
        self._peer = self._former = ""
        self.has_left = asyncio.Event()
        self.has_left.set()
        self._behaviours: dict[str, UnityBehaviour] = {}
        self._announced: dict[str, pb.Behaviour] = {}
        self._statistics: dict[str, float] = {}
        self._called_at = 0.0
        self._calls = 0

    @property
    def is_playing(self) -> bool:
        """Whether a game calls here."""
        return not self.has_left.is_set()

    async def answer(self, data: bytes, peer: str) -> bytes:
        """The answer to a call.

        Args:
            data: the call's message.
            peer: the address that calls, which differs from game to game.
        """
        async with self._lock:
            self._calls += 1
            try:
                message = await self._answer(parse_message(data), peer)
            except ProtocolError as error:  # the game's fault
                await self._leave(f"{self._name} was refused and told to quit: {error.message}{self._again}")
                message = quit_message()
            except BrayxError as error:
                if not self._run.is_over():
                    self._run.fail(error)
                await self._leave()
                message = quit_message()
            self._called_at = time.monotonic()
            return message.SerializeToString()

    def missed(self) -> None:
        """Says that a call's message was not read."""
        if not self._run.is_over():
            self._run.say(
                f"{self._name} sent no whole message: one of more than {MAX_MESSAGE_BYTES / 2**20:g} MiB is refused; "
                "give its cameras fewer pixels, or fewer agents to a scene"
            )

    async def watch(self) -> None:
        """Call several times a second: ends the sessions of a game that does not call any more."""
        if not self.is_playing or time.monotonic() - self._called_at < _SILENT_S:
            return
        if len(self._agents) and not self._lock.locked():
            async with self._lock:
                self._run.say(
                    f"{self._name} has not called for {_SILENT_S:g} s: its episodes are broken off; is it paused?"
                )
                await self._agents.break_off()

    async def close(self) -> None:
        """Ends the sessions that still run."""
        async with self._lock:
            await self._leave()

    async def _answer(self, message: pb.Message, peer: str) -> pb.Message:
        output = message.output
        if self._run.is_over():
            await self._leave()
            return quit_message()
        if output.hello.communicator_version:
            return await self._greet(output.hello, peer)
        if peer == self._former:
            return quit_message()
        if message.header.status != GO_ON:
            if self.is_playing:
                await self._leave(f"{self._name} has left after {self._calls} calls{self._to_go_on}")
            return quit_message()
        if not self.is_playing:
            raise ProtocolError("it calls without a hello: it was started before brayx")
        self._peer = peer
        if not output.HasField("agents"):
            return reset_message(self._settings.side_channel(self._seed))
        return await self._step(output)

    async def _greet(self, hello: pb.Hello, peer: str) -> pb.Message:
        if self.is_playing:
            self._former = self._peer
            await self._leave(f"{self._name} calls again; its previous game ended without notice: its log may say why")
        answer = welcome(hello, self._seed, self._settings.num_areas)
        self._peer, self._calls = peer, 1
        self.has_left.clear()
        self._former = "" if self._former == peer else self._former
        if lack := outdated(hello.communicator_version):
            self._run.say(f"{self._name} plays, but {lack}")
        return answer

    async def _leave(self, line: str = "") -> None:
        """Forgets the game; ends its agents' sessions."""
        if line:
            self._run.say(line)
        await self._agents.break_off()
        self._peer = ""
        self.has_left.set()
        self._behaviours, self._announced, self._statistics = {}, {}, {}

    async def _step(self, output: pb.Output) -> pb.Message:
        lists = output.agents.by_behaviour
        for announced in output.hello.behaviours:
            self._announced[announced.name] = announced
            if behaviour := self._behaviours.get(announced.name):
                # Reading a key of a message's map adds it.
                agents = lists[announced.name].agents if announced.name in lists else ()
                behaviour.check_same(announced, agents)
        self._statistics.update(statistics(output.agents.side_channel))
        if len(self._statistics) > _MAX_STATISTICS:
            raise BadBody(
                f"the game records {len(self._statistics)} statistics, expected at most {_MAX_STATISTICS} names"
            )
        actions = await self._agents.exchange(self._steps(output.agents))
        if actions:
            self._statistics = {}
        return actions_message(
            {
                name: [self._behaviours[name].action(actions[agent.id]) for agent in listed.agents if not agent.done]
                for name, listed in lists.items()
            }
        )

    def _steps(self, agents: pb.Agents) -> list[tuple[Contract, list[AgentStep]]]:
        """The steps of all agents, ends before starts. The game's statistics go with the first that wants an action."""
        wanting: set[int] = set()
        steps = []
        for name, listed in agents.by_behaviour.items():
            ends, others = [], []
            for agent in listed.agents:
                behaviour = self._behaviours.get(name) or self._new_behaviour(name, agent)
                if agent.done:
                    ends.append(behaviour.step(agent))
                    continue
                if agent.id in wanting:
                    raise BadBody(f"agent {agent.id} of behaviour {name!r} wants two actions in one call")
                others.append(behaviour.step(agent, None if wanting else self._statistics))
                wanting.add(agent.id)
            if ends or others:
                steps.append((self._behaviours[name].contract, [*ends, *others]))
        return steps

    def _new_behaviour(self, name: str, agent: pb.Agent) -> UnityBehaviour:
        announced = self._announced.get(name)
        if announced is None:
            raise ProtocolError(f"behaviour {name!r:.80} has agents before it is announced: {UNMODIFIED}")
        behaviour = UnityBehaviour(announced, agent)
        self._run.say(f"{self._name} plays {described(behaviour.contract)}")
        self._behaviours[name] = behaviour
        return behaviour


async def play(
    run: EngineRun,
    *,
    listen: int | None = None,
    command: str = "",
    num: int = 1,
    headless: bool = False,
    restarts: int | None = None,
    restarts_within_s: float = 60.0,
    lifetime_restarts: int | None = None,
    on_listen: Callable[[list[int]], None] = lambda ports: None,
    **settings: Any,
) -> None:
    """Plays games of a Unity project.

    Args:
        run: the service, and how to play.
        listen: port for a game that is started by hand, or for the first build; 0: free ones; None: where ML-Agents'
            package calls, 5004 for the Editor, 5005 and the next for builds.
        command: command line of a build; empty: a game is started by hand.
        num: number of builds. Each has its own port, and the seeds follow each other.
        headless: builds draw nothing; not for agents that see.
        restarts, restarts_within_s, lifetime_restarts: as for `brayx.restarts.RestartLimits`.
        on_listen: called with the ports when all are open.
        **settings: as for `GameSettings`.

    Raises:
        ConfigError: a port is taken, a build cannot be started, or an option has no meaning here.
        StartupError: a build ends too often.
        BrayxError: the service's last error.
    """
    game_settings = GameSettings(**settings)
    words = words_of(command) if command else []
    if not words:
        say_unused(run.say, num=num > 1, headless=headless)  # `brayx mlagents-learn` always limits restarts
    first = listen if listen is not None else BUILD_PORT if words else EDITOR_PORT
    seed = run.run.seed or 0
    async with contextlib.AsyncExitStack() as stack:
        ports, numbers = [], []
        for index in range(num if words else 1):
            name = f"build {index}" if words else "the game"
            port = UnityPort(run, name, by_hand=not words, seed=seed + index, settings=game_settings)
            stack.push_async_callback(port.close)
            server, number = _server(port, first and first + index)
            await server.start()
            stack.push_async_callback(server.stop, 0.5)
            ports.append(port)
            numbers.append(number)
        flags = ["-nographics", "-batchmode"] if headless else []
        commands = [[*words, *flags, "--mlagents-port", str(number)] for number in numbers] if words else []
        limits = RestartLimits(restarts, restarts_within_s, lifetime_restarts)
        builds = await stack.enter_async_context(Builds(commands, run.say, run.builds, limits))
        stack.push_async_callback(_wait_for_end, run, ports)
        if not words:
            run.say(f"listens at 127.0.0.1:{numbers[0]}: press Play in the Unity Editor")
        on_listen(numbers)
        while not await run.wait(_LOOK_S):
            builds.watch()
            for port in ports:
                await port.watch()


run_games = functools.partial(engine.run_games, play)
"""Plays games of a Unity project at a service elsewhere: `brayx.bridges.engine.run_games`."""


async def _wait_for_end(run: EngineRun, ports: list[UnityPort]) -> None:
    """Gives each game the time to call once more and get the command to quit."""
    run.end()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            for port in ports:
                await port.has_left.wait()


def _server(port: UnityPort, number: int) -> tuple[Any, int]:
    """A server of the call that a game makes; and where it listens."""

    async def exchange(messages: AsyncIterator[bytes], context: Any) -> bytes:
        try:
            data = await anext(messages, None)
        except grpc.RpcError:
            data = None
        if data is None:
            port.missed()
            return b""
        return await port.answer(data, context.peer())

    service, method = PATH
    # The game sends one message; but gRPC never calls a function of one message if that is too large.
    handlers = grpc.method_handlers_generic_handler(service, {method: grpc.stream_unary_rpc_method_handler(exchange)})
    server = grpc.aio.server(
        handlers=(handlers,),
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
        ),
        maximum_concurrent_rpcs=8,
    )
    try:
        socket.create_server(("127.0.0.1", number)).close()  # gRPC prints its own line about a taken port
        taken: int = server.add_insecure_port(f"127.0.0.1:{number}")
    except (OSError, RuntimeError):
        raise ConfigError(
            f"port {number} is taken: does mlagents-learn, or another training, wait for Unity? Stop it; or give "
            "--listen PORT (`brayx train`: --set game.listen=PORT), and start the game with --mlagents-port PORT",
            port=number,
        ) from None
    with contextlib.suppress(RuntimeError):  # a machine without IPv6; the game calls "localhost", which may be either
        server.add_insecure_port(f"[::1]:{taken}")
    return server, taken


def parser() -> argparse.ArgumentParser:
    """The command line."""
    does = "Play Unity projects that use the package ML-Agents, unmodified."
    made = playing.command_parser("unity", does, is_engine=True)
    ports = f", or for the first build (default: {EDITOR_PORT}, {BUILD_PORT} with --command)"
    add_options(made, listen=None, ports=ports, headless=False)
    made.add_argument(
        "--time-scale",
        type=float,
        default=20.0,
        help="how much faster than real time the game runs (default: %(default)g)",
    )
    made.add_argument("--width", type=int, help="width of a build's window (default: the build's own)")
    made.add_argument("--height", type=int, help="height of a build's window (default: the build's own)")
    made.add_argument(
        "--quality-level", type=int, help="index of the project's quality level (default: the game's own)"
    )
    made.add_argument(
        "--target-frame-rate", type=int, default=-1, help="most frames drawn per second (default: no limit)"
    )
    made.add_argument(
        "--capture-frame-rate", type=int, default=60, help="frames per second of the game's time (default: %(default)s)"
    )
    made.add_argument(
        "--num-areas", type=int, default=1, help="copies that a Training Area Replicator makes (default: %(default)s)"
    )
    made.add_argument(
        "--parameter", dest="parameters", action="append", default=[], metavar="NAME=VALUE",
        help="environment parameter: gravity=9.81, or drawn by the game: mass=uniform:0.5:10, also "
        "gaussian:MEAN:DEVIATION and multirangeuniform:MIN:MAX:MIN:MAX...",
    )  # fmt: skip
    return made


OPTIONS = (*starting.OPTIONS, *(field.name for field in dataclasses.fields(GameSettings)))
"""Options of the command line that `play` takes."""


def main(argv: list[str] | None = None) -> int:
    """The command ``brayx gamecore unity``; exit codes as for `brayx.gamecore.games.run_command`."""
    return playing.run_command(parser(), argv, run_games, *OPTIONS)


if __name__ == "__main__":
    sys.exit(main())
