"""Comparisons of recorded sessions with versions of their model.

Only one runs at a time, in a separate process, and only while somebody asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Query

from brayx.children import Child, ChildDied
from brayx.console.documents import MAX_POINTS, Document
from brayx.console.recordings import FirstTick, RecordingFolder, TickCount
from brayx.console.source import Source
from brayx.console.ticks import RecordedCurvesDocument, array_of, named, probabilities_of
from brayx.errors import BadRecording, BrayxError, ServiceFull, StartupError
from brayx.recording.reader import Recording
from brayx.tracking import PoolEntry, find, local_files

_KEPT = 4
"""Number of comparisons that are kept; the least recently used is dropped."""
_ASKED_S = 20.0
"""A comparison stops this long after the last request for it. A page on a busy machine may take seconds to the next."""
_FREE_S = 5.0
"""As `_ASKED_S`, if another comparison is requested."""


_Registered = Annotated[str, Query(pattern=r"^models:/[^/@]+/\d+$", description="models:/NAME/VERSION")]


class ComparisonDocument(Document):
    """A recorded session compared with a version of its model, or with two versions."""

    recording: str
    version: str
    """``models:/NAME/VERSION``."""
    reference: str
    """The version that it is compared with; empty: the recording."""
    done: bool
    """False: the numbers below are not known yet."""
    state: str
    """What the comparison is doing, in words."""
    progress: float
    """Share of the ticks compared so far."""
    ticks: int = 0
    """Number of compared ticks."""
    left_out: int = 0
    """Number of ticks that lack a needed array, such as failed ones."""
    first: int | None = None
    """Index in the recording of the first tick with another action; null: there is none."""
    agreement: float | None = None
    """Share of ticks with equal actions."""
    kl: float | None = None
    """Mean of KL(recorded || version) in nats; null: not known."""
    kl_max: float | None = None
    kl_exact: bool = True
    """False: it is estimated from the log-probabilities of the recorded actions."""
    value: float | None = None
    """Mean absolute difference of the values; null: not known."""
    sampled: bool = False
    """Whether recorded actions were sampled, so that some differ by chance from a version's most likely ones."""
    curves: RecordedCurvesDocument | None = None
    """``KL`` and ``value difference`` by tick. In a long session, each point is the largest of a span of ticks."""


class ChosenDocument(Document):
    """What a version would have done at a tick."""

    action: Any
    """Its most likely action."""
    probabilities: list[float] | None
    value: float | None


class ComparedTickDocument(Document):
    """One compared tick."""

    number: int
    equal: bool
    """Whether the version's most likely action is the recorded one, or the reference's."""
    kl: float | None
    value: float | None
    """The version's value minus the recorded one, or the reference's."""
    chosen: dict[str, ChosenDocument]
    """Keys ``version`` and, if there is one, ``reference``."""


def routes(source: Source, folder: RecordingFolder) -> APIRouter:
    """The API's calls about comparisons."""
    router = APIRouter(prefix="/api/recordings/{recording}/comparison", tags=["recordings"])
    comparisons = Comparisons(source.uri, source.trust)

    @router.get("")
    def comparison(recording: str, version: _Registered, reference: _Registered | None = None) -> ComparisonDocument:
        """What a version would have done, or the progress of computing it. The first request starts the comparison, and
        it stops 20 s after the last one. Only one runs at a time: while another runs that was requested in the last
        5 s, a request gets `service_full`. If the comparison failed, the request gets its error.
        """
        ticks = len(folder.episode(recording))
        return comparisons.ask(Key(recording, version, reference or ""), folder.path, ticks)

    @router.get("/ticks")
    def ticks(
        recording: str,
        version: _Registered,
        reference: _Registered | None = None,
        first: FirstTick = 0,
        count: TickCount = 100,
    ) -> list[ComparedTickDocument]:
        """Consecutive ticks of a finished comparison."""
        return comparisons.ticks(Key(recording, version, reference or ""), folder.episode(recording), first, count)

    return router


