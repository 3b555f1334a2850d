"""A YAML file with the place of every key, and the ``--set`` overrides laid over it. Knows nothing of jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from brayx.errors import ConfigError, first_line
from brayx.other_names import hint
from brayx.text_files import read_text
from brayx.yaml_text import Loader, value_of

Loc = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


class JobFile:
    """The parsed file, with the place of each value."""

    def __init__(self, values: dict[str, Any], lines: dict[Loc, int], file: str) -> None:
        self.values = values
        self.lines = lines
        self.file = file
        self.overridden: dict[Loc, str] = {}

    @classmethod
    def parse(cls, text: str, file: str) -> JobFile:
        try:
            loader = Loader(text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{file}:{line}: not YAML: {first_line(error)}", file=file) from None
        try:
            node = loader.get_single_node()
            lines = dict(_lines(node, ())) if node is not None else {}
            values = loader.construct_document(node) if node is not None else {}
        except _RepeatedKey as error:
            raise ConfigError(f"{file}:{error.line}: key {dotted(error.loc)!r} is given twice", file=file) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{file}:{mark.line + 1}" if mark else file
            raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}", file=file) from None
        finally:
            loader.dispose()
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ConfigError(f"{file}: expected keys such as 'project' and components, got {short(values)}", file=file)
        return cls(values, lines, file)

    def override(self, text: str, top: Sequence[str] = ()) -> None:
        """Lays ``NAME.KEY=VALUE`` over the file. ``NAME.kind=KIND`` may add a component, ``NAME=null`` leaves one out.

        Args:
            text: the override.
            top: keys that the file may leave out.

        Raises:
            ConfigError: it has another form, or there is no such place.
        """
        path, equals, value = text.partition("=")
        loc: Loc = tuple(int(part) if part.isdigit() else part for part in path.strip().split("."))
        if not equals or "" in loc:
            raise ConfigError(f"--set {text}: expected NAME.KEY=VALUE, such as trainer.learning_rate=1e-3")
        try:
            parsed = value_of(value)
        except ConfigError as error:
            raise ConfigError(f"--set {text}: {error.message}") from None
        if len(loc) > 1 and loc[1:] != ("kind",) and loc[0] not in (*self.values, *top):
            raise ConfigError(f"--set {text}: there is no component {loc[0]!r}{nearest(str(loc[0]), self.values)}")
        target: Any = self.values
        for depth, part in enumerate(loc):
            last = depth == len(loc) - 1
            if isinstance(target, list):
                if not isinstance(part, int) or part >= len(target):
                    what = f"{dotted(loc[:depth])!r} is a list of {len(target)}"
                    raise ConfigError(f"--set {text}: {what}, {part!r} is no index of it")
            elif not isinstance(target, dict):
                raise ConfigError(f"--set {text}: {dotted(loc[:depth])!r} is {short(target)}, which has no keys")
            elif not last and target.get(str(part)) is None:
                target[str(part)] = {}
            key = part if isinstance(target, list) else str(part)
            if last and parsed is None and depth == 0 and key not in top:
                target.pop(key, None)
            elif last:
                target[key] = parsed
            else:
                target = target[key]
        self.overridden[loc] = text

    def where(self, loc: Loc) -> str:
        """``file:line`` or the ``--set`` that the value at ``loc`` came from."""
        inside = [text for path, text in self.overridden.items() if path[: len(loc)] == loc]
        if loc and inside:
            return f"--set {inside[-1]}"
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.overridden:
                return f"--set {self.overridden[loc[:end]]}"
            if loc[:end] in self.lines:
                return f"{self.file}:{self.lines[loc[:end]]}"
        return self.file


class _RepeatedKey(Exception):
    def __init__(self, loc: Loc, line: int) -> None:
        super().__init__(loc, line)
        self.loc, self.line = loc, line


def _lines(node: yaml.Node, loc: Loc) -> Iterator[tuple[Loc, int]]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            place = (*loc, str(key.value))
            if place in seen and key.value != "<<":
                raise _RepeatedKey(place, key.start_mark.line + 1)
            seen.add(place)
            yield place, key.start_mark.line + 1
            yield from _lines(value, place)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*loc, index), value.start_mark.line + 1
            yield from _lines(value, (*loc, index))


def nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    if near := hint(word, names):
        return f"; {near}"
    return f"; there is {', '.join(repr(name) for name in names)}" if 0 < len(names) <= 12 else ""


def place_of(option: str, values: Mapping[str, Any], kinds: Mapping[str, type[BaseModel]]) -> str:
    """The place of an option in a job, such as ``trainer.target_return``: where its components take it, or a part of
    them has it; empty if there is none.
    """
    for name, part in values.items():
        if isinstance(part, dict):
            model = kinds.get(str(part.get("kind")))
            if option in part or (model is not None and option in model.model_fields):
                return f"{name}.{option}"
            for key, inner in part.items():
                if isinstance(inner, dict) and option in inner:
                    return f"{name}.{key}.{option}"
    return ""


def read_yaml(path: str | Path, others: Iterable[str] = ()) -> str:
    """The text of a YAML file. The error for one that does not exist names the nearest beside it, or of ``others``.

    Raises:
        ConfigError: it cannot be read.
    """
    file = Path(path).expanduser().absolute()
    try:
        return read_text(file)
    except OSError as error:
        near = _nearest_file(file, others) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{near}", file=str(path)) from None


def _nearest_file(file: Path, others: Iterable[str]) -> str:
    names = list(others)
    with contextlib.suppress(OSError):
        names += [entry.name for entry in file.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    return nearest(file.name, sorted({*names}))


def dotted(loc: Loc) -> str:
    return ".".join(map(str, loc)) or "the job"


def short(value: Any) -> str:
    text = "null" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def walk(model: type[BaseModel], loc: Loc) -> tuple[Loc, list[str]]:
    """``loc`` as in the file, and the keys valid there; none if annotations do not define them."""
    plain: list[int | str] = []
    choices = [model]
    for part in loc:
        named = [
            model for model in choices if "name" in model.model_fields and model.model_fields["name"].default == part
        ]
        if len(choices) > 1 and named:  # pydantic's note of which of several models it took
            choices = named
            continue
        plain.append(part)
        if isinstance(part, str):
            choices = [
                inner
                for model in choices
                for name, field in model.model_fields.items()
                if part in (name, field.alias)
                for inner in _models_in(field.annotation)
            ]
    fields = choices[0].model_fields if len(choices) == 1 else {}
    return tuple(plain), [field.alias or name for name, field in fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
