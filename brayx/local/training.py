"""Options of a training from Python environments, in one process or on a cluster.

`brayx.local.train.train_local` and `brayx.commands.distributed.train_distributed` take them; a search may vary them.
Knows nothing of how either trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError

from brayx.algorithms.config import AlgorithmConfig
from brayx.errors import ConfigError
from brayx.nets.policy import NetworkConfig
from brayx.other_names import hint
from brayx.replay.config import BufferConfig
from brayx.rollout.component import RolloutComponent
from brayx.rollout.envs import Vectorization
from brayx.rollout.evaluate import MAX_STEPS
from brayx.rollout.policy import ActingEngine
from brayx.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.jobs.config import JobConfig
    from brayx.rollout.envs import EnvSource
    from brayx.rollout.networks import Model
    from brayx.types import NestedArray

_SAME: dict[type[BaseModel], list[str]] = {RolloutComponent: [], BufferConfig: [], TrainerConfig: []}
"""Options that mean the same in a job, by their component."""
_READY_MADE = "brayx.jobs.models"
_NETWORK = "network."
_INNER = "reinforcement."
_Count = Annotated[int, Field(ge=1)]


class _Same:
    """Gives a field the type and bounds of a component's option, and allows None if that is the default."""

    def __init__(self, component: type[BaseModel], name: str, default: Any) -> None:
        field = component.model_fields[name]
        option: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        self._option = option | None if default is None else option

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(self._option)


def _same(component: type[BaseModel], name: str, *default: Any) -> Any:
    """An option of a job's component, with its type, bounds and default, unless another default is given."""
    _SAME[component].append(name)
    value = default[0] if default else component.model_fields[name].default
    field = Field(default=value)
    field.metadata.append(_Same(component, name, value))
    return field


class Training(BaseModel):
    """Options of a training, apart from its algorithm's. `of` replaces None by the algorithm's defaults.

    Options without a docstring are those of a job's `RolloutComponent`, `TrainerConfig` and `BufferConfig`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_steps: _Count = 100_000
    """Transitions to collect; for an algorithm that only imitates, transitions of its batches. Schedules end here."""
    num_envs: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Environments stepped together; on a cluster, those of all workers, divided evenly."""
    unroll_length: int | None = _same(BufferConfig, "unroll_length", None)
    """Steps of a run; None: the algorithm's. With ``fifo``, a batch is a run of all environments: ``num_envs *
    unroll_length`` transitions."""
    learning_rate: float = _same(TrainerConfig, "learning_rate")
    target_return: float | None = _same(TrainerConfig, "target_return")
    target_games: int = _same(TrainerConfig, "target_games", 100)
    seed: int = 0
    """Seed of environments, actions, weights and minibatches."""
    network: NetworkConfig | None = None
    """Options of the ready-made networks; None: what suits the algorithm."""
    sampler: Literal["fifo", "uniform", "prioritised"] | None = _same(BufferConfig, "sampler", None)
    """``fifo``: each run is learned from once. Otherwise runs go into a table, whose columns are sampled. None: the
    algorithm's."""
    priority_exponent: float = _same(BufferConfig, "priority_exponent")
    importance_exponent: float = _same(BufferConfig, "importance_exponent")
    importance_batches: int | None = _same(BufferConfig, "importance_batches")
    batch_size: int | None = _same(BufferConfig, "batch_size", None)
    """Columns of a sample, and of a batch of demonstrations; None: the algorithm's."""
    capacity: _Count = 100_000
    """Columns of the table."""
    samples_per_insert: float | None = _same(BufferConfig, "samples_per_insert")
    """Average number of times that a column is sampled; None: as the algorithm's number of updates per transition
    requires."""
    min_columns: int = _same(BufferConfig, "min_columns", 1_000)
    blocking: bool = True
    """Collect with the newest weights only. Otherwise the next run is collected during learning, with weights that are
    one update older."""
    normalise_obs: bool = _same(RolloutComponent, "normalise_obs")
    normalise_reward: bool = _same(RolloutComponent, "normalise_reward")
    reward_clip: float | None = _same(RolloutComponent, "reward_clip")
    sde_steps: int = _same(RolloutComponent, "sde_steps")
    vectorization: Vectorization = _same(RolloutComponent, "vectorization")
    env_options: Mapping[str, Any] = _same(RolloutComponent, "env_options")
    engine: ActingEngine = "onnx"
    """Engine that acts."""
    threads: int | None = _same(TrainerConfig, "threads")
    use_gpu: bool = _same(TrainerConfig, "use_gpu")
    evaluation_episodes: Annotated[int, Field(ge=0)] = 0
    """Greedy episodes played after training."""
    evaluation_steps: _Count = MAX_STEPS
    """Limit of such an episode: a longer one is cut, and counts with its return so far (`PolicyEvaluation.cut`)."""
    checkpoint_interval: int | None = _same(TrainerConfig, "checkpoint_interval")

    def of(self, algorithm: AlgorithmConfig) -> Settled:
        """Returns these options with every None replaced by the algorithm's default."""
        sampling = algorithm.sampling
        length = self.unroll_length or sampling.unroll_length
        size = self.batch_size or sampling.batch_size(length)
        filled = {
            "sampler": self.sampler or sampling.sampler,
            "unroll_length": length,
            "batch_size": size,
            "samples_per_insert": self.samples_per_insert or sampling.samples_per_insert(length, size) or None,
        }
        return Settled.model_construct(**{**dict(self), **filled})