class Key(NamedTuple):
    """Names a comparison: the recording's id, the version, and the reference version; empty: the recording itself."""

    recording: str
    version: str
    reference: str


class Comparisons:
    """Runs comparisons, and keeps those used last. Thread safe.

    Args:
        uri: tracking URI.
        trust: as for `brayx.jobs.stored_models.stored_model`.
    """

    def __init__(self, uri: str, trust: bool | str = False) -> None:
        self._uri, self._trust = uri, trust
        self._lock = threading.Lock()
        self._kept: dict[Key, _Comparison] = {}
        self._newest: _Comparison | None = None

    def ask(self, key: Key, folder: str, ticks: int) -> ComparisonDocument:
        """The comparison, or its progress; the first request starts it. A failed one is dropped with its error.

        Args:
            key: which comparison.
            folder: folder of the recordings.
            ticks: number of recorded ticks. A comparison of another number, made while the session ran, is made again.

        Raises:
            ServiceFull: another comparison runs.
            ModelNotFound: there is no such version.
            BrayxError: the comparison failed.
        """
        with self._lock:
            running = self._kept.pop(key, None)
            if running is None or running.stopped or (running.arrays and running.ticks != ticks):
                newest = self._newest
                if newest is not None and newest.runs and time.monotonic() < newest.asked_at + _FREE_S:
                    raise ServiceFull(
                        "another comparison runs, and only one can at a time: try again when it has ended"
                    )
                found = self._found(key)
                if newest is not None and newest.runs:
                    newest.stop()
                running = self._newest = _Comparison(key, folder, found, self._uri, self._trust, ticks)
            if running.error is not None:
                raise running.error
            running.asked_at = time.monotonic()
            self._kept[key] = running  # the most recently used comes last
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return running.document()

    def _found(self, key: Key) -> list[tuple[PoolEntry, Path | None]]:
        """The versions, and where their files are: this process has imported MLflow, which takes seconds."""
        entries = [find(version, self._uri) for version in (key.reference, key.version) if version]
        return [(entry, local_files(entry, self._uri)) for entry in entries]

    def ticks(self, key: Key, episode: Recording, first: int, count: int) -> list[ComparedTickDocument]:
        """How the versions would have acted at consecutive recorded ticks, except those that were left out.

        Raises:
            BadRecording: there is no such comparison, or it is not finished.
        """
        with self._lock:
            running = self._kept.get(key)
        if running is None or not running.arrays:
            raise BadRecording("this comparison is not finished, or was dropped for newer ones: ask for it first")
        masks = [name for name in episode.columns if name.rpartition("/")[2] == "action_mask"][:1]
        columns = episode.read(first, count, masks)
        mask = named(columns.arrays, "action_mask")
        rows = np.searchsorted(running.arrays["number"], columns.number)
        return [
            running.tick(int(row), None if mask is None else mask[index])
            for index, row in enumerate(rows)
            if row < len(running.arrays["number"]) and running.arrays["number"][row] == columns.number[index]
        ]


