"""Options of the ``trainer`` component."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brayx.algorithms.build import AnyAlgorithm
from brayx.algorithms.ppo import PPOConfig
from brayx.metrics import XAxis


class TrainerConfig(BaseModel):
    """The learner: its model, buffers, algorithm, length and checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["trainer"] = "trainer"
    model: str
    """Name of the model component that learns."""
    buffers: Annotated[list[str], Field(min_length=1, max_length=64)]
    """Names of the buffer components it learns from."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Share of each buffer, in proportion; null: equal shares."""
    initial_weights: str | None = None
    """Weights to start from: ``models:/NAME/VERSION`` or ``models:/NAME@ALIAS``; ``runs:/TRIAL``, the newest checkpoint
    of the trial with this id or name; or a checkpoint's folder, from the YAML file's folder. A resumed trial has its
    own; null: those of the seed."""
    eval_buffers: Annotated[list[str], Field(max_length=64)] = []
    """Names of buffer components to evaluate losses on, not to learn from."""
    eval_interval: Annotated[int, Field(ge=1)] = 100
    """Updates between two evaluations, on those buffers and by the hook ``evaluate``."""
    eval_batches: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of newest batches of each of those buffers that an evaluation uses."""
    hooks: str | None = None
    """Import path of a module with ``handle``, ``loss`` or ``evaluate``, searched in the YAML file's folder first."""
    algorithm: AnyAlgorithm = PPOConfig()
    """Options of the algorithm: ``name`` (default: ppo), or ``module`` for one of your own, and its options."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Initial learning rate of Adam, whose epsilon is 1e-5."""
    num_steps: Annotated[int, Field(ge=1)] = 1_000_000
    """Transitions to learn from, each time one is sampled; learning rate and clip fall towards it."""
    target_return: float | None = None
    """Training ends when the mean return of the last games reaches this; null: never."""
    target_games: Annotated[int, Field(ge=1)] = 20
    """Games that must be finished before a mean return counts; after a resume as many as the trial had, 100 at most."""
    max_lost_share: Annotated[float, Field(gt=0, le=1)] | None = 0.5
    """Training stops when a larger share than this of the last 100 games, or of the last 100 fragments, is lost to
    errors for 10 s: exceptions in agents, fragments that are refused, game processes that fail. null: never."""
    weights_publish_interval: Annotated[int, Field(ge=1)] = 1
    """Updates between two published weights."""
    checkpoint_interval_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds between two checkpoints."""
    checkpoint_interval: Annotated[int, Field(ge=1)] | None = None
    """Updates between two checkpoints, in addition to the interval in seconds; null: only that."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, in addition to the best."""
    histogram_interval_s: Annotated[float, Field(gt=0)] | None = 30.0
    """Minimum seconds between two pictures of the distributions of actions, advantages and weights; they become rarer
    with time, and each takes about a millisecond of the learner. null: none."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 0
    """Batches that a thread prepares in advance, on a GPU with a stream; each ages the data by an update."""
    x_axis: XAxis = "env_steps"
    """X axis of metrics in MLflow: ``env_steps``, ``updates`` or ``seconds``; the others are metrics."""
    where: Literal["train", "process", "child"] | None = None
    """Where the learner runs. ``process``: a thread of the job. ``child``: a child process of the job; on a cluster the
    same as ``process``. ``train``: on a cluster workers of a Ray Train `TorchTrainer`, fed by Ray Data; locally the
    same as ``process``. null: locally ``child`` for PPO of games that say their contract, with two cores or more; on a
    cluster ``train`` for several ranks or a GPU; else ``process``."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks, with ``train``. Each gradient is the mean over them, so a batch grows with their number. Some algorithms,
    such as ``mixed``, take one."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for a rank."""
    use_gpu: bool = False
    """A GPU for each rank; with ``process``, one for the job's process."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads of torch in a rank. null: 1; for pictures one for each core, or as many as OMP_NUM_THREADS says, which
    Ray sets to an actor's CPUs, at least 1; and one fewer while games at doors play."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """With ``train``: maximum restarts within an hour: of dead ranks, from the newest checkpoint, and of ranks that
    cannot start."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if self.weights is not None and len(self.weights) != len(self.buffers):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.buffers)} buffers")
        names = [*self.buffers, *self.eval_buffers]
        if len(set(names)) < len(names):
            raise ValueError("a buffer is named more than once in buffers and eval_buffers")
        if self.num_workers > 1 and not self.algorithm.several_ranks:
            raise ValueError(
                f"num_workers is {self.num_workers}, and algorithm {self.algorithm.name!r} learns in one rank"
            )
        if self.where in ("process", "child") and self.num_workers > 1:
            raise ValueError(f"num_workers 1, since where is {self.where}; {self.num_workers} ranks need where: train")
        if self.where == "child" and (self.prefetch or self.eval_buffers):
            raise ValueError("where is child, expected process: a child has neither prefetch nor eval_buffers")
        return self

    @property
    def in_process(self) -> bool:
        """Whether a cluster's learner is a thread of the job, see `where`."""
        single = self.num_workers == 1 and not self.use_gpu
        return self.where in ("process", "child") or (self.where is None and single)
