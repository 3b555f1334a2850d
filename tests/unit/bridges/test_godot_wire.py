"""The wire of Godot's add-on: literal messages, what they announce, and what a faulty game sends."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from brayx.bridges.godot_wire import MAX_MESSAGE_BYTES, GodotGame, GodotStep, contracts_of, parse_message
from brayx.errors import BadBody, BodyTooLarge, DeadlineExceeded
from brayx.gamecore.contract_bodies import ContractBodies
from tests.godot_game import SIDE, Document, GodotStandIn

SPACES = {
    "observation_space": {
        "obs": {"size": [4.0], "space": "box"},
        "eye_2d": {"size": [2, 3, 1], "space": "box"},
        "card": {"size": 5, "space": "discrete"},
    },
    "action_space": {
        "steer": {"size": 2, "action_type": "continuous"},
        "dash": {"size": 3, "action_type": "discrete"},
    },
}


def frame(message: Any) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


@asynccontextmanager
async def game_that_sends(*answers: bytes, timeout_s: float = 30.0) -> AsyncIterator[tuple[GodotGame, socket.socket]]:
    """A game whose answers are there already, and its end of the connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        for answer in answers:
            theirs.sendall(answer)
        _, game = await asyncio.get_running_loop().create_connection(lambda: GodotGame(timeout_s), sock=ours)
        yield game, theirs
        game.close()


