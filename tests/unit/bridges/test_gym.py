"""Gymnasium gamecores: real CartPole games through real doors, and what happens when the service fails."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from brayx.bridges import gym
from brayx.errors import AgentError, BadBody, ConfigError, ConnectFailed, OutOfSequence, SessionLost, SessionResumed
from brayx.gamecore import Client, StepKind
from brayx.gamecore.games import MAX_RESUMED, command_parser
from brayx.ports import free_port
from tests.unit.bridges.by_contract import ByContract, playing_by_contract
from tests.unit.gamecore.echo_server import EchoApp, serving, serving_tcp
from tests.unit.gamecore.relay import When, relaying

NO_OP = b'{"action":0}'


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observations that contain the step; rewards 1, 2, 3; terminates after three steps."""

    def __init__(self, observation: Any = None, action_space: gymnasium.Space[Any] | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 10, (1,))
        self.action_space = action_space or gymnasium.spaces.Discrete(2, start=3)
        self.observation = observation
        self.actions: list[Any] = []

    def _obs(self) -> Any:
        return np.array([len(self.actions)], np.float32) if self.observation is None else self.observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.actions.clear()
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self._obs(), float(len(self.actions)), len(self.actions) == 3, False, {}


@pytest.fixture
def app() -> EchoApp:
    return EchoApp(lambda body: NO_OP)


@pytest.fixture
def address(app: EchoApp) -> Iterator[str]:
    with serving(app) as address:
        yield address


@pytest.mark.parametrize("door", ["http", "ws"])
def test_cartpole_games(app: EchoApp, address: str, door: Literal["http", "ws"]) -> None:
    reported: list[gym.GameResult] = []
    results = gym.run_games("CartPole-v1", f"http://{address}", games=3, door=door, seed=5, on_game=reported.append)
    assert results == reported
    assert len(results) == 3
    for result in results:
        assert 8 <= result.length <= 11  # pushing left only, the pole falls so soon
        assert result.total_reward == result.length
        assert result.ended == "terminated"
    assert not app.running
    kinds = [request.kind for request in app.requests]
    assert kinds.count(StepKind.START) == kinds.count(StepKind.STOP) == 3
    assert kinds.count(StepKind.TICK) == sum(result.length for result in results)
    assert gym.run_games("CartPole-v1", f"http://{address}", games=3, door=door, seed=5) == results
    starts = [json.loads(request.body) for request in app.requests if request.kind is StepKind.START]
    assert starts[:3] == starts[3:]
    assert len({start["seed"] for start in starts}) == 3


def test_bodies_of_the_gym_profile(app: EchoApp, address: str) -> None:
    app.answer = lambda body: b'{"action": 4}'
    env = CountingEnv()
    with Client(f"http://{address}") as client:
        assert gym.play_game(env, client, seed=7) == gym.GameResult(6.0, 3, "terminated")
        assert env.actions == [4, 4, 4]
        assert gym.play_game(env, client, max_ticks=2) == gym.GameResult(3.0, 2, "truncated")
        assert gym.play_game(env, client, should_stop=lambda: True) == gym.GameResult(1.0, 1, "stopped")
    said = (
        b'"contract":1,"behaviour":"agent","team":0,'
        b'"observations":[{"name":"obs","kind":"vector","shape":[1],"dtype":"float32"}],'
        b'"actions":[{"name":"action","kind":"discrete","size":2,"start":3,"mask":false}],"encoding":"packed"}'
    )
    assert [request.body for request in app.requests] == [
        b'{"env_id":"","seed":7,"num_actions":2,"first_action":3,' + said,
        b'{"obs":[0.0],"reward":0.0}',
        b'{"obs":[1.0],"reward":1.0}',
        b'{"obs":[2.0],"reward":2.0}',
        b'{"obs":[3.0],"reward":3.0,"terminated":true,"truncated":false}',
        b'{"env_id":"","seed":null,"num_actions":2,"first_action":3,' + said,
        b'{"obs":[0.0],"reward":0.0}',
        b'{"obs":[1.0],"reward":1.0}',
        b'{"obs":[2.0],"reward":2.0,"terminated":false,"truncated":true}',
        b'{"env_id":"","seed":null,"num_actions":2,"first_action":3,' + said,
        b'{"obs":[0.0],"reward":0.0}',
        b'{"obs":[1.0],"reward":1.0,"terminated":false,"truncated":false}',  # interrupted: neither
    ]


