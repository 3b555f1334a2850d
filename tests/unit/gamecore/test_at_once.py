"""Several games of one process over one TCP connection: the games of several processes, and what ends one of them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from brayx.bridges import gym
from brayx.errors import AgentError, BadBody, BodyTooLarge, ConfigError, ConnectFailed, DeadlineExceeded, SessionResumed
from brayx.gamecore import StepKind
from brayx.gamecore.auth import sign
from brayx.gamecore.games import MAX_RESUMED
from brayx.gamecore.protocol import StepRequest
from brayx.ports import free_port
from tests.unit.gamecore.echo_server import EchoApp, serving_tcp
from tests.unit.gamecore.relay import relaying
from tests.waiting import until

NO_OP = b'{"action":0}'


@pytest.fixture
def app() -> EchoApp:
    return EchoApp(lambda body: NO_OP)


@pytest.fixture
def url(app: EchoApp) -> Iterator[str]:
    with serving_tcp(app.answered) as address:
        yield f"tcp://{address}"


def seeds(app: EchoApp) -> list[int]:
    """Seeds of the games so far, in order of their size."""
    return sorted(json.loads(request.body)["seed"] for request in app.requests if request.kind is StepKind.START)


def test_a_seed_makes_the_games_repeatable_and_different(app: EchoApp, url: str) -> None:
    gym.run_games("CartPole-v1", url, games=1, seed=5)
    (alone,) = seeds(app)
    app.requests.clear()
    results = gym.run_games("CartPole-v1", url, games=3, seed=5, at_once=3)
    begun = seeds(app)
    assert len({*begun}) == 3
    assert alone in begun
    assert len(results) == 3
    app.requests.clear()
    gym.run_games("CartPole-v1", url, games=3, seed=5, at_once=3)
    assert seeds(app) == begun
    app.requests.clear()
    gym.run_games("CartPole-v1", url, games=3, seed=6, at_once=3)
    assert not {*begun} & {*seeds(app)}, "another seed gives other games"
    assert not app.running


def test_all_sessions_share_one_connection_and_run_side_by_side(app: EchoApp, url: str) -> None:
    most = 0

    def answer(body: bytes) -> bytes:
        nonlocal most
        most = max(most, len(app.running))
        return NO_OP

    app.answer = answer
    with relaying(url.removeprefix("tcp://")) as relay:
        results = gym.run_games("CartPole-v1", f"tcp://{relay.address}", games=8, max_ticks=5, at_once=4)
        assert relay.connections == 1
    assert [(result.length, result.ended) for result in results] == [(5, "truncated")] * 8
    assert most == 4
    kinds = [request.kind for request in app.requests]
    assert (kinds.count(StepKind.START), kinds.count(StepKind.TICK), kinds.count(StepKind.STOP)) == (8, 40, 8)


def test_an_error_ends_only_its_own_game(app: EchoApp, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = 0

    def answer(body: bytes) -> bytes:
        nonlocal ticks
        ticks += 1
        if ticks == 5:
            app.running.discard(app.requests[-1].session)
            raise AgentError("the agent raised ValueError")
        return NO_OP

    app.answer = answer
    assert len(gym.run_games("CartPole-v1", url, games=3, max_ticks=4, at_once=3)) == 3
    assert [request.kind for request in app.requests].count(StepKind.START) == 4
    assert "agent_error: the agent raised ValueError" in capsys.readouterr().err


def test_a_broken_connection_ends_all_of_its_games(app: EchoApp, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with relaying(url.removeprefix("tcp://")) as relay:

        def answer(body: bytes) -> bytes:
            if len(app.applied) == 4:
                relay.break_next("after")
            return NO_OP

        app.answer = answer
        assert len(gym.run_games("CartPole-v1", f"tcp://{relay.address}", games=2, max_ticks=6, at_once=2)) == 2
        assert relay.connections == 2
    assert "connection_lost" in capsys.readouterr().err


def test_a_resumed_session_gets_its_tick_again(app: EchoApp, url: str) -> None:
    def answer(body: bytes) -> bytes:
        raise SessionResumed("it goes on from a snapshot", tick=0)

    app.answer = answer
    with pytest.raises(SessionResumed):
        gym.run_games("CartPole-v1", url, games=1, at_once=2, give_up_after_s=0.0)
    assert [request.kind for request in app.requests].count(StepKind.TICK) == MAX_RESUMED + 1


def test_an_error_that_every_game_would_get_ends_the_run(app: EchoApp, url: str) -> None:
    app.answer = lambda body: b"[]"
    with pytest.raises(BadBody, match="list indices"):
        gym.run_games("CartPole-v1", url, games=4, at_once=2)


def test_requests_are_signed(app: EchoApp, url: str) -> None:
    gym.run_games("CartPole-v1", url, games=2, max_ticks=2, at_once=2, key="k", secret=b"s" * 16)
    for request in app.requests:
        assert request.token == sign(b"s" * 16, "k", request.session, request.time)
        assert request.key == "k"


def test_no_reply_in_time_gives_the_connection_up(app: EchoApp) -> None:
    async def silent(request: StepRequest) -> bytes:
        await asyncio.sleep(0.0 if request.kind is StepKind.START else 60.0)
        return b"started"

    with (
        serving_tcp(silent) as address,
        pytest.raises(DeadlineExceeded, match=r"no reply to tick of session \w+ within"),
    ):
        gym.run_games("CartPole-v1", f"tcp://{address}", games=1, at_once=2, timeout_s=2.0, give_up_after_s=0.0)


def test_a_refused_connection_raises_its_error(app: EchoApp) -> None:
    with serving_tcp(app.answered, max_body_bytes=1) as address, pytest.raises(BodyTooLarge):
        gym.run_games("CartPole-v1", f"tcp://{address}", games=1, at_once=2)
    with pytest.raises(ConnectFailed):
        gym.run_games("CartPole-v1", f"tcp://127.0.0.1:{free_port()}", games=1, at_once=2, give_up_after_s=0.0)


@pytest.mark.parametrize("options", [{"door": "ws"}, {"reconnect_s": 1.0}])
def test_options_that_concurrent_games_refuse(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="several games at once"):
        gym.run_games("CartPole-v1", "http://127.0.0.1:1", games=1, at_once=2, **options)  # type: ignore[arg-type]


def test_the_command_stops_between_ticks(app: EchoApp, url: str) -> None:
    command = [sys.executable, "-m", "brayx.bridges.gym", "CartPole-v1", "--url", url, "--at-once", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(app.applied) > 10)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert "ticks/s" in out
    until(lambda: not app.running)
