"""Recorded sessions of several agents give the fragments that the agents pushed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import brayx.recording.rows
from brayx.errors import ConfigError
from brayx.recording import dataset
from brayx.recording.comparison import NotCompared, compare
from brayx.recording.reader import open as open_recordings
from brayx.recording.version import Version
from brayx.types import Fragment
from tests.recorded import Tick
from tests.unit.actor.test_contract_agent import CONTINUOUS, DISCRETE, HYBRID, Game
from tests.unit.actor.test_contract_agent_rows import SCRIPT, SeeingRows, by_content, start_rows, tick_rows
from tests.unit.recording.demonstrations import save

CONTRACTS = {"discrete": DISCRETE, "continuous": CONTINUOUS, "hybrid": HYBRID}


async def recorded(
    folder: Path, kind: str, *, stop: dict[str, Any] | None = None, gap: int | None = None, **events: str
) -> list[Fragment]:
    """Records a played session, without the number ``gap``; returns the fragments that its agents pushed."""
    game = Game(CONTRACTS[kind], SeeingRows(kind))
    bodies: list[tuple[bytes, bytes]] = []
    answer = game.actor.tick

    async def tick(body: bytes) -> bytes:
        bodies.append((body, await answer(body)))
        return bodies[-1][1]

    game.actor.tick = tick  # type: ignore[method-assign]
    await start_rows(game)
    for rows in SCRIPT:
        await tick_rows(game, rows)
    last = b"" if stop is None else json.dumps(stop).encode()
    await game.actor.stop(last)
    await game.actor.on_end("stop")
    numbers = [number for number in range(len(bodies) + 1) if number != gap][: len(bodies)]
    ticks = [
        Tick(number, 0.1 * number, 0.0, body, reply, {}, events.get(f"at_{number}", ""))
        for number, (body, reply) in zip(numbers, bodies, strict=True)
    ]
    ticks[-1] = ticks[-1]._replace(stop=last)
    save(folder, "a", ticks, start=json.dumps({**game.contract, "rows": True}), end="stop")
    return game.buffer.fragments


@pytest.mark.parametrize("kind", CONTRACTS)
async def test_they_are_those_that_the_agents_pushed(tmp_path: Path, kind: str) -> None:
    stop = {
        "agent": [4],
        "obs": [[0, 8]],
        "reward": {"win": [6]} if kind == "continuous" else [6],
        "terminated": [True],
    }
    pushed = await recorded(tmp_path, kind, stop=stop)
    read = list(dataset(tmp_path))
    assert len(read) == len(pushed)
    for ours, theirs in zip(by_content(read), by_content(pushed), strict=True):
        np.testing.assert_array_equal(ours.obs["side"], theirs.obs["side"])
        numbers = {"discrete": 0, "continuous": 3, "hybrid": 1}[kind]
        inside = theirs.action.copy()
        if numbers:
            inside[:, -numbers:] = np.clip(inside[:, -numbers:], -1, 1)  # what the game got
        np.testing.assert_allclose(ours.action, inside, atol=1e-5)
        assert (ours.action.shape, ours.action.dtype) == (theirs.action.shape, theirs.action.dtype)
        np.testing.assert_array_equal(ours.reward, theirs.reward)
        assert (ours.terminated, ours.truncated) == (theirs.terminated, theirs.truncated)
    assert dataset(tmp_path).check() >= {"action", "reward", "terminated"}


async def test_they_are_cut_where_an_action_did_not_reach_the_game(tmp_path: Path) -> None:
    await recorded(tmp_path, "discrete", at_1="fallback")
    seen = sorted(fragment.obs["side"][:, 1].tolist() for fragment in dataset(tmp_path))
    assert [0.0, 2.0] not in seen, "what followed tick 1 was not the agent's doing"
    assert [4.0, 5.0, 6.0, 7.0] in seen


@pytest.mark.parametrize("block_rows", [4, 1024])
async def test_they_are_cut_where_a_number_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(brayx.recording.rows, "BLOCK_ROWS", block_rows)
    await recorded(tmp_path, "discrete", gap=4)
    seen = [fragment.obs["side"][:, 1].tolist() for fragment in dataset(tmp_path)]
    assert [4.0, 5.0] in seen
    assert not any({5.0, 6.0} <= {*side} for side in seen), "the number between them is missing"


async def test_a_session_whose_start_has_no_contract_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "a", [Tick(0, 0.0, 0.0, b"{}", b"{}", {})], start='{"contract": "sha256:0", "rows": true}')
    with pytest.raises(ConfigError, match="session 'a': contract is"):
        list(dataset(tmp_path))


async def test_they_are_not_compared_with_a_version_s_actions(tmp_path: Path) -> None:
    await recorded(tmp_path, "discrete")
    (episode,) = open_recordings(str(tmp_path))
    (result,) = compare([episode], Version("v", torch.nn.Linear(2, 3), (torch.zeros(1, 2),)))
    assert isinstance(result, NotCompared)
    assert "session 'a' has several agents" in result.error.message
