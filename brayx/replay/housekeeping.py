"""What Ray Data keeps of each block for as long as a dataset is executed, let go: a replay stream has no last block.

Ray Data is made for datasets that end. Of each block it keeps statistics. And in the process that executes, which with
Ray Train is the coordinator of the ranks' shards, Ray keeps a small block whole, of a large one a marker: the reference
is dropped there before the consumer's, and Ray's core deletes what its own process was the last to hold, not what a
borrower was. Ten batches of 30 KB a second would be a gigabyte an hour. Knows nothing of replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.data import DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback


class Housekeeping(ExecutionCallback):
    """Runs where Ray Data executes, by `DataContext.custom_execution_callback_classes`."""

    def before_execution_starts(self, executor: Any) -> None:
        """Has every block that nobody refers to any more forgotten."""
        counter = executor._block_ref_counter
        add = counter._add_callback_fn

        def add_both(block: Any, freed: Callable[[bytes], None]) -> bool:
            def freed_and_forgotten(name: bytes) -> None:
                freed(name)
                # As the last reference of this process, it takes with it what the process keeps under this name.
                ray.ObjectRef(name)

            return bool(add(block, freed_and_forgotten))

        counter._add_callback_fn = add_both

    def on_execution_step(self, executor: Any) -> None:
        """Drops what is counted of each block; sums, as of rows and bytes, stay."""
        for operator in executor._topology:
            for blocks in operator.get_stats().values():
                if isinstance(blocks, list):
                    blocks.clear()


def keep_house(context: DataContext) -> None:
    """Has datasets of this context executed with `Housekeeping`."""
    if Housekeeping not in context.custom_execution_callback_classes:
        context.custom_execution_callback_classes.append(Housekeeping)
