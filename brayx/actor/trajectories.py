"""`Trajectories`: the rows of a session's agents, cut into fragments by agent and episode, without an object per tick.

A row has what an agent observed and its action; the agent's next row has what that action earned. A session of one
agent is one of rows, too, each of its ticks having one. Knows nothing of bodies, models or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from brayx.gamecore.contract_ticks import Tick
from brayx.types import Fragment, Step

GOES_ON, TERMINATED, TRUNCATED, BROKEN_OFF = range(4)
"""State of an agent's episode after a row. In a row that ends the episode the action has no meaning."""


def ends_of(tick: Tick, goes_on: int) -> Any:
    """State of each row's episode after a tick, uint8; ``goes_on`` for rows that have not ended."""
    return np.where(tick.terminated, TERMINATED, np.where(tick.truncated, TRUNCATED, goes_on)).astype(np.uint8)


@dataclass(frozen=True)
class Rows:
    """Rows in the order of time, ``R`` of them.

    Attributes:
        agent: number of each row's agent, int64.
        end: `GOES_ON`, `TERMINATED`, `TRUNCATED` or `BROKEN_OFF`, uint8.
        obs, action, log_prob, policy_version, extras: as in `Fragment`, ``[R, ...]``.
        reward: since the agent's previous row, float64.
        parts: the same by the game's names.
        seen: further leaves of the observation, which only learning sees.
    """

    agent: np.ndarray
    end: np.ndarray
    obs: Mapping[str, np.ndarray]
    action: np.ndarray
    log_prob: np.ndarray
    policy_version: np.ndarray
    extras: Mapping[str, np.ndarray]
    reward: np.ndarray
    parts: Mapping[str, np.ndarray]
    seen: Mapping[str, np.ndarray] = field(default_factory=dict)

    def take(self, index: np.ndarray) -> Rows:
        """Some of the rows, in this order."""
        return _mapped(lambda column: column[index], self)

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """One or more parts, one after the other."""
        return _mapped(lambda *columns: np.concatenate(columns), *parts)


def _mapped(function: Callable[..., np.ndarray], *rows: Rows) -> Rows:
    """Rows whose columns are those of ``function``, given the same column of each of ``rows``."""
    values: dict[str, Any] = {}
    for name in (item.name for item in fields(Rows)):
        first, *others = (getattr(part, name) for part in rows)
        if isinstance(first, Mapping):
            values[name] = {key: function(first[key], *(other[key] for other in others)) for key in first}
        else:
            values[name] = function(first, *others)
    return Rows(**values)


class Piece(NamedTuple):
    """A part of an agent's episode.

    Attributes:
        agent: the agent's number.
        fragment: its transitions; None: there are none.
        reward: sum of their rewards.
        parts: the same by the game's names.
        end: how the episode is after it.
    """

    agent: int
    fragment: Fragment | None
    reward: float
    parts: Mapping[str, float]
    end: int


class Trajectories:
    """Cuts the rows of a session's agents. The newest row of an agent whose episode goes on waits for its outcome."""

    def __init__(self) -> None:
        self._waiting: Rows | None = None

    def example(self, has_rows: bool) -> Step | None:
        """A step like those of the rows that wait, with an axis of rows or without; None: there are none."""
        if self._waiting is None:
            return None
        index = np.array([0]) if has_rows else np.array(0)
        row = self._waiting.take(index)
        return Step(row.obs, row.action, row.log_prob, row.policy_version, row.extras)

    def forget(self) -> None:
        """Drops the rows that wait: what their actions earned will not be known."""
        self._waiting = None

    def cut(self, rows: Rows, *, done: bool) -> Iterator[Piece]:
        """The pieces that these rows complete, agent by agent.

        Args:
            rows: what has come since the last call.
            done: no more rows will come: episodes that go on are cut.
        """
        if self._waiting is not None:
            rows = Rows.joined([self._waiting, rows])
        if (rows.agent != rows.agent[0]).any():
            rows = rows.take(rows.agent.argsort(kind="stable"))
        agents, ends = rows.agent, rows.end
        lasts = np.flatnonzero(np.append((agents[1:] != agents[:-1]) | (ends[:-1] != GOES_ON), True)).tolist()
        waiting = [last for last in lasts if ends[last] == GOES_ON]
        self._waiting = rows.take(np.array(waiting)) if waiting and not done else None
        first = 0
        for last in lasts:
            yield _piece(rows, first, last, done)
            first = last + 1


def _piece(rows: Rows, first: int, last: int, done: bool) -> Piece:
    end = int(rows.end[last])
    steps, earned = slice(first, last), slice(first + 1, last + 1)
    if first == last:
        return Piece(int(rows.agent[last]), None, 0.0, {}, end)
    fragment = Fragment(
        obs={name: leaf[first : last + 1] for name, leaf in (*rows.obs.items(), *rows.seen.items())},
        action=rows.action[steps],
        log_prob=rows.log_prob[steps],
        reward=rows.reward[earned].astype(np.float32),
        terminated=end == TERMINATED,
        truncated=end in (TRUNCATED, BROKEN_OFF) or (done and end == GOES_ON),
        policy_version=rows.policy_version[steps],
        extras={name: leaf[steps] for name, leaf in rows.extras.items()},
    )
    parts = {name: float(leaf[earned].sum()) for name, leaf in rows.parts.items()}
    return Piece(int(rows.agent[last]), fragment, float(rows.reward[earned].sum()), parts, end)
