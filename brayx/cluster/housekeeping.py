"""Frees what Ray Data keeps of each block while a dataset is executed: a replay stream has no last block.

Ray Data is made for datasets that end, and keeps statistics of each block. The process that executes (with Ray Train,
the coordinator of the ranks' shards) also keeps each small block whole, and a marker of each large one: it drops the
reference before the consumer does, and Ray's core deletes an object only when its own process was the last holder, not
a borrower. Ten batches of 30 KB a second would cost a gigabyte an hour.

All of this is private to Ray. If a version has changed it, one warning says so, and the stream goes on without. Knows
nothing of replay.
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
        """Has every block that nobody refers to any more forgotten."""
        self._attempt(self._forget_freed_blocks, executor)

    def on_execution_step(self, executor: Any) -> None:
        """Drops what is counted of each block; sums, as of rows and bytes, stay."""
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
        """Does it, unless it has failed before."""
        if do.__name__ in self._without:
            return
        try:
            do(*args)
        except Exception as error:  # whatever comes of names that mean something else now
            if not self._without:
                _warn(f"{type(error).__name__}: {error}")
            self._without.add(do.__name__)


def keep_house(context: DataContext) -> None:
    """Has datasets of this context executed with `Housekeeping`."""
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
    # As the last reference of this process, it takes with it what the process keeps under this name.
    ray.ObjectRef(name)


def _warn(why: str) -> None:
    logger.warning(
        "Ray %s keeps something of each batch of a replay stream, which could not be let go, so memory grows: %s",
        ray.__version__,
        why,
    )
