"""A job: one YAML file, whose top names the project and the trial; every other key is a component with a ``kind``.

The options of a kind are a pydantic model next to the code that they configure; this file only joins them, and
`brayx.jobs.validation` checks them. Knows nothing of running a job.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from brayx.actor.config import ActorConfig, AgentConfig
from brayx.errors import ConfigError
from brayx.jobs.document import JobFile, walk
from brayx.jobs.former import forget_former
from brayx.jobs.kinds import BoardConfig, FreeConfig, RenderConfig, SourceConfig
from brayx.jobs.shipped import files_folder_of, is_shipped, read_job
from brayx.league.config import LeagueConfig, SelfPlayConfig
from brayx.model.config import ModelConfig
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.replay.config import BufferConfig
from brayx.rollout.component import RolloutComponent
from brayx.tracking.config import TrackingConfig
from brayx.tracking.options import Options
from brayx.trainer.config import TrainerConfig

KINDS: dict[str, type[BaseModel]] = {
    "model": ModelConfig,
    "agent": AgentConfig,
    "buffer": BufferConfig,
    "source": SourceConfig,
    "rollout": RolloutComponent,
    "actor": ActorConfig,
    "trainer": TrainerConfig,
    "league": LeagueConfig,
    "self_play": SelfPlayConfig,
    "render": RenderConfig,
    "recording": RecordingConfig,
    "board": BoardConfig,
    "config": FreeConfig,
}

_POOL_NAME = re.compile(r"\w[\w .+=,-]{0,199}")


class JobConfig(BaseModel):
    """A validated job. Components are in dicts by their names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    project: Annotated[str, Field(min_length=1)]
    """Name of the MLflow experiment, and of the registered model."""
    trial: Annotated[str, Field(min_length=1)]
    """Name of the MLflow run; an interrupted one of that name is resumed."""
    mode: Literal["train", "serve"] = "train"
    """Mode that agents read as ``config["mode"]``: whether they explore."""
    seed: int = 0
    """Seed of the first weights, the learner, and the agents by session id; games have theirs in their command."""
    contract: dict[str, Any] | None = None
    """What games observe and do: a contract, a list of one for each behaviour, or the path of a file with either, here
    or where the command runs; null: the first game that connects says it, or the champion that is served."""
    behaviours: dict[str, dict[str, Any]] = {}
    """Options of single behaviours of the games, by name: their components, with the options that differ."""
    other_behaviours: Literal["learn", "refuse"] = "learn"
    """Whether behaviours that ``behaviours`` does not name are learned or refused."""
    tracking: TrackingConfig = TrackingConfig()
    """Where trials are kept: MLflow's ``uri``, or a mapping of options."""

    console_port: Annotated[int, Field(ge=0, le=65535)] | None = 8110
    """Port of the console. 0, or if it is taken: a free port; null: no console."""
    console_host: str = "127.0.0.1"
    """Address of the console; any other than loopback needs ``console_keys_file``."""
    console_keys_file: str | None = None
    """File of the console's keys (`brayx keys new --scope control`), relative to the YAML's folder; null: everybody on
    this machine may use it."""

    models: dict[str, ModelConfig] = {}
    agents: dict[str, AgentConfig] = {}
    buffers: dict[str, BufferConfig] = {}
    sources: dict[str, SourceConfig] = {}
    rollouts: dict[str, RolloutComponent] = {}
    actors: dict[str, ActorConfig] = {}
    trainers: dict[str, TrainerConfig] = {}
    leagues: dict[str, LeagueConfig] = {}
    self_plays: dict[str, SelfPlayConfig] = {}
    renders: dict[str, RenderConfig] = {}
    recordings: dict[str, RecordingConfig] = {}
    boards: dict[str, BoardConfig] = {}
    configs: dict[str, FreeConfig] = {}

    file: str
    """Absolute path of the YAML file."""
    folder: str
    """Absolute path of the folder where modules are looked up first: the file's; of a shipped job the current."""

    _own: dict[str, JobConfig] = PrivateAttr(default_factory=dict)
    """The job of each behaviour that has its own options."""
    _further: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    """The contracts that follow the first one in the file."""

    @field_validator("project")
    @classmethod
    def _registrable(cls, project: str) -> str:
        # Check before the training, not after it: MLflow's registry takes no / or :, and @ starts an alias.
        if _POOL_NAME.fullmatch(project) is None:
            raise ValueError("up to 200 letters, digits, spaces or _.+=,- that begin with a letter, a digit or _")
        return project

    @staticmethod
    def load(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
        """Reads a job.

        Args:
            path: path of the YAML file.
            overrides: ``component.key=value`` each, with the value as YAML; an integer indexes a list
                (``actor.gamecores.0.num=4``).

        Raises:
            ConfigError: the file, a key or a value cannot be used. ``details["errors"]`` has one line for each thing
                that is wrong; the message is the first of them.
        """
        return JobConfig.parse(read_job(path), Path(path).expanduser().absolute(), str(path), overrides)

    @staticmethod
    def parse(text: str, file: Path, name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> JobConfig:
        """A job from the text of its YAML.

        Args:
            text: the YAML.
            file: path of the file.
            name: what errors of its text call the file.
            overrides: as of `load`.
            folder: where modules are looked up; None: the file's folder, or the current one of a shipped job.

        Raises:
            ConfigError: as `load`.
        """
        document = JobFile.parse(text, name)
        for override in overrides:
            document.override(override, TOP_OPTIONS)
        from brayx.jobs.validation import Validation  # which needs this class

        folder = folder or (Path() if is_shipped(file) else file.parent)
        return Validation(document, file.absolute(), folder.absolute()).job()

    @staticmethod
    def of(options: Mapping[str, Any], folder: str, overrides: Sequence[str] = ()) -> JobConfig:
        """A job from what `as_dict` gave, and the folder of its modules, with overrides as of `load`. Former options
        that do not decide how its models act or learn are left out.

        Raises:
            ConfigError: as `load`.
        """
        options = copy.deepcopy(dict(options))
        forget_former(options, options_by_kind())
        name = f"the job recorded in {folder or '.'}"
        return JobConfig.parse(json.dumps(options), Path(folder, "job"), name, overrides)

    def as_dict(self) -> dict[str, Any]:
        """The job as the YAML has it, defaults filled in, as JSON values; agents and models get this."""
        plain = self._components(self.model_dump(mode="json", by_alias=True, exclude={"file", "folder"}))
        return {**plain, "contract": self.contracts} if self._further else plain

    def options(self, **more: Any) -> Options:
        """The job as options of a trial, with more of them.

        The chosen ones are those that differ from the defaults, without the contract, and always the seed and the
        learning rate, since these are compared most.
        """
        excluded = {"file", "folder", "contract"}
        chosen = self._components(self.model_dump(mode="json", by_alias=True, exclude=excluded, exclude_defaults=True))
        for name, trainer in self.trainers.items():
            chosen[name] = {**chosen.get(name, {}), "learning_rate": trainer.learning_rate}
        return Options({**more, **self.as_dict()}, {**more, "seed": self.seed, **chosen})

    @staticmethod
    def _components(plain: dict[str, Any]) -> dict[str, Any]:
        components = {name: part for group in GROUPS.values() for name, part in plain.pop(group, {}).items()}
        return {**plain, **components}

    @property
    def files_folder(self) -> str:
        """Where its games run and its relative paths start, see `files_folder_of`."""
        return files_folder_of(self.file, self.folder)

    @property
    def has_contract(self) -> bool:
        """Whether its actor reads bodies by a contract."""
        return any(actor.serialize == "contract" for actor in self.actors.values())

    @property
    def needs_contract(self) -> bool:
        """Whether its actor reads bodies by a contract, and the job has none yet."""
        return self.contract is None and self.has_contract

    @property
    def contracts(self) -> list[dict[str, Any]]:
        """Its contracts, one for each behaviour; empty: it has none yet."""
        return [] if self.contract is None else [self.contract, *self._further]

    @property
    def needs_games(self) -> bool:
        """Whether all data come from games at its doors: it has neither rollouts nor sources."""
        return not (self.rollouts or self.sources)

    @property
    def recording(self) -> RecordingConfig | None:
        """The options of its recording; None: nothing is recorded."""
        return next(iter(self.recordings.values()), None)

    @property
    def frames_render(self) -> str:
        """Name of the render that draws the frames of its recording; empty: they are an array, or there are none."""
        name = self.recording.frames if self.recording is not None else None
        return name if name in self.renders else ""

    @property
    def drawing(self) -> Drawing | None:
        """The function of that render."""
        render = self.renders.get(self.frames_render)
        return None if render is None else Drawing(render.module, render.func, self.folder)

    def in_mode(self, mode: Literal["train", "serve"]) -> JobConfig:
        """The same job in another mode."""
        return self.model_copy(update={"mode": mode})

    def of_behaviour(self, name: str) -> JobConfig:
        """The same job with the components of one behaviour, which have its own options."""
        components = {group: getattr(self._own.get(name, self), group) for group in GROUPS.values()}
        own = self.model_copy(update={**components, "behaviours": {}})
        own._further = []
        return own

    def with_initial_weights(self, reference: str | None) -> JobConfig:
        """The same job, whose learner starts from the weights of ``reference``; None: from new ones."""
        trainers = {
            name: trainer.model_copy(update={"initial_weights": reference}) for name, trainer in self.trainers.items()
        }
        return self.model_copy(update={"trainers": trainers})


GROUPS = {kind: f"{kind}s" for kind in KINDS}
"""The field of `JobConfig` that has the components of each kind."""
TOP_OPTIONS = (
    "project", "trial", "mode", "seed", "contract", "behaviours", "other_behaviours", "tracking", "console_port",
    "console_host", "console_keys_file",
)  # fmt: skip
"""Keys at the top of a job that are no components."""


def options_by_kind() -> dict[str, set[str]]:
    """Names of the options of each kind of component; "": at the top of the file."""
    return {"": set(TOP_OPTIONS), **{kind: set(walk(model, ())[1]) for kind, model in KINDS.items()}}


def only(kind: str, components: Mapping[str, Any], name: str = "") -> str:
    """The name of the only component of a kind, or ``name`` if a component of that name exists.

    Raises:
        ConfigError: there is none, or several to choose from.
    """
    if name in components or (not name and len(components) == 1):
        return name or next(iter(components))
    if not components:
        raise ConfigError(f"the job has no {kind}")
    problem = f"the job has no {kind} named {name!r}" if name else f"name one {kind}"
    raise ConfigError(f"{problem}; the job has: {', '.join(components)}")


def pool_name(job: JobConfig, model: str) -> str:
    """Name in the registry of one of a job's models: the project's, and the model's if there are several."""
    return pool_name_of(job.project, model, job.models)


def pool_name_of(project: str, model: str, models: Collection[str]) -> str:
    """As `pool_name`, of a project with these models."""
    return project if len(models) == 1 else f"{project}-{model}"


def job_of(job: JobConfig, league: str, player: str) -> JobConfig:
    """The job of one player that learns: the trainer has the player's own options."""
    name = only("trainer", job.trainers)
    options = job.leagues[league].players[player].trainer
    if not options:
        return job
    plain = job.trainers[name].model_dump(mode="json", by_alias=True)
    trainer = TrainerConfig.model_validate(merged_options(plain, options), context={"folder": job.folder})
    return job.model_copy(update={"trainers": {name: trainer}})


def merged_options(plain: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Merges ``overriding`` into options, mapping by mapping. A mapping with another ``name``, such as another
    algorithm's, replaces the former one completely."""
    merged = dict(plain)
    for key, value in overriding.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            is_same = value.get("name", before.get("name")) == before.get("name")
            merged[key] = merged_options(before, value) if is_same else value
        else:
            merged[key] = value
    return merged
