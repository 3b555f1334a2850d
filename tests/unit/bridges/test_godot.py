"""The Godot bridge: stand-in games through a real door, what ends their episodes, and their faults."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.bridges import godot
from brayx.errors import AgentError, ConfigError
from brayx.gamecore.games import GameResult
from tests.godot_game import Chaser, Document, GodotStandIn
from tests.unit.bridges.contract_service import ContractService, action_of
from tests.waiting import until

BUILD = f"{sys.executable} -m tests.godot_game"


@contextmanager
def bridging(
    service: ContractService, *, door: str = "tcp", run: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Callable[..., str], Callable[[], list[GameResult]]]]:
    """A bridge that plays: a function that plays a game to its end, and one that waits for the bridge's results."""
    stop = threading.Event()
    ports: list[int] = []
    given = {"url": service.urls[door], "games": None, "timeout_s": 30.0, "should_stop": stop.is_set, **(run or {})}
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(godot.run_games, **given, listen=0, on_listen=ports.extend, **options)
        until(lambda: ports or playing.done(), "it listens")
        try:
            yield lambda **options: GodotStandIn(ports[0], **options).run(), lambda: playing.result(60)
        finally:
            stop.set()
        playing.result(60)


def quits_after(steps: int) -> Callable[[Document], Document | None]:
    """A game that quits instead of sending so many steps."""
    left = iter(range(steps))
    return lambda message: message if message["type"] != "step" or next(left, None) is not None else None


def wait_for_ends(service: ContractService) -> None:
    until(lambda: all(played.ended for played in service.sessions), "all sessions have ended")


@pytest.mark.parametrize(("door", "run"), [("tcp", {}), ("ws", {}), ("http", {"reconnect_s": 5.0})])
def test_each_episode_of_an_agent_is_a_session_of_what_the_game_showed(
    service: ContractService, door: str, run: dict[str, Any]
) -> None:
    with bridging(service, door=door, run={"games": 8, **run}) as (play, results):
        assert play(agents=3, limit=6, seed=5) == "close"
        games = results()
    wait_for_ends(service)
    rng = random.Random(5)
    chasers = [Chaser(rng, 6, picture=False) for _ in range(3)]
    for chaser in chasers:  # the bridge resets the game first
        chaser.reset()
    action = action_of(service.sessions[0].contract)
    expected: list[tuple[list[Any], list[float]]] = []
    running: list[tuple[list[Any], list[float]]] = [([], [0.0]) for _ in chasers]
    while len(expected) < 8:
        for (seen, _), chaser in zip(running, chasers, strict=True):
            seen.append(chaser.observed()["obs"])
        steps = [chaser.step(action) for chaser in chasers]
        for index, (chaser, (reward, done)) in enumerate(zip(chasers, steps, strict=True)):
            running[index][1].append(reward)
            if done:
                expected.append(running[index])
                running[index] = ([], [0.0])
                chaser.reset()
    whole = [played for played in service.sessions if played.last is not None]
    assert len(whole) == len(expected)
    for seen, rewards in expected:
        ((played, last),) = [
            (played, played.last)
            for played in whole
            if np.array_equal(played.ticks[0].obs["obs"], np.float32(seen[0])) and played.last is not None
        ]
        np.testing.assert_array_equal([tick.obs["obs"] for tick in played.ticks], np.float32(seen))
        np.testing.assert_allclose([*(tick.reward for tick in played.ticks), last.reward], rewards, rtol=1e-6)
        assert (last.terminated, last.truncated) == (True, False)
        np.testing.assert_array_equal(last.obs["obs"], np.float32(seen[-1]), "no value of the next episode")
    assert [result.total_reward for result in games] == pytest.approx([sum(rewards) for _, rewards in expected[:8]])
    assert [result.length for result in games] == [len(seen) for seen, _ in expected[:8]]
    assert {result.ended for result in games} == {"terminated"}


