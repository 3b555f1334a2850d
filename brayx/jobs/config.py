"""Reads a job from one YAML file, and validates it. Errors name the file, line, key and the nearest right name.

The top of the file names the project and the trial; every other key is a component with a ``kind``. The options of a
kind are a pydantic model next to the code that they configure; this file only joins them. Knows nothing of running a
job. Of the modules that a job names, it imports only a user's own algorithm, because that defines options.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from brayx.actor.config import ActorConfig, AgentConfig
from brayx.algorithms.build import config_class
from brayx.algorithms.config import Sampling
from brayx.components import check_module
from brayx.errors import ConfigError
from brayx.jobs.bray import translate, unit_notes
from brayx.jobs.contracts import contracts_of
from brayx.jobs.document import JobFile, Loc, dotted, nearest, nearest_file, place_of, short, walk
from brayx.jobs.former import forget_former, remove_former
from brayx.jobs.kinds import BoardConfig, FreeConfig, RenderConfig, SourceConfig
from brayx.league.config import LeagueConfig, SelfPlayConfig
from brayx.model.config import ModelConfig
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.replay.config import BufferConfig, buffer_options
from brayx.rollout.component import RolloutComponent
from brayx.text_files import read_text
from brayx.tracking.config import TrackingConfig
from brayx.trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

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
    """Absolute path of its folder, where modules are looked up first."""

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
        file = Path(path).expanduser().absolute()
        try:
            text = read_text(file)
        except OSError as error:
            other = nearest_file(file) if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"{path}: cannot be read: {error.strerror}{other}", file=str(path)) from None
        return JobConfig.parse(text, file, str(path), overrides)

    @staticmethod
    def parse(text: str, file: Path, name: str, overrides: Sequence[str] = ()) -> JobConfig:
        """A job from the text of its YAML.

        Args:
            text: the YAML.
            file: path of the file; modules are looked up in its folder.
            name: what errors call the file.
            overrides: as of `load`.

        Raises:
            ConfigError: as `load`.
        """
        document = JobFile.parse(text, name)
        for override in overrides:
            document.override(override, TOP_OPTIONS)
        return _Validation(document, file.absolute()).job()

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
        plain = self.model_dump(mode="json", by_alias=True, exclude={"file", "folder"})
        if self._further:
            plain["contract"] = self.contracts
        components = {name: part for group in _GROUPS.values() for name, part in plain.pop(group).items()}
        return {**plain, **components}

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
        components = {group: getattr(self._own.get(name, self), group) for group in _GROUPS.values()}
        own = self.model_copy(update={**components, "behaviours": {}})
        own._further = []
        return own

    def with_initial_weights(self, reference: str | None) -> JobConfig:
        """The same job, whose learner starts from the weights of ``reference``; None: from new ones."""
        trainers = {
            name: trainer.model_copy(update={"initial_weights": reference}) for name, trainer in self.trainers.items()
        }
        return self.model_copy(update={"trainers": trainers})


_GROUPS = {kind: f"{kind}s" for kind in KINDS}
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
    """The job of one player that learns: the trainer has the player's own options.

    Raises:
        ConfigError: they do not fit the trainer's.
    """
    name = only("trainer", job.trainers)
    options = job.leagues[league].players[player].trainer
    if not options:
        return job
    plain = job.trainers[name].model_dump(mode="json", by_alias=True)
    try:
        trainer = type(job.trainers[name]).model_validate(
            merged_options(plain, options), context={"folder": job.folder}
        )
    except ValueError as error:
        raise ConfigError(f"{league}.players.{player}.trainer: {error}") from None
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


class _Validation:
    """One pass over a document that collects all errors."""

    def __init__(self, document: JobFile, file: Path) -> None:
        self.document = document
        self.path = file
        self.folder = str(file.parent)
        self._context = {"folder": self.folder}
        self.errors: list[str] = []

    def job(self) -> JobConfig:
        groups: dict[str, dict[str, BaseModel]] = {group: {} for group in _GROUPS.values()}
        top, further = dict[str, Any](), list[dict[str, Any]]()
        values = {name: copy.deepcopy(value) for name, value in self.document.values.items()}
        known = options_by_kind()
        former = list(remove_former(values, known))  # before the notes: Bray has options of the same names
        notes = [self._placed(*note) for note in unit_notes(values, known)]
        for refused in (*former, *translate(values, known)):
            self._add(*refused)
        sampling = self._sampling(values)
        for name, value in values.items():
            if name == "contract" and value is not None:
                try:
                    top[name], *further = contracts_of(value, self.folder)
                except ConfigError as error:
                    self._add((name,), error.message)
            elif name in TOP_OPTIONS:
                top[name] = value
            else:
                self._component(name, value, groups, sampling.get(name))
        self._references(groups)
        place = {"file": str(self.path), "folder": self.folder}
        job = self._validate(JobConfig, {**top, **place}, ())
        if self.errors:
            self.errors += notes
        self._raise()
        for note in notes:
            logger.warning("%s", note)
        assert isinstance(job, JobConfig)
        job = job.model_copy(update=groups)
        job._further = further
        for name, own in job.behaviours.items():
            try:
                job._own[name] = self._of_behaviour(name, own)
            except ConfigError as error:
                self.errors += [f"behaviour {name!r}: {line}" for line in error.details["errors"]]
        self._raise()
        return job

    def _of_behaviour(self, name: str, own: Mapping[str, Any]) -> JobConfig:
        """The job of a behaviour that has its own options. Raises `ConfigError` as `JobConfig.load`."""
        values = {key: value for key, value in self.document.values.items() if key != "behaviours"}
        for key in set(own) & set(TOP_OPTIONS):
            self._add(("behaviours", name, key), "is an option of the whole job, expected components")
        prefix: Loc = ("behaviours", name)
        lines = {loc[2:]: line for loc, line in self.document.lines.items() if loc[:2] == prefix and len(loc) > 2}
        merged = merged_options(values, own)
        values = {key: merged[key] for key in merged if merged[key] is not None or key not in own}
        document = JobFile(values, {**self.document.lines, **lines}, self.document.file)
        return _Validation(document, self.path).job()

    def _sampling(self, values: Mapping[str, Any]) -> dict[str, Sampling]:
        """The algorithm's `Sampling` for each buffer that the trainer learns from, by name; empty unless there is
        exactly one trainer and it is valid.
        """
        sampling: dict[str, Sampling] = {}
        trainers = [part for part in values.values() if isinstance(part, dict) and part.get("kind") == "trainer"]
        if len(trainers) == 1:
            part = trainers[0]
            try:
                trainer = TrainerConfig.model_validate_json(json.dumps(part), strict=True, context=self._context)
            except (TypeError, ValidationError):  # reported with the trainer, and not at its buffers too
                names = part.get("buffers")
                any_options = Sampling(unroll_length=32, batch_steps=256, sampler="uniform")
                return {name: any_options for name in names if isinstance(name, str)} if isinstance(names, list) else {}
            sampling = dict.fromkeys(trainer.buffers, trainer.algorithm.sampling)
        return sampling

    def _component(
        self, name: str, value: Any, groups: dict[str, dict[str, BaseModel]], sampling: Sampling | None
    ) -> None:
        if not isinstance(value, dict):
            place = place_of(name, self.document.values, KINDS)
            hint = f"{nearest(name, TOP_OPTIONS)}; components are mappings with a `kind`"
            self._add((name,), f"unknown key; did you mean {place!r}?" if place else f"unknown key{hint}")
            return
        kind = value.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            problem = "has no `kind`" if kind is None else f"`kind` is {short(kind)}"
            self._add((name, "kind"), f"{problem}, expected one of {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
            return
        if not name.isidentifier():
            self._add((name,), "a component's name has letters, digits and underscores only")
        if sampling is not None and kind == "buffer":
            value = {**buffer_options(sampling, value), **value}
        component = self._validate(KINDS[kind], value, (name,))
        if isinstance(component, ActorConfig) and component.keys_file is not None:
            # A replica runs in another working directory than the author of the file expects.
            component = component.model_copy(update={"keys_file": str(Path(self.folder, component.keys_file))})
        if component is not None:
            groups[_GROUPS[kind]][name] = component
            self._modules(component, (name,))

    def _validate(self, model: type[BaseModel], value: Any, loc: Loc) -> BaseModel | None:
        try:
            # Through JSON, because that is strict about types and yet takes a list for a tuple.
            return model.model_validate_json(json.dumps(value), strict=True, context=self._context)
        except TypeError as error:
            self._add(loc, str(error))
        except ValidationError as error:
            # Unknown keys first: a key that is missing is often there under another name.
            problems = error.errors(include_url=False)
            for problem in sorted(problems, key=lambda problem: problem["type"] != "extra_forbidden"):
                self._add((*loc, *walk(model, problem["loc"])[0]), self._message(model, value, problem))
        return None

    def _message(self, model: type[BaseModel], value: Any, problem: Mapping[str, Any]) -> str:
        """One of pydantic's findings in this project's words."""
        loc: Loc = problem["loc"]
        if problem["type"] == "extra_forbidden":
            if model is TrainerConfig and loc[0] == "algorithm":  # its model depends on its value
                model, loc = config_class(value["algorithm"], self.folder), loc[1:]
            return f"unknown key{nearest(str(loc[-1]), walk(model, loc[:-1])[1])}"
        if problem["type"] == "missing":
            return "is missing"
        if problem["type"] == "union_tag_invalid":
            return f"name is {problem['ctx']['tag']!r}, expected one of {problem['ctx']['expected_tags']}"
        message = str(problem["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
        return message if problem["type"] == "algorithm" else f"is {short(problem['input'])}, expected {message}"

    def _modules(self, part: BaseModel, loc: Loc) -> None:
        """Checks that every ``module`` in a component exists."""
        for name in type(part).model_fields:
            value = getattr(part, name)
            if isinstance(value, BaseModel):
                self._modules(value, (*loc, name))
            elif name in ("module", "hooks") and isinstance(value, str):
                try:
                    check_module(value, self.folder)
                except ConfigError as error:
                    self._add((*loc, name), error.message)

    def _references(self, groups: dict[str, dict[str, BaseModel]]) -> None:
        def check(group: str, loc: Loc, name: str) -> None:
            if name not in groups[group] and name not in self._broken(group):
                kind = group.removesuffix("s")
                self._add(loc, f"there is no {kind} {name!r}{nearest(name, groups[group])}")

        for name, actor in groups["actors"].items():
            assert isinstance(actor, ActorConfig)
            for index, agent in enumerate(actor.agents):
                check("agents", (name, "agents", index), agent)
        for name, trainer in groups["trainers"].items():
            assert isinstance(trainer, TrainerConfig)
            check("models", (name, "model"), trainer.model)
            for index, buffer in enumerate(trainer.buffers):
                check("buffers", (name, "buffers", index), buffer)
            for index, buffer in enumerate(trainer.eval_buffers):
                check("buffers", (name, "eval_buffers", index), buffer)
        for name, league in groups["leagues"].items():
            assert isinstance(league, LeagueConfig)
            check("models", (name, "model"), league.model)
            for player, config in league.players.items():
                if config.script is not None:
                    try:
                        check_module(config.script.rpartition(".")[0], self.folder)
                    except ConfigError as error:
                        self._add((name, "players", player, "script"), error.message)
        for name, source in groups["sources"].items():
            assert isinstance(source, SourceConfig)
            check("buffers", (name, "buffer"), source.buffer)
        for name, rollout in groups["rollouts"].items():
            assert isinstance(rollout, RolloutComponent)
            check("models", (name, "model"), rollout.model)
            check("buffers", (name, "buffer"), rollout.buffer)

        for kind in ("recording", "board", "self_play"):
            for name in list(groups[f"{kind}s"])[1:]:
                self._add((name,), f"a job has one {kind} at most")
        if groups["leagues"] and groups["self_plays"]:
            self._add((*groups["self_plays"],), "a job has a league or self_play, not both")

    def _broken(self, group: str) -> set[str]:
        """Components of a group in the file, valid or not, so that each error is reported once."""
        values = self.document.values.items()
        return {name for name, value in values if isinstance(value, dict) and f"{value.get('kind')}s" == group}

    def _add(self, loc: Loc, what: str) -> None:
        self.errors.append(self._placed(loc, what))

    def _placed(self, loc: Loc, what: str) -> str:
        return f"{self.document.where(loc)}: {dotted(loc)}: {what}"

    def _raise(self) -> None:
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            raise ConfigError(self.errors[0] + more, file=self.document.file, errors=self.errors)
