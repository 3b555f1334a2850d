"""A job as documented YAML: every option with its value, and its meaning as a comment.

The texts are the docstrings under the fields of the config models, so templates and code describe an option in the same
words. Knows nothing of running a job.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

from brayx.jobs.config import KINDS, TOP_OPTIONS, JobConfig

_WIDTH = 118


def documented(job: JobConfig) -> str:
    """The job's YAML with all defaults filled in and a comment for every option.

    Of components in a mapping, such as the players of a league, the first has all options; the others have those that
    differ from the defaults, so that their comments are not repeated.
    """
    plain = job.as_dict()
    lines = list(_fields(job, {name: plain.pop(name) for name in TOP_OPTIONS}, 0))
    components = {name: part for group in KINDS for name, part in getattr(job, f"{group}s").items()}
    for name, values in plain.items():
        lines += [
            "",
            *comment_lines(class_doc(type(components[name])), 0),
            f"{name}:",
            *_fields(components[name], values, 1),
        ]
    return "\n".join(lines) + "\n"


@cache
def option_docs(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstring under each field, by its name in the YAML; empty if there is none."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs.update(_docs_in(base))
    return {field.alias or name: docs.get(name, "") for name, field in model.model_fields.items()}


def class_doc(model: type[BaseModel]) -> str:
    """First paragraph of a config model's docstring."""
    return _plain((inspect.getdoc(model) or "").split("\n\n")[0])


def _docs_in(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(parsed, ast.ClassDef)
    for field, text in zip(parsed.body, parsed.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield field.target.id, _plain(inspect.cleandoc(text.value.value))


def _fields(part: BaseModel, values: Mapping[str, Any], depth: int) -> Iterator[str]:
    docs = option_docs(type(part))
    inner = {field.alias or name: getattr(part, name) for name, field in type(part).model_fields.items()}
    for name, value in values.items():
        option = inner.get(name)
        if isinstance(option, BaseModel):
            yield from comment_lines(docs.get(name, ""), depth)
            yield f"{'  ' * depth}{name}:"
            yield from _fields(option, value, depth + 1)
        elif isinstance(option, Mapping) and option and all(isinstance(item, BaseModel) for item in option.values()):
            yield from comment_lines(docs.get(name, ""), depth)
            yield f"{'  ' * depth}{name}:"
            yield from _named(option, value, depth + 1)
        elif isinstance(option, (list, tuple)) and option and all(isinstance(item, BaseModel) for item in option):
            yield from comment_lines(docs.get(name, ""), depth)
            yield f"{'  ' * depth}{name}:"
            for item, plain in zip(option, value, strict=True):
                lines = list(_fields(item, plain, depth + 2))
                first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
                yield from (line[2:] for line in lines[:first])  # a comment stands before its item
                yield f"{'  ' * (depth + 1)}- {lines[first].lstrip()}"
                yield from lines[first + 1 :]
        else:
            yield from option_lines(name, value, docs.get(name, ""), depth)


def _named(parts: Mapping[str, BaseModel], values: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Models by name: the first with every option and comment, the others with what differs from the defaults."""
    for place, (name, part) in enumerate(parts.items()):
        if place == 0:
            yield f"{'  ' * depth}{name}:"
            yield from _fields(part, values[name], depth + 1)
            continue
        plain = {option: value for option, value in values[name].items() if _given(part, option)}
        yield f"{'  ' * depth}{name}:" if plain else f"{'  ' * depth}{name}: {{}}"
        for option, value in plain.items():
            yield from option_lines(option, value, "", depth + 1)


def _given(part: BaseModel, option: str) -> bool:
    """Whether an option, by its name in the YAML, has another value than its default."""
    names = {field.alias or name: name for name, field in type(part).model_fields.items()}
    name = names[option]
    field = type(part).model_fields[name]
    default = field.get_default(call_default_factory=True, validated_data={})
    return field.is_required() or bool(getattr(part, name) != default)


def option_lines(name: str, value: Any, doc: str, depth: int) -> list[str]:
    """The option and its comment: on one line if that fits, else the comment above."""
    line = f"{'  ' * depth}{name}: {_flow(value)}"
    if doc and len(line) + len(doc) + 4 <= _WIDTH:
        return [f"{line}  # {doc}"]
    return [*comment_lines(doc, depth), line]


def comment_lines(doc: str, depth: int) -> list[str]:
    """A comment, wrapped."""
    indent = "  " * depth + "# "
    return textwrap.wrap(doc, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _plain(text: str) -> str:
    """A docstring as a comment: one paragraph without markup."""
    return " ".join(text.replace("``", "").replace("`", "").split())