class Settled(Training):
    """Options of a training with its algorithm's defaults filled in; made by `Training.of`."""

    sampler: Literal["fifo", "uniform", "prioritised"]
    unroll_length: int
    batch_size: int


def option_names(model: type[AlgorithmConfig]) -> list[str]:
    """The names that `with_options` takes for this algorithm."""
    names = [*Training.model_fields, *(name for name in model.model_fields if name not in ("name", "module"))]
    names += [_NETWORK + name for name in NetworkConfig.model_fields]
    return names + sorted({_INNER + name for inner in model.inner for name in inner.model_fields if name != "module"})


def with_options(
    algorithm: AlgorithmConfig | type[AlgorithmConfig],
    values: Mapping[str, Any],
    training: Training | None = None,
    *,
    fixed: Collection[str] = (),
) -> tuple[AlgorithmConfig, Training]:
    """Sets options by name: of `Training` (``num_envs``), of the algorithm (``clip_param``), of the ready-made network
    (``network.hidden``), or of the algorithm inside the algorithm (``reinforcement.epochs``).

    Args:
        algorithm: the algorithm with its other options, or its class.
        values: values of the options.
        training: all other options; None: their defaults.
        fixed: options that cannot be set.

    Raises:
        ConfigError: there is no such option (names the nearest), or a value is out of range.
    """
    from brayx.nets.soft import NETWORK

    training = training or Training()
    model = algorithm if isinstance(algorithm, type) else type(algorithm)
    options = {} if isinstance(algorithm, type) else algorithm.model_dump(exclude_unset=True)
    known = [name for name in option_names(model) if name not in fixed]
    chosen: dict[str, dict[str, Any]] = {"training": {}, "algorithm": {}, _NETWORK: {}, _INNER: {}}
    for name, value in values.items():
        if name not in known:
            choices = hint(name, known) or f"there is {', '.join(sorted(known))}"
            raise ConfigError(f"there is no option {name!r}; {choices}", key=name)
        prefix = next((prefix for prefix in (_NETWORK, _INNER) if name.startswith(prefix)), "")
        group = prefix or ("training" if name in Training.model_fields else "algorithm")
        chosen[group][name.removeprefix(prefix)] = value
    options |= chosen["algorithm"]
    inner_options = options.get("reinforcement", {})
    if chosen[_INNER] and isinstance(inner_options, Mapping):  # anything else is refused with the rest
        options["reinforcement"] = {**inner_options, **chosen[_INNER]}
    try:
        config = model.model_validate(options)
        if chosen[_NETWORK]:
            soft = config.critic is not None and "action" in config.critic.takes
            network = training.network or (NETWORK if soft else NetworkConfig())
            chosen["training"]["network"] = NetworkConfig.model_validate(
                {**network.model_dump(exclude_unset=True), **chosen[_NETWORK]}
            )
        given = {name: getattr(training, name) for name in training.model_fields_set}
        return config, Training.model_validate({**given, **chosen["training"]})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name} is {first['input']!r}: {first['msg']}", key=name) from None


