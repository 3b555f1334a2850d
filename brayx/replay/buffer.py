"""Where fragments wait for the learner: each once in order, or sampled; bounded, and honest about what it drops.

`ReplayBuffer` is the logic, without any waiting (`actor.py` waits, in a Ray actor; `remote.py` is the handle to that).
Knows nothing of Ray, of models, or of what the learner does with a batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from brayx.errors import BadFragment
from brayx.replay.config import BufferConfig
from brayx.replay.packing import Batch, Layout, Packer, oldest, rows, transitions
from brayx.replay.table import MAX_CAPACITY, PRIORITY, Table
from brayx.types import Columns, Fragment


class ReplayBuffer:
    """Packs fragments and columns into learner batches: each once, in order (``fifo``), or sampled from a `Table`.

    Args:
        config: sizes, and how to sample.
        layout: what fragments must look like; what it does not know, or None, is as in the first good one.
        seed: of what is drawn; None: another each time.
        shard: number of this one, where a buffer has several.

    Attributes:
        pushed: transitions accepted so far.
        dropped: transitions dropped so far, by reason: ``bad_fragment``; ``full`` (the oldest); ``policy_lag``
            (too old when sampled); ``rate_limited`` and ``reservoir`` of a `Table`.
        reused: batches given again because there was no other.
        last_refusal: what the newest refused fragment was refused for.
    """

    def __init__(
        self, config: BufferConfig, layout: Layout | None = None, *, seed: int | None = None, shard: int = 0
    ) -> None:
        self._config = config
        self.table = None if config.sampler == "fifo" else Table.of(config, seed, shard)
        self._packer = Packer(config.batch_size if self.table is None else 1, config.unroll_length, layout)
        self._batches: deque[Batch] = deque()
        self._newest = -1
        self._last: Batch | None = None
        self._last_used = 0
        self._dropped: Counter[str] = Counter()
        self.pushed = 0
        self.reused = 0
        self.last_refusal = ""

    @property
    def dropped(self) -> Counter[str]:
        """Transitions dropped so far, by reason."""
        return self._dropped if self.table is None else self._dropped + self.table.dropped

    @property
    def newest_version(self) -> int | None:
        """The newest version of the policy, as far as somebody told; None: nobody did."""
        return self._packer.newest_version

    def __len__(self) -> int:
        """Whole batches waiting, or columns enough for as many."""
        return len(self._batches) if self.table is None else len(self.table) // self._config.batch_size

    @property
    def has_room(self) -> bool:
        """Whether a column can be taken without dropping one."""
        return self._room() > 0

    def dropped_elsewhere(self, reason: str, transitions: int) -> None:
        """Counts what its owner did not even push."""
        self._dropped[reason] += transitions

    def published(self, version: int) -> None:
        """Tells that the policy has this version: what claims to be of a newer one is refused from now on."""
        self._packer.newest_version = max(version, self._packer.newest_version or version)
        self.expire(version)

    def expire(self, newest: int) -> None:
        """Tells that the policy has this version: what lags further behind than ``max_policy_lag`` is not given.

        What is in the way of newer columns goes at once: batches of old ones have their room, and half a batch of them
        would make every batch after it a mixture.
        """
        self._newest = max(self._newest, newest)
        least = self._least_version()
        if self.table is not None or least is None:
            return
        gone, kept = self._packer.drop_older(least), deque[Batch]()
        for batch in self._batches:
            if batch["mask"][oldest(batch) >= least].any():
                kept.append(batch)
            else:
                gone += int(np.count_nonzero(batch["mask"]))
        self._batches = kept
        if gone:
            self._dropped["policy_lag"] += gone

    def push(self, replay: Fragment | Columns) -> None:
        """Takes a fragment, or columns, in; when there is no room, something is dropped (see ``dropped``).

        Raises:
            BadFragment: names the field. Counted, and nothing is packed.
        """
        self._push(replay, None)

    def push_what_fits(self, replay: Fragment | Columns) -> Fragment | Columns | None:
        """As `push`, but takes only what no other has to be dropped for, and gives back the rest; None: all is taken.

        A fragment that fills up more columns than there is room for is taken up to a column's end, so that one of any
        length gets in, however few columns the rate allows at a time.
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
        """The next batch, or None when the learner has to wait.

        Args:
            reuse: give the last one again, at most ``max_reuse`` times, when there is no other.
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
        """Priorities ``[n]`` of columns by the ``index`` ``[n]`` that batches had; see `Table.update_priorities`."""
        return 0 if self.table is None else self.table.update_priorities(index, priorities)

    def flush(self) -> None:
        """Makes a batch, or a column, of what was packed so far, its rest masked out."""
        batch = self._packer.flush()
        if batch is None:
            return
        if self.table is None:
            self._append(batch)
        else:
            self.table.insert(batch)

    @property
    def exhausted(self) -> bool:
        """Nothing more can be given unless something is pushed."""
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
        """Takes in ``steps`` transitions of a fragment, or all of ``replay``; as `push`."""
        try:
            made = self._pack(replay, steps)
        except BadFragment as error:
            self._dropped["bad_fragment"] += transitions(replay)
            self.last_refusal = error.message
            raise
        self.pushed += len(replay) if steps is None else steps
        for batch in made:
            if self.table is None:
                self._append(batch)
            else:
                self.table.insert(batch)
        least = self._least_version()
        if self.table is None and least is not None and _oldest(replay) < least:
            self.expire(self._newest)  # what comes late would stay in the way of all that comes later

    def _pack(self, replay: Fragment | Columns, steps: int | None) -> Iterable[Batch]:
        if self.table is None:
            made: Iterable[Batch] = self._packer.add(replay, steps)
        else:
            _check_priority(replay)
            made = [self._packer.checked(replay)] if isinstance(replay, Columns) else self._packer.add(replay, steps)
        if self._config.max_policy_lag is not None:
            self._newest = max(self._newest, _newest(replay))
        return made

    def _room(self) -> int:
        """Columns that can be taken before something is dropped."""
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


def _cut(columns: Columns, at: int) -> tuple[Columns, Columns] | None:
    """The first ``at`` columns and the rest; None where something is no array, which packing refuses."""
    try:
        first = {key: array[:at] for key, array in columns.arrays.items()}
        return Columns(first), columns.after(at)
    except (IndexError, TypeError):
        return None


def _check_priority(replay: Fragment | Columns) -> None:
    named: Any = replay.arrays if isinstance(replay, Columns) else getattr(replay, "extras", {})
    if not isinstance(named, Mapping):
        return  # which packing refuses
    for name in ("weight", "index"):
        if name in named:
            raise BadFragment(f"{name}: is the buffer's own name for what it samples", field=name)
    if PRIORITY not in named:
        return
    try:
        given = np.asarray(named[PRIORITY])
    except ValueError as error:  # of lists that are not all of one length
        raise BadFragment(f"{PRIORITY}: is no array: {error}", field=PRIORITY) from None
    axes = 2 if isinstance(replay, Columns) else 1
    if given.ndim != axes or given.dtype.kind not in "biuf":
        raise BadFragment(
            f"{PRIORITY}: expected a number for each step, got {given.dtype} of shape {given.shape}", field=PRIORITY
        )
    if given.min(initial=0) < 0:
        raise BadFragment(f"{PRIORITY}: is negative", field=PRIORITY)
