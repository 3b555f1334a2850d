"""Options of the ``rollout`` component."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_WORKERS = 10_000


class RolloutComponent(BaseModel):
    """Environments that Python steps next to the policy, and the age of the weights that act in them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["rollout"] = "rollout"
    env: str | None = None
    """Gymnasium id; null: ``module`` and ``func`` make the environment."""
    env_options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    module: str | None = None
    """Import path of your module, searched in the YAML file's folder first. It makes the environment or registers
    the id."""
    func: str | None = None
    """Its function ``(name, config)`` that returns a `gymnasium.Env`."""
    model: str
    """Name of the model component that acts."""
    buffer: str
    """Name of the buffer component for the transitions."""
    num_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Workers: on a cluster a process with an engine each; in one process a thread steps the environments of all."""
    num_envs: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Environments of each worker."""
    vectorization: Literal["auto", "native", "sync", "async"] = "auto"
    """How environments are stepped: ``native`` by their own vector version, ``sync`` one after the other, ``async`` in
    a process each; ``auto``: native if there is one, else sync."""
    mode: Literal["blocking", "non_blocking"] = "non_blocking"
    """``blocking``: workers collect each fragment with the newest weights, then wait for the next ones.
    ``non_blocking``: they collect the next one during an update; the buffer bounds its age."""
    wait_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait for new weights, or for room in the buffer; then the worker continues, and the wait is counted."""
    fragment_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """A worker that takes longer for a fragment counts as hanging: it is replaced, or ends a local training."""
    normalise_obs: bool = False
    """Observations are scaled by their running mean and deviation, which all workers share."""
    normalise_reward: bool = False
    """Rewards are scaled by the running deviation of the discounted return."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Rewards for learning are clipped to +- this; null: not clipped. Returns are never clipped."""
    sde_steps: Annotated[int, Field(ge=1)] = 1
    """Steps for which state-dependent noise stays the same, for a model with such noise."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each worker."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Maximum failures of a worker and its successors by errors of their environment within an hour, or by consecutive
    deaths before the first fragment. A worker that is killed later is always replaced."""

    @model_validator(mode="after")
    def _one_source(self) -> RolloutComponent:
        if (self.env is None) == (self.func is None):
            raise ValueError("either `env`, a Gymnasium id, or `module` and `func`")
        if self.func is not None and self.module is None:
            raise ValueError("`module`, where `func` is")
        return self
