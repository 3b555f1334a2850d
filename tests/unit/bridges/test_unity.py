"""The bridge for Unity: a stand-in game on the real wire, a real door, and what games do wrong."""

from __future__ import annotations

import queue
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from brayx.bridges import unity
from brayx.bridges.unity import run_games
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import AgentError, ConfigError
from brayx.gamecore.games import GameResult
from tests.unit.bridges.contract_service import ContractService
from tests.unity_game import (
    BEHAVIOUR,
    Caller,
    UnityGame,
    agents_message,
    behaviour,
    empty,
    hello,
    leaving,
    picture,
    statistic,
    vector,
)
from tests.waiting import WAIT_S, until


class Bridge:
    """A bridge in a thread.

    Attributes:
        ports: where it listens.
        results: what `run_games` returned.
        error: what it raised.
    """

    def __init__(self, service: ContractService, **options: Any) -> None:
        self._stop = threading.Event()
        self._ports: queue.Queue[list[int]] = queue.Queue()
        self.results: list[GameResult] = []
        self.error: BaseException | None = None
        self._options = {"url": service.urls["tcp"], "games": None, "listen": 0, **options}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bridge:
        self._thread.start()
        self.ports = self._ports.get(timeout=4 * WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(4 * WAIT_S)
        assert not self._thread.is_alive()

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.results = run_games(on_listen=self._ports.put, should_stop=self._stop.is_set, **self._options)
        except BaseException as error:
            self.error = error
            self._ports.put([0])


@contextmanager
def connected(bridge: Bridge) -> Iterator[Caller]:
    """A game that has said hello."""
    with Caller(bridge.ports[0]) as caller:
        assert caller.call(hello()).header.status == 200
        assert caller.call(empty()).input.actions.command == pb.Actions.RESET
        yield caller


def one(number: int, *, reward: float = 0.0, value: float = 1.0, **more: Any) -> pb.Agent:
    return pb.Agent(id=number, reward=reward, observations=[vector([value, 0.0])], **more)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# Games


def test_a_game_of_eight_agents(service: ContractService) -> None:
    game = UnityGame(limit=5)
    with Bridge(service, seed=3) as bridge, Caller(bridge.ports[0]) as caller:
        game.play(caller, calls=12)
    assert (game.seed, game.commands, game.steps) == (3, [pb.Actions.RESET], 96)
    assert {session.contract.behaviour for session in service.sessions} == {BEHAVIOUR}
    stops = [session.last for session in service.sessions if session.last is not None]
    truncated = [stop for stop in stops if stop.truncated]
    assert len(truncated) >= 8, "Max Step cuts"
    assert all(stop.obs for stop in truncated), "the value after the cut counts"
    assert all(stop.terminated or stop.truncated for stop in stops)
    broken_off = [session for session in service.sessions if session.last is None]
    assert len(broken_off) == 8, "the game left in mid-episode"
    assert all(session.ended for session in service.sessions)
    ticks = [tick for session in service.sessions for tick in session.ticks]
    assert len(ticks) == game.steps
    # The door's actor always dashes; so it is forbidden after each one that was taken.
    assert {tuple(tick.obs["action_mask"]) for tick in ticks} == {(1, 1), (1, 0)}
    assert {tick.info.get("Chaser/agents") for tick in ticks} == {None, 8.0}
    assert all(len(session.ticks) <= 5 for session in service.sessions)
    assert [session.ticks[0].reward for session in service.sessions] == [0.0] * len(service.sessions)


def test_pictures_and_decision_periods(service: ContractService) -> None:
    game = UnityGame(4, picture=True, period=2)
    with Bridge(service) as bridge, Caller(bridge.ports[0]) as caller:
        game.play(caller, calls=6)
    assert game.steps == 12
    assert sum(len(session.ticks) for session in service.sessions) == 12
    camera = service.sessions[0].ticks[-1].obs["CameraSensor"]
    assert (camera.shape, camera.dtype, int(camera.max())) == ((3, 84, 84), np.uint8, 255)


def test_the_number_of_episodes_ends_the_run(service: ContractService) -> None:
    with Bridge(service, games=5) as bridge, Caller(bridge.ports[0]) as caller:
        game = UnityGame(2, limit=3)
        game.play(caller)
        until(bridge.ended, "the end of the bridge")
    assert len(bridge.results) == 5
    assert {result.ended for result in bridge.results} <= {"terminated", "truncated"}
    assert game.commands[-1] == pb.Actions.QUIT


def test_a_build_is_started_with_its_port_and_told_to_quit(service: ContractService, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    game = f"{sys.executable} -m tests.unity_game --agents 2 --limit 4"
    command = f"""sh -c 'echo "$*" >> {starts}; exec {game} "$@"' build"""
    with Bridge(service, command=command, num=2, games=8, headless=True) as bridge:
        until(bridge.ended, "the end of the bridge")
    assert bridge.error is None
    expected = [f"-nographics -batchmode --mlagents-port {port}" for port in bridge.ports]
    assert sorted(starts.read_text().splitlines()) == sorted(expected)
    assert len(bridge.results) == 8


def test_agents_come_and_go_and_their_actions_keep_the_order(service: ContractService) -> None:
    with Bridge(service) as bridge, connected(bridge) as caller:
        answer = caller.call(agents_message({BEHAVIOUR: [one(1), one(2)]}, [behaviour()]))
        assert len(answer.input.actions.by_behaviour[BEHAVIOUR].actions) == 2
        ended = one(2, reward=2.0, group_reward=1.0, done=True)
        answer = caller.call(agents_message({BEHAVIOUR: [ended, one(3)]}))
        (action,) = answer.input.actions.by_behaviour[BEHAVIOUR].actions
        assert (list(action.continuous), list(action.discrete)) == ([0.5, 0.5], [1])
        # An agent that ends before it ever wanted an action, and one that starts anew under its old id.
        listed = [one(1), one(4, done=True), one(3, done=True, max_step_reached=True), one(3)]
        answer = caller.call(agents_message({BEHAVIOUR: listed[::-1]}))
        assert len(answer.input.actions.by_behaviour[BEHAVIOUR].actions) == 2
        assert not caller.call(agents_message({})).input.actions.by_behaviour
        caller.call(leaving())
    assert [len(session.ticks) for session in service.sessions] == [2, 1, 1, 1]
    assert service.sessions[1].last is not None
    assert (service.sessions[1].last.reward, service.sessions[1].last.terminated) == (3.0, True)
    assert service.sessions[2].last is not None
    assert service.sessions[2].last.truncated


def test_stop_and_play_again_ten_times(service: ContractService, capsys: pytest.CaptureFixture[str]) -> None:
    with Bridge(service) as bridge:
        for _ in range(10):
            with Caller(bridge.ports[0]) as caller:
                UnityGame(2).play(caller, calls=3)
    assert len(service.sessions) == 20
    assert all(session.ended and session.last is None for session in service.sessions)
    assert said(capsys).count("press Play to go on") == 10


def test_a_game_that_crashed_is_followed_by_another(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bridge(service) as bridge:
        with connected(bridge) as caller:
            caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
        with connected(bridge) as caller:
            caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
            caller.call(leaving())
    assert "calls again; its previous game ended without notice: its log may say why" in said(capsys)
    assert [len(session.ticks) for session in service.sessions] == [1, 1]


def test_a_silent_game_keeps_no_sessions(
    service: ContractService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bridge(service) as bridge, connected(bridge) as caller:
        caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
        monkeypatch.setattr(unity, "_SILENT_S", 0.0)
        until(lambda: service.sessions[0].ended, "the end of the session")
        monkeypatch.setattr(unity, "_SILENT_S", 600.0)
        caller.call(agents_message({BEHAVIOUR: [one(1)]}))
        caller.call(leaving())
    assert "is it paused?" in said(capsys)
    assert len(service.sessions) == 2


# What games do wrong


def seeing(height: int, width: int) -> pb.Agent:
    return pb.Agent(id=1, observations=[picture([np.zeros((height, width, 3), np.uint8)], 3)])


@pytest.mark.parametrize(
    ("first", "then", "line"),
    [
        ([one(1), one(1)], None, "agent 1 of behaviour 'Chaser' wants two actions in one call"),
        ([one(1, value=float("nan"))], None, "agent 1: obs.VectorSensor[0] is nan, expected a finite number"),
        ([one(1)], [one(1, reward=float("inf"))], "agent 1: reward is inf, expected a finite number"),
        ([one(1)], [pb.Agent(id=1)], "agent 1: obs has 0 observations, expected 1"),
        ([one(1)], [pb.Agent(id=1, observations=[vector([1.0])])], "obs.VectorSensor has shape [1], expected [2]"),
        ([one(1)], [one(1, action_mask=[True, True])], "agent 1: mask.branch_0 allows no choice"),
        ([pb.Agent(id=1)], None, "observations has 0 entries"),
        ([seeing(4, 5)], [seeing(8, 8)], "obs.CameraSensor has shape [3, 8, 8], expected [3, 4, 5]"),
    ],
)
def test_faults_of_a_game_are_said_in_one_line(
    first: list[pb.Agent],
    then: list[pb.Agent] | None,
    line: str,
    service: ContractService,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bridge(service) as bridge:
        with connected(bridge) as caller:
            answer = caller.call(agents_message({BEHAVIOUR: first}, [behaviour()]))
            if then is not None:
                assert answer.header.status == 200
                answer = caller.call(agents_message({BEHAVIOUR: then}))
            assert (answer.header.status, answer.input.actions.command) == (400, pb.Actions.QUIT)
        lines = [text for text in said(capsys).splitlines() if "refused" in text]
        assert len(lines) == 1
        assert "the game was refused and told to quit: " in lines[0]
        assert line in lines[0]
        assert lines[0].endswith("; press Play again once that is mended")
        with connected(bridge) as caller:  # the bridge goes on
            assert caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()])).header.status == 200
            caller.call(leaving())


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (hello("0.15.0"), "version 0.15.0, expected 1.5.0: update the package com.unity.ml-agents"),
        (empty(), "it calls without a hello"),
        (agents_message({BEHAVIOUR: [one(1)]}), "it calls without a hello"),
    ],
)
def test_calls_that_begin_wrongly(
    message: pb.Message, line: str, service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bridge(service) as bridge, Caller(bridge.ports[0]) as caller:
        assert caller.call(message).header.status == 400
    assert line in said(capsys)


@pytest.mark.parametrize(("version", "lines"), [("1.3.0", 1), ("1.5.0", 0), ("1.12.0", 0), ("1", 0)])
def test_an_older_communicator_plays_and_one_line_says_what_it_lacks(
    version: str, lines: int, service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bridge(service) as bridge, Caller(bridge.ports[0]) as caller:
        assert caller.call(hello(version)).header.status == 200
        caller.call(leaving())
    line = f"plays, but its communicator {version} is older than 1.5.0: it has no groups and no Buffer Sensors; update"
    assert said(capsys).count(line) == lines


def test_a_fault_of_a_build_says_what_to_do(service: ContractService, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([sys.executable, "-c", "input()"])  # the calls are the test's
    with Bridge(service, command=command) as bridge, Caller(bridge.ports[0]) as caller:
        assert caller.call(hello("0.15.0")).header.status == 400
    assert "to 2.0 or newer; mend the project and export it again: a build that ends is started again by itself" in (
        said(capsys)
    )


def test_unknown_second_and_changed_behaviours(service: ContractService, capsys: pytest.CaptureFixture[str]) -> None:
    changed = agents_message({BEHAVIOUR: [one(1)]}, [behaviour(branches=[3])])
    changed_before_its_agents_come = agents_message({}, [behaviour(branches=[3])])
    differs = "'Chaser' changed while the game runs: actions.branch_0.size is 3, expected 2"
    unknown = agents_message({"Ghost": [one(2)]})
    with Bridge(service) as bridge:
        for message, line in (
            (changed, differs),
            (changed_before_its_agents_come, differs),
            (unknown, "'Ghost' has agents before it is announced: use the package com.unity.ml-agents unmodified"),
        ):
            with connected(bridge) as caller:
                first = agents_message({BEHAVIOUR: [one(1)]}, [behaviour()])
                assert caller.call(first).header.status == 200
                assert caller.call(message).header.status == 400
            assert line in said(capsys)
        with connected(bridge) as caller:  # announced again without its agents
            caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
            answer = caller.call(agents_message({}, [behaviour()]))
            assert answer.header.status == 200
            assert not answer.input.actions.by_behaviour
            caller.call(leaving())
        with connected(bridge) as caller:  # sides of one behaviour
            sides = {f"{BEHAVIOUR}?team={team}": [one(team)] for team in (0, 1)}
            answer = caller.call(agents_message(sides, [behaviour(name) for name in sides]))
            assert answer.header.status == 200
            caller.call(leaving())
        assert {session.contract.team for session in service.sessions[-2:]} == {0, 1}
        with connected(bridge) as caller:  # two behaviours, each with its own sizes
            keeper = behaviour("Keeper", branches=[3])
            answer = caller.call(agents_message({BEHAVIOUR: [one(1)], "Keeper": [one(2)]}, [behaviour(), keeper]))
            assert answer.header.status == 200
            assert set(answer.input.actions.by_behaviour) == {BEHAVIOUR, "Keeper"}
            caller.call(leaving())
    contracts = {session.contract.behaviour: session.contract for session in service.sessions[-2:]}
    assert {name: contract.sizes for name, contract in contracts.items()} == {BEHAVIOUR: (2,), "Keeper": (3,)}


def test_a_training_that_expects_another_game_says_by_which_field(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bridge(service) as bridge:
        with connected(bridge) as caller:
            caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
            caller.call(leaving())
        service.expected = service.sessions[0].contract
        with connected(bridge) as caller:
            message = agents_message({BEHAVIOUR: [one(1)]}, [behaviour(branches=[5])])
            assert caller.call(message).header.status == 400
    assert "the training refuses the game's agents: actions.branch_0.size is 5, expected 2" in said(capsys)


def test_messages_cut_at_each_byte(service: ContractService) -> None:
    whole = agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]).SerializeToString()
    with Bridge(service) as bridge, Caller(bridge.ports[0]) as caller:
        for end in range(len(whole)):
            caller.call(hello())
            caller.call(empty())
            assert caller.call_bytes(whole[:end])  # an answer, whatever the first bytes mean
        caller.call(hello())
        caller.call(empty())
        assert pb.Message.FromString(caller.call_bytes(whole)).header.status == 200


def test_a_message_beyond_the_limit(
    service: ContractService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def named() -> bool:
        heard.append(said(capsys))
        return "the game sent no whole message: one of more than 0.0625 MiB is refused" in "".join(heard)

    monkeypatch.setattr(unity, "MAX_MESSAGE_BYTES", 1 << 16)
    with Bridge(service) as bridge, connected(bridge) as caller:
        with pytest.raises(grpc.RpcError) as caught:
            caller.call_bytes(bytes(1 << 17))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        until(named, "the line on the screen")
        assert caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()])).header.status == 200
        caller.call(leaving())


