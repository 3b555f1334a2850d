"""Options of the ``rollout`` component. Knows nothing of what they configure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_WORKERS = 10_000


class RolloutComponent(BaseModel):
    """Environments that Python steps next to the policy: which ones, how many, and how close to the newest weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["rollout"] = "rollout"
    env: str | None = None
    """Gymnasium id; null: ``module`` and ``func`` make the environment."""
    env_options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    module: str | None = None
    """Import path of a module of one's own, looked up beside the YAML file first: it makes the environment, or
    registers the id."""
    func: str | None = None
    """Function in it, ``(name, config)``, that returns a `gymnasium.Env`."""
    model: str
    """Name of the model component that acts."""
    buffer: str
    """Name of the buffer component that transitions go to."""
    num_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Workers: processes with an engine each on a cluster; in one process, one thread steps the environments of all."""
    num_envs: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Environments that each of them steps together."""
    vectorization: Literal["auto", "native", "sync", "async"] = "auto"
    """How: ``native`` is the environment's own vector version, ``sync`` one after the other, ``async`` a process
    each; ``auto`` is native where there is one, else sync."""
    mode: Literal["blocking", "non_blocking"] = "non_blocking"
    """``blocking``: each fragment is collected with the newest weights, and the next one waits for those that it led
    to. ``non_blocking``: the next one is collected while the learner learns; the buffer bounds how old it may be."""
    wait_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait for new weights, or for room in the buffer; then the worker goes on, and it is counted."""
    fragment_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """A worker that takes longer for a fragment hangs: it is replaced, or ends the training in one process."""
    normalise_obs: bool = False
    """Observations are scaled by their running mean and deviation, which all workers share."""
    normalise_reward: bool = False
    """Rewards are scaled by the running deviation of the discounted return."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Rewards that are learned from are clipped to +- this; null: they are not. Returns are counted unclipped."""
    scale_actions: bool = True
    """Of a continuous action with finite bounds, -1 to 1 of the policy are the bounds; else they are its own unit."""
    sde_steps: Annotated[int, Field(ge=1)] = 1
    """Steps for which noise that depends on the state stays the same, of a model that explores so."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each worker."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Times that a worker and its successors may end by an error of their environment within ``failure_window_s``, or
    die before they have collected anything, one after the other. One that is killed at work is always replaced."""
    failure_window_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after which an error of an environment does not count any more."""

    @model_validator(mode="after")
    def _one_source(self) -> RolloutComponent:
        if (self.env is None) == (self.func is None):
            raise ValueError("either `env`, a Gymnasium id, or `module` and `func`")
        if self.func is not None and self.module is None:
            raise ValueError("`module`, where `func` is")
        return self
