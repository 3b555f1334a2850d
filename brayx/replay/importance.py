"""Importance weights of prioritised replay, with an exponent ``beta`` that grows over a training.

A shard gives weights for ``beta`` 1 (`samplers.Prioritised`), and the learner applies its ``beta``: only the learner
knows the number of batches, over all shards and restarts. Knows nothing of shards or of the learner.
"""

from __future__ import annotations

from dataclasses import dataclass

from brayx.replay.packing import Batch


@dataclass(frozen=True)
class Importance:
    """Importance weights ``(N P(i))^-beta``, divided by the largest of their batch (Schaul et al. 2016, section 3.4).

    Attributes:
        start: ``beta`` of the first batch; 1 is a full correction.
        batches: learner batches over which ``beta`` grows linearly to 1; None: it is constant.
    """

    start: float = 0.4
    batches: int | None = None

    def exponent(self, before: int) -> float:
        """``beta`` after ``before`` batches."""
        return self.start if self.batches is None else self.start + (1 - self.start) * min(1.0, before / self.batches)

    def weigh(self, batch: Batch, before: int) -> Batch:
        """The batch with its ``weight`` ``[B]`` raised to ``beta``; a batch without weights is returned unchanged.

        Args:
            batch: batch from a shard or `Table`, with weights for ``beta`` 1; not modified.
            before: number of learner batches before it.
        """
        if "weight" not in batch:
            return batch
        return {**batch, "weight": batch["weight"] ** batch["weight"].dtype.type(self.exponent(before))}
