"""The open doors of a job that does not know its games' contracts: the first game of each behaviour says it.

That start and those that follow are held until the behaviour's first weights act, and then answered by its actor. So no
reply is lost, and no client has to try again. Knows nothing of learning.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable
from typing import Any, Self

from brayx.actor.actor import Actor
from brayx.actor.examples import contract_example
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.command_line import say
from brayx.errors import Overloaded, StartupError
from brayx.gamecore.contract import Contract
from brayx.jobs.admission import Admission
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores, gamecores_of, says_itself
from brayx.jobs.watching import Absence
from brayx.logs import one_line
from brayx.metrics import Recorder

_LOOK_S = 0.25
_CONNECT_S = 180.0
"""Deadline for the first start while a gamecore of the job keeps failing. One that runs may be a bridge, which waits
for a person."""
_STEADY_S = 60.0
"""A gamecore that has not failed for this long works."""
_END_S = 2.0
_ANY = Contract.parse(
    {
        "contract": 1,
        "observations": {"position": {"shape": [2]}},
        "actions": {"move": {"kind": "discrete", "size": 4}},
    }
)
"""A contract for the doors' page while none is known: this job learns any."""


class Lobby:
    """Opens a job's doors and starts its gamecores; a context manager, at whose end both have ended.

    Args:
        job: the job; the first contract that it has is the first behaviour's.
        actor: name of its actor.

    Attributes:
        job: the job.
        doors: the actor's doors, open inside the context.
        games: the job's gamecores.
        say: prints a line; `bind` replaces it by the display's.
    """

    def __init__(self, job: JobConfig, actor: str) -> None:
        self.job, self._config = job, job.actors[actor]
        self._gamecores, self._failure = gamecores_of(job, actor), ""
        self._arrived: queue.SimpleQueue[Contract] = queue.SimpleQueue()
        self._admission = Admission(job, self._config, self._arrived.put)
        self._recorder = Recorder()
        self._bound: Runtime | None = None
        self._on_hold: Callable[[], None] = lambda: None
        self._runtime = Runtime(self._make_actor, self._recorder, self._describe, admit=self._admission.admit)
        self.say: Callable[[str], None] = say
        if job.contract is not None:
            contract = Contract.parse(job.contract)
            self._admission.expect(contract)
            self._arrived.put(contract)
        self.doors = LocalHost(self._config, self._runtime, name=actor, on_hold=lambda: self._on_hold())

    def __enter__(self) -> Self:
        self.doors.open()
        try:
            self.games = Gamecores(
                self._gamecores,
                self.doors.urls,
                self.job.folder,
                self._failed,
                lambda text: self.say(text),
                self.doors,
            )
            self.games.__enter__()
        except BaseException:
            self.doors.close(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.games.stop()
        with contextlib.suppress(RuntimeError):  # the training has closed the doors
            self.doors.loop.call_soon_threadsafe(self._admission.end)
        self.doors.close(_END_S)

    def wait(self) -> JobConfig:
        """Waits for the first game's contract; returns the job with it.

        Raises:
            StartupError: the job's own gamecores fail, and send none in time.
        """
        waiting = f"waiting for a game: it connects to {', '.join(self.doors.urls.values())}"
        absence, failed_at, failing_since = Absence(), 0.0, math.inf
        failures, last = 0, ""
        if self._arrived.empty():
            self.say(waiting)
        while True:
            with contextlib.suppress(queue.Empty):
                contract = self._arrived.get(timeout=_LOOK_S)
                return self.job.model_copy(update={"contract": contract.as_dict()})
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

    def expect(self, contract: Contract) -> None:
        """Holds the starts of a behaviour that the job learns before its first game comes."""
        self.doors.loop.call_soon_threadsafe(self._admission.expect, contract)

    def arrived(self) -> list[Contract]:
        """The contracts of further behaviours that have come since the last call."""
        contracts = []
        with contextlib.suppress(queue.Empty):
            while True:
                contracts.append(self._arrived.get_nowait())
        return contracts

    def bind(self, runtime: Runtime, say: Callable[[str], None], on_hold: Callable[[], None]) -> None:
        """Gives the doors the parts of the job that was made of the contract; starts are still held.

        Args:
            runtime: the parts; its recorder gets the samples of the doors, too.
            say: prints a line above the job's display.
            on_hold: as for `LocalHost`.
        """
        runtime.recorder.include(self._recorder)
        self._runtime.close.extend(runtime.close)
        self._bound, self.say, self._on_hold = runtime, say, on_hold

    def admit(self, behaviour: str, refusal: str = "") -> None:
        """See `Admission.decide`."""
        self.doors.loop.call_soon_threadsafe(self._admission.decide, behaviour, refusal)

    def _make_actor(self) -> Actor:
        if self._bound is None:  # a stateless call: only starts are held
            raise Overloaded("no game has sent its contract yet: send a start first")
        return self._bound.make_actor()

    def _describe(self) -> dict[str, Any]:
        if self._bound is not None:
            return self._bound.describe()
        example = contract_example(self._admission.first or _ANY)
        return {"mode": "train", "waits_for": "a game's contract", "example": example}

    def _failed(self, line: str) -> None:
        self._failure = line  # `Gamecores` says it
        self._recorder.add("gamecores_failed", 1.0, note=one_line(line))
