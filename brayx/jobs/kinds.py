"""Options of the components of a job that have no package of their own: sources, renders, boards and free values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brayx.recording.config import Selection


class SourceConfig(BaseModel):
    """Data at rest that feeds a buffer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["source"] = "source"
    module: str | None = None
    """Import path of the module, searched in the YAML file's folder first; null: the data is in files."""
    func: str = "build_source"
    """Function in it, ``(name, config)``, that returns an iterator of fragments or columns, or a list of iterables of
    them, which are read side by side."""
    path: str | None = None
    """File of the data, a pattern with ``*``, or a folder of recordings, from the YAML file's folder; or an address of
    recordings; null: a module gives the data."""
    format: Literal["npz", "parquet", "hdf5", "minari", "unity", "godot", "recording"] | None = None
    """Format of the files; null: by their extension: ``.demo`` is ``unity``, ML-Agents' demonstrations; ``.json``
    ``godot``, those of godot_rl. A folder has recordings, unless it is a Minari dataset. ``minari`` is the same as
    ``hdf5``."""
    actions: Literal["environment", "policy"] | None = None
    """Whose actions the files have: ``environment``, the rollout's, which are converted; or ``policy``, with categories
    from 0 and scaled actions from -1 to 1; null: as the files say."""
    fields: dict[str, str] = {}
    """The files' names for brayx's fields, such as ``obs: observations``; of recordings also ``input/KEY``."""
    only: Selection | None = None
    """Which recorded sessions are read; null: all."""
    demonstration: bool = False
    """Files are what ``mixed`` imitates; else they are taken for the agent's own play. A module marks its fragments by
    the extra of this name."""
    buffer: str
    """Name of the buffer component it feeds."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """How many times the data is read to its end."""
    num_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads that read files side by side, or row groups of Parquet files that are fewer."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.module is None) == (self.path is None):
            raise ValueError("either a `module` or a `path`")
        if self.only is not None and self.path is None:
            raise ValueError("a `path` with `only`, which selects recorded sessions")
        if self.demonstration and self.path is None:
            raise ValueError("a `path` with `demonstration`: a module marks its fragments by the extra of that name")
        return self


class RenderConfig(BaseModel):
    """A function that draws the frames of recordings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["render"] = "render"
    module: str
    """Import path of the module, searched in the YAML file's folder first."""
    func: str = "render"
    """Function in it, ``(states)``, that returns an image ``[height, width, 3]`` uint8 for each state; or of a single
    state the image."""


class BoardConfig(BaseModel):
    """A function that plays the game with a human, in the page of the console."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["board"] = "board"
    module: str
    """Import path of the module, searched in the YAML file's folder first. The console's process loads it."""
    func: str = "board"
    """Function in it, ``(opponent)``, that returns a generator: one game, which yields requests of its agents' sessions
    and, when the human is to move, boards."""
    draw: str = ""
    """Function in it, ``(state)``, that returns the board of a recorded tick or stop, for the page of a recording, with
    the result of its agent; empty: there is none."""


class FreeConfig(BaseModel):
    """Values of the user's own that agents and models read from the job; any keys."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    kind: Literal["config"] = "config"

    @property
    def flags(self) -> str:
        """The values as a gamecore's command gets them for ``{NAME}``: `flags_of`."""
        return shlex.join(flags_of(self.model_extra or {}))


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Values as flags of a command: ``--num=4``; ``--headless`` of true, ``--no-headless`` of false; of a list one for
    each of its values; of null none."""
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given = value if isinstance(value, list) else [] if value is None else [value]
            flags += [f"--{flag}={part}" for part in given]
    return flags
