"""`Groups`: what the value of a group of agents sees, and when a group's episode ends.

The members of a group are its agents whose episodes go on. A member whose episode is terminated while others go on
still earns the group's rewards to come (Cohen et al. 2022, "On the use and misuse of absorbing states in multi-agent
reinforcement learning", https://arxiv.org/abs/2111.05992). So its last transition bootstraps from the group's value.
Knows nothing of algorithms, models or buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from brayx.actor.trajectories import GOES_ON, TERMINATED, TRUNCATED, Rows
from brayx.errors import BadBody
from brayx.gamecore.contract_ticks import Tick
from brayx.spaces import MASK

PRESENT = "state/present"
"""Observation leaf uint8 ``[size]``: 1 for members, 0 behind the last one."""
MEMBERS = "state/obs/{}"
"""Observation leaf ``[size, ...]`` of the members' observations of a name, zeros behind the last one."""


class _Row(NamedTuple):
    """A row of a tick; ``place`` counts all rows, and a ``group`` below 0 has only this agent."""

    place: int
    agent: int
    group: int
    end: int


class Groups:
    """The groups of a session's agents. An agent without a group is the only member of one.

    Args:
        size: number of members whose observations a value sees.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.forget()

    def forget(self) -> None:
        """Drops all members, because ticks were lost: each is a member again from its next row on."""
        self._groups: dict[int, int] = {}
        """Group of each agent whose episode goes on; below 0 for one that is alone."""
        self._members: dict[int, dict[int, int]] = {}
        """By group and agent, the place of its newest row in `_newest`, or behind those among the rows to come."""
        self._newest: dict[str, np.ndarray] = {}

    def check(self, tick: Tick) -> None:
        """Refuses a tick in which more agents of a group act than a value sees.

        Raises:
            BadBody: names the group.
        """
        if tick.groups is None:
            return
        acting = tick.groups if tick.acting is None else tick.groups[tick.acting]
        numbers, counts = np.unique(acting[acting > 0], return_counts=True)
        if len(counts) and counts.max() > self._size:
            largest = int(counts.argmax())
            raise BadBody(
                f"group {numbers[largest]} has {counts[largest]} agents that act, expected at most {self._size}, "
                "which the value of a group sees: algorithm.group_size sets it",
                field="group",
            )

    def seen(self, rows: Rows, ticks: Sequence[Tick]) -> Rows:
        """The rows with what the value of each sees, which are leaves of its observation: the agent's own observation
        first, then its group's. A row that is terminated while members go on becomes truncated, and the value is that
        of the first of these.

        Args:
            rows: of all ticks since the last call, in their order.
            ticks: these ticks.
        """
        first = len(self._groups)  # places count on from those of the rows that were kept
        agents, ends = rows.agent.tolist(), rows.end.tolist()
        seen: list[list[int]] = []
        for tick in ticks:
            count = 1 if tick.agents is None else len(tick.agents)
            groups = [0] * count if tick.groups is None else tick.groups.tolist()
            done = slice(len(seen), len(seen) + count)
            given = zip(agents[done], groups, ends[done], strict=True)
            places, ends[done] = self._follow(
                [
                    _Row(first + row, agent, group or -1 - agent, end)
                    for row, (agent, group, end) in enumerate(given, done.start)
                ]
            )
            seen += places
        return self._with_leaves(replace(rows, end=np.array(ends, np.uint8)), seen)

    def _follow(self, tick: Sequence[_Row]) -> tuple[list[list[int]], list[int]]:
        """Takes the rows of one tick in; returns the places of the observations that each row's value sees, and how
        its episode is after it."""
        ended: dict[int, int] = {}
        """Group of each agent whose running episode ends, by the place of the row."""
        cut: dict[int, list[int]] = {}
        """Places of the last rows of episodes that are cut, by group."""
        for row in tick:
            if row.end != GOES_ON and row.agent in self._groups:
                group = ended[row.place] = self._leave(row.agent)
                if row.end != TERMINATED:
                    cut.setdefault(group, []).append(row.place)
        for row in tick:
            if row.end == GOES_ON and self._groups.get(row.agent) == row.group:
                self._members[row.group][row.agent] = row.place
        # Members that begin an episode in this tick come after the group's end, if it has one.
        left = {group: [*self._members.get(group, {}).values(), *cut.get(group, [])] for group in set(ended.values())}
        for row in tick:
            if row.end == GOES_ON:
                self._join(row)
        seen, ends = [], []
        for row in tick:
            members = left[ended[row.place]] if row.place in ended else [*self._members.get(row.group, {}).values()]
            is_bootstrapped = row.place in ended and row.end == TERMINATED and bool(members)
            own = [] if is_bootstrapped else [row.place]
            seen.append([*own, *(place for place in members if place != row.place)][: self._size])
            ends.append(TRUNCATED if is_bootstrapped else row.end)
        return seen, ends

    def _join(self, row: _Row) -> None:
        if row.agent in self._groups:
            self._leave(row.agent)
        self._groups[row.agent] = row.group
        self._members.setdefault(row.group, {})[row.agent] = row.place

    def _leave(self, agent: int) -> int:
        """Takes a member out of its group, which it returns."""
        group = self._groups.pop(agent)
        del self._members[group][agent]
        if not self._members[group]:
            del self._members[group]
        return group

    def _with_leaves(self, rows: Rows, seen: Sequence[Sequence[int]]) -> Rows:
        """The rows with the observations at these places, and the newest rows of all members kept."""
        names = [name for name in rows.obs if name != MASK]
        every = {
            name: np.concatenate([self._newest[name], rows.obs[name]]) if self._newest else rows.obs[name]
            for name in names
        }
        places, present = np.zeros((len(seen), self._size), np.int64), np.zeros((len(seen), self._size), np.uint8)
        for row, members in enumerate(seen):
            places[row, : len(members)] = members
            present[row, : len(members)] = 1
        leaves = {PRESENT: present}
        for name, array in every.items():
            leaf = leaves[MEMBERS.format(name)] = array[places]
            leaf[present == 0] = 0
        newest: list[int] = []
        for members_of_group in self._members.values():
            for agent, place in members_of_group.items():
                members_of_group[agent] = len(newest)
                newest.append(place)
        self._newest = {name: array[newest] for name, array in every.items()}
        return replace(rows, seen=leaves)
