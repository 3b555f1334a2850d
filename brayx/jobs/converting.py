"""Converts a job of Bray to one of brayx, as YAML, with a comment on each line whose meaning changed.

Options that mean the same keep their lines. Those of `brayx.jobs.bray` are renamed or replaced by a comment. If one
option of Bray is several here, all of them are written. Knows nothing of the modules that the job names: agents,
models and losses are code, and `docs/from-bray.md` maps its names.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from brayx.errors import ConfigError
from brayx.jobs.bray import OPTIONS, Same, translate
from brayx.jobs.config import JobConfig, options_by_kind
from brayx.jobs.document import JobFile, Loc, short
from brayx.jobs.options import comment_lines, option_lines

_LEARNING_RATE = 5e-4
"""Bray's default."""
_UNROLL = 32
"""Transitions of a column, if the job's episodes are not cut at a length of their own."""
_TO_DO = "TO DO:"


@dataclass(frozen=True)
class Conversion:
    """A converted job.

    Attributes:
        text: the YAML of the job.
        left: what the user has to fill in; each is a comment in the text, too.
    """

    text: str
    left: tuple[str, ...]


def convert(text: str, file: Path) -> Conversion:
    """Converts the text of a YAML file of Bray.

    Args:
        text: content of the file.
        file: its path; modules are looked up in its folder.

    Raises:
        ConfigError: it is not YAML, or no job.
    """
    document = JobFile.parse(text, str(file))
    converted = _Converter(document.values)
    lines = list(converted.lines(_comments(text, document.lines)))
    left = _left("\n".join(lines), file)
    for line, problem in sorted(left, reverse=True):
        indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
        lines[line - 1 : line - 1] = comment_lines(f"{_TO_DO} {problem}", indent // 2)
    return Conversion("\n".join(lines) + "\n", tuple(problem for _, problem in left))


class _Converter:
    """The values of a job while they are converted, and the comments on them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._given = values
        self._values: dict[str, Any] = copy.deepcopy(dict(values))
        self._notes: dict[Loc, str] = {}
        self._dropped: dict[str, list[str]] = defaultdict(list)
        """Comments on options that have no line any more, by component; "": the top of the file."""
        self._sources()
        for name, trainer in self._parts("trainer"):
            self._trainer(name, trainer)
        for name, model in self._parts("model"):
            self._model(name, model)
        if self._values.get("mode") == "deploy":
            self._values["mode"] = "serve"
            self._notes["mode",] = "Bray: deploy"
        self._tables()

    def _parts(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            (name, part) for name, part in self._values.items() if isinstance(part, dict) and part.get("kind") == kind
        ]

    def _set(self, component: str, option: str, value: Any, note: str) -> None:
        self._values[component][option] = value
        self._notes[component, option] = note

    def _sources(self) -> None:
        """A buffer names its sources in Bray; here a source names its buffer."""
        sources = dict(self._parts("source"))
        for name, buffer in self._parts("buffer"):
            for source in buffer.pop("sources", None) or []:
                if source in sources:
                    self._set(source, "buffer", name, f"Bray: {name}.sources")
                else:
                    self._dropped[name].append(f"sources named {source}, which is no source")

    def _trainer(self, name: str, trainer: dict[str, Any]) -> None:
        buffers = {buffer: part for buffer, part in self._parts("buffer") if buffer in (trainer.get("buffers") or [])}
        if "algorithm" not in trainer:
            loss = ".".join(str(trainer.pop(key)) for key in ("module", "class") if trainer.get(key))
            self._set(name, "algorithm", {"name": self._algorithm(buffers)}, _ALGORITHM.format(loss or "its loss"))
        if isinstance(evaluation := trainer.pop("eval", None), dict):
            self._evaluation(name, evaluation)
        if reuse := trainer.pop("max_reuse", None):
            for buffer in buffers:
                self._set(
                    buffer, "max_reuse", reuse, f"Bray: {name}.max_reuse. Repeats of the last batch while none is new"
                )
        updates, transitions = trainer.get("num_steps"), self._batches(name, buffers, trainer.pop("batch_size", None))
        if isinstance(updates, int) and transitions:
            self._set(name, "num_steps", updates * transitions, f"transitions; Bray: {updates} updates")
        trainer.pop("batch_kind", None)
        if "learning_rate" not in trainer:
            self._set(name, "learning_rate", _LEARNING_RATE, "Bray's default; here it is 3e-4")

    def _algorithm(self, buffers: Mapping[str, Any]) -> str:
        """The algorithm for what the buffers get: recorded data, play, or both."""
        recorded = {source.get("buffer") for _, source in self._parts("source")} & set(buffers)
        return "ppo" if not recorded else "bc" if recorded == set(buffers) else "mixed"

    def _evaluation(self, name: str, given: Mapping[str, Any]) -> None:
        for option, bray in (("eval_buffers", "buffer"), ("eval_interval", "interval"), ("eval_batches", "steps")):
            if (value := given.get(bray)) is not None:
                self._set(name, option, [value] if bray == "buffer" else value, f"Bray: eval.{bray}")

    def _batches(self, trainer: str, buffers: Mapping[str, dict[str, Any]], stacked: Any) -> int:
        """Sets the size of every batch, in columns; returns the transitions of an update, 0 if it is not known."""
        lengths = [part.get("episode_length") for _, part in self._parts("actor")]
        length = next((length for length in lengths if isinstance(length, int)), _UNROLL)
        factor = stacked if isinstance(stacked, int) and stacked > 1 else 1
        evaluated = self._values[trainer].get("eval_buffers", [])
        transitions = 0
        for name, part in self._parts("buffer"):
            items = part.get("batch_size")
            if name not in (*buffers, *evaluated) or not isinstance(items, int) or "unroll_length" in part:
                continue
            items *= factor
            unroll = max(1, min(length, items))
            columns = max(1, items // unroll)
            times = f" x {trainer}.batch_size {factor}" if factor > 1 else ""
            self._set(name, "batch_size", columns, f"columns of unroll_length; Bray: {items // factor} items{times}")
            self._set(name, "unroll_length", unroll, "transitions of a column: agents push no longer fragments")
            if name in buffers:
                transitions = transitions or columns * unroll
        return transitions

    def _model(self, name: str, model: dict[str, Any]) -> None:
        """Options of a model that are the trainer's here."""
        for trainer, part in self._parts("trainer"):
            if part.get("model") != name:
                continue
            if isinstance(interval := model.get("checkpoint_interval"), int):
                del model["checkpoint_interval"]
                self._set(trainer, "checkpoint_interval", interval, f"Bray: {name}.checkpoint_interval")
            if model.pop("tensorboard_step", None) is True:
                self._set(trainer, "x_axis", "updates", f"Bray: {name}.tensorboard_step")

    def _tables(self) -> None:
        """Applies the tables of options: renames, and replaces what has no counterpart by a comment."""
        for loc, error in list(translate(self._values, options_by_kind())):
            *component, option = map(str, loc)
            name = component[0] if component else ""
            given = (self._given[name] if name else self._given).get(option)
            advice = error.removeprefix("is an option of Bray; here ")
            self._dropped[name].append(f"{option}: {short(given)}. Here {advice}")
        for name, part in self._given.items():
            kind = part.get("kind") if isinstance(part, dict) else None
            for option, same in OPTIONS.get(str(kind), {}).items():
                if not isinstance(same, Same) or option not in part or same.path == "kind":  # without effect
                    continue
                if self._values[name].get(same.path, part[option]) != part[option]:
                    self._notes.setdefault((name, same.path), f"Bray: {option}: {short(part[option])}")

    def lines(self, comments: Mapping[Loc, tuple[list[str], str]]) -> Iterator[str]:
        """The lines of the YAML; ``comments``: those of the given file, kept where the meaning is the same."""
        for name, value in self._values.items():
            before, after = comments.get((name,), ([], ""))
            yield from before
            if not isinstance(value, dict):
                yield from option_lines(name, value, self._notes.get((name,), after), 0)
                continue
            yield f"{name}:{f'  # {after}' if after else ''}"
            for option, given in value.items():
                before, after = comments.get((name, option), ([], ""))
                note = self._notes.get((name, option), "")
                yield from ([] if note else [f"  {line}" for line in before])
                yield from option_lines(option, given, note or after, 1)
            for dropped in self._dropped.pop(name, []):
                yield from comment_lines(f"Bray's {dropped}", 1)
        for dropped in self._dropped.pop("", []):
            yield from comment_lines(f"Bray's {dropped}", 0)


_ALGORITHM = (
    "instead of {}: ppo learns from play, bc imitates recorded data, mixed does both; a loss of your own is "
    "{{module: ...}}, see docs/guide-algorithms.md"
)


def _comments(text: str, lines: Mapping[Loc, int]) -> dict[Loc, tuple[list[str], str]]:
    """The comment lines above each key, and the comment behind its value."""
    ends: dict[int, int] = {}
    for token in yaml.scan(text):
        ends[token.end_mark.line] = max(ends.get(token.end_mark.line, 0), token.end_mark.column)
    rows = text.splitlines()
    comments = {}
    for loc, number in lines.items():
        above = []
        for row in reversed(rows[: number - 1]):
            if not row.strip().startswith("#") and (row.strip() or len(loc) > 1):
                break
            above.append(row.strip())
        behind = re.match(r"\s+#\s?(.*)", rows[number - 1][ends.get(number - 1, 0) :])
        comments[loc] = (above[::-1], behind[1].strip() if behind else "")
    return comments


def _left(text: str, file: Path) -> list[tuple[int, str]]:
    """Line and text of each error that brayx reports in the converted job, such as a missing module."""
    try:
        JobConfig.parse(text, file, "job")
    except ConfigError as error:
        matches = [re.fullmatch(r"job(?::(\d+))?: (.*)", line, re.S) for line in error.details["errors"]]
        return [(int(match[1] or 1), match[2]) for match in matches if match]
    return []
