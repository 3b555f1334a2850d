"""Options of the ``trainer`` component. Knows nothing of what they configure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from brayx.algorithms.ppo import PPOConfig


class TrainerConfig(BaseModel):
    """What learns, from which buffers, for how long, and what it leaves behind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["trainer"] = "trainer"
    model: str
    """Name of the model component that learns."""
    buffers: Annotated[list[str], Field(min_length=1, max_length=1)]
    """Name of the buffer component it learns from."""
    algorithm: PPOConfig = PPOConfig()
    """Options of the algorithm."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """Adam's, at the start."""
    num_steps: Annotated[int, Field(ge=1)] = 1_000_000
    """Transitions to learn from; learning rate and clip fall towards it."""
    target_return: float | None = None
    """Training ends when the mean return of the last games reaches this; null: never."""
    target_games: Annotated[int, Field(ge=1)] = 20
    """Games that must have been finished before a mean return counts, in this run too when a trial is resumed."""
    weights_publish_interval: Annotated[int, Field(ge=1)] = 1
    """Updates between two published weights."""
    checkpoint_interval_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds between two checkpoints."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, beside the best."""
    where: Literal["train", "process"] = "train"
    """``train``: workers of a Ray Train `TorchTrainer`, fed by Ray Data. ``process``: a thread of the job itself, fed
    by the buffer directly; for small jobs, it starts at once."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks, with ``train``. Each gradient is the mean over them, so a batch grows with their number."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for a rank."""
    use_gpu: bool = False
    """A GPU for each rank; with ``process``, one of the job's own."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of torch in a rank."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Times that ranks which died are started again, from the newest checkpoint; as often if they cannot start."""
