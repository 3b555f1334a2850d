"""The keys of ML-Agents' YAML (mlagents 1.1.0), with their defaults, and what becomes of each.

Each section is a model, whose fields are the keys. A field's mark is `To` (an option of the job or of the bridge) or
`Lost` (no counterpart). `brayx.jobs.mlagents` converts keys without a mark, which set several options together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=-1)]
"""A number of restarts; -1: no limit."""
Schedule = Literal["linear", "constant"]


@dataclass(frozen=True)
class To:
    """Mark of a key that sets one option.

    Attributes:
        option: dotted path in the job; ``algorithm.`` is the trainer's algorithm, ``game.`` an option of the bridge.
        convert: makes the option's value from the key's; if it returns None, the option keeps its default.
    """

    option: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Lost:
    """Mark of a key without a counterpart.

    Attributes:
        instead: what to use or expect instead; empty: the key has no effect on learning.
        harmless: values that brayx can ignore without a message.
        refused: ignoring it changes what is learned, so the user has to agree.
    """

    instead: str = ""
    harmless: tuple[Any, ...] = ()
    refused: bool = False


class Section(BaseModel):
    """A section; its fields are its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PPOKeys(Section):
    """``hyperparameters`` of ppo."""

    batch_size: Annotated[Count, To("algorithm.minibatch_size")] = 1024
    buffer_size: Count = 10240
    learning_rate: Annotated[float, To("trainer.learning_rate")] = 3e-4
    learning_rate_schedule: Annotated[Schedule, To("algorithm.learning_rate_schedule")] = "linear"
    beta: Annotated[float, To("algorithm.entropy_coef")] = 5e-3
    beta_schedule: Annotated[Schedule, Lost("the entropy's weight stays at beta", harmless=("constant",))] = "linear"
    epsilon: Annotated[float, To("algorithm.clip_param")] = 0.2
    epsilon_schedule: Annotated[Schedule, To("algorithm.clip_schedule")] = "linear"
    lambd: Annotated[float, To("algorithm.gae_lambda")] = 0.95
    num_epoch: Annotated[int, To("algorithm.epochs")] = 3
    shared_critic: Annotated[bool, To("network.shared", lambda shared: shared or None)] = False

    @model_validator(mode="before")
    @classmethod
    def _one_schedule(cls, values: Any) -> Any:
        if isinstance(values, dict) and "learning_rate_schedule" in values:
            return {"epsilon_schedule": values["learning_rate_schedule"], **values}
        return values


class POCAKeys(PPOKeys):
    """``hyperparameters`` of poca."""

    shared_critic: Annotated[bool, Lost("a group's value has layers of its own", harmless=(False,))] = False


class SACKeys(Section):
    """``hyperparameters`` of sac."""

    batch_size: Annotated[Count, To("buffer.batch_size")] = 128
    buffer_size: Count = 50_000
    buffer_init_steps: Annotated[int, To("buffer.min_columns", lambda steps: max(steps, 1))] = 0
    learning_rate: Annotated[float, To("trainer.learning_rate")] = 3e-4
    learning_rate_schedule: Annotated[Schedule, To("algorithm.learning_rate_schedule")] = "constant"
    tau: Annotated[float, To("algorithm.tau")] = 0.005
    steps_per_update: Annotated[float, Field(gt=0)] = 1.0
    init_entcoef: Annotated[float, To("algorithm.alpha_initial")] = 1.0
    save_replay_buffer: Annotated[bool, Lost("a resumed run fills a new buffer", harmless=(False,))] = False
    reward_signal_steps_per_update: Annotated[float, Lost()] = 1.0


