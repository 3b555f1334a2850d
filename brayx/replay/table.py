"""A table of columns for sampling: a sampler, a remover and a rate limiter around preallocated memory.

Each array has room for ``capacity`` columns and is read and written by arrays of slots, so Python time does not grow
with the number of columns. All memory is reserved at the start; the system provides a page when it is first written.
Knows nothing of fragments, layouts or waiting.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable

import numpy as np

from brayx.replay.config import BufferConfig
from brayx.replay.limiter import RateLimiter
from brayx.replay.packing import Batch
from brayx.replay.removers import LowestPriority, Oldest, Remover, Reservoir
from brayx.replay.samplers import Prioritised, Sampler, Uniform

PRIORITY = "priority"
"""Name of an extra ``[T]`` with initial priorities; a column's priority is the largest of its steps."""

_SLOT_BITS, _GENERATION_BITS, _RANDOM_BITS = 28, 12, 16
"""Bits of a column's id, lowest first: its slot, how often the slot was written, and its table: random bits, and above
them 7 bits for the shard."""
MAX_CAPACITY = 1 << _SLOT_BITS
_NEVER = int(np.iinfo(np.int64).max)


class Table:
    """A bounded set of columns to sample from.

    Args:
        capacity: largest number of columns.
        batch_size: columns of a sample.
        sampler, remover, limiter: made for this capacity and batch size.
        seed: seed of the sampling.
        shard: number of the table, 0 to 127, which makes ids distinct between the shards of a buffer.

    Attributes:
        dropped: transitions, by reason: ``rate_limited`` (not inserted), ``policy_lag`` (too old), ``reservoir`` (not
            drawn into it).
        replaced: columns that were overwritten.
        stale: priorities received for columns that are gone.
    """

    def __init__(
        self,
        capacity: int,
        batch_size: int,
        sampler: Sampler,
        remover: Remover,
        limiter: RateLimiter | None = None,
        *,
        seed: int | None = None,
        shard: int = 0,
    ) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity is {capacity}, expected 1 to {MAX_CAPACITY}")
        self._capacity, self._batch_size = capacity, batch_size
        self._sampler, self._remover = sampler, remover
        self.limiter = limiter or RateLimiter(samples=batch_size, capacity=capacity)
        self._rng = np.random.default_rng(seed)
        self._arrays: Batch = {}
        self._alive = np.zeros(capacity, np.bool_)
        self._version = np.zeros(capacity, np.int64)
        self._transitions = np.zeros(capacity, np.int64)
        self._generation = np.zeros(capacity, np.int64)
        # The shard makes ids distinct between shards; random bits, between buffers and between restarts of one buffer.
        self._origin = shard << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        self._lowest_version = _NEVER
        self._count = 0
        self.dropped: Counter[str] = Counter()
        self.replaced = 0
        self.stale = 0

    @classmethod
    def uniform(cls, capacity: int, batch_size: int, limiter: RateLimiter | None = None, **options: int) -> Table:
        """Samples uniformly; replaces the oldest column."""
        return cls(capacity, batch_size, Uniform(capacity), Oldest(capacity), limiter, **options)

    @classmethod
    def prioritised(
        cls,
        capacity: int,
        batch_size: int,
        limiter: RateLimiter | None = None,
        *,
        exponent: float = 0.6,
        **options: int,
    ) -> Table:
        """Prioritised experience replay; replaces the oldest column."""
        return cls(capacity, batch_size, Prioritised(capacity, exponent), Oldest(capacity), limiter, **options)

    @classmethod
    def of(cls, config: BufferConfig, seed: int | None = None, shard: int = 0) -> Table:
        """The table for a buffer's options."""
        capacity = config.capacity
        removers: dict[str, Callable[[int], Remover]] = {
            "oldest": Oldest,
            "lowest_priority": LowestPriority,
            "reservoir": Reservoir,
        }
        sampler: Sampler
        if config.sampler == "prioritised":
            sampler = Prioritised(capacity, config.priority_exponent)
        else:
            sampler = Uniform(capacity)
        return cls(
            capacity,
            config.batch_size,
            sampler,
            removers[config.remover](capacity),
            config.limiter(),
            seed=seed,
            shard=shard,
        )

    def __len__(self) -> int:
        """Number of stored columns."""
        return self._count

    @property
    def room(self) -> int | None:
        """Columns that the rate limiter allows to insert now; None: any number."""
        return self.limiter.room(self._count)

    def insert(self, columns: Batch) -> int:
        """Copies as many of the first columns of ``[n, T + 1, ...]`` as the rate allows; returns their number."""
        rows = len(columns["mask"])
        room = self.room
        count = rows if room is None else min(rows, room)
        if count < rows:
            self.dropped["rate_limited"] += int(np.count_nonzero(columns["mask"][count:]))
        if count == 0:
            return 0
        mask = columns["mask"][:count] > 0
        priorities = columns[PRIORITY][:count].max(axis=1, where=mask, initial=0) if PRIORITY in columns else None
        slots = self._remover.place(count, priorities, self._rng)
        inserted = np.flatnonzero(slots >= 0)
        transitions = mask.sum(axis=1)
        if len(inserted) < count:
            self.dropped["reservoir"] += int(transitions.sum() - transitions[inserted].sum())
        slots = slots[inserted]
        before = slots[self._alive[slots]]
        self._sampler.remove(before)
        self.replaced += len(before)
        self._write(columns, inserted, slots)
        self._version[slots] = columns["policy_version"][inserted].min(axis=1, where=mask[inserted], initial=_NEVER)
        self._lowest_version = min(self._lowest_version, int(self._version[slots].min(initial=_NEVER)))
        self._transitions[slots] = transitions[inserted]
        self._generation[slots] = (self._generation[slots] + 1) & ((1 << _GENERATION_BITS) - 1)
        self._alive[slots] = True
        self._count += len(slots) - len(before)
        self._sampler.insert(slots, None if priorities is None else priorities[inserted])
        self.limiter.inserted(count)
        return count

    def sample(self, least_version: int | None = None) -> Batch | None:
        """A copied batch; None if the limiter does not allow one, or the table is empty.

        With priorities it has ``weight`` ``[B]`` float32 for ``beta`` 1 (see `brayx.replay.samplers`), and ``index``
        ``[B]`` int64, the columns' ids for `update_priorities`.

        Args:
            least_version: first drop columns with a step of an older policy version; None: drop none.
        """
        if least_version is not None:
            self._expire(least_version)
        if self._count == 0 or not self.limiter.may_sample(self._count, self._batch_size):
            return None
        slots, weights = self._sampler.draw(self._batch_size, self._rng)
        self.limiter.sampled(self._batch_size)
        batch = {key: array[slots] for key, array in self._arrays.items()}
        if weights is not None:
            batch["weight"] = weights
            batch["index"] = self._ids(slots)
        return batch

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> int:
        """Sets the priorities ``[n]`` of columns by the ``index`` ``[n]`` of their batch; returns how many were stored.

        Priorities of columns that are gone are counted as stale; ids of other tables are ignored. If an id is repeated,
        its last priority counts.

        Raises:
            ValueError: a priority of a stored column is negative or not finite.
        """
        index, priorities = np.asarray(index, np.int64), np.asarray(priorities, np.float64)
        is_here = index >> (_SLOT_BITS + _GENERATION_BITS) == self._origin
        slots = index[is_here] & (MAX_CAPACITY - 1)
        within = slots < self._capacity
        index, slots, priorities = index[is_here][within], slots[within], priorities[is_here][within]
        is_current = self._alive[slots] & (self._ids(slots) == index)
        self.stale += int(len(is_current) - is_current.sum())
        slots, priorities = slots[is_current], priorities[is_current]
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError("a priority is negative or not finite")
        self._sampler.update(slots, priorities)
        self._remover.update(slots, priorities)
        return len(slots)

    def _write(self, columns: Batch, rows: np.ndarray, slots: np.ndarray) -> None:
        if not self._arrays:
            self._arrays = {
                key: np.zeros((self._capacity, *array.shape[1:]), array.dtype) for key, array in columns.items()
            }
        if not len(slots):
            return
        together = slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all()
        source = slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] + 1 - rows[0] else rows
        for key, array in self._arrays.items():
            array[slice(slots[0], slots[-1] + 1) if together else slots] = columns[key][source]

    def _ids(self, slots: np.ndarray) -> np.ndarray:
        ids: np.ndarray = (
            (np.int64(self._origin) << (_SLOT_BITS + _GENERATION_BITS))
            | (self._generation[slots] << _SLOT_BITS)
            | slots
        )
        return ids

    def _expire(self, least_version: int) -> None:
        if self._lowest_version >= least_version:
            return
        old = np.flatnonzero(self._alive & (self._version < least_version))
        self.dropped["policy_lag"] += int(self._transitions[old].sum())
        self._alive[old] = False
        self._count -= len(old)
        self._sampler.remove(old)
        self._remover.remove(old)
        self._lowest_version = int(self._version.min(where=self._alive, initial=_NEVER))
