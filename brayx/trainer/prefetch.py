"""Prepares the learner's next batch as tensors, on demand or ahead in a thread.

`Prepare` turns a batch into tensors on the device, in the module's layout. `Prefetch` iterates over prepared batches.
Knows nothing of learning, nor of where batches come from.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from brayx.errors import ConfigError
from brayx.replay.packing import READY_KEY, Batch
from brayx.threads import NativeThread
from brayx.types import NestedArray, flatten

_LOOK_S = 0.5
_CLOSE_S = 0.5


@dataclass
class Ready:
    """A batch to learn from.

    Attributes:
        batch: NumPy arrays, possibly read only.
        tensors: the same as tensors on the device, with nests under ``obs``.
        ready_at_s: Unix time at which it became ready in the buffer; None: unknown.
        prepare_s: seconds that the learner itself spent on preparing it.
        copied: event of the copy on a GPU's side stream.
    """

    batch: Batch
    tensors: dict[str, Any]
    ready_at_s: float | None = None
    prepare_s: float = 0.0
    copied: Any = None


class Prepare:
    """Prepares batches.

    Args:
        forward_args: example arguments of the module; observations of a batch get the same layout.
        state_at: index of a recurrent module's state among them; None: there is none.
        device: device of the tensors.
        handle: the user's hook, which returns the batch to learn from.
        aside: copy to a GPU on a separate stream, from pinned memory; `settle` waits for it. On the CPU only read-only
            arrays are copied.

    Raises:
        ConfigError: at a call: the batch does not have the observation that the module takes.
    """

    def __init__(
        self,
        forward_args: tuple[NestedArray, ...],
        device: torch.device,
        handle: Callable[[Batch], Batch] | None = None,
        aside: bool = False,
        state_at: int | None = None,
    ) -> None:
        observed = tuple(arg for index, arg in enumerate(forward_args) if index != state_at)
        # A tuple is several arguments, even if there is only one, which may be a tuple itself.
        self._obs_of = _laid_out("obs", observed[0] if len(observed) == 1 else observed)
        self._one = len(observed) == 1
        self._state_of = None if state_at is None else _laid_out("state", forward_args[state_at])
        self._device = device
        self._handle = handle
        self._side: Any = torch.cuda.Stream(device) if aside and device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Ready:
        """The batch as tensors; removes `READY_KEY` from it."""
        ready_at = batch.get(READY_KEY)
        batch = {key: array for key, array in batch.items() if key != READY_KEY}
        if self._handle is not None:
            batch = self._handle(batch)
        copied = None
        if self._side is None:
            tensors = {key: _tensor(array).to(self._device) for key, array in batch.items()}
        else:
            with torch.cuda.stream(self._side):
                tensors = {
                    key: _tensor(array).pin_memory().to(self._device, non_blocking=True) for key, array in batch.items()
                }
                copied = self._side.record_event()
        obs = self._obs_of(tensors)
        nests = {"obs": (obs,) if self._one else obs}
        if self._state_of is not None:
            nests["state"] = self._state_of(tensors)
        at_s = None if ready_at is None or np.isnan(ready_at).any() else float(np.reshape(ready_at, -1)[0])
        return Ready(batch, {**tensors, **nests}, at_s, copied=copied)


def settle(ready: Ready) -> Ready:
    """Makes the current stream wait for the copy on the side stream, and own the copied tensors."""
    if ready.copied is not None:
        current = torch.cuda.current_stream()
        current.wait_event(ready.copied)
        leaves: list[Tensor] = optree.tree_leaves(ready.tensors)  # type: ignore[arg-type]
        for tensor in leaves:
            tensor.record_stream(current)
    return ready


class Prefetch:
    """An iterator of prepared batches in the order of the stream. A context manager, which ends its thread.

    Args:
        batches: the stream.
        prepare: prepares a batch.
        depth: maximum batches taken from the stream in advance; each ages the data by an update. 0: no thread, each
            batch is prepared on demand.
    """

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], Ready], depth: int = 0) -> None:
        self._batches = batches
        self._prepare = prepare
        self._ready: queue.Queue[Ready | BaseException | None] = queue.Queue()  # bounded by the room below
        self._room = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if depth:
            context = contextvars.copy_context()  # hooks find the recorder in it
            work = functools.partial(context.run, self._work)
            self._thread = NativeThread(work, "brayx-prefetch", self._stopped.set)
            self._thread.start()

    def __iter__(self) -> Iterator[Ready]:
        return self

    def __next__(self) -> Ready:
        """Waits for the next batch; raises exceptions of the stream or of `Prepare`."""
        if self._thread is None:
            batch = next(self._batches)
            began = time.monotonic()
            ready = self._prepare(batch)
            ready.prepare_s = time.monotonic() - began
            return settle(ready)
        while True:
            try:
                return self._given(self._ready.get(timeout=_LOOK_S))
            except queue.Empty:
                if self._stopped.is_set() or (not self._thread.is_alive() and self._ready.empty()):
                    raise StopIteration from None

    def poll(self) -> Ready | None:
        """The next batch if it is ready; needs a depth. None also once the stream has ended."""
        try:
            return self._given(self._ready.get_nowait())
        except (queue.Empty, StopIteration):
            return None

    def _given(self, item: Ready | BaseException | None) -> Ready:
        if isinstance(item, Ready):
            self._room.release()
            return settle(item)
        self._ready.put(item)  # later calls get it again
        if item is None:
            raise StopIteration
        raise item

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._room.acquire(timeout=_LOOK_S):
                    continue
                batch = next(self._batches, None)
                if batch is None or self._stopped.is_set():
                    break
                self._ready.put(self._prepare(batch))
            self._ready.put(None)
        except BaseException as error:  # raised in `__next__`
            self._ready.put(error)
        finally:
            if self._stopped.is_set():
                close(self._batches)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread. If it waits for a batch, it ends, and closes the stream, after that batch."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)


def close(batches: Iterator[Batch]) -> None:
    """Closes a generator, unless a prefetching thread is running it, which then closes it later."""
    with contextlib.suppress(ValueError):  # "generator already executing"
        getattr(batches, "close", lambda: None)()


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor that shares memory, unless the array is read only, like blocks of Ray's object store."""
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def _laid_out(prefix: str, example: NestedArray) -> Callable[[Mapping[str, Tensor]], Any]:
    """Rebuilds a nest like ``example`` from a batch's leaves, which are named by ``prefix`` and path."""
    paths = list(flatten(example, prefix))
    structure = optree.tree_structure(example)

    def rebuild(batch: Mapping[str, Tensor]) -> Any:
        missing = [path for path in paths if path not in batch]
        if missing:
            keys = sorted(key for key in batch if key.split("/")[0] == prefix)
            memory = (
                ": expected the model's memory before each step, which a playing agent records. Recordings without it "
                "can be cloned with train_local(demonstrations=...)"
            )
            raise ConfigError(
                f"batches hold no {missing[0]!r}, which the model takes; they hold {keys}"
                + (memory if prefix == "state" else "")
            )
        return optree.tree_unflatten(structure, [batch[path] for path in paths])

    return rebuild
