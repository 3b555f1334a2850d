"""Converts the options of `mlagents-learn` (mlagents 1.1.0) to a job, based on unity.yaml.

`brayx.jobs.mlagents_keys` has the keys of its YAML; this file reads them and makes the job. Knows nothing of a game's
contract, and starts nothing.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from brayx.bridges.unity_settings import GameSettings
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig, merged_options
from brayx.jobs.document import JobFile, Loc, dotted, nearest, read_yaml, short
from brayx.jobs.mlagents_keys import (
    SECTIONS,
    TRAINERS,
    CheckpointKeys,
    CloningKeys,
    EnvironmentKeys,
    Lost,
    PPOBehaviourKeys,
    SACBehaviourKeys,
    Section,
    To,
)
from brayx.jobs.shipped import TEMPLATES

_TEMPLATE = "unity.yaml"
_MODEL = ("network", "trainer.algorithm", "behaviours")
"""Options by which a model is built."""
_CLIP_END = 0.1
"""Clip range at the end of a linear ``epsilon_schedule``."""
_DEMONSTRATIONS = "demonstrations"
_EPOCHS = 1000
"""How often demonstrations are read: files that do not fit into the buffer at once must be read again."""
_FIT_VALUE = 0.5
"""The policy is cloned before the first play. An unfitted value would then undo the cloning."""
_BUILDS = ("", ".x86_64", ".x86", ".exe")
_OLD = "a file from before ML-Agents 1.0 needs `python -m mlagents.trainers.upgrade_config` first"

_AnySection = TypeVar("_AnySection", bound=Section)
_TOP = (*SECTIONS, "behaviors", "default_settings", "environment_parameters", "debug")


@dataclass
class LearnOptions:
    """The job and the run that the options ask for.

    Attributes:
        project: the file's name, which names the champion.
        file: the file.
        job: options of the job by dotted path; those of its bridge are of the component ``game``.
        checkpoints: the run, and what it starts from.
        notes: a line for each key that has no counterpart.
        refused: a line for each key without a counterpart that changes what is learned.
    """

    project: str
    file: str = _TEMPLATE
    job: dict[str, Any] = field(default_factory=dict)
    checkpoints: CheckpointKeys = field(default_factory=CheckpointKeys)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def load(self, overrides: Sequence[str] = ()) -> JobConfig:
        """The job, whose folder is the current one.

        Args:
            overrides: as for `JobConfig.load`; they come last.

        Raises:
            ConfigError: an option has a value that the job does not take.
        """
        text = (TEMPLATES / _TEMPLATE).read_text(encoding="utf-8")
        given = [f"{path}={json.dumps(value)}" for path, value in {"project": self.project, **self.job}.items()]
        return JobConfig.parse(text, Path(self.file), _TEMPLATE, [*given, *overrides], folder=Path())

    def serve_command(self, job: JobConfig) -> str:
        """The command that serves the champions of the loaded job, each with the model that it was trained with."""
        if job.other_behaviours == "refuse" and len(job.behaviours) == 1:
            return f"brayx serve models:/{job.project}@champion"
        model = {path: value for path, value in self.job.items() if path.startswith(_MODEL)}
        given = {"project": job.project, **model}.items()
        words = [part for path, value in given for part in ("--set", f"{path}={json.dumps(value)}")]
        return shlex.join(["brayx", "serve", _TEMPLATE, *words])


def learn_options(config: str | None, flags: Mapping[str, Mapping[str, Any]]) -> LearnOptions:
    """Converts a file and flags.

    Args:
        config: path of the YAML; None: all keys have their defaults.
        flags: values from the command line by section and key; they override the file's.

    Raises:
        ConfigError: the file cannot be read, or a key or value does not exist.
    """
    document = JobFile({}, {}, "mlagents-learn")
    if config is not None:
        document = JobFile.parse(read_yaml(config), config)
    file = config or _TEMPLATE
    project = re.sub(r"[^\w .+=,-]", "_", Path(file).stem).lstrip(" .+=,-")[:200]
    return _Translation(document, flags, LearnOptions(project or "unity", file)).options()


class _Translation:
    """One pass over a file and flags."""

    def __init__(self, document: JobFile, flags: Mapping[str, Mapping[str, Any]], made: LearnOptions) -> None:
        self._document, self._flags, self._made = document, flags, made
        self._quiet: list[str] = []

    def options(self) -> LearnOptions:
        made, values = self._made, self._document.values
        for key in values:
            if key not in _TOP:
                raise self._error((key,), f"unknown key{nearest(key, _TOP)}; {_OLD}")
        environment, engine, checkpoints, torch = (
            self._section(model, {**self._mapping((name,)), **self._flags.get(name, {})}, (name,))
            for name, model in SECTIONS.items()
        )
        assert isinstance(environment, EnvironmentKeys)
        assert isinstance(checkpoints, CheckpointKeys)
        self._behaviours()
        for name, section in zip(SECTIONS, (environment, engine, checkpoints, torch), strict=True):
            self._keys(section, (name,))
        self._environment(environment)
        made.checkpoints = self._checkpoints(checkpoints)
        made.job["game.parameter"] = parameters = list(self._parameters())
        GameSettings(parameters=parameters)  # refuses parameters that cannot be sent to the game
        if self._quiet:
            made.notes.append(f"without effect: {', '.join(dict.fromkeys(self._quiet))}")
        return made

    def _behaviours(self) -> None:
        """Converts the behaviours: common options become the job's, others each behaviour's own. Behaviours that are
        not named learn by ``default_settings``; without these, the job refuses them."""
        default = self._mapping(("default_settings",))
        names = self._mapping(("behaviors",))
        places: list[Loc] = [("behaviors", name) for name in names] or [("default_settings",)]
        network = {"network_settings": dict(self._flags.get("network_settings", {}))}
        made, jobs = self._made, list[dict[str, Any]]()
        before = made.job
        for loc in places:
            jobs.append(self._converted(merged_options(default, self._mapping(loc)), loc, network))
        if names and default:
            said = [*made.notes], [*made.refused], [*self._quiet]  # by each behaviour, too
            given = self._converted(default, ("default_settings",), network)
            made.notes, made.refused, self._quiet = said
            common = {key: value for key, value in given.items() if all(key in job for job in jobs)}
        else:
            common = {key: value for key, value in jobs[0].items() if all(job.get(key) == value for job in jobs)}
        made.job = before | common
        if names:
            made.job.setdefault("trainer.algorithm", {"name": jobs[0]["trainer.algorithm"]["name"]})
            own = [{key: job[key] for key in job if key not in made.job or made.job[key] != job[key]} for job in jobs]
            made.job["behaviours"] = dict(zip(names, map(_nested, own), strict=True))
            if not default:
                made.job["other_behaviours"] = "refuse"

    def _converted(self, values: Mapping[str, Any], loc: Loc, network: Mapping[str, Any]) -> dict[str, Any]:
        """The job's options for one behaviour."""
        self._made.job = {}
        self._behaviour(merged_options(values, network), loc)
        return self._made.job

    def _behaviour(self, values: Mapping[str, Any], loc: Loc) -> None:
        trainer = str(values.get("trainer_type", "ppo"))
        if trainer not in TRAINERS:
            raise self._error((*loc, "trainer_type"), f"is {trainer!r}, expected {', '.join(TRAINERS)}")
        behaviour = self._section(TRAINERS[trainer], values, loc)
        self._keys(behaviour, loc)
        signals = values.get("reward_signals")
        if signals and "extrinsic" not in signals:
            self._refuse((*loc, "reward_signals"), "there is no extrinsic: brayx always learns the game's own rewards")
        job, network = self._made.job, behaviour.network_settings
        if network.memory is not None and behaviour.algorithm != "ppo":
            self._refuse((*loc, "network_settings", "memory"), f"{behaviour.trainer_type} learns without; ppo has one")
            network = network.model_copy(update={"memory": None})
            job.pop("network.lstm")
        job["network.hidden"] = [network.hidden_units] * network.num_layers
        length = behaviour.time_horizon
        if isinstance(behaviour, SACBehaviourKeys):
            steps = behaviour.hyperparameters
            job["buffer.unroll_length"] = 1
            job["buffer.size"] = max(1, steps.buffer_size // steps.batch_size)
            job["buffer.samples_per_insert"] = steps.batch_size / steps.steps_per_update
            # The learner counts a transition each time that it is sampled, ML-Agents once.
            job["trainer.num_steps"] = max(1, round(behaviour.max_steps * job["buffer.samples_per_insert"]))
        else:
            buffer_size = behaviour.hyperparameters.buffer_size
            length = min(length, buffer_size, *([] if network.memory is None else [network.memory.sequence_length]))
            job["buffer.unroll_length"] = length
            job["buffer.batch_size"] = max(1, round(buffer_size / length))
            job["algorithm.clip_final"] = min(1.0, _CLIP_END / max(behaviour.hyperparameters.epsilon, _CLIP_END))
        job["actor.episode_length"] = length
        job["trainer.algorithm"] = {"name": behaviour.algorithm, **_taken(job, "algorithm.")}
        job["self_play"] = {"kind": "self_play", **_taken(job, "self_play.")} if behaviour.self_play else None
        if behaviour.behavioral_cloning is None:
            return
        if behaviour.algorithm != "ppo":
            self._refuse((*loc, "behavioral_cloning"), f"{behaviour.trainer_type} does not imitate; ppo does")
        elif network.memory is not None:
            self._refuse((*loc, "behavioral_cloning"), "demonstrations lack the policy's memory: give up one of both")
        else:
            self._cloning(behaviour.behavioral_cloning, behaviour)

    def _cloning(self, cloning: CloningKeys, behaviour: PPOBehaviourKeys | SACBehaviourKeys) -> None:
        """Makes the job imitate demonstrations as well as reinforce: a source, its buffer, and `mixed`."""
        job, length = self._made.job, self._made.job["buffer.unroll_length"]
        columns = max(1, round((cloning.batch_size or behaviour.hyperparameters.batch_size) / length))
        job["trainer.algorithm"] = {
            "name": "mixed",
            "reinforcement": job["trainer.algorithm"],
            "imitation_coef": cloning.strength,
            "imitation_until": min(1.0, cloning.steps / behaviour.max_steps) if cloning.steps else 1.0,
            "imitation_final": 0.0 if cloning.steps else 1.0,
            "imitation_columns": columns,
            "fit_value": _FIT_VALUE,
        }
        job[_DEMONSTRATIONS] = {"kind": "buffer", "batch_size": columns, "unroll_length": length}
        job["expert"] = {
            "kind": "source",
            "path": _demonstrations(cloning.demo_path),
            "demonstration": True,
            "epochs": _EPOCHS,
            "buffer": _DEMONSTRATIONS,
        }
        job["trainer.buffers"] = ["buffer", _DEMONSTRATIONS]

    def _environment(self, environment: EnvironmentKeys) -> None:
        job = self._made.job
        job["seed"] = job["game.seed"] = random.randrange(10_000) if environment.seed < 0 else environment.seed
        if environment.env_path is None:
            if environment.num_envs > 1:
                raise self._error(("env_settings", "num_envs"), "is more than 1 without a build: give --env BUILD")
            return
        job["game.command"] = shlex.join([_build(environment.env_path), *(environment.env_args or [])])
        job["game.num"], job["game.listen"] = environment.num_envs, environment.base_port

    def _checkpoints(self, given: CheckpointKeys) -> CheckpointKeys:
        flags = self._flags.get("checkpoint_settings", {})
        resume = given.resume or given.load_model
        if resume and "initialize_from" in flags and not {"resume", "load_model"} & {*flags}:
            resume = False
        if given.initialize_from is not None and not resume:
            self._made.job["trainer.initial_weights"] = f"runs:/{given.initialize_from}"
        return given.model_copy(update={"resume": resume})

    def _parameters(self) -> Iterator[str]:
        """The environment parameters as the bridge takes them."""
        for name, value in self._mapping(("environment_parameters",)).items():
            loc = ("environment_parameters", name)
            if isinstance(value, int | float):
                yield f"{name}={value}"
            elif isinstance(value, dict) and "curriculum" in value:
                self._refuse(
                    loc,
                    "there are no curricula: give a number or a sampler, and train lessons one after the other with "
                    "--initialize-from",
                )
            else:
                yield f"{name}={self._sampler(value, loc)}"

    def _sampler(self, value: Any, loc: Loc) -> str:
        wanted: Mapping[Any, Mapping[str, Any]] = {
            "constant": {"value": 0.0},
            "uniform": {"min_value": 0.0, "max_value": 1.0},
            "gaussian": {"mean": 1.0, "st_dev": 1.0},
            "multirangeuniform": {"intervals": [[0.0, 1.0]]},
        }
        kind = value.get("sampler_type") if isinstance(value, dict) else None
        parameters = value.get("sampler_parameters") if isinstance(value, dict) else None
        if not isinstance(parameters, dict) or kind not in wanted:
            raise self._error(
                loc,
                f"is {short(value)}, expected a number, or sampler_type (uniform, gaussian, multirangeuniform) and "
                "sampler_parameters",
            )
        numbers = [parameters.get(key, default) for key, default in wanted[kind].items()]
        if kind == "multirangeuniform" and isinstance(numbers[0], list):
            numbers = [
                end for interval in numbers[0] for end in (interval if isinstance(interval, list) else [interval])
            ]
        return ":".join(map(str, numbers if kind == "constant" else [kind, *numbers]))

    def _keys(self, section: BaseModel, loc: Loc) -> None:
        """Converts each key of a section by its mark."""
        for name, info in type(section).model_fields.items():
            value, place = getattr(section, name), (*loc, name)
            for mark in info.metadata:
                if isinstance(mark, To) and (converted := mark.convert(value)) is not None:
                    self._made.job[mark.option] = converted
                elif isinstance(mark, Lost) and name in section.model_fields_set and value not in mark.harmless:
                    if mark.instead:
                        lines = self._made.refused if mark.refused else self._made.notes
                        lines.append(f"{dotted(place)}: {mark.instead}")
                    else:
                        self._quiet.append(name if len(place) < 4 else dotted(place[-2:]))
            if isinstance(value, BaseModel):
                self._keys(value, place)

    def _section(self, model: type[_AnySection], values: Mapping[str, Any], loc: Loc) -> _AnySection:
        try:
            return model.model_validate(dict(values))
        except ValidationError as error:
            # Unknown keys first: a missing key is often misspelt.
            problem = min(error.errors(include_url=False), key=lambda entry: entry["type"] != "extra_forbidden")
            inner: type[BaseModel] = model
            for part in problem["loc"][:-1]:
                annotation = inner.model_fields[str(part)].annotation
                kinds = (annotation, *get_args(annotation))  # X | None has two
                inner = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
            place = (*loc, *problem["loc"])
            if problem["type"] == "extra_forbidden":
                raise self._error(place, f"unknown key{nearest(str(place[-1]), inner.model_fields)}") from None
            message = str(problem["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
            raise self._error(place, f"is {short(problem['input'])}, expected {message}") from None

    def _mapping(self, loc: Loc) -> dict[str, Any]:
        value: Any = self._document.values
        for part in loc:
            value = value.get(part)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._error(loc, f"is {short(value)}, expected keys with values")
        return value

    def _refuse(self, loc: Loc, problem: str) -> None:
        """Notes a key whose loss changes what is learned."""
        self._made.refused.append(f"{dotted(loc)}: {problem}")

    def _error(self, loc: Loc, problem: str) -> ConfigError:
        return ConfigError(f"{self._document.where(loc)}: {dotted(loc)}: {problem}", key=dotted(loc))


def _nested(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by component, from dotted paths."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in options.items():
        component, _, key = path.partition(".")
        if key:
            nested.setdefault(component, {})[key] = value
        else:
            nested[component] = value
    return nested


def _taken(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Takes the options whose paths begin with a prefix, without it."""
    return {key.removeprefix(prefix): options.pop(key) for key in [*options] if key.startswith(prefix)}


def _build(path: str) -> str:
    """The executable of a build that may be named without its ending."""
    for ending in _BUILDS:
        if Path(path + ending).is_file():
            return str(Path(path + ending).absolute())
    inside = sorted(Path(f"{path.removesuffix('.app')}.app", "Contents", "MacOS").glob("*"))
    if inside:
        return str(inside[0].absolute())
    raise ConfigError(f"--env {path}: there is no such build; expected the path of its executable", key="env_path")


def _demonstrations(path: str) -> str:
    """The demonstrations that a path names: a file, or all of a folder."""
    place = Path(path).expanduser().absolute()
    return str(place / "*.demo" if place.is_dir() else place)
