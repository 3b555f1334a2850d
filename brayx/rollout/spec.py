"""A rollout as a job describes it: its options, its collector, and a look at it before anything starts.

Knows nothing of threads, processes, or where fragments go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from brayx.components import load, load_module
from brayx.errors import BrayxError, ConfigError, EnvironmentFailed, first_line
from brayx.model.build import build_model
from brayx.model.config import ModelConfig
from brayx.replay.config import BufferConfig
from brayx.rollout.collector import Collector
from brayx.rollout.component import RolloutComponent
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """Everything that a worker needs to know; picklable.

    Attributes:
        name: of the component.
        config: its options.
        model_name, model: the model component that acts.
        buffer_config: options of the buffer, whose ``unroll_length`` is the length of a fragment.
        folder: where modules are looked up first.
        job: the whole job as plain dicts, for the user's functions.
        gamma: discount of the learner; rewards are normalised with it.
        seed: of the environments and of what is drawn; each worker gets its own from it.
        update_columns: columns that lead to new weights: what an update of all ranks takes, times the updates between
            two publishes. A ``blocking`` rollout collects no more with one version.
    """

    name: str
    config: RolloutComponent
    model_name: str
    model: ModelConfig
    buffer_config: BufferConfig
    folder: str
    job: Mapping[str, Any]
    gamma: float = 0.99
    seed: int = 0
    update_columns: int = 0

    @property
    def env_name(self) -> str:
        """What it plays, for people."""
        return self.config.env or f"{self.config.module}.{self.config.func}"

    @property
    def fragment_steps(self) -> int:
        """Transitions of one fragment of a worker at most."""
        return self.config.num_envs * self.buffer_config.unroll_length


def make_collector(
    spec: RolloutSpec, *, num_envs: int | None = None, unroll_length: int | None = None, index: int = 0, past: int = 0
) -> Collector:
    """The environments of one worker and the policy that plays them, with the weights that the model was built with.

    Args:
        spec: of the rollout.
        num_envs, unroll_length: instead of the component's and the buffer's.
        index: of the worker.
        past: how many workers had this index before: their environments' seeds are not played again.

    Raises:
        ConfigError: there is no such environment, it cannot be made, or the model does not fit it.
        ModelError: the model cannot act.
    """
    config = spec.config
    module, example = build_model(spec.folder, spec.model.module, spec.model_name, dict(spec.job))
    if spec.model.engine not in ("onnx", "torch"):
        raise ConfigError(f"a rollout acts with engine onnx or torch, not {spec.model.engine!r}", key="engine")
    policy = Policy(module, example, engine=spec.model.engine, threads=spec.model.threads)
    envs = make_envs(
        env_source(spec.name, config, spec.job, spec.folder),
        config.num_envs if num_envs is None else num_envs,
        vectorization=config.vectorization,
        options=config.env_options,
    )
    return Collector(
        envs,
        policy,
        spec.buffer_config.unroll_length if unroll_length is None else unroll_length,
        # One number of three: neighbours' environments must not be the same ones, one later.
        seed=int(np.random.SeedSequence([spec.seed, index, past]).generate_state(1)[0] >> 1),
        scale_actions=config.scale_actions,
        normalise_obs=config.normalise_obs,
        normalise_reward=config.normalise_reward,
        gamma=spec.gamma,
        reward_clip=config.reward_clip,
        sde_steps=config.sde_steps,
    )


def rounds(spec: RolloutSpec, workers: int) -> int:
    """Fragments that each of ``workers`` blocking workers collects with one version of the weights.

    Raises:
        ConfigError: these do not make up updates, or not in each shard, or the buffer samples: all would wait for
            weights that never come.
    """
    buffer = spec.buffer_config
    if buffer.sampler != "fifo":
        raise ConfigError(
            f"mode is blocking, and the buffer's sampler is {buffer.sampler!r}: when it gives the next batch is up to "
            "min_columns and samples_per_insert, and until then all would wait for new weights: that needs mode "
            "non_blocking, or sampler fifo",
            key="mode",
        )
    if buffer.num_workers > 1 and spec.config.num_envs != buffer.batch_size:
        raise ConfigError(
            f"mode is blocking, and the {buffer.num_workers} shards of the buffer each wait for whole batches, which "
            f"workers of {spec.config.num_envs} environments would leave unfinished in several: that needs one shard, "
            f"or num_envs {buffer.batch_size}, a batch",
            key="mode",
        )
    of_all = workers * spec.config.num_envs
    if spec.update_columns % of_all:
        raise ConfigError(
            f"mode is blocking, where {workers} workers x {spec.config.num_envs} environments give {of_all} columns "
            f"with each version of the weights, but new weights come of {spec.update_columns} (batch_size x ranks x "
            f"weights_publish_interval): that must be a multiple, such as batch_size {of_all}",
            key="mode",
        )
    return spec.update_columns // of_all


def counts_that_fit(spec: RolloutSpec) -> list[int]:
    """How many blocking workers there may be, see `rounds`."""
    each = spec.config.num_envs
    return [count for count in range(1, spec.update_columns // each + 1) if spec.update_columns % (count * each) == 0]


def check_rollout(spec: RolloutSpec) -> tuple[str, dict[str, np.ndarray]]:
    """Makes one environment, acts in it once and closes it, so that errors are reported before anything starts.

    Returns:
        The kind of its actions, as `ActionSpec` names it, and a batch of it: columns of one transition.

    Raises:
        ConfigError, ModelError: as `make_collector`; names the environment.
        EnvironmentFailed: it raised.
    """
    with naming(f"rollout {spec.name!r} ({spec.env_name})"):
        if spec.config.mode == "blocking":
            rounds(spec, spec.config.num_workers)
        collector = make_collector(spec, num_envs=_made_at_once(spec), unroll_length=1)
        try:
            return collector.action_spec.kind, dict(collector.collect().arrays)
        finally:
            collector.close()


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """Prefixes errors with ``who``; an environment's exception becomes `EnvironmentFailed`."""
    try:
        yield
    except BrayxError as error:
        raise type(error)(f"{who}: {error.message}", **error.details) from error
    except Exception as error:
        raise EnvironmentFailed(f"{who} raised {type(error).__name__}: {first_line(error)}") from error


def env_source(name: str, config: RolloutComponent, job: Mapping[str, Any], folder: str = "") -> EnvSource:
    """What makes the environments of a rollout component, for `make_envs`.

    Args:
        name: of the component.
        config: its options.
        job: the whole job as plain dicts.
        folder: where its module is looked up first.

    Raises:
        ConfigError: the module or function is not there.
    """
    if config.func is None:
        assert config.env is not None
        if config.module is not None:
            load_module(config.module, folder)
        return config.env
    assert config.module is not None
    make: Callable[..., Any] = load(config.module, config.func, folder)
    return lambda: make(name, dict(job))


def _made_at_once(spec: RolloutSpec) -> int:
    """A user's function may make all environments at once; one of a Gymnasium id is enough to look at."""
    return 1 if spec.config.func is None else spec.config.num_envs