def test_a_cut_episode_is_truncated_with_what_is_known_of_its_end(service: ContractService) -> None:
    def says_so(message: Document) -> Document:
        infos = [{"truncated": True, "score": 3} if done else {} for done in message.get("done", ())]
        return {**message, "info": infos} if infos else message

    with bridging(service, run={"games": 2}) as (play, results):
        play(agents=1, limit=4, spoil=says_so)
        assert {result.ended for result in results()} == {"truncated"}
    with bridging(service, run={"games": 2}, time_limit=4) as (play, results):
        play(agents=1, limit=4)
        assert {result.ended for result in results()} == {"truncated"}
    wait_for_ends(service)
    cut = [played for played in service.sessions if played.last is not None]
    assert len(cut) == 4
    for played in cut:
        assert played.last is not None
        assert (played.last.terminated, played.last.truncated) == (False, True)
        np.testing.assert_array_equal(played.last.obs["obs"], played.ticks[-1].obs["obs"])
    assert cut[0].last is not None
    assert cut[0].last.info == {"truncated": True, "score": 3}


def test_games_that_quit_break_their_sessions_off_and_ten_more_play(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with bridging(service) as (play, _):
        for round_ in range(1, 11):
            assert play(agents=2, spoil=quits_after(3), dashes=False) == "quit"
            until(lambda: len(service.sessions) >= 2 * round_, "the game has played")  # noqa: B023
            wait_for_ends(service)
    assert [len(played.ticks) for played in service.sessions] == [4] * 20
    assert {played.last for played in service.sessions} == {None}, "neither terminated nor truncated"
    said = capsys.readouterr().err
    assert said.count("has left after 3 steps; press Play to go on") == 10
    assert "press Play in Godot, or start the game with --port=" in said
    assert "plays with 2 agents: shared_policy: obs [4] -> steer 2" in said


def test_policies_of_a_game_are_behaviours_with_contracts_of_their_own(service: ContractService) -> None:
    quits = quits_after(3)

    def with_policies(message: Document) -> Document | None:
        if message["type"] == "env_info":
            both = message["action_space"][0]
            message |= {"agent_policy_names": ["chaser", "runner"], "action_space": [both, {"steer": both["steer"]}]}
        return quits(message)

    with bridging(service) as (play, _):
        assert play(agents=2, spoil=with_policies) == "quit"
        until(lambda: len(service.sessions) >= 2, "the game has played")
        wait_for_ends(service)
    actions = {played.contract.behaviour: played.contract.actions for played in service.sessions}
    assert {name: [part.name for part in parts] for name, parts in actions.items()} == {
        "chaser": ["steer", "dash"],
        "runner": ["steer"],
    }


def test_a_games_fault_is_one_line_and_the_next_game_plays(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_obs(change: Callable[[Document], Any]) -> Callable[[Document], Document]:
        def spoil(message: Document) -> Document:
            if message["type"] == "step":
                change(message["obs"][1])
            return message

        return spoil

    faults = {
        r"agent 1: obs.obs[2] is nan": with_obs(lambda obs: obs["obs"].__setitem__(2, float("nan"))),
        r"agent 1: obs.obs[0] is -inf": with_obs(lambda obs: obs["obs"].__setitem__(0, -float("inf"))),
        r"agent 1: obs.obs is missing": with_obs(lambda obs: obs.pop("obs")),
        r"agent 1: obs.obs has shape [5]": with_obs(lambda obs: obs["obs"].append(0.0)),
        r"agent 1: obs.more is unknown": with_obs(lambda obs: obs.update(more=1)),
        r"agent 1: obs.camera_2d has 10 bytes": with_obs(lambda obs: obs.update(camera_2d="00" * 10)),
        r"agent 1: obs.camera_2d is missing": with_obs(lambda obs: obs.pop("camera_2d")),
        r"obs.camera_2d is 'red'": with_obs(lambda obs: obs.update(camera_2d="red")),
        r"agent 0: reward is nan": lambda message: {**message, "reward": [float("nan")] * 2},
        r"obs is 1 entries, expected objects: one for each of 2 agents": lambda message: {
            **message,
            "obs": message.get("obs", [])[:1],
        },
        r"n_agents is 0": lambda message: {**message, "n_agents": 0},
        r"action_space.steer is": lambda message: {**message, "action_space": {"steer": {"size": 2}}},
        r'type is None, expected "env_info"': lambda message: {},
    }
    with bridging(service) as (play, _):
        for line, spoil in faults.items():
            assert play(agents=2, picture="camera" in line, spoil=spoil) in ("close", "disconnected")
            lines = capsys.readouterr().err.splitlines()
            (said,) = [said for said in lines if "was closed: " in said]
            assert line in said
            assert said.endswith("; press Play again once that is mended")
        assert play(agents=2, spoil=quits_after(2)) == "quit"
    wait_for_ends(service)
    assert len(service.sessions[-1].ticks) == 3


def test_a_contract_that_the_service_refuses_closes_its_game_only(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    with bridging(service) as (play, _):
        play(agents=1, spoil=quits_after(1))
        wait_for_ends(service)
        service.expected = service.sessions[0].contract
        assert play(agents=1, dashes=False, spoil=quits_after(1)) in ("close", "disconnected")
        assert "actions.dash is missing, expected" in capsys.readouterr().err
        assert play(agents=1, spoil=quits_after(1)) == "quit"


def test_a_session_that_the_service_ends_is_followed_by_another(
    service: ContractService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failures = [AgentError("the agent failed")]
    with bridging(service) as (play, _):
        assert play(agents=2, spoil=quits_after(4)) == "quit"
        wait_for_ends(service)
    assert [len(played.ticks) for played in service.sessions] == [5, 5], "the first tick failed"
    assert "the agent failed" in capsys.readouterr().err


def test_a_service_that_takes_no_contracts_ends_the_bridge(service: ContractService) -> None:
    service.takes_contracts = False
    with pytest.raises(ConfigError, match="takes no contracts"), bridging(service) as (play, _):
        assert play(agents=1) in ("close", "disconnected")


def test_a_port_that_is_taken_is_named(service: ContractService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            godot.run_games(service.urls["tcp"], listen=port, games=1)
    assert refused.value.details["port"] == port


def test_builds_are_started_with_the_engines_flags_and_again_when_they_end(
    service: ContractService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("brayx.restarts._FIRST_S", 0.01)
    monkeypatch.setattr("brayx.restarts.LAST_S", 0.01)
    starts = tmp_path / "starts"
    command = f"""sh -c 'echo "$*" >> {starts}; exec {BUILD} --quit-after=6 --limit=3 --agents=1 "$@"' build"""
    words = ["--url", service.urls["tcp"], "--command", command, "--num", "2", "--games", "5", "--seed", "3", "--json"]
    assert godot.main([*words, "--speedup", "8", "--action-repeat", "4", "--fixed-fps", "60"]) == 0
    flags = "--disable-render-loop --headless --fixed-fps 60 --action_repeat=4 --speedup=8"
    ports, others = zip(*(line.split(" ", 1) for line in starts.read_text().splitlines()), strict=True)
    assert {*others} == {f"--env_seed={seed} {flags}" for seed in (3, 4)}
    assert len({*ports}) == 2
    assert all(re.fullmatch(r"--port=\d+", port) for port in ports)
    printed = capsys.readouterr()
    games = [json.loads(line) for line in printed.out.splitlines()]
    assert len(games) == 5
    assert all(game["length"] <= 3 and game["ended"] == "terminated" for game in games)
    assert "ended with status 3" in printed.err
    with pytest.raises(ConfigError, match="cannot be started"):
        godot.run_games(service.urls["tcp"], command="./no-such-build.x86_64", games=1)
    words = ["--url", service.urls["tcp"], "--command", "sh -c 'exit 7'", "--lifetime-restarts", "1"]
    assert godot.main(words) == 3
    assert "brayx: build 0 ended 2 times, the last time with status 7 after 0 s" in capsys.readouterr().err