def test_a_game_by_contract_is_the_same_game() -> None:
    with playing_by_contract() as url:
        env = CountingEnv()
        with Client(url) as client:
            assert gym.play_game(env, client) == gym.GameResult(6.0, 3, "terminated")
            assert env.actions == [4, 4, 4]
        (ticks,) = ByContract.ticks.values()
        assert [(tick.obs["obs"].tolist(), tick.reward) for tick in ticks] == [([i], i) for i in range(4)]
        assert [tick.terminated for tick in ticks] == [False, False, False, True]
        with gym.make_env("Taxi-v4") as taxi, Client(url) as client:
            gym.play_game(taxi, client, seed=7, max_ticks=5)
        (*_, ticks) = ByContract.ticks.values()
        rules: Any = gymnasium.make("Taxi-v4").unwrapped
        for tick in ticks[:-1]:
            assert tick.obs["action_mask"].tolist() == rules.action_mask(int(tick.obs["obs"])).tolist()
        assert ticks[-1].truncated


def test_a_mask_in_info_is_sent_with_its_observation(app: EchoApp, address: str) -> None:
    app.answer = lambda body: b'{"action": %d}' % json.loads(body or b"{}").get("action_mask", [1]).index(1)
    with Client(f"http://{address}") as client, gym.make_env("Taxi-v4") as env:
        gym.play_game(env, client, seed=7, max_ticks=5)
    rules: Any = gymnasium.make("Taxi-v4").unwrapped
    ticks = [json.loads(request.body) for request in app.requests if request.kind is StepKind.TICK]
    assert len(ticks) == 5
    for tick in ticks:
        assert tick["action_mask"] == rules.action_mask(tick["obs"]).tolist()


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (3, b"3"),
        (np.int64(3), b"3"),
        (np.zeros((2, 1), np.uint8), b"[[0],[0]]"),
        ({"a": np.array([1]), "b": (np.float32(0.5), 2)}, b'{"a":[1],"b":[0.5,2]}'),
    ],
)
def test_observations_of_every_space(app: EchoApp, address: str, observation: Any, text: bytes) -> None:
    app.answer = lambda body: b'{"action": 3}'
    with Client(f"http://{address}") as client:
        gym.play_game(CountingEnv(observation), client)
    assert app.requests[1].body == b'{"obs":%s,"reward":0.0}' % text


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (gymnasium.spaces.Box(-1, 1, (2,)), b'{"action": [0.5, -1]}', np.array([0.5, -1], np.float32)),
        (
            gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float64),
            b'{"action": [0.10000000149011612, -0.1]}',
            np.array([0.1, -0.1]),
        ),
        (gymnasium.spaces.MultiDiscrete([3, 3]), b'{"action": [0, 2]}', np.array([0, 2])),
        (gymnasium.spaces.Discrete(3, start=4, dtype=np.int32), b'{"action": 5}', np.int32(5)),
        (gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)] * 2), b'{"action": [0, 1]}', (0, 1)),
        (
            gymnasium.spaces.Dict(a=gymnasium.spaces.Box(-1, 1, (1,))),
            b'{"action": {"a": [0.5]}}',
            {"a": np.array([0.5], np.float32)},
        ),
    ],
)
def test_actions_of_other_spaces(app: EchoApp, address: str, space: Any, reply: bytes, action: Any) -> None:
    app.answer = lambda body: reply
    env = CountingEnv(action_space=space)
    with Client(f"http://{address}") as client:
        gym.play_game(env, client)
    assert space.contains(env.actions[0])
    assert type(env.actions[0]) is type(action)
    assert getattr(env.actions[0], "dtype", None) == getattr(action, "dtype", None)
    assert np.array_equal(env.actions[0], action)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"act": 0}', "no field 'action'"),
        (b"[0]", "list indices"),
        (b'{"action": 2}', "not an integer from 0 to 1"),
        (b'{"action": true}', "not an integer"),
        (b'{"action": "0"}', "not an integer"),
        (b"\xff", "decode"),
    ],
)
def test_a_reply_without_an_action_ends_the_run(app: EchoApp, address: str, reply: bytes, reason: str) -> None:
    app.answer = lambda body: reply
    with pytest.raises(BadBody, match=reason):
        gym.run_games("CartPole-v1", f"http://{address}", games=1, give_up_after_s=0)


