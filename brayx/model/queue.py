"""The rows that wait for a batcher's next call: bounded, and fair to callers when there are too many.

Rows may have a *key*, such as a policy version: a call has rows of one key only. Rows that fit into one call are taken
in order of arrival. If there are more rows, or several keys, keys take turns, and within a key callers, a row each: a
caller with a thousand rows does not delay another's single row. Nor does it fill the queue: if the queue is full, a row
of a caller with fewer rows replaces the newest row of the caller with the most (longest queue drop: Suter, Lakshman,
Stiliadis and Choudhury, "Design considerations for supporting TCP with per-flow queueing", 1998).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from brayx.errors import QueueFull

Row = TypeVar("Row")


class WaitingRow(Generic[Row]):
    """A row, its arrival and deadline by the loop's clock, and the future of its result; see `Batcher.submit`."""

    __slots__ = ("arrived", "caller", "deadline", "future", "key", "row", "whole")

    def __init__(
        self,
        row: Row,
        future: asyncio.Future[Any],
        arrived: float,
        deadline: float,
        key: Hashable,
        caller: Hashable,
        whole: bool,
    ) -> None:
        self.row = row
        self.future = future
        self.arrived = arrived
        self.deadline = deadline
        self.key = key
        self.caller = caller
        self.whole = whole


class FairQueue(Generic[Row]):
    """The waiting rows of a batcher. Iterates over all of them.

    Args:
        max_rows: rows that may wait.
        max_batch_size: maximum rows of one call.

    Attributes:
        abandoned: some waiting rows may have been abandoned.
    """

    def __init__(self, max_rows: int, max_batch_size: int) -> None:
        self.max_rows = max_rows
        self.abandoned = False
        self._max_batch_size = max_batch_size
        self._waiting: deque[WaitingRow[Row]] = deque()
        # Earlier arrivals that did not fit into one call: by key, then by caller, each in turn.
        self._lanes: OrderedDict[Hashable, OrderedDict[Hashable, deque[WaitingRow[Row]]]] = OrderedDict()
        self._in_lanes = 0
        self._held: dict[Hashable, int] = {}  # waiting rows of each named caller

    def __len__(self) -> int:
        return len(self._waiting) + self._in_lanes

    def __iter__(self) -> Iterator[WaitingRow[Row]]:
        for callers in self._lanes.values():
            for lane in callers.values():
                yield from lane
        yield from self._waiting

    def add(self, request: WaitingRow[Row]) -> None:
        """Adds a row, perhaps in place of another caller's newest; raises `QueueFull` if it has no claim to room."""
        caller = request.caller
        if len(self._waiting) + self._in_lanes >= self.max_rows:
            self._make_room(caller)
        self._waiting.append(request)
        if caller is not None:
            self._held[caller] = self._held.get(caller, 0) + 1

    def clear(self) -> None:
        """Removes all rows."""
        self._waiting.clear()
        self._lanes.clear()
        self._in_lanes = 0
        self._held.clear()

    def check_room(self, rows: int) -> None:
        """Raises `QueueFull` if ``rows`` rows do not fit."""
        if self.max_rows - len(self) < rows:
            self._drop_abandoned()
            if self.max_rows - len(self) < rows:
                raise self._full(rows)

    def _make_room(self, caller: Hashable) -> None:
        """Makes room for a row of ``caller`` in a full queue, or raises `QueueFull`."""
        self._drop_abandoned()
        if len(self) < self.max_rows:
            return
        most = max(self._held, key=self._held.__getitem__, default=None)
        if most is None or self._held[most] <= self._held.get(caller, 0) + 1:
            raise self._full()
        future = self._remove_newest(most).future
        if not future.done():  # its caller may have been cancelled just now
            future.set_exception(self._full())

    def _remove_newest(self, caller: Hashable) -> WaitingRow[Row]:
        """Removes the newest waiting row of a caller."""
        self._let_go(caller)
        for back, request in enumerate(reversed(self._waiting), 1):
            if request.caller == caller:
                del self._waiting[-back]
                return request
        lanes = [(key, callers) for key, callers in self._lanes.items() if caller in callers]
        key, callers = max(lanes, key=lambda lane: lane[1][caller][-1].arrived)
        request = callers[caller].pop()
        self._in_lanes -= 1
        if not callers[caller]:
            del callers[caller]
        if not callers:
            del self._lanes[key]
        return request

    def _drop_abandoned(self) -> None:
        """Removes rows whose callers were cancelled or missed their deadline.

        Only if there may be some: otherwise every refused row of an overload would scan the whole queue.
        """
        if not self.abandoned:
            return
        self.abandoned = False
        for key, callers in list(self._lanes.items()):
            for caller, lane in list(callers.items()):
                if left := _still_waited_for(lane):
                    callers[caller] = left
                else:
                    del callers[caller]
            if not callers:
                del self._lanes[key]
        self._waiting = _still_waited_for(self._waiting)
        requests = list(self)
        self._in_lanes = len(requests) - len(self._waiting)
        self._held = dict(Counter(request.caller for request in requests if request.caller is not None))

    def _full(self, more: int = 1) -> QueueFull:
        room = "" if more == 1 else f"there is no room for {more} more: "
        most = self.max_rows
        return QueueFull(f"{room}{len(self)} forwards wait already, max_queue is {most}", max_queue=most)

    def take(self) -> list[WaitingRow[Row]]:
        """The rows of the next call, all of one key; empty if no caller waits any more."""
        if not self._lanes and len(self._waiting) <= self._max_batch_size:
            batch = [request for request in self._waiting if not request.future.done()]
            key = batch[0].key if batch else None
            if not [request for request in batch if request.key != key]:  # a generator would cost most of this method
                self._waiting.clear()
                self._held.clear()
                return batch
        self._into_lanes()
        while self._lanes:
            if batch := self._of_next_key():
                return batch
        return []

    def _into_lanes(self) -> None:
        """Sorts new arrivals by key and caller; each row once, so that a row's cost does not depend on the queue."""
        for request in self._waiting:
            callers = self._lanes.setdefault(request.key, OrderedDict())
            lane = callers.setdefault(request if request.caller is None else request.caller, deque())
            lane.append(request)
        self._in_lanes += len(self._waiting)
        self._waiting.clear()

    def _of_next_key(self) -> list[WaitingRow[Row]]:
        """Rows of the next key, one of each caller in turn; empty if all of them were abandoned."""
        key, callers = self._lanes.popitem(last=False)
        batch: list[WaitingRow[Row]] = []
        while callers and len(batch) < self._max_batch_size:
            caller, lane = callers.popitem(last=False)
            request = lane.popleft()
            self._in_lanes -= 1
            if request.caller is not None:
                self._let_go(request.caller)
            if lane:
                callers[caller] = lane
            if not request.future.done():
                batch.append(request)
        if callers:
            self._lanes[key] = callers
        return batch

    def _let_go(self, caller: Hashable) -> None:
        rows = self._held[caller] - 1
        if rows:
            self._held[caller] = rows
        else:
            del self._held[caller]


def _still_waited_for(requests: deque[WaitingRow[Row]]) -> deque[WaitingRow[Row]]:
    return deque(request for request in requests if not request.future.done())
