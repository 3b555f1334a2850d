"""Validates the document of a job: errors name the file, line, key and the nearest right name.

Of the modules that a job names, it imports only a user's own algorithm, because that defines options.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from brayx.actor.config import ActorConfig
from brayx.algorithms.build import config_class
from brayx.algorithms.config import Sampling
from brayx.components import check_module
from brayx.errors import ConfigError
from brayx.jobs.bray import translate, unit_notes
from brayx.jobs.config import GROUPS, KINDS, TOP_OPTIONS, JobConfig, merged_options, options_by_kind
from brayx.jobs.contracts import contracts_of
from brayx.jobs.document import JobFile, Loc, dotted, nearest, place_of, short, walk
from brayx.jobs.former import remove_former
from brayx.jobs.kinds import SourceConfig
from brayx.jobs.shipped import files_folder_of
from brayx.league.config import LeagueConfig
from brayx.replay.config import buffer_options
from brayx.rollout.component import RolloutComponent
from brayx.trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

_OTHER = (
    "; {0} has its own options and batches: --set 'trainer.algorithm={{name: {0}}}' --set 'buffer={{kind: buffer}}'"
)


class Validation:
    """One pass over a document that collects all errors."""

    def __init__(self, document: JobFile, file: Path, folder: Path) -> None:
        self.document = document
        self.path = file
        self.folder = str(folder)
        self._context = {"folder": self.folder}
        self.errors: list[str] = []

    def job(self) -> JobConfig:
        groups: dict[str, dict[str, BaseModel]] = {group: {} for group in GROUPS.values()}
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
        merged, before = merged_options(values, own), self._sampling(values)
        for buffer, sampling in self._sampling(merged).items():
            given = own.get(buffer, {})
            # The job's buffer has the batches of the job's algorithm.
            if sampling.sampler != before.get(buffer, sampling).sampler and isinstance(given, dict):
                merged[buffer] = {"kind": "buffer", **given}
        values = {key: merged[key] for key in merged if merged[key] is not None or key not in own}
        document = JobFile(values, {**self.document.lines, **lines}, self.document.file)
        return Validation(document, self.path, Path(self.folder)).job()

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
            keys_file = Path(files_folder_of(self.path, self.folder), component.keys_file).absolute()
            component = component.model_copy(update={"keys_file": str(keys_file)})
        if component is not None:
            groups[GROUPS[kind]][name] = component
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
            other = ""
            if model is TrainerConfig and loc[0] == "algorithm":  # its model depends on its value
                model, loc = config_class(value["algorithm"], self.folder), loc[1:]
                if ("trainer", "algorithm", "name") in self.document.overridden:
                    other = _OTHER.format(value["algorithm"]["name"])
            return f"unknown key{nearest(str(loc[-1]), walk(model, loc[:-1])[1])}{other}"
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
                for trainer in groups["trainers"].values() if config.trainer else ():
                    plain = trainer.model_dump(mode="json", by_alias=True)
                    self._validate(
                        TrainerConfig, merged_options(plain, config.trainer), (name, "players", player, "trainer")
                    )
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
