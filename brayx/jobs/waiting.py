"""How a job waits for its first game's contract, on any host: its doors are open, and its own gamecores run.

Knows nothing of doors.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Mapping

from brayx.command_line import say
from brayx.errors import StartupError
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores, says_itself
from brayx.jobs.watching import Absence

_LOOK_S = 0.25
_CONNECT_S = 180.0
"""Deadline for the first start while a gamecore of the job keeps failing. One that runs may be a bridge, which waits
for a person."""
_STEADY_S = 60.0
"""A gamecore that has not failed for this long works."""


class WaitingJob(abc.ABC):
    """A job that waits for its first game's contract.

    Args:
        job: the job.

    Attributes:
        job: the job.
        games: its gamecores.
        say: prints a line; later the display's.
        failed: counts a gamecore's failure, of which it gets a line.
    """

    games: Gamecores

    def __init__(self, job: JobConfig) -> None:
        self.job, self._failure = job, ""
        self.say: Callable[[str], None] = say
        self.failed: Callable[[str], None] = lambda line: None

    @property
    @abc.abstractmethod
    def urls(self) -> Mapping[str, str]:
        """URL of each open door by name."""

    @abc.abstractmethod
    def next(self, timeout_s: float) -> Contract | None:
        """The next contract of a behaviour that has appeared; None: there is none within this time."""

    def wait(self) -> JobConfig:
        """Waits for the first game's contract; returns the job with it.

        Raises:
            StartupError: the job's own gamecores fail, and send none in time; or one ends too often.
        """
        waiting = "waiting for a game"
        if not self.games.num:  # a bridge of the job says itself where its games connect
            waiting += f": it connects to {', '.join(self.urls.values())}"
        absence, failed_at, failing_since = Absence(), 0.0, math.inf
        failures, last = 0, ""
        contract = self.next(0.0)
        if contract is None:
            self.say(waiting)
        while contract is None:
            self.games.check()
            now = time.monotonic()
            if self.games.messages and self.games.messages[-1] != last:
                last = self.games.messages[-1]
                if not says_itself(last) and last != self._failure:
                    self.say(last)
            if hint := absence.hint({}):
                self.say(f"{hint}; {waiting}{last and '; '}{last}")
            if self.games.failures != failures:
                failures, failed_at, failing_since = self.games.failures, now, min(failing_since, now)
            elif now - failed_at > _STEADY_S:
                failing_since = math.inf
            if now - failing_since > _CONNECT_S:
                raise StartupError(f"no game has sent its contract within {_CONNECT_S:g} s; {self.games}; {last}")
            contract = self.next(_LOOK_S)
        return self.job.model_copy(update={"contract": contract.as_dict()})

    def _failed(self, line: str) -> None:
        self._failure = line  # `Gamecores` says it
        self.failed(line)
