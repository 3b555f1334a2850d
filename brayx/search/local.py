"""Trials of a search in processes of this machine: each worker process trains one trial after another.

At each comparison a trial waits for its verdict: continue, stop, or become a copy of another trial. Knows nothing of
what a trial trains, nor of Ray.
"""

from __future__ import annotations

import math
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from brayx import systems
from brayx.children import Channel, Child, ChildDied
from brayx.errors import BrayxError, first_line
from brayx.search.competition import Asha, Competition, Options, Population, ReportListener, TrialReport, Work
from brayx.temporary import temporary_folder

_TRIES = 2
_END_S = 5.0
"""Time for worker processes to end."""
_LOOK_S = 0.5
_QUARTER = 0.25


@dataclass(frozen=True)
class Copy:
    """Verdict: become a copy of trial ``origin``."""

    origin: int


Verdict = Copy | bool
"""Verdict of a comparison: a copy, continue (True), or stop (False)."""


class Halving:
    """The verdicts of `Asha`."""

    def __init__(self, rules: Asha) -> None:
        self._reduction = rules.reduction
        self._rungs: dict[int, dict[int, float]] = {}
        rung = rules.grace_steps
        while rung < rules.max_steps:
            self._rungs[rung] = {}
            rung *= rules.reduction

    def judge(self, number: int, report: TrialReport) -> Verdict:
        """The verdict on a trial; only the highest rung that it has reached counts, and only once."""
        reached = [rung for rung in self._rungs if rung <= report.env_steps]
        if not reached or number in self._rungs[max(reached)]:
            return True
        scores = self._rungs[max(reached)]
        cutoff = np.percentile(list(scores.values()), 100 * (1 - 1 / self._reduction)) if scores else -math.inf
        scores[number] = report.score
        return bool(report.score >= cutoff)

    def leave(self, number: int) -> None:
        """Called when a trial has ended; its scores stay."""


