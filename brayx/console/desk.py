"""The interface behind the console's API. `brayx.console.store_desk` implements it for a job and a tracking store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Literal, NamedTuple, Protocol

from brayx.console import documents as doc

FileFormat = Literal["parquet", "mp4", "rerun", "minari"]
"""Formats of `brayx recordings export`."""


class Download(NamedTuple):
    """A file for a viewer, who closes it.

    Attributes:
        name: its name.
        size: its size in bytes.
        file: its bytes.
    """

    name: str
    size: int
    file: IO[bytes]


class Desk(Protocol):
    """Answers the API's calls. Methods block, may be called from several threads, and raise `BrayxError`."""

    def job(self) -> doc.Job:
        """The job and its health."""

    def sessions(self) -> list[doc.Session]:
        """The running sessions."""

    def ticks(self, session: str, after: int) -> doc.Ticks:
        """The newest ticks of a session; see `brayx.actor.live.LiveTable.newer`."""

    def end_session(self, session: str) -> doc.Done:
        """Ends a session."""

    def models(self) -> list[doc.Model]:
        """The registered models."""

    def promote(self, name: str, version: int, alias: str) -> doc.Move:
        """Moves an alias to a version."""

    def roll_back(self, name: str) -> doc.Move:
        """Restores the previous champion."""

    def set_share(self, component: str, share: float) -> doc.Done:
        """Sets the canary's share of new sessions, until the service ends."""

    def trials(self, project: str) -> list[doc.Trial]:
        """The newest trials; of all projects if ``project`` is empty."""

    def curves(self, run_id: str, metrics: Sequence[str] = ()) -> doc.Curves:
        """A trial's newest numbers, and the curves of ``metrics``; if empty, of the most important metrics."""

    def stop_trial(self, run_id: str) -> doc.Done:
        """Interrupts the trial of the job behind this console, as Ctrl-C does."""

    def league(self) -> doc.League | None:
        """The newest league; None: there is none."""

    def recordings(self, limit: int, session: str) -> doc.Recordings:
        """The newest recordings of sessions named as for `brayx.recording.reader.Recordings.newest`."""

    def recorded_ticks(self, recording: str, first: int, count: int) -> doc.RecordedTicks:
        """Consecutive ticks of a recording."""

    def recorded_curves(self, recording: str) -> doc.RecordedCurves:
        """Curves over all ticks of a recording."""

    def frame(self, recording: str, tick: int) -> bytes | None:
        """The frame of a recorded tick, by its index, as a PNG; None: it has none."""

    def recording_file(self, recording: str, format: FileFormat) -> Download:
        """A recorded session as a file."""

    def comparison(self, recording: str, version: str, reference: str) -> doc.Comparison:
        """The comparison of a recording with a version. The first call starts it; it stops if nobody calls any more.

        ``version`` and ``reference`` are ``models:/NAME/VERSION``; an empty ``reference`` is the recording itself.
        """

    def compared_ticks(
        self, recording: str, version: str, reference: str, first: int, count: int
    ) -> list[doc.ComparedTick]:
        """Consecutive ticks of a finished comparison."""

    def opponents(self) -> doc.Opponents:
        """The opponents for a human."""

    def new_game(self, opponent: dict[str, Any] | None) -> doc.Game:
        """Begins a game that a human plays."""

    def move(self, game: str, move: Any) -> doc.Game:
        """Plays a human's move."""

    def give_up(self, game: str) -> doc.Done:
        """Gives up a game."""
