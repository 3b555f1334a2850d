"""Options of the component `kind: recording`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from brayx.gamecore.protocol import game_of
from brayx.recording.addresses import absolute


class RecordingConfig(BaseModel):
    """Which sessions are recorded, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["recording"] = "recording"
    folder: str = "recordings"
    """Folder of the files: a path from where the command runs, or an address such as ``s3://bucket/folder``."""
    every: Annotated[int, Field(ge=0)] = 1
    """Record every n-th session, or game of several sessions; 0: only those that another option chooses."""
    errors: bool = True
    """Record sessions that an error ends."""
    before: Annotated[int, Field(ge=0)] = 1000
    """Newest ticks that a session keeps in memory in case an error ends it or its agent decides to record it; 0: none,
    so that sessions that are not recorded cost nothing."""
    on_request: bool = False
    """Record sessions whose start has the header ``record``; false: refuse such a start. Strangers who may start
    sessions can then fill the folder up to ``max_mb``, which deletes older recordings."""
    max_mb: Annotated[float, Field(gt=0)] = 1024.0
    """Maximum size of the folder; beyond it the oldest files are deleted."""
    memory_mb: Annotated[float, Field(gt=0)] = 64.0
    """Maximum memory for ticks that wait to be written, or for the decision whether to record their session. Further
    ticks are lost, and counted as ``recording_lost``."""
    frames: str | None = None
    """Picture of each tick, kept as video: the name of an array that the agents set, such as ``obs/image``, which is
    then not kept itself, or of a render component, which draws it; null: none. Needs the extra ``video``."""
    fps: Annotated[int, Field(ge=1, le=240)] = 30
    """Ticks per second of the videos."""
    flush_s: Annotated[float, Field(gt=0)] = 5.0
    """Maximum time that a tick waits in the writer's process; killing that process loses no more than this."""

    to_trial: Annotated[int, Field(ge=0)] = 0
    """At the end of a training, copy to the artifacts of its trial this many sessions with the best result, as many
    with the worst, and as many with an error; 0: none."""

    def absolute(self) -> RecordingConfig:
        """The same options with an absolute folder, for other processes."""
        return self.model_copy(update={"folder": absolute(self.folder)})


class Selection(BaseModel):
    """Which recorded sessions to read; a null option selects all."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    session: str | None = None
    """The session's id, which may have ``*``; or a game, the part of its sessions' ids before ``-agent-``."""
    agent: str | None = None
    """The agent in the session's id, ``GAME-agent-AGENT``; may have ``*``."""
    player: str | None = None
    """The seat's player in a league, such as ``main`` or ``main:*``."""
    min_version: int | None = None
    """Minimum policy version that acted; excludes sessions with an older one, and those without versions."""
    max_version: int | None = None
    """Maximum policy version that acted."""
    min_result: float | None = None
    """Minimum return of the game; excludes sessions without a return."""
    max_result: float | None = None
    """Maximum return of the game; excludes sessions without a return."""
    reported: str | None = None
    """The seat's result in a league: ``win``, ``draw``, ``loss`` or a score."""
    human: bool | None = None
    """Only sessions that a human played: the start's body is JSON with ``"human": true``; false: only the others."""


def is_named(session: str, name: str) -> bool:
    """Whether ``name`` is the session's id, which may have ``*``, or its game."""
    return name in (session, game_of(session)) or fnmatchcase(session, name)


def pattern_hint(name: str) -> str:
    """The end of an error for a name that no session has: the name may be the beginning of a long id."""
    return f" (ids that begin so: {name + '*'!r})" if name and "*" not in name else ""
