"""Columns kept to be sampled again and again: a sampler, a remover and a rate limiter around one block of memory.

Arrays lie in one block of ``capacity`` columns that is written and read by slots, so that neither pushing nor sampling
costs Python time by the column, and memory is what it is from the start (the system gives a page when it is first
written). Knows nothing of fragments, layouts or waiting.
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
"""Name of an extra ``[T]``: what is pushed with it has its largest one as the priority to begin with."""

_SLOT_BITS, _GENERATION_BITS, _RANDOM_BITS = 28, 12, 16
"""Of a column's id, from the lowest: where it lies, how often that was written, and whose it is: chance, and in the 7
bits above it the shard."""
MAX_CAPACITY = 1 << _SLOT_BITS
_NEVER = int(np.iinfo(np.int64).max)


class Table:
    """Columns that are sampled.

    Args:
        capacity: columns kept.
        batch_size: columns of a sample.
        sampler, remover, limiter: made for that capacity and batch size.
        seed: of what is drawn.
        shard: number of the table among those whose ids must not be taken for each other's; 0 to 127.

    Attributes:
        dropped: transitions, by reason: ``rate_limited`` (not taken in), ``policy_lag`` (too old), ``reservoir`` (not
            drawn into it).
        replaced: columns whose place others took.
        stale: priorities that came for columns which were gone.
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
        # Ids of another shard's columns are not taken for ours; chance tells those of another buffer, and of this one
        # before its process died.
        self._origin = shard << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        self._lowest_version = _NEVER
        self._count = 0
        self.dropped: Counter[str] = Counter()
        self.replaced = 0
        self.stale = 0

    @classmethod
    def uniform(cls, capacity: int, batch_size: int, limiter: RateLimiter | None = None, **options: int) -> Table:
        """Every column is equally likely, the oldest goes."""
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
        """Prioritised experience replay; the oldest goes."""
        return cls(capacity, batch_size, Prioritised(capacity, exponent), Oldest(capacity), limiter, **options)

    @classmethod
    def reservoir(cls, capacity: int, batch_size: int, limiter: RateLimiter | None = None, **options: int) -> Table:
        """A weighted sample of all that was ever pushed, drawn from uniformly."""
        return cls(capacity, batch_size, Uniform(capacity), Reservoir(capacity), limiter, **options)

    @classmethod
    def of(cls, config: BufferConfig, seed: int | None = None, shard: int = 0) -> Table:
        """What the options of a buffer ask for."""
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
        """Columns that are there."""
        return self._count

    @property
    def room(self) -> int | None:
        """Columns that may be inserted before some are sampled; None: any number."""
        return self.limiter.room(self._count)

    def insert(self, columns: Batch) -> int:
        """Copies columns ``[n, T + 1, ...]`` in, as far as the rate allows, and says how many of the first it took."""
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
        kept = np.flatnonzero(slots >= 0)
        transitions = mask.sum(axis=1)
        if len(kept) < count:
            self.dropped["reservoir"] += int(transitions.sum() - transitions[kept].sum())
        slots = slots[kept]
        before = slots[self._alive[slots]]
        self._sampler.remove(before)
        self.replaced += len(before)
        self._write(columns, kept, slots)
        self._version[slots] = columns["policy_version"][kept].min(axis=1, where=mask[kept], initial=_NEVER)
        self._lowest_version = min(self._lowest_version, int(self._version[slots].min(initial=_NEVER)))
        self._transitions[slots] = transitions[kept]
        self._generation[slots] = (self._generation[slots] + 1) & ((1 << _GENERATION_BITS) - 1)
        self._alive[slots] = True
        self._count += len(slots) - len(before)
        self._sampler.insert(slots, None if priorities is None else priorities[kept])
        self.limiter.inserted(count)
        return count

    def sample(self, least_version: int | None = None) -> Batch | None:
        """A batch, copied out; None when the limiter says wait, or nothing is there.

        With priorities it has ``weight`` ``[B]`` float32, which corrects the bias in full (see
        `brayx.replay.importance`), and ``index`` ``[B]`` int64, which names the columns to `update_priorities`.

        Args:
            least_version: columns with a step of an older policy are dropped first; None: none are.
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
        """Sets the priorities ``[n]`` of columns by the ``index`` ``[n]`` of their batch; says how many were there.

        Those of columns that are gone are counted as stale, those of other tables are let be. The last of a column
        that comes twice counts.

        Raises:
            ValueError: a priority of a column that is there is negative or not finite.
        """
        index, priorities = np.asarray(index, np.int64), np.asarray(priorities, np.float64)
        own = index >> (_SLOT_BITS + _GENERATION_BITS) == self._origin
        slots = index[own] & (MAX_CAPACITY - 1)
        within = slots < self._capacity
        index, slots, priorities = index[own][within], slots[within], priorities[own][within]
        there = self._alive[slots] & (self._ids(slots) == index)
        self.stale += int(len(there) - there.sum())
        slots, priorities = slots[there], priorities[there]
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
