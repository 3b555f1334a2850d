"""The open doors of a job that does not know its games' contracts: the first game of each behaviour says it.

That start and those that follow are held until the behaviour's first weights act, and then answered by its actor. So no
reply is lost, and no client has to try again. Knows nothing of learning.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Mapping
from typing import Any, Self

from brayx.actor.actor import Actor
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.gamecore.auth import Keys
from brayx.gamecore.contract import Contract
from brayx.jobs.admission import Admission
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores, gamecores_of
from brayx.jobs.waiting import WaitingJob
from brayx.logs import one_line
from brayx.metrics import Recorder

_END_S = 2.0


class Lobby(WaitingJob):
    """Opens a job's doors and starts its gamecores; a context manager, at whose end both have ended.

    Args:
        job: the job; the first contract that it has is the first behaviour's.
        actor: name of its actor.

    Attributes:
        doors: the actor's doors, open inside the context.
    """

    def __init__(self, job: JobConfig, actor: str) -> None:
        super().__init__(job)
        self._config, self._gamecores = job.actors[actor], gamecores_of(job, actor)
        self._arrived: queue.SimpleQueue[Contract] = queue.SimpleQueue()
        self._admission = Admission(job, self._config, self._arrived.put)
        self._recorder = Recorder()
        self._bound: Runtime | None = None
        self._on_hold: Callable[[], None] = lambda: None
        self._runtime = Runtime(self._make_actor, self._recorder, self._describe, admit=self._admission.admit)
        self.failed = lambda line: self._recorder.add("gamecores_failed", 1.0, note=one_line(line))
        if job.contract is not None:
            contract = Contract.parse(job.contract)
            self._admission.expect(contract)
            self._arrived.put(contract)
        keys = Keys.configured(self._config.keys_file)
        self.doors = LocalHost(self._config, self._runtime, name=actor, keys=keys, on_hold=lambda: self._on_hold())

    def __enter__(self) -> Self:
        self.doors.open()
        try:
            self.games = Gamecores(
                self._gamecores,
                self.doors.urls,
                self.job.files_folder,
                self._failed,
                lambda text: self.say(text),
                self.doors,
                self._config.keys_file,
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

    @property
    def urls(self) -> Mapping[str, str]:
        """See `WaitingJob.urls`."""
        return self.doors.urls

    def next(self, timeout_s: float) -> Contract | None:
        """See `WaitingJob.next`."""
        with contextlib.suppress(queue.Empty):
            return self._arrived.get(timeout=timeout_s)
        return None

    def expect(self, contract: Contract) -> None:
        """Holds the starts of a behaviour that the job learns before its first game comes."""
        self.doors.loop.call_soon_threadsafe(self._admission.expect, contract)

    def arrived(self) -> list[Contract]:
        """The contracts of further behaviours that have come since the last call."""
        contracts = []
        while (contract := self.next(0.0)) is not None:
            contracts.append(contract)
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
        return self._admission.refuse_call() if self._bound is None else self._bound.make_actor()

    def _describe(self) -> dict[str, Any]:
        return {"mode": "train", **self._admission.describe()} if self._bound is None else self._bound.describe()