class Exploiting:
    """The verdicts of `Population`."""

    def __init__(self, rules: Population) -> None:
        self._scores: dict[int, float] = {}
        self._rng = random.Random(rules.seed)

    def judge(self, number: int, report: TrialReport) -> Verdict:
        """The verdict on a trial, by the newest score of each that still runs."""
        self._scores[number] = report.score
        ranked = sorted(self._scores, key=lambda trial: self._scores[trial])
        quarter = min(math.ceil(len(ranked) * _QUARTER), len(ranked) // 2)
        if number in ranked[:quarter]:
            return Copy(self._rng.choice(ranked[-quarter:]))
        return True

    def leave(self, number: int) -> None:
        """Called when a trial has ended: others are no longer compared with it, nor copy it."""
        self._scores.pop(number, None)


def run_trials(
    work: Work, drawn: Sequence[Options], competition: Competition, listener: ReportListener, *, deadline_s: float
) -> None:
    """Runs all trials to their ends.

    Args:
        work: trains a trial.
        drawn: options of each trial, by number.
        competition: the rule of comparison. All trials of a population run at once, others one per CPU.
        listener: called at each comparison and end.
        deadline_s: deadline of all trials together; running ones are then ended.
    """
    cpus = systems.cores()
    at_once = len(drawn) if isinstance(competition, Population) else max(1, min(len(drawn), cpus))
    with temporary_folder("search") as folder:
        search = _Search(work, drawn, competition, listener, folder, at_once, threads=max(1, cpus // at_once))
        workers = [
            threading.Thread(target=search.run_worker, args=(child,), daemon=True, name="brayx-trial")
            for child in search.children
        ]
        for worker in workers:
            worker.start()
        end = time.monotonic() + deadline_s
        try:
            while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
                for worker in workers:
                    worker.join(_LOOK_S / len(workers))
        finally:
            search.end()
            for worker in workers:
                worker.join(_END_S)
    if search.failure is not None:
        raise search.failure


class _Search:
    """Shared state of the threads, each of which has a worker process."""

    def __init__(
        self,
        work: Work,
        drawn: Sequence[Options],
        competition: Competition,
        listener: ReportListener,
        folder: Path,
        at_once: int,
        *,
        threads: int,
    ) -> None:
        self._work, self._listener, self._folder = work, listener, folder
        self._change = competition.change if isinstance(competition, Population) else None
        self._judge = Exploiting(competition) if isinstance(competition, Population) else Halving(competition)
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(drawn)):
            self._waiting.put(number)
        self._options = [dict(options) for options in drawn]
        self._kept: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.children = [Child("brayx.search.local", OMP_NUM_THREADS=str(threads)) for _ in range(at_once)]
        self.failure: BaseException | None = None
        """Exception of the listener, which ends the search."""

    def run_worker(self, child: Child) -> None:
        """Runs waiting trials one after another, in one process while that lives."""
        try:
            while True:
                try:
                    number = self._waiting.get_nowait()
                except queue.Empty:
                    return
                error: str | None = None
                for _ in range(_TRIES):
                    error = self._run(child, number)
                    if error is None or self._ended:
                        break
                if self._ended:
                    return
                with self._lock:
                    self._judge.leave(number)
                    if error is None:
                        self._listener.on_end(number)
                    else:
                        self._listener.on_error(number, error)
        except BaseException as error:
            self.failure = self.failure or error
            self.end()
        finally:
            child.end(_END_S)

    def end(self) -> None:
        """Ends every worker process now."""
        self._ended = True
        for child in self.children:
            child.close()

    def _run(self, child: Child, number: int) -> str | None:
        """Runs a trial to its end; returns its error."""
        begun = self._kept.get(number)
        try:
            child.start()
            child.send((self._work, number, self._options[number], begun))
            while True:
                kind, *content = child.receive()
                if kind == "done":
                    return None
                if kind == "failed":
                    return str(content[0])
                child.send(self._judged(number, *content))
        except ChildDied as died:
            return f"its process {died}"

    def _judged(self, number: int, report: TrialReport, checkpoint: Path) -> tuple[str, Options, Path | None]:
        """Keeps the checkpoint, calls the listener, and returns the verdict with a copy's initial state."""
        with self._lock:
            former, saved = self._kept.get(number), self._new_folder(number)
            shutil.copytree(checkpoint, saved)
            self._kept[number] = saved
            if former is not None:
                shutil.rmtree(former, ignore_errors=True)
            self._listener.on_report(number, report, saved)
            if report.over:  # a finished trial is not copied
                self._judge.leave(number)
                return "go on", {}, None
            verdict = self._judge.judge(number, report)
            if isinstance(verdict, bool):
                return "go on" if verdict else "stop", {}, None
            assert self._change is not None
            self._options[number] = self._change(self._options[verdict.origin])
            begun = self._new_folder(number)
            shutil.copytree(self._kept[verdict.origin], begun)
            return "copy", self._options[number], begun

    def _new_folder(self, number: int) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{number:03d}-", dir=self._folder)) / "checkpoint"


class _Stopped(BaseException):
    """Leaves a trial's training at a comparison; not an `Exception`, so that error handlers do not catch it."""

    def __init__(self, options: Options, begun: Path | None) -> None:
        self.options, self.begun = options, begun


def main(search: Channel) -> None:
    """The worker process: trains trials until its search ends."""

    def send_report(report: TrialReport, checkpoint: Path) -> None:
        search.send(("report", report, checkpoint))
        verdict, options, begun = search.receive()
        if verdict != "go on":
            raise _Stopped(options, begun)

    while True:
        try:
            work, number, options, begun = search.receive()
        except EOFError:
            return
        going_on = True
        while going_on:
            going_on = False
            try:
                work(number, options, send_report, begun)
            except _Stopped as stopped:
                options, begun, going_on = stopped.options, stopped.begun, stopped.begun is not None
            except Exception as error:
                said = (
                    error.message if isinstance(error, BrayxError) else f"{type(error).__name__}: {first_line(error)}"
                )
                search.send(("failed", said))
                break
        else:
            search.send(("done",))
