"""Levels of difficulty: who plays each level, and the file that `brayx league calibrate` writes.

Knows nothing of how games are played or served.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from brayx.errors import ConfigError, LeagueError
from brayx.text_files import read_text, write_whole

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Strength(BaseModel):
    """A snapshot, its temperature and delay, and the measured points."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    player: str
    """The snapshot's player."""
    version: Annotated[int, Field(ge=1)]
    """The snapshot's version in the registry."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of its policy. 1: as it learned; above 1: weaker; 0: its best moves."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Number of ticks by which it sees its input late."""
    points: float
    """Its points, on the scale of the league's table; ``low`` to ``high`` is the 95 % interval."""
    low: float
    high: float
    games: Annotated[int, Field(ge=0)]


class Levels(BaseModel):
    """The content of a levels file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    """Name of the registered model."""
    levels: dict[str, Strength]
    """Levels by name, the easiest first."""
    others: list[Strength] = []
    """Other measured strengths, the weakest first. A start's `rating` may draw from them, too."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        check_names(list(self.levels))
        return self

    def level(self, name: str) -> Strength:
        """Finds a level by its name.

        Raises:
            LeagueError: there is no such level; the message has the nearest name.
        """
        if name not in self.levels:
            near = difflib.get_close_matches(name, self.levels, n=1, cutoff=0.0)[0]
            raise LeagueError(
                f"no level is {name[:80]!r}, nearest is {near!r}; there are: {', '.join(self.levels)}",
                level=name[:80],
                nearest=near,
                known=list(self.levels),
            )
        return self.levels[name]


def check_names(names: Sequence[str]) -> None:
    """Checks names of levels.

    Raises:
        ValueError: there are fewer than two, a name comes twice, or has other characters than letters, digits, - and _.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a level is named {name!r}, expected letters, digits, - and _")
    if len(names) < 2 or len(set(names)) != len(names):
        raise ValueError(f"levels are {', '.join(names) or 'none'}, expected two or more, each once")


def read_levels(file: Path) -> Levels | None:
    """Reads a levels file; None: there is no such file.

    Raises:
        ConfigError: the file cannot be read, or is no levels file.
    """
    try:
        text = read_text(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", file=str(file)) from None
    try:
        return Levels.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}", file=str(file)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{file}: {field + ': ' if field else ''}{first['msg']}; `brayx league calibrate` rewrites it",
            file=str(file),
        ) from None


def write_levels(file: Path, levels: Levels, comment: str) -> None:
    """Writes a levels file, whole or not at all.

    Args:
        file: path of the file.
        levels: its content.
        comment: text of the comment in its first line.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = [f"# {comment}", f"model: {levels.model}", "levels:"]
    lines += [f"  {name}: {_flow(strength)}" for name, strength in levels.levels.items()]
    lines += ["others:  # also measured; a start's rating may draw from these, too"] if levels.others else []
    lines += [f"  - {_flow(strength)}" for strength in levels.others]
    write_whole(file, "\n".join(lines) + "\n")


def _flow(strength: Strength) -> str:
    values: dict[str, object] = strength.model_dump()
    values |= {name: round(getattr(strength, name), 1) for name in ("points", "low", "high")}
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000).strip()