@pytest.mark.parametrize("reply", [NO_OP, b'{"action": [1.01, 0]}', b'{"action": [0, 0, 0]}', b'{"action": {}}'])
def test_an_action_outside_its_box(app: EchoApp, address: str, reply: bytes) -> None:
    app.answer = lambda body: reply
    env = CountingEnv(action_space=gymnasium.spaces.Box(-1, 1, (2,)))
    with Client(f"http://{address}") as client, pytest.raises(BadBody, match="Box"):
        gym.play_game(env, client)


def test_an_action_too_large_for_its_dtype(app: EchoApp, address: str) -> None:
    app.answer = lambda body: b'{"action": [300]}'
    env = CountingEnv(action_space=gymnasium.spaces.MultiDiscrete([3], dtype=np.int8))
    with Client(f"http://{address}") as client, pytest.raises(BadBody, match="MultiDiscrete"):
        gym.play_game(env, client)


def test_an_observation_that_is_not_finite(address: str) -> None:
    with Client(f"http://{address}") as client, pytest.raises(BadBody, match="NaN"):
        gym.play_game(CountingEnv(np.array([np.nan])), client)


@pytest.mark.parametrize("env_id", ["CartPol-v1", "CartPole-v7"])
def test_an_unknown_environment_names_the_nearest(env_id: str) -> None:
    with pytest.raises(ConfigError, match="CartPole-v1"):
        gym.run_games(env_id, "http://127.0.0.1:1", games=1)


def test_a_wrong_environment_argument() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        gym.run_games("CartPole-v1", "http://127.0.0.1:1", games=1, env_kwargs={"no_such": 1})


def test_environment_arguments_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["CartPole-v1", "--url", "http://127.0.0.1:1", "--set"]
    assert gym.main([*words, "env_options.no_such=1e-1"]) == 2
    assert "no_such" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gym.main([*words, "no_such=1"])
    assert "'no_such=1', expected env_options.KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("door", ["http", "ws"])
