"""Frees Ray Data's records of each block during the execution of a dataset, because a replay stream is endless.

Ray Data is made for datasets that end, and keeps statistics of each block. The executing process (with Ray Train, the
coordinator of the ranks' shards) also keeps each small block, and a marker of each large one: it drops its reference
before the consumer does, and Ray's core deletes an object only if its own process was the last holder, not a borrower.
Ten batches of 30 KB a second would cost a gigabyte an hour.

All of this is private to Ray. If a version has changed it, one warning is logged, and the stream runs without this
clean-up. Knows nothing of replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.data import DataContext

try:
    from ray.data._internal.execution.execution_callback import ExecutionCallback
except ImportError:
    ExecutionCallback = object  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)


class Housekeeping(ExecutionCallback):
    """Runs where Ray Data executes, by `DataContext.custom_execution_callback_classes`."""

    def __init__(self) -> None:
        self._without: set[str] = set()

    def before_execution_starts(self, executor: Any) -> None:
        """Makes Ray forget every block without references."""
        self._attempt(self._forget_freed_blocks, executor)

    def on_execution_step(self, executor: Any) -> None:
        """Drops the statistics of each block; sums, such as rows and bytes, stay."""
        self._attempt(_drop_statistics, executor)

    def _forget_freed_blocks(self, executor: Any) -> None:
        counter = executor._block_ref_counter
        add = counter._add_callback_fn

        def add_both(block: Any, *callback: Any, **named: Any) -> Any:
            self._attempt(_check_is_one, callback, named)
            if _check_is_one.__name__ in self._without:
                return add(block, *callback, **named)
            (freed,) = callback

            def freed_and_forgotten(name: bytes) -> None:
                freed(name)
                self._attempt(_forget, name)

            return add(block, freed_and_forgotten)

        counter._add_callback_fn = add_both

    def _attempt(self, do: Callable[..., None], *args: Any) -> None:
        """Calls ``do``, unless an earlier call has failed."""
        if do.__name__ in self._without:
            return
        try:
            do(*args)
        except Exception as error:  # any error of a private interface that has changed
            if not self._without:
                _warn(f"{type(error).__name__}: {error}")
            self._without.add(do.__name__)


def keep_house(context: DataContext) -> None:
    """Makes datasets of this context run with `Housekeeping`."""
    classes: Any = getattr(context, "custom_execution_callback_classes", None)
    if ExecutionCallback is object or classes is None:
        _warn("it takes no callbacks")
    elif Housekeeping not in classes:
        classes.append(Housekeeping)


def _drop_statistics(executor: Any) -> None:
    for operator in executor._topology:
        for blocks in operator.get_stats().values():
            if isinstance(blocks, list):
                blocks.clear()


def _check_is_one(callback: tuple[Any, ...], named: dict[str, Any]) -> None:
    if named or len(callback) != 1 or not callable(callback[0]):
        raise TypeError(f"a block's callback is given as {len(callback)} arguments and {sorted(named)}")


def _forget(name: bytes) -> None:
    # The end of this process's last reference frees the process's records of the object.
    ray.ObjectRef(name)


def _warn(why: str) -> None:
    logger.warning(
        "Ray %s keeps records of each batch of a replay stream, which could not be cleared, so memory grows: %s",
        ray.__version__,
        why,
    )
