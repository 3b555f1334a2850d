"""How far a batch makes up for columns that come more often than others: ``beta``, as a training goes on.

A shard weighs in full (`samplers.Prioritised`), whoever learns tempers that: only there is known how many batches there
have been, of all shards, and before a shard or the job was started anew. Knows nothing of either.
"""

from __future__ import annotations

from dataclasses import dataclass

from brayx.replay.packing import Batch


@dataclass(frozen=True)
class Importance:
    """Importance weights ``(N P(i))^-beta``, divided by the largest of their batch (Schaul et al. 2016, section 3.4).

    Attributes:
        start: ``beta`` of the first batch; 1 corrects in full.
        batches: learner batches until it has grown linearly to 1; None: it stays.
    """

    start: float = 0.4
    batches: int | None = None

    def exponent(self, before: int) -> float:
        """``beta`` of a batch with so many before it."""
        return self.start if self.batches is None else self.start + (1 - self.start) * min(1.0, before / self.batches)

    def weigh(self, batch: Batch, before: int) -> Batch:
        """The batch with its ``weight`` ``[B]``, which corrected in full, for ``beta``; one without is as it was.

        Args:
            batch: as a shard or `Table` gave it; it is not changed.
            before: learner batches that were before it.
        """
        if "weight" not in batch:
            return batch
        return {**batch, "weight": batch["weight"] ** batch["weight"].dtype.type(self.exponent(before))}