class _Comparison:
    """A comparison, running or finished.

    Attributes:
        ticks: number of recorded ticks when it started.
        asked_at: time of the last request for it.
        runs: whether it has neither a result nor an error yet.
        stopped: whether it was stopped because no viewer requested it any more.
        error: why it failed; None: it has not.
        arrays: its result, see `brayx.console.comparison_process.compared`; empty: there is none yet.
    """

    def __init__(
        self,
        key: Key,
        folder: str,
        versions: Sequence[tuple[PoolEntry, Path | None]],
        uri: str,
        trust: bool | str,
        ticks: int,
    ) -> None:
        self.key, self.ticks = key, ticks
        self.asked_at = time.monotonic()
        self.runs, self.stopped = True, False
        self.error: BrayxError | None = None
        self.arrays: dict[str, np.ndarray] = {}
        self._state, self._progress = "starting", 0.0
        self._summary: dict[str, Any] = {}
        request = {"folder": folder, "recording": key.recording, "versions": versions, "uri": uri, "trust": trust}
        self._child = Child("brayx.console.comparison_process")
        self._child.start()
        self._child.send(request)
        threading.Thread(target=self._read, name="brayx-comparison", daemon=True).start()

    def stop(self) -> None:
        """Ends it without a result."""
        self.stopped = True
        self._child.close()

    def document(self) -> ComparisonDocument:
        """The comparison for the API."""
        head = {"recording": self.key.recording, "version": self.key.version, "reference": self.key.reference}
        if not self.arrays:
            return ComparisonDocument(**head, done=False, state=self._state, progress=self._progress)
        summary = self._summary
        return ComparisonDocument(
            **head,
            done=True,
            state="done",
            progress=1.0,
            ticks=summary["ticks"],
            left_out=summary["left_out"],
            first=summary["first_at"],
            agreement=summary["equal"] / summary["ticks"] if summary["ticks"] else None,
            kl=summary["kl"],
            kl_max=summary["kl_max"],
            kl_exact=summary["exact"],
            value=summary["value"],
            sampled=summary["sampled"],
            curves=self._curves(),
        )

    def tick(self, row: int, mask: np.ndarray | None) -> ComparedTickDocument:
        """One tick, by its row among the compared ones."""
        numbers = {name: float(self.arrays[name][row]) for name in ("kl", "value")}
        return ComparedTickDocument(
            number=int(self.arrays["number"][row]),
            equal=bool(self.arrays["equal"][row]),
            **{name: number if np.isfinite(number) else None for name, number in numbers.items()},
            chosen={
                name: self._chosen(name, row, mask)
                for name in ("reference", "version")
                if f"{name}/action" in self.arrays
            },
        )

    def _chosen(self, name: str, row: int, mask: np.ndarray | None) -> ChosenDocument:
        logits, value = self.arrays.get(f"{name}/logits"), self.arrays.get(f"{name}/value")
        return ChosenDocument(
            action=array_of(self.arrays[f"{name}/action"][row]),
            probabilities=None if logits is None else probabilities_of(np.asarray(logits[row]), mask),
            value=None if value is None or not np.isfinite(value[row]) else float(value[row]),
        )

    def _curves(self) -> RecordedCurvesDocument:
        """The largest divergence and difference of values in each span of ticks, so that the curves hide no peak."""
        numbers = self.arrays["number"]
        every = max(1, -(-len(numbers) // MAX_POINTS))
        starts = np.arange(0, len(numbers), every)
        curves = {}
        for name, title in (("kl", "KL"), ("value", "value difference")):
            array = np.asarray(self.arrays[name])
            if not np.isfinite(array).any():
                continue
            finite = np.where(np.isfinite(array), array, 0.0)
            largest = [int(start + np.abs(finite[start : start + every]).argmax()) for start in starts]
            curves[title] = finite[largest].astype(float).tolist()
        return RecordedCurvesDocument(ticks=numbers[starts].tolist(), curves=curves)

    def _read(self) -> None:
        """Reads the process's messages until it ends; ends it once no viewer requests its result any more."""
        try:
            while self.runs:
                if time.monotonic() > self.asked_at + _ASKED_S:
                    self.stop()
                try:
                    message = self._child.receive(1.0)
                except TimeoutError:
                    continue
                if "error" in message:
                    self.error, self.runs = message["error"], False
                elif "state" in message:
                    self._state, self._progress = message["state"], message["progress"]
                else:
                    self._summary, self.arrays, self.runs = message["summary"], message["arrays"], False
        except ChildDied:
            pass
        finally:
            self._child.end()
            if not self.arrays and self.error is None:
                self.error = StartupError(f"the comparison's process {self._child.death} before its result")
            self.runs = False