# Ports and the service


def test_a_port_that_is_taken(service: ContractService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Bridge(service, listen=port) as bridge:
            until(bridge.ended, "the end of the bridge")
    assert isinstance(bridge.error, ConfigError)
    assert f"port {port} is taken: does mlagents-learn" in str(bridge.error)


def test_a_lost_session_goes_on_as_another(service: ContractService) -> None:
    with Bridge(service) as bridge, connected(bridge) as caller:
        caller.call(agents_message({BEHAVIOUR: [one(1), one(2)]}, [behaviour()]))
        service.failures.append(AgentError("broken"))
        answer = caller.call(agents_message({BEHAVIOUR: [one(1), one(2)]}))
        assert len(answer.input.actions.by_behaviour[BEHAVIOUR].actions) == 2
        caller.call(leaving())
    assert len(service.sessions) == 4, "two agents, each with an episode in both sessions"


def test_a_service_that_is_gone_ends_the_game_and_the_bridge(service: ContractService) -> None:
    with Bridge(service, give_up_after_s=0.0) as bridge, connected(bridge) as caller:
        assert service.host is not None
        service.host.close()
        answer = caller.call(agents_message({BEHAVIOUR: [one(1)]}, [behaviour()]))
        assert answer.header.status == 400
        until(bridge.ended, "the end of the bridge")
    assert "connect" in str(bridge.error)


def test_statistics_wait_for_an_agent_that_wants_an_action(service: ContractService) -> None:
    with Bridge(service) as bridge, connected(bridge) as caller:
        caller.call(agents_message({}, side_channel=statistic("speed", 2.0)))
        caller.call(agents_message({BEHAVIOUR: [one(1), one(2)]}, [behaviour()]))
        caller.call(leaving())
    infos = [session.ticks[0].info for session in service.sessions]
    assert sorted(map(len, infos)) == [0, 1]
    assert {"speed": 2.0} in infos


def test_too_many_statistics(service: ContractService, capsys: pytest.CaptureFixture[str]) -> None:
    with Bridge(service) as bridge, connected(bridge) as caller:
        channel = b"".join(statistic(f"speed {number}", 2.0) for number in range(300))
        assert caller.call(agents_message({}, side_channel=channel)).header.status == 400
    assert "the game records 300 statistics, expected at most 256 names" in said(capsys)


def test_the_command_line() -> None:
    options = unity.parser().parse_args(
        ["--url", "tcp://h:1", "--command", "./game", "--num", "3", "--time-scale", "1"]
    )
    assert (options.listen, options.num, options.time_scale, options.headless) == (None, 3, 1.0, False)