def as_job(
    env: str, algorithm: AlgorithmConfig, training: Training, *, num_workers: int, buffer_size: int | None = None
) -> dict[str, Any]:
    """The components of a job that trains as `brayx.local.train.train_local` does with these options.

    Args:
        env: Gymnasium id.
        algorithm, training: the options.
        num_workers: rollout workers, which share the environments.
        buffer_size: transitions that a `fifo` keeps for the learner; None: two batches.

    Raises:
        ConfigError: there are not as many environments for each worker.
    """
    settled = training.of(algorithm)
    num_envs, num_steps = settled.num_envs, settled.num_steps
    if num_workers < 1 or num_envs % num_workers:
        raise ConfigError(f"num_envs is {num_envs}, expected a multiple of num_workers, {num_workers}", key="num_envs")
    same = {part: {name: getattr(settled, name) for name in names} for part, names in _SAME.items()}
    batches = 2 if buffer_size is None else max(1, buffer_size // (num_envs * settled.unroll_length))
    buffer: dict[str, Any] = {"size": batches, "batch_size": num_envs}
    if settled.sampler != "fifo":
        buffer = {"size": -(-settled.capacity // settled.batch_size), **same[BufferConfig]}
        # The learner counts a sampled transition each time it learns from it.
        num_steps = round(num_steps * (settled.samples_per_insert or 1.0))
    # Only the options that were set: the algorithm chooses the others.
    network = {} if settled.network is None else settled.network.model_dump(mode="json", exclude_unset=True)
    return {
        "seed": settled.seed,
        "network": {"kind": "config", **network},
        "model": {"kind": "model", "module": _READY_MADE, "engine": settled.engine},
        "rollout": {
            "kind": "rollout", "env": env, "model": "model", "buffer": "buffer",
            "num_workers": num_workers, "num_envs": num_envs // num_workers,
            "mode": "blocking" if settled.blocking and settled.sampler == "fifo" else "non_blocking",
            **same[RolloutComponent], "env_options": dict(settled.env_options),
        },
        "buffer": {"kind": "buffer", "unroll_length": settled.unroll_length, **buffer},
        "trainer": {
            "kind": "trainer", "model": "model", "buffers": ["buffer"], "num_steps": num_steps, **same[TrainerConfig],
            "algorithm": algorithm.model_dump(mode="json"),
        },
    }  # fmt: skip


def of_job(
    job: JobConfig,
) -> tuple[EnvSource, AlgorithmConfig, Callable[[NestedArray, ActionSpec], Model] | None, dict[str, Any]]:
    """The environment, algorithm, model (None: ready-made) and other options of a job with one rollout.

    A batch of a ``fifo`` is a run of all environments here, so there are as many as it has columns.

    Raises:
        ConfigError: the job has more than a rollout, a model, a buffer and a trainer, or its trainer needs more.
    """
    for kind in ("actor", "source", "league"):
        if components := getattr(job, f"{kind}s"):
            raise ConfigError(f"{job.file}: a Trainer steps environments only: expected no {kind}", key=min(components))
    for kind in ("rollout", "buffer", "model", "trainer"):
        if (count := len(getattr(job, f"{kind}s"))) != 1:
            raise ConfigError(f"{job.file}: a Trainer has one {kind}, but the job has {count}", key=kind)
    ((rollout_name, rollout),), ((model_name, model),) = job.rollouts.items(), job.models.items()
    (buffer,), (trainer,) = job.buffers.values(), job.trainers.values()
    for name in ("hooks", "initial_weights"):
        if getattr(trainer, name) is not None:
            raise ConfigError(f"{job.file}: a Trainer has no trainer.{name}: expected null", key=name)
    table = buffer.sampler != "fifo"
    options = {
        name: getattr(part, name)
        for part in (rollout, trainer, buffer)
        for name in (_SAME[type(part)] if part is not buffer or table else ("sampler",))
    }
    options |= {
        "seed": job.seed,
        "engine": model.engine,
        "unroll_length": buffer.unroll_length,
        "num_envs": rollout.num_envs * rollout.num_workers if table else buffer.batch_size,
        "blocking": rollout.mode == "blocking",
        "num_steps": trainer.num_steps,
    }
    if table:
        options["capacity"] = buffer.capacity
        options["num_steps"] = max(1, round(trainer.num_steps / (buffer.samples_per_insert or 1.0)))
    as_dict = job.as_dict()
    make: Callable[[NestedArray, ActionSpec], Model] | None = None
    if model.module == _READY_MADE:
        network = {name: value for name, value in as_dict.get("network", {}).items() if name != "kind"}
        options |= {"network": network} if network else {}
    else:
        from brayx.model.build import build_model

        build = functools.partial(build_model, job.folder, model.module or "", model_name, as_dict)

        def make(obs: NestedArray, spec: ActionSpec) -> Model:
            return build()

    from brayx.rollout.spec import env_source

    env = env_source(rollout_name, rollout, as_dict, job.folder)
    return env, trainer.algorithm, make, options
