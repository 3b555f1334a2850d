"""Options of the ``trainer`` component. Knows nothing of what they configure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brayx.algorithms.build import AnyAlgorithm
from brayx.algorithms.ppo import PPOConfig
from brayx.metrics import XAxis


class TrainerConfig(BaseModel):
    """What learns, from which buffers, for how long, and what it leaves behind."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["trainer"] = "trainer"
    model: str
    """Name of the model component that learns."""
    buffers: Annotated[list[str], Field(min_length=1, max_length=64)]
    """Names of the buffer components it learns from."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """How much of each buffer it learns from, in proportion; null: equally much."""
    eval_buffers: Annotated[list[str], Field(max_length=64)] = []
    """Names of buffer components whose losses are measured and not learned from."""
    eval_interval: Annotated[int, Field(ge=1)] = 100
    """Updates between two evaluations, on those buffers and by the hook ``evaluate``."""
    eval_batches: Annotated[int, Field(ge=1, le=1024)] = 4
    """Newest batches of each of those buffers that are measured; they are kept until newer ones come."""
    hooks: str | None = None
    """Import path of a module with ``handle``, ``loss`` or ``evaluate``, looked up beside the YAML file first."""
    algorithm: AnyAlgorithm = PPOConfig()
    """Options of the algorithm; ``name`` says which, PPO if it is absent, or ``module``, one of your own."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Adam's, at the start; its epsilon is 1e-5."""
    num_steps: Annotated[int, Field(ge=1)] = 1_000_000
    """Transitions to learn from; learning rate and clip fall towards it."""
    target_return: float | None = None
    """Training ends when the mean return of the last games reaches this; null: never."""
    target_games: Annotated[int, Field(ge=1)] = 20
    """Games that must have been finished before a mean return counts, in this run too when a trial is resumed."""
    max_lost_share: Annotated[float, Field(gt=0, le=1)] | None = 0.5
    """Training stops when errors have taken a larger share than this of the last 100 games, or of the last 100
    fragments, for 10 s: exceptions in agents, fragments that are refused, game processes that fail. null: never."""
    weights_publish_interval: Annotated[int, Field(ge=1)] = 1
    """Updates between two published weights."""
    checkpoint_interval_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds between two checkpoints."""
    checkpoint_interval: Annotated[int, Field(ge=1)] | None = None
    """Updates between two checkpoints, beside those that the seconds ask for; null: only those."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, beside the best."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 0
    """Batches made ready ahead of the learner by a thread, on a GPU by a stream; each ages the data by an update."""
    x_axis: XAxis = "env_steps"
    """What metrics are written over in MLflow: ``env_steps``, ``updates`` or ``seconds``; the others are metrics."""
    where: Literal["train", "process"] = "train"
    """``train``: workers of a Ray Train `TorchTrainer`, fed by Ray Data. ``process``: a thread of the job itself, fed
    by the buffer directly; for small jobs of one rank, it starts at once."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks, with ``train``. Each gradient is the mean over them, so a batch grows with their number. Some algorithms,
    such as ``mixed``, take one."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for a rank."""
    use_gpu: bool = False
    """A GPU for each rank; with ``process``, one of the job's own."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of torch in a rank."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Times that ranks which died are started again, from the newest checkpoint; as often if they cannot start."""
    failure_window_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after which those times are counted anew."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if self.weights is not None and len(self.weights) != len(self.buffers):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.buffers)} buffers")
        names = [*self.buffers, *self.eval_buffers]
        if len(set(names)) < len(names):
            raise ValueError("a buffer stands more than once in buffers and eval_buffers")
        if self.num_workers > 1 and not self.algorithm.several_ranks:
            raise ValueError(
                f"num_workers is {self.num_workers}, and algorithm {self.algorithm.name!r} learns in one rank"
            )
        if self.where == "process" and self.num_workers > 1:
            raise ValueError(f"num_workers 1, since where is process; {self.num_workers} ranks need where: train")
        return self