class MemoryKeys(Section):
    """``network_settings.memory``."""

    sequence_length: Count = 64
    memory_size: Annotated[int, Field(ge=2, multiple_of=2), To("network.lstm", lambda size: size // 2)] = 128


class NetworkKeys(Section):
    """``network_settings``."""

    normalize: Annotated[bool, To("network.normalise")] = False
    hidden_units: Count = 128
    num_layers: Annotated[int, Field(ge=0)] = 2
    vis_encode_type: Annotated[
        Literal["simple", "nature_cnn", "resnet", "match3", "fully_connected"],
        To("network.convolutions", {"nature_cnn": "nature", "resnet": "impala"}.get),
        Lost("the layers are chosen by the picture's size", harmless=("simple", "nature_cnn", "resnet")),
    ] = "simple"
    memory: MemoryKeys | None = None
    goal_conditioning_type: Annotated[
        Literal["hyper", "none"], Lost("a goal is an observation like any other", harmless=("none",))
    ] = "hyper"
    deterministic: Annotated[
        bool, Lost("a training samples its actions; the champion takes the best ones", harmless=(False,))
    ] = False


class ExtrinsicKeys(Section):
    """``reward_signals.extrinsic``."""

    gamma: Annotated[float, To("algorithm.gamma")] = 0.99
    strength: Annotated[
        float, Lost("let the game scale its rewards: they are learned as it gives them", refused=True, harmless=(1.0,))
    ] = 1.0
    network_settings: Annotated[Any, Lost()] = None


_NO_INTRINSIC = Lost("there are no intrinsic rewards: a greater beta explores more", refused=True)


class RewardSignalsKeys(Section):
    """``reward_signals``."""

    extrinsic: ExtrinsicKeys = ExtrinsicKeys()
    curiosity: Annotated[Any, _NO_INTRINSIC] = None
    rnd: Annotated[Any, _NO_INTRINSIC] = None
    gail: Annotated[Any, Lost("behavioral_cloning imitates demonstrations", refused=True)] = None


class CloningKeys(Section):
    """``behavioral_cloning``."""

    demo_path: str
    steps: Annotated[int, Field(ge=0)] = 0
    strength: Annotated[float, Field(ge=0)] = 1.0
    samples_per_update: Annotated[int, Lost(harmless=(0,))] = 0
    num_epoch: Annotated[int | None, Lost(harmless=(None,))] = None
    batch_size: Count | None = None


class SelfPlayKeys(Section):
    """``self_play``. ML-Agents counts the opponent's steps, which are half of all."""

    save_steps: Annotated[Count, To("self_play.snapshot_every")] = 20_000
    team_change: Annotated[Count | None, To("self_play.team_every")] = None
    swap_steps: Annotated[Count, To("self_play.swap_every", lambda steps: 2 * steps)] = 10_000
    window: Annotated[Count, To("self_play.pool_size")] = 10
    play_against_latest_model_ratio: Annotated[
        float,
        Field(ge=0, le=1),
        To("self_play.against", lambda ratio: {"latest": ratio, "uniform": 1 - ratio}),
    ] = 0.5
    initial_elo: Annotated[float, Lost("points begin at 1200", harmless=(1200.0,))] = 1200.0

    @model_validator(mode="before")
    @classmethod
    def _default_team_change(cls, values: Any) -> Any:
        save_steps = values.get("save_steps", 20_000) if isinstance(values, dict) else None
        return {"team_change": 5 * save_steps, **values} if isinstance(save_steps, int) else values


class BehaviourKeys(Section):
    """A behaviour, without the ``hyperparameters`` of its trainer."""

    trainer_type: str = "ppo"
    network_settings: NetworkKeys = NetworkKeys()
    reward_signals: RewardSignalsKeys = RewardSignalsKeys()
    max_steps: Annotated[Count, To("trainer.num_steps")] = 500_000
    time_horizon: Count = 64
    keep_checkpoints: Annotated[Count, To("trainer.checkpoints_kept")] = 5
    checkpoint_interval: Annotated[int, Lost()] = 500_000
    even_checkpoints: Annotated[bool, Lost()] = False
    summary_freq: Annotated[int, Lost()] = 50_000
    threaded: Annotated[bool, Lost(harmless=(False,))] = False
    output_path: Annotated[Any, Lost()] = None
    framework: Annotated[Any, Lost()] = None
    init_path: Annotated[
        str | None,
        Lost("its file is not read: --initialize-from takes a run of brayx", harmless=(None,), refused=True),
    ] = None
    self_play: SelfPlayKeys | None = None
    behavioral_cloning: CloningKeys | None = None

    algorithm: ClassVar[str] = "ppo"


class PPOBehaviourKeys(BehaviourKeys):
    """A behaviour that learns by ppo."""

    hyperparameters: PPOKeys = PPOKeys()


class POCABehaviourKeys(PPOBehaviourKeys):
    """A behaviour that learns by poca."""

    hyperparameters: POCAKeys = POCAKeys()

    algorithm: ClassVar[str] = "mappo"


class SACBehaviourKeys(BehaviourKeys):
    """A behaviour that learns by sac."""

    hyperparameters: SACKeys = SACKeys()

    algorithm: ClassVar[str] = "sac"


TRAINERS: Mapping[str, type[PPOBehaviourKeys | SACBehaviourKeys]] = {
    "ppo": PPOBehaviourKeys,
    "sac": SACBehaviourKeys,
    "poca": POCABehaviourKeys,
}


def _limit(restarts: int) -> int | None:
    return None if restarts < 0 else restarts


class EnvironmentKeys(Section):
    """``env_settings``."""

    env_path: str | None = None
    env_args: list[str] | None = None
    base_port: Annotated[int, Field(ge=0, le=65535)] = 5005
    num_envs: Count = 1
    num_areas: Annotated[Count, To("game.num_areas")] = 1
    seed: Annotated[int, Field(ge=-1)] = -1
    timeout_wait: Annotated[Any, Lost()] = 60
    max_lifetime_restarts: Annotated[Limit, To("game.lifetime_restarts", _limit)] = 10
    restarts_rate_limit_n: Annotated[Limit, To("game.restarts", _limit)] = 1
    restarts_rate_limit_period_s: Annotated[float, Field(ge=0), To("game.restarts_within_s")] = 60


class EngineKeys(Section):
    """``engine_settings``."""

    width: Annotated[Count, To("game.width")] = 84
    height: Annotated[Count, To("game.height")] = 84
    quality_level: Annotated[int, To("game.quality_level")] = 5
    time_scale: Annotated[float, Field(gt=0), To("game.time_scale")] = 20.0
    target_frame_rate: Annotated[int, To("game.target_frame_rate")] = -1
    capture_frame_rate: Annotated[int, To("game.capture_frame_rate")] = 60
    no_graphics: Annotated[bool, To("game.headless", lambda headless: headless or None)] = False
    no_graphics_monitor: Annotated[bool, Lost("all builds draw, or with --no-graphics none", harmless=(False,))] = False


class CheckpointKeys(Section):
    """``checkpoint_settings``: the run, and what it starts from."""

    run_id: Annotated[str, Field(min_length=1), To("trial")] = "ppo"
    initialize_from: str | None = None
    load_model: bool = False
    resume: bool = False
    force: bool = False
    train_model: Annotated[bool, Lost(harmless=(False,))] = False
    inference: bool = False
    results_dir: str = "results"


class TorchKeys(Section):
    """``torch_settings``."""

    device: Annotated[
        str | None,
        To("trainer.use_gpu", lambda device: (device or "").startswith("cuda") or None),
        Lost("brayx learns on the CPU, or with cuda on a GPU", harmless=(None, "cpu", "cuda", "cuda:0")),
    ] = None


SECTIONS: Mapping[str, type[Section]] = {
    "env_settings": EnvironmentKeys,
    "engine_settings": EngineKeys,
    "checkpoint_settings": CheckpointKeys,
    "torch_settings": TorchKeys,
}
"""The sections whose keys are also flags."""