def test_a_failed_game_is_reported_and_the_next_started(
    app: EchoApp, address: str, door: Literal["http", "ws"], capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = 0

    def answer(body: bytes) -> bytes:
        nonlocal ticks
        ticks += 1
        if ticks in (3, 4):
            raise AgentError("the agent raised ValueError")
        return NO_OP

    app.answer = answer
    assert len(gym.run_games("CartPole-v1", f"http://{address}", games=2, door=door)) == 2
    failed, went_on = capsys.readouterr().err.splitlines()
    assert "agent_error: the agent raised ValueError" in failed
    assert re.search(r"games go on after [0-9.]+ s \(failed games: 2\)", went_on)


def test_each_kind_of_error_is_printed_once_until_a_game_is_complete(
    app: EchoApp, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = iter([AgentError("a"), SessionLost("b"), AgentError("c"), None, AgentError("d")])

    def answer(body: bytes) -> bytes:
        error = next(raised, None)
        if error is not None:
            raise error
        return NO_OP

    app.answer = answer
    assert len(gym.run_games("CartPole-v1", f"http://{address}", games=2, max_ticks=1)) == 2
    first, other, went_on, second = capsys.readouterr().err.splitlines()
    assert "ended by agent_error: a;" in first
    assert "ended by session_lost: b;" in other
    assert "(failed games: 3)" in went_on
    assert "ended by agent_error: d;" in second, "nothing followed it, so there is nothing left to report"


@pytest.mark.parametrize("scheme", ["http", "ws", "tcp"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_game_outlives_its_connection(
    app: EchoApp, scheme: str, when: When, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_tcp(app.answered) if scheme == "tcp" else serving(app) as service, relaying(service) as relay:

        def answer(body: bytes) -> bytes:
            if len(app.applied) in (2, 5):
                relay.break_next(when)
            return NO_OP

        app.answer = answer
        command = ["CartPole-v1", "--url", f"{scheme}://{relay.address}", "--games", "1", "--max-ticks", "7", "--quiet"]
        assert gym.main([*command, "--reconnect", "20"]) == 0
        assert capsys.readouterr().err == ""
        assert relay.connections > 1
        assert [seq for _, seq, _ in app.applied] == list(range(7))
        assert [request.kind for request in app.requests].count(StepKind.START) == 1
        assert not app.running

        app.applied.clear()
        assert gym.main(command) == 0
        assert "game ended by connection_lost" in capsys.readouterr().err, "without the option nothing changes"
        assert {seq for _, seq, _ in app.applied} == {None}


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_an_invalid_time_to_reconnect(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gym.main(["CartPole-v1", "--url", "http://127.0.0.1:1", "--reconnect", seconds])
    assert "--reconnect" in capsys.readouterr().err


@pytest.mark.parametrize("notified", [True, False], ids=["notified", "notice lost"])
def test_a_game_goes_on_from_a_snapshot(app: EchoApp, address: str, notified: bool) -> None:
    env = CountingEnv(action_space=gymnasium.spaces.Discrete(2))
    resumed = False

    def answer(body: bytes) -> bytes:
        nonlocal resumed
        if len(app.applied) == 2 and not resumed:
            resumed = True
            (session,) = app.running
            app.kept[session] = (0, b"")
            if notified:
                raise SessionResumed("it goes on from a snapshot", tick=1)
            raise OutOfSequence("tick 2 is out of sequence, expected 1", expected=1, got=2)
        return NO_OP

    app.answer = answer
    with Client(f"http://{address}", reconnect_s=20.0) as client:
        assert gym.play_game(env, client) == gym.GameResult(6.0, 3, "terminated")
    assert [(seq, json.loads(body)["obs"]) for _, seq, body in app.applied] == [(0, [0.0]), (1, [1.0]), (1, [2.0])]
    assert not app.running


def test_a_session_that_always_resumes_ends_its_game(app: EchoApp, address: str) -> None:
    def answer(body: bytes) -> bytes:
        raise SessionResumed("it goes on from a snapshot", tick=0)

    app.answer = answer
    with pytest.raises(SessionResumed):
        gym.run_games("CartPole-v1", f"http://{address}", games=1, give_up_after_s=0.0)
    assert [request.kind for request in app.requests].count(StepKind.TICK) == MAX_RESUMED + 1


def test_giving_up_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectFailed):
        gym.run_games("CartPole-v1", f"http://127.0.0.1:{free_port()}", games=1, give_up_after_s=0.6)
    assert time.monotonic() - began < 30
    first, last = capsys.readouterr().err.splitlines()
    assert "ended by connect_failed" in first
    assert "giving up after 0.6 s without a complete game" in first
    given_up = re.search(r"given up after [0-9.]+ s \(failed games: (\d+)\); --give-up-after-s changes when", last)
    assert given_up is not None, last
    assert int(given_up[1]) >= 2


def test_the_help_has_the_defaults_of_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gym.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "time limit of one request (default: 30)" in shown
    assert "without a complete game (default: 60)" in shown


# The command


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "brayx.bridges.gym", *arguments]


def test_the_command(address: str) -> None:
    done = subprocess.run(
        _command("CartPole-v1", "--url", f"http://{address}", "--games", "2", "--door", "ws", "--max-ticks", "4"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *games, summary = done.stdout.splitlines()
    assert games == [f"game {number}: return 4, 4 ticks, truncated" for number in (1, 2)]
    assert summary.startswith("2 games, mean return 4, 8 ticks")


def test_the_command_with_a_bad_environment_and_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert gym.main(["CartPol-v1", "--url", "http://127.0.0.1:1"]) == 2
    assert "CartPole-v1" in capsys.readouterr().err
    assert gym.main(["CartPole-v1", "--url", "http://127.0.0.1:1", "--give-up-after-s", "0"]) == 1
    assert "is the service running" in capsys.readouterr().err
    assert gym.main(["CartPole-v1", "--url", "localhost"]) == 2
    assert capsys.readouterr().out == "", "without a game there is no mean"


@pytest.mark.parametrize("door", ["http", "ws"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_cleanly(app: EchoApp, address: str, number: signal.Signals, door: str) -> None:
    command = _command("CartPole-v1", "--url", f"http://{address}", "--door", door)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("game 1:")
        process.send_signal(number)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "mean return" in output.splitlines()[-1]
    assert not app.running  # the running game was stopped


def test_a_signal_ends_a_gamecore_whose_service_is_away() -> None:
    command = _command("CartPole-v1", "--url", "http://127.0.0.1:1")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "connect_failed" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_option_of_earlier_jobs_is_accepted() -> None:
    parser = command_parser("gym", "")
    assert parser.parse_args(["--url", "http://127.0.0.1:1", "--die-with-parent"])
    assert "die-with-parent" not in parser.format_help()
