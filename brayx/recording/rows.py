"""Converts recorded sessions of several agents to fragments, from the bodies, which have a row for each agent.

Arrays that the agents set cannot be used: the number of rows varies from tick to tick, so they may not be recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.actor.trajectories import BROKEN_OFF, GOES_ON, Rows, Trajectories, ends_of
from brayx.errors import BadBody, BadRecording
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_actions import policy_rows
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.recording.columns import NOT_APPLIED, texts
from brayx.replay.steps import BLOCK_ROWS
from brayx.types import Fragment

if TYPE_CHECKING:
    from brayx.recording.reader import Recording


def has_rows(episode: Recording) -> bool:
    """Whether a session has several agents."""
    try:
        start = json.loads(episode.start)
    except (ValueError, RecursionError):
        return False
    return isinstance(start, dict) and start.get("rows") is True


def row_fragments(episode: Recording) -> Iterator[Fragment]:
    """The fragments of the agents of a session, with log-probability and policy version 0.

    Their actions are the policy's. An agent's last action is left out, since what it earned is not known.

    Raises:
        BadRecording: a body does not fit the contract of the session's start.
    """
    try:
        bodies = RowBodies(Contract.parse(json.loads(episode.start)))
        trajectories, waiting, expected = Trajectories(), list[Rows](), 0
        for first in range(0, len(episode), BLOCK_ROWS):
            block = episode.read(first, min(BLOCK_ROWS, len(episode) - first), [])
            ticks = zip(block.number.tolist(), block.event, texts(block.input), texts(block.output), strict=True)
            for number, event, body, reply in ticks:
                if number != expected or "skipped" in event:
                    yield from _cut(trajectories, waiting, done=False)
                    trajectories.forget()
                expected = number + 1
                if any(name in event for name in NOT_APPLIED):
                    yield from _cut(trajectories, waiting, done=False)
                    trajectories.forget()
                    continue
                waiting.append(_rows(bodies.decode(body), bodies.decode_reply(reply), GOES_ON, bodies.contract))
            is_last = first + BLOCK_ROWS >= len(episode)
            stop = bodies.decode_stop(block.stop[-1]) if is_last else None
            if stop is not None:
                none = bodies.decode_reply(bodies.encode({}))
                waiting.append(_rows(stop, none, BROKEN_OFF, bodies.contract))
            yield from _cut(trajectories, waiting, done=is_last)
    except BadBody as error:
        raise BadRecording(f"session {episode.session!r}: {error.message}") from None


def _cut(trajectories: Trajectories, waiting: list[Rows], *, done: bool) -> Iterator[Fragment]:
    if waiting:
        for piece in trajectories.cut(Rows.joined(waiting), done=done):
            if piece.fragment is not None:
                yield piece.fragment
    waiting.clear()


def _rows(tick: Tick, actions: Mapping[str, Any], goes_on: int, contract: Contract) -> Rows:
    assert tick.agents is not None
    count = len(tick.agents)
    chosen = policy_rows(contract, actions)
    action = chosen
    if len(chosen) < count:  # of the rows that go on
        action = np.zeros((count, *chosen.shape[1:]), chosen.dtype)
        if len(chosen):
            action[slice(None) if tick.acting is None else tick.acting] = chosen
    return Rows(
        tick.agents,
        ends_of(tick, goes_on),
        tick.obs,
        action,
        np.zeros(count, np.float32),
        np.zeros(count, np.int64),
        {},
        tick.reward,
        {},
    )
