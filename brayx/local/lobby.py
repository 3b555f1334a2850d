"""The open doors of a job that does not know its games' contract: the first game that connects says it.

That start and those that follow are held until the learner's first weights act, and then answered by the job's actor.
So no reply is lost, and no client has to try again. Knows nothing of learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from brayx.actor.actor import Actor
from brayx.actor.contract_agent import ActionLimits
from brayx.actor.contracts import contract_of
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.command_line import say
from brayx.errors import Overloaded, ServiceFull, StartupError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.protocol import StepRequest
from brayx.jobs.config import JobConfig
from brayx.jobs.contract_model import check_parameters
from brayx.jobs.gamecores import Gamecores
from brayx.logs import one_line
from brayx.metrics import Recorder
from brayx.strict_json import parse_json

_LOOK_S = 0.25
_HELD_S = 180.0
"""Deadline for a held start: the job builds the agent and the model, and its learner publishes."""
_CONNECT_S = 180.0
"""Deadline for the first start while a gamecore of the job keeps failing. One that runs may wait for a person, as a
bridge does."""
_STEADY_S = 60.0
"""A gamecore that has not failed for this long works."""
_REPEAT_S = 60.0
_END_S = 2.0


class Lobby:
    """Opens a job's doors and starts its gamecores; a context manager, at whose end both have ended.

    Args:
        job: the job, without a contract.
        actor: name of its actor.

    Attributes:
        doors: the actor's doors, open inside the context.
        games: the job's gamecores.
        say: prints a line; `bind` replaces it by the display's.
    """

    def __init__(self, job: JobConfig, actor: str) -> None:
        self._job, self._config = job, job.actors[actor]
        self._contract: Contract | None = None
        self._decided = threading.Event()
        self._admits = asyncio.Event()
        self._has_ended = False
        self._recorder = Recorder()
        self._bound: Runtime | None = None
        self._on_hold: Callable[[], None] = lambda: None
        self._runtime = Runtime(self._make_actor, self._recorder, self._describe, admit=self._admit)
        self.say: Callable[[str], None] = say
        self.doors = LocalHost(self._config, self._runtime, name=actor, on_hold=lambda: self._on_hold())

    def __enter__(self) -> Self:
        self.doors.open()
        try:
            self.games = Gamecores(
                self._config.gamecores, self.doors.urls, self._job.folder, self._failed, lambda text: self.say(text)
            )
            self.games.__enter__()
        except BaseException:
            self.doors.close(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.games.stop()
        self._has_ended = True
        with contextlib.suppress(RuntimeError):  # the training has closed the doors
            self.admit()
        self.doors.close(_END_S)

    def wait(self) -> JobConfig:
        """Waits for the first game's contract; returns the job with it.

        Raises:
            StartupError: the job's own gamecores fail, and send none in time.
        """
        waiting = f"waiting for a game: it connects to {', '.join(self.doors.urls.values())}"
        said_at, failed_at, failing_since = time.monotonic(), 0.0, math.inf
        failures, last = 0, ""
        self.say(waiting)
        while not self._decided.wait(_LOOK_S):
            now = time.monotonic()
            if self.games.messages and self.games.messages[-1] != last:
                last = self.games.messages[-1]
                self.say(last)
                said_at = now
            if now - said_at > _REPEAT_S:
                said_at = now
                self.say(f"still {waiting}{last and '; '}{last}")
            if self.games.failures != failures:
                failures, failed_at, failing_since = self.games.failures, now, min(failing_since, now)
            elif now - failed_at > _STEADY_S:
                failing_since = math.inf
            if now - failing_since > _CONNECT_S:
                raise StartupError(f"no game has sent its contract within {_CONNECT_S:g} s; {self.games}; {last}")
        assert self._contract is not None
        return self._job.model_copy(update={"contract": self._contract.as_dict()})

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

    def admit(self) -> None:
        """Passes the starts that are held, and all later ones, to the job's actor."""
        self.doors.loop.call_soon_threadsafe(self._admits.set)

    async def _admit(self, start: StepRequest) -> None:
        if self._admits.is_set():
            return
        contract = self._contract_of(start)
        if self._contract is None:
            self._contract = contract
            self._decided.set()
        try:
            async with asyncio.timeout(_HELD_S):
                await self._admits.wait()
        except TimeoutError:
            raise Overloaded(f"the learner has published no weights within {_HELD_S:g} s; try again") from None
        if self._has_ended:
            raise ServiceFull("the training ended before its model acted: its screen says why")

    def _contract_of(self, start: StepRequest) -> Contract:
        """The contract of a start that the job's actor would not refuse.

        Raises:
            BrayxError: it would, or the contract does not fit the one that the job has.
        """
        if start.opponent:
            Actor().ask(start.opponent)
        if start.record and (self._job.recording is None or not self._job.recording.on_request):
            Actor().record()
        document: Any = parse_json(start.body) if start.body else None
        contract = contract_of(document, self._contract)
        ActionLimits(contract, *ContractBodies(contract).limits(document)).check_learnable()
        if self._contract is None:
            check_parameters(contract, self._job.as_dict())
        return contract

    def _make_actor(self) -> Actor:
        if self._bound is None:  # of a stateless call, which nothing holds
            raise Overloaded("no game has sent its contract yet: send a start first")
        return self._bound.make_actor()

    def _describe(self) -> dict[str, Any]:
        return {"mode": "train", "waits_for": "a game's contract"} if self._bound is None else self._bound.describe()

    def _failed(self, line: str) -> None:
        self._recorder.add("gamecores_failed", 1.0, note=one_line(line))
