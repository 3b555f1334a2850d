"""The replay buffer: a bounded store of fragments for the learner, read once in order or sampled. It counts all drops.

`ReplayBuffer` never waits: the hosts add the waiting around it. Knows nothing of Ray, of models, or of the learner.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from brayx.errors import BadFragment
from brayx.replay.config import BufferConfig
from brayx.replay.packing import Batch, BatchPacker, Layout, oldest, rows, transitions
from brayx.replay.table import MAX_CAPACITY, PRIORITY, Table
from brayx.types import Columns, Fragment


class ReplayBuffer:
    """Packs fragments and columns into learner batches, read once in order (``fifo``) or sampled from a `Table`.

    Args:
        config: sizes, and how to sample.
        layout: required shapes and dtypes of fragments; missing parts are taken from the first valid fragment.
        seed: seed of the sampling; None: a random one.
        shard: number of this shard, where a buffer has several.

    Attributes:
        pushed: transitions accepted so far.
        dropped: transitions dropped so far, by reason: ``bad_fragment``; ``full`` (the oldest); ``policy_lag``
            (too old when sampled); ``rate_limited`` and ``reservoir`` of a `Table`.
        reused: batches given again because there was no newer one.
    """

    def __init__(
        self, config: BufferConfig, layout: Layout | None = None, *, seed: int | None = None, shard: int = 0
    ) -> None:
        self._config = config
        self.table = None if config.sampler == "fifo" else Table.of(config, seed, shard)
        self._packer = BatchPacker(config.batch_size if self.table is None else 1, config.unroll_length, layout)
        self._batches: deque[Batch] = deque()
        self._newest = -1
        self._last: Batch | None = None
        self._last_used = 0
        self._dropped: Counter[str] = Counter()
        self.pushed = 0
        self.reused = 0

    @property
    def dropped(self) -> Counter[str]:
        """Transitions dropped so far, by reason."""
        return self._dropped if self.table is None else self._dropped + self.table.dropped

    @property
    def newest_version(self) -> int | None:
        """The newest policy version announced by `published` or `expire`; None if there was none."""
        return self._packer.newest_version

    def __len__(self) -> int:
        """Number of complete batches, or of batches that the table's columns would fill."""
        return len(self._batches) if self.table is None else len(self.table) // self._config.batch_size

    @property
    def has_room(self) -> bool:
        """Whether a column can be taken without dropping one."""
        return self._room() > 0

    def dropped_elsewhere(self, reason: str, transitions: int) -> None:
        """Counts transitions that the owner dropped before they were pushed."""
        self._dropped[reason] += transitions

    def published(self, version: int) -> None:
        """Announces a new policy version; fragments of a version newer than this are refused."""
        self._packer.newest_version = max(version, self._packer.newest_version or version)
        self.expire(version)

    def expire(self, newest: int) -> None:
        """Announces a new policy version; columns more than ``max_policy_lag`` versions older are no longer given.

        Old columns are removed at once where newer ones need their place: complete batches take up room, and an
        unfinished batch would mix its old columns with new ones.
        """
        self._newest = max(self._newest, newest)
        least = self._least_version()
        if self.table is not None or least is None:
            return
        dropped, batches = self._packer.drop_older(least), deque[Batch]()
        for batch in self._batches:
            if batch["mask"][oldest(batch) >= least].any():
                batches.append(batch)
            else:
                dropped += int(np.count_nonzero(batch["mask"]))
        self._batches = batches
        if dropped:
            self._dropped["policy_lag"] += dropped

    def push(self, replay: Fragment | Columns) -> None:
        """Stores a fragment or columns; drops transitions if there is no room (see ``dropped``).

        Raises:
            BadFragment: names the field. The fragment is counted, and none of it is stored.
        """
        self._push(replay, None)

    def push_what_fits(self, replay: Fragment | Columns) -> Fragment | Columns | None:
        """Like `push`, but drops nothing: it stores as much as there is room for and returns the rest, or None.

        A fragment that needs more columns than are free is split at a column's end. So a fragment of any length gets
        in eventually, however few columns the rate limiter allows at a time.
        """
        room = self._room()
        if isinstance(replay, Columns):
            parts = _cut(replay, room) if rows(replay) > room else None
            if parts is None:
                self.push(replay)
                return None
            if room:
                self.push(parts[0])
            return parts[1]
        size = transitions(replay)
        steps = self._packer.fitting(size, room)
        if steps == size:
            self.push(replay)
            return None
        if not steps:
            return replay
        self._push(replay, steps)
        return replay.after(steps)

    def pop(self, *, reuse: bool = True) -> Batch | None:
        """The next batch, or None if the learner has to wait.

        Args:
            reuse: if there is no other batch, give the last one again, at most ``max_reuse`` times.
        """
        batch = self._next()
        if batch is not None:
            self._last, self._last_used = (batch, 0) if self._config.max_reuse else (None, 0)
            return batch
        if reuse and self._last is not None and self._last_used < self._config.max_reuse:
            least = self._least_version()
            if least is None or oldest(self._last).min() >= least:
                self._last_used += 1
                self.reused += 1
                return self._last
        return None

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> int:
        """Sets priorities ``[n]`` of columns, identified by their batch's ``index`` ``[n]``; returns how many exist.

        See `Table.update_priorities`.
        """
        return 0 if self.table is None else self.table.update_priorities(index, priorities)

    def flush(self) -> None:
        """Completes the unfinished batch, or column, with masked steps."""
        batch = self._packer.flush()
        if batch is None:
            return
        if self.table is None:
            self._append(batch)
        else:
            self.table.insert(batch)

    @property
    def exhausted(self) -> bool:
        """True if there is no further batch until the next push."""
        if self.table is None:
            return not self._batches
        return not self.table.limiter.may_sample(len(self.table), self._config.batch_size)

    def stats(self) -> dict[str, float]:
        """Counters by name.

        ``pushed``, ``waiting`` transitions of the unfinished batch, ``batches``, ``reused``, ``dropped.*``; with a
        `Table` also ``columns``, ``inserts``, ``samples``, ``replaced`` and ``stale`` priorities.
        """
        table = {}
        if self.table is not None:
            table = {
                "columns": len(self.table),
                "inserts": self.table.limiter.inserts,
                "samples": self.table.limiter.samples,
                "replaced": self.table.replaced,
                "stale": self.table.stale,
            }
        return {
            "pushed": self.pushed,
            "waiting": self._packer.waiting,
            "batches": len(self),
            "reused": self.reused,
            **table,
            **{f"dropped.{reason}": count for reason, count in self.dropped.items()},
        }

    def _push(self, replay: Fragment | Columns, steps: int | None) -> None:
        """Like `push`, for the first ``steps`` transitions of a fragment; None: all of ``replay``."""
        try:
            batches = self._pack(replay, steps)
        except BadFragment:
            self._dropped["bad_fragment"] += transitions(replay)
            raise
        self.pushed += len(replay) if steps is None else steps
        for batch in batches:
            if self.table is None:
                self._append(batch)
            else:
                self.table.insert(batch)
        least = self._least_version()
        if self.table is None and least is not None and _oldest(replay) < least:
            self.expire(self._newest)  # late data would otherwise hold up everything after it

    def _pack(self, replay: Fragment | Columns, steps: int | None) -> Iterable[Batch]:
        if self.table is None:
            packed: Iterable[Batch] = self._packer.add(replay, steps)
        else:
            _check_priority(replay)
            packed = [self._packer.checked(replay)] if isinstance(replay, Columns) else self._packer.add(replay, steps)
        if self._config.max_policy_lag is not None:
            self._newest = max(self._newest, _newest(replay))
        return packed

    def _room(self) -> int:
        """Columns that fit without dropping any."""
        if self.table is None:
            free = self._config.size - len(self._batches)
            return (free + 1) * self._config.batch_size - 1 - self._packer.columns if free else 0
        room = self.table.room
        return MAX_CAPACITY if room is None else room

    def _next(self) -> Batch | None:
        least = self._least_version()
        if self.table is not None:
            return self.table.sample(least)
        while self._batches:
            batch = self._batches.popleft()
            if least is None:
                return batch
            old = oldest(batch) < least
            if old.any():
                self._dropped["policy_lag"] += int(np.count_nonzero(batch["mask"][old]))
                batch = {**batch, "mask": np.where(old[:, np.newaxis], np.float32(0), batch["mask"])}
            if batch["mask"].any():
                return batch
        return None

    def _least_version(self) -> int | None:
        return None if self._config.max_policy_lag is None else self._newest - self._config.max_policy_lag

    def _append(self, batch: Batch) -> None:
        self._batches.append(batch)
        while len(self._batches) > self._config.size:
            self._dropped["full"] += int(np.count_nonzero(self._batches.popleft()["mask"]))


