"""Options of the component `kind: recording`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    """Newest ticks that a session keeps in memory until an error or its agent decides to record it; 0: none, so that
    ticks of sessions that are not recorded cost nothing."""
    on_request: bool = False
    """Record sessions whose start has the header ``record``; false: refuse such a start. Where strangers may start
    sessions, they can fill the folder up to ``max_mb``, and so push other recordings out."""
    max_mb: Annotated[float, Field(gt=0)] = 1024.0
    """Maximum size of the folder; beyond it the oldest files are deleted."""
    memory_mb: Annotated[float, Field(gt=0)] = 64.0
    """Maximum memory of ticks that wait: to be written, or for the decision whether to record their session. Beyond it
    ticks are lost, and counted as ``recording_lost``."""
    frames: str | None = None
    """Picture of each tick, kept as video: name of an array that the agents set, such as ``obs/image``, or of a render
    component, which draws it; null: none. Needs the extra ``video``. The array itself is then not kept."""
    fps: Annotated[int, Field(ge=1, le=240)] = 30
    """Ticks per second of the videos."""
    flush_s: Annotated[float, Field(gt=0)] = 5.0
    """Maximum age of a tick in the writer's process before it is written; killing that process loses no more."""

    to_trial: Annotated[int, Field(ge=0)] = 0
    """At the end of a training, copy so many sessions with the best result, with the worst and with an error to the
    artifacts of its trial in MLflow; 0: none."""

    def absolute(self) -> RecordingConfig:
        """The same options with an absolute folder, for other processes."""
        return self.model_copy(update={"folder": absolute(self.folder)})


class Selection(BaseModel):
    """Which recorded sessions are read; an option that is null selects all."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    session: str | None = None
    """The session's id, which may have ``*``; or a game, the part of its sessions' ids before ``-agent-``."""
    agent: str | None = None
    """Agent of the session's id, ``GAME-agent-AGENT``; may have ``*``."""
    player: str | None = None
    """Player of the seat in a league, such as ``main`` or ``main:*``."""
    min_version: int | None = None
    """Minimum policy version that acted; leaves out sessions with an older one, and those without versions."""
    max_version: int | None = None
    """Maximum policy version that acted."""
    min_result: float | None = None
    """Minimum return of the game; leaves out sessions without a return."""
    max_result: float | None = None
    """Maximum return of the game."""
    reported: str | None = None
    """Result of the seat in a league: ``win``, ``draw``, ``loss`` or a score."""
    human: bool | None = None
    """Only sessions of humans, whose start has a body with a true ``human``; false: only the others."""
