"""A job's rollout: its options, its collector, and a check of both before anything starts.

Knows nothing of threads, processes, or where fragments go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from brayx.actions import ActionSpec
from brayx.components import load, load_module
from brayx.errors import BrayxError, ConfigError, EnvironmentFailed, first_line
from brayx.model.build import build_model
from brayx.model.config import ModelConfig
from brayx.replay.config import BufferConfig
from brayx.rollout.collector import Collector
from brayx.rollout.component import RolloutComponent
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.policy import RolloutPolicy


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """The settings of a rollout's workers; picklable.

    Attributes:
        name: name of the component.
        config: options of the component.
        model_name, model: the model component that acts.
        buffer_config: options of the buffer; its ``unroll_length`` is the length of a fragment.
        folder: searched first for the user's modules.
        job: the whole job as plain dicts, for the user's functions.
        gamma: discount of the learner, used to normalise rewards.
        seed: seed of environments and actions; each worker derives its own.
        update_columns: columns per publish: those of one update of all ranks, times the updates between two publishes.
            A ``blocking`` rollout collects as many with each version.
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
        """Display name of the environment."""
        return self.config.env or f"{self.config.module}.{self.config.func}"

    @property
    def fragment_steps(self) -> int:
        """Most transitions in one fragment of a worker."""
        return self.config.num_envs * self.buffer_config.unroll_length


def make_collector(
    spec: RolloutSpec, *, num_envs: int | None = None, unroll_length: int | None = None, index: int = 0, past: int = 0
) -> Collector:
    """Makes the environments of one worker and its policy, with the model's initial weights.

    Args:
        spec: the rollout.
        num_envs, unroll_length: override the component's and the buffer's values.
        index: index of the worker.
        past: number of earlier workers with this index; the seeds of their environments are not used again.

    Raises:
        ConfigError: the environment does not exist or cannot be made, or the model does not fit it.
        ModelError: the model cannot act.
    """
    config = spec.config
    module, example = build_model(spec.folder, spec.model.module, spec.model_name, dict(spec.job))
    if spec.model.engine not in ("onnx", "torch"):
        raise ConfigError(f"a rollout acts with engine onnx or torch, not {spec.model.engine!r}", key="engine")
    policy = RolloutPolicy(module, example, engine=spec.model.engine, threads=spec.model.threads)
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
        # Hash the three: with seed + index, neighbouring workers would play mostly the same environments.
        seed=int(np.random.SeedSequence([spec.seed, index, past]).generate_state(1)[0] >> 1),
        normalise_obs=config.normalise_obs,
        normalise_reward=config.normalise_reward,
        gamma=spec.gamma,
        reward_clip=config.reward_clip,
        sde_steps=config.sde_steps,
    )


def rounds(spec: RolloutSpec, workers: int) -> int:
    """Number of fragments that each of ``workers`` blocking workers collects with one version of the weights.

    Raises:
        ConfigError: the fragments do not add up to whole updates in each shard, or the buffer samples. Workers and
            learner would wait for each other forever.
    """
    buffer = spec.buffer_config
    if buffer.sampler != "fifo":
        raise ConfigError(
            f"mode is blocking, but a buffer with sampler {buffer.sampler!r} gives batches by min_columns and "
            "samples_per_insert, so workers could wait forever for new weights: it needs mode non_blocking, or "
            "sampler fifo",
            key="mode",
        )
    if buffer.num_workers > 1 and spec.config.num_envs != buffer.batch_size:
        raise ConfigError(
            f"mode is blocking, and workers of {spec.config.num_envs} environments would leave an incomplete batch "
            f"in each of the buffer's {buffer.num_workers} shards, and wait forever: use one shard, or num_envs "
            f"{buffer.batch_size}, a whole batch",
            key="mode",
        )
    of_all = workers * spec.config.num_envs
    if spec.update_columns % of_all:
        raise ConfigError(
            f"mode is blocking, where {workers} workers x {spec.config.num_envs} environments give {of_all} columns "
            f"with each version of the weights, but new weights need {spec.update_columns} (batch_size x ranks x "
            f"weights_publish_interval): that must be a multiple, such as batch_size {of_all}",
            key="mode",
        )
    return spec.update_columns // of_all


def counts_that_fit(spec: RolloutSpec) -> list[int]:
    """The possible numbers of blocking workers, see `rounds`."""
    num_envs = spec.config.num_envs
    return [
        count
        for count in range(1, spec.update_columns // num_envs + 1)
        if spec.update_columns % (count * num_envs) == 0
    ]


def check_rollout(spec: RolloutSpec) -> tuple[ActionSpec, dict[str, np.ndarray]]:
    """Makes one environment, takes one step in it and closes it, so that errors are reported before anything starts.

    Returns:
        Its actions, and a batch with columns of one transition.

    Raises:
        ConfigError, ModelError: as for `make_collector`; names the environment.
        EnvironmentFailed: the environment raised.
    """
    with naming(f"rollout {spec.name!r} ({spec.env_name})"):
        if spec.config.mode == "blocking":
            rounds(spec, spec.config.num_workers)
        collector = make_collector(spec, num_envs=_made_at_once(spec), unroll_length=1)
        try:
            return collector.action_spec, dict(collector.collect().arrays)
        finally:
            collector.close()


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Prefixes errors with ``source``; an environment's exception becomes `EnvironmentFailed`."""
    try:
        yield
    except BrayxError as error:
        raise type(error)(f"{source}: {error.message}", **error.details) from error
    except Exception as error:
        raise EnvironmentFailed(f"{source} raised {type(error).__name__}: {first_line(error)}") from error


def env_source(name: str, config: RolloutComponent, job: Mapping[str, Any], folder: str = "") -> EnvSource:
    """Returns the source of a rollout component's environments, for `make_envs`.

    Args:
        name: name of the component.
        config: options of the component.
        job: the whole job as plain dicts.
        folder: searched first for its module.

    Raises:
        ConfigError: the module or function does not exist.
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
    """Number of environments to check: one of a Gymnasium id; all of a user's function, which may make a vector."""
    return 1 if spec.config.func is None else spec.config.num_envs