def _newest(replay: Fragment | Columns) -> int:
    if isinstance(replay, Fragment):
        return int(np.max(replay.policy_version))
    return int(np.max(replay.arrays["policy_version"], where=np.asarray(replay.arrays["mask"]) > 0, initial=-1))


def _oldest(replay: Fragment | Columns) -> int:
    if isinstance(replay, Fragment):
        return int(np.min(replay.policy_version))
    return int(oldest(replay.arrays).min(initial=np.iinfo(np.int64).max))


def _cut(columns: Columns, row: int) -> tuple[Columns, Columns] | None:
    """The first ``at`` columns and the rest; None if a value is not an array, which packing refuses."""
    try:
        first = {key: array[:row] for key, array in columns.arrays.items()}
        return Columns(first), columns.after(row)
    except (IndexError, TypeError):
        return None


def _check_priority(replay: Fragment | Columns) -> None:
    named: Any = replay.arrays if isinstance(replay, Columns) else getattr(replay, "extras", {})
    if not isinstance(named, Mapping):
        return  # packing refuses it
    for name in ("weight", "index"):
        if name in named:
            raise BadFragment(f"{name}: a name reserved by the buffer", field=name)
    if PRIORITY not in named:
        return
    try:
        priorities = np.asarray(named[PRIORITY])
    except ValueError as error:  # lists of different lengths
        raise BadFragment(f"{PRIORITY}: not an array: {error}", field=PRIORITY) from None
    axes = 2 if isinstance(replay, Columns) else 1
    if priorities.ndim != axes or priorities.dtype.kind not in "biuf":
        raise BadFragment(
            f"{PRIORITY}: expected a number for each step, got {priorities.dtype} of shape {priorities.shape}",
            field=PRIORITY,
        )
    if priorities.min(initial=0) < 0:
        raise BadFragment(f"{PRIORITY}: negative", field=PRIORITY)


class NullBuffer:
    """A buffer that drops everything: a served job does not learn, nor does an opponent."""

    def push(self, *replays: Fragment | Columns) -> None:
        """Takes fragments and columns."""

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Takes all of them."""
        return []