@asynccontextmanager
async def stand_in(**options: Any) -> AsyncIterator[tuple[GodotGame, Callable[[], str]]]:
    """A stand-in game that plays in a thread, and a function that waits for its end and tells why it ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        player = GodotStandIn(listener.getsockname()[1], **options)
        ends: list[str] = []
        thread = threading.Thread(target=lambda: ends.append(player.run()))
        thread.start()
        sock, _ = listener.accept()

    def ended() -> str:
        thread.join(30)
        return ends[0]

    _, game = await asyncio.get_running_loop().create_connection(lambda: GodotGame(30.0), sock=sock)
    try:
        yield game, ended
    finally:
        game.close()
        await asyncio.to_thread(thread.join, 30)


async def test_the_messages_are_literally_those_of_the_protocol() -> None:
    announced = {"type": "env_info", "n_agents": 1, **SPACES}
    obs = [{"obs": [1, 2, 3, 4], "eye_2d": "000102030405", "card": 4.0}]
    step = {"type": "step", "obs": obs, "reward": [0.5], "done": [True], "info": [{"score": 3}]}
    async with game_that_sends(frame(announced), frame({"type": "reset", "obs": obs}), frame(step)) as (game, theirs):
        assert await game.announce() is not None
        assert await game.reset() == GodotStep(
            [{"obs": [1, 2, 3, 4], "eye_2d": bytes(range(6)), "card": 4}], [0.0], [False], [False], [{}]
        )
        answer = await game.act([{"steer": [0.25, -1.0], "dash": 1}])
        assert answer is not None
        assert (answer.rewards, answer.dones, answer.truncated, answer.infos) == (
            [0.5],
            [True],
            [False],
            [{"score": 3}],
        )
        game.close()
        assert await asyncio.to_thread(theirs.recv, 1000) == (
            b'\x3c\x00\x00\x00{"type":"handshake","major_version":"0","minor_version":"7"}'
            b'\x13\x00\x00\x00{"type":"env_info"}'
            b'\x10\x00\x00\x00{"type":"reset"}'
            b'\x3b\x00\x00\x00{"type":"action","action":[{"steer":[0.25,-1.0],"dash":1}]}'
            b'\x10\x00\x00\x00{"type":"close"}'
        )


def test_what_a_game_announces_becomes_contracts() -> None:
    policies = ["wolf", "sheep"]
    first, second = contracts_of({"n_agents": 2, "agent_policy_names": policies, **SPACES})
    assert [first.behaviour, second.behaviour] == policies
    assert first.id == second.id
    assert first.as_dict() == {
        "contract": 1,
        "behaviour": "wolf",
        "team": 0,
        "observations": [
            {"name": "obs", "kind": "vector", "shape": [4], "dtype": "float32"},
            {"name": "eye_2d", "kind": "image", "shape": [2, 3, 1], "dtype": "uint8", "layout": "HWC"},
            {"name": "card", "kind": "category", "size": 5, "start": 0},
        ],
        "actions": [
            {"name": "steer", "kind": "continuous", "size": 2, "low": -1.0, "high": 1.0},
            {"name": "dash", "kind": "discrete", "size": 3, "start": 0, "mask": False},
        ],
        "encoding": "packed",
    }
    # An older add-on announces one space for all, and no names; a newer one a space for each agent.
    assert [contract.behaviour for contract in contracts_of({"n_agents": 2, **SPACES})] == ["shared_policy"] * 2
    other = {"observation_space": [SPACES["observation_space"], {"obs": {"size": [1], "space": "box"}}]}
    assert len({contract.id for contract in contracts_of({"n_agents": 2, **SPACES, **other})}) == 2
    other["observation_space"].pop()
    with pytest.raises(BadBody) as refused:
        contracts_of({"n_agents": 2, **SPACES, **other})
    assert refused.value.details["field"] == "observation_space"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"action_space": None}, "action_space"),
        ({"n_agents": 0}, "n_agents"),
        ({"n_agents": "8"}, "n_agents"),
        ({"agent_policy_names": ["a", "b"]}, "agent_policy_names"),
        ({"agent_policy_names": [7]}, "behaviour"),
        ({"observation_space": {"obs": {"size": [4], "space": "graph"}}}, "observation_space.obs"),
        ({"observation_space": {"obs": [4]}}, "observation_space.obs"),
        ({"observation_space": {"obs": {"size": [0], "space": "box"}}}, "observations.obs.shape"),
        ({"observation_space": {"eye_2d": {"size": [9], "space": "box"}}}, "observations.eye_2d.shape"),
        ({"action_space": {"go": {"size": 2, "action_type": "sideways"}}}, "action_space.go"),
        ({"action_space": {"go": {"size": 2.5, "action_type": "discrete"}}}, "actions.go.size"),
    ],
)
def test_an_announcement_that_cannot_be_read_is_refused_by_field(change: Document, field: str) -> None:
    with pytest.raises(BadBody) as refused:
        contracts_of({"n_agents": 1, **SPACES, **change})
    assert refused.value.details["field"] == field
    with pytest.raises(BadBody, match="update godot_rl_agents"):
        contracts_of({"type": "env_info", "obs_space": {}})


async def test_the_stand_in_plays_with_pictures_and_ends_when_told() -> None:
    async with stand_in(agents=3, picture=True) as (game, ended):
        contracts = await game.announce()
        assert contracts is not None
        step = await game.reset()
        bodies = ContractBodies(contracts[0])
        for _ in range(3):
            assert step is not None
            tick = bodies.decode(bodies.encode_tick(step.obs[2], step.rewards[2]))
            assert tick.obs["camera_2d"].shape == (SIDE, SIDE, 3)
            assert tick.obs["camera_2d"].sum() in (255, 510)
            np.testing.assert_array_equal(tick.obs["obs"], np.float32(step.obs[2]["obs"]))
            step = await game.act([{"steer": [0.0, 0.0], "dash": 0}] * 3)
        game.close()
        assert await asyncio.to_thread(ended) == "close"


async def test_answers_may_arrive_in_any_pieces_and_end_at_any_byte() -> None:
    announced = frame({"type": "env_info", "n_agents": 1, **SPACES})
    for cut in range(1, len(announced)):
        async with game_that_sends(announced[:cut]) as (game, theirs):
            sender = threading.Thread(target=theirs.sendall, args=(announced[cut:],))
            sender.start()
            contracts = await game.announce()
            await asyncio.to_thread(sender.join)
            assert contracts is not None
            assert contracts[0].sizes == (3,)
    for cut in range(len(announced)):
        async with game_that_sends(announced[:cut]) as (game, theirs):
            theirs.shutdown(socket.SHUT_WR)
            assert await game.announce() is None, "the game has left"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", BodyTooLarge),
        ((2**31 - 1).to_bytes(4, "little"), BodyTooLarge),
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), BodyTooLarge),
        (frame(b"\xff\xfe"), BadBody),
        (frame(b"[1]"), BadBody),
        (frame(b"[" * 100_000), BadBody),
        (frame({"type": "reset", "obs": []}), BadBody),
    ],
)
async def test_what_is_no_message_of_a_game_is_refused(answer: bytes, problem: type[Exception]) -> None:
    async with game_that_sends(answer) as (game, _):
        with pytest.raises(problem):
            await game.announce()


def test_numbers_that_are_not_finite_reach_the_contract_which_names_them() -> None:
    contract = contracts_of({"n_agents": 1, **SPACES})[0]
    message = parse_message(b'{"obs":[1,nan,-inf,inf],"more":[1e999,"nan,"],"last":nan}')
    assert math.isnan(message["obs"][1])
    assert message["obs"][2:] == [-math.inf, math.inf]
    assert message["more"] == [math.inf, "nan,"]
    assert math.isnan(message["last"])
    obs = {"obs": message["obs"], "eye_2d": bytes(6), "card": 0}
    with pytest.raises(BadBody, match=r"obs\.obs\[1\] is nan, expected a finite number"):
        ContractBodies(contract).encode_tick(obs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"obs": None}, "obs"),
        ({"obs": []}, "obs"),
        ({"obs": [[1, 2]]}, "obs"),
        ({"obs": [{"eye_2d": "0g"}]}, "obs.eye_2d"),
        ({"obs": [{"eye_2d": [0]}]}, "obs.eye_2d"),
        ({"reward": [None]}, "reward"),
        ({"reward": [0.0, 1.0]}, "reward"),
        ({"done": None}, "done"),
        ({"done": ["yes"]}, "done"),
        ({"info": [1]}, "info"),
    ],
)
async def test_a_step_that_is_not_one_for_each_agent_is_refused_by_field(change: Document, field: str) -> None:
    step = {"type": "step", "obs": [{}], "reward": [0.0], "done": [False], **change}
    async with game_that_sends(frame({"type": "env_info", "n_agents": 1, **SPACES}), frame(step)) as (game, _):
        await game.announce()
        with pytest.raises(BadBody) as refused:
            await game.act([{}])
    assert refused.value.details["field"] == field


@pytest.mark.parametrize("said", [{"truncated": [True, True]}, {"info": [{"truncated": True}, {"truncated": True}]}])
async def test_truncation_is_told_beside_done_or_in_the_info(said: Document) -> None:
    step = {"type": "step", "obs": [{}, {}], "reward": [0, 0], "done": [1, 0], **said}
    async with game_that_sends(frame({"type": "env_info", "n_agents": 2, **SPACES}), frame(step)) as (game, _):
        await game.announce()
        answer = await game.act([{}, {}])
    assert answer is not None
    assert (answer.dones, answer.truncated) == ([True, False], [True, False])


async def test_a_silent_game_is_named_and_given_up_in_time() -> None:
    async with game_that_sends(timeout_s=0.3) as (game, _):
        with pytest.raises(DeadlineExceeded) as late:
            await game.announce()
    assert late.value.details["timeout_s"] == 0.3
    async with game_that_sends() as (game, _):
        game.interrupt()
        assert await game.announce() is None
    async with game_that_sends() as (game, theirs):
        theirs.close()
        assert await game.announce() is None
