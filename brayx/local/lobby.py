"""The open doors of a job that does not know its games' contracts: the first game of each behaviour says it.

That start and those that follow are held until the behaviour's first weights act, and then answered by its actor. So no
reply is lost, and no client has to try again. Knows nothing of learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from brayx.actor.actor import Actor
from brayx.actor.contract_agent import ActionLimits
from brayx.actor.contracts import behaviour_of, contract_of, unknown_behaviour
from brayx.actor.examples import contract_example
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.command_line import say
from brayx.errors import BadBody, Overloaded, ServiceFull, StartupError
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import StepRequest
from brayx.jobs.config import JobConfig
from brayx.jobs.contract_model import check_parameters
from brayx.jobs.gamecores import Gamecores, gamecores_of, says_itself
from brayx.jobs.watching import Absence
from brayx.logs import one_line
from brayx.metrics import Recorder
from brayx.strict_json import parse_json

_LOOK_S = 0.25
_HELD_S = 180.0
"""Deadline for a held start: the job builds the agent and the model, and its learner publishes."""
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
MAX_BEHAVIOURS = 16
"""Maximum number of behaviours in a job: each has its own network and learner. Refused ones do not count."""
MAX_CONTRACTS = 64
"""Maximum number of contracts for which a job starts a learner, including those that it then refuses: each makes a
trial."""


@dataclass
class _Behaviour:
    """A behaviour whose contract is known.

    Attributes:
        contract: the contract.
        decided: its starts need no longer wait.
        refusal: why its starts are refused; empty: they are not.
    """

    contract: Contract
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


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
        self._behaviours: dict[str, _Behaviour] = {}
        self._arrived: queue.SimpleQueue[Contract] = queue.SimpleQueue()
        self._taken = 0
        self._has_ended = False
        self._recorder = Recorder()
        self._bound: Runtime | None = None
        self._on_hold: Callable[[], None] = lambda: None
        self._runtime = Runtime(self._make_actor, self._recorder, self._describe, admit=self._admit)
        self.say: Callable[[str], None] = say
        if job.contract is not None:
            self._take(Contract.parse(job.contract))
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
        self._has_ended = True
        with contextlib.suppress(RuntimeError):  # the training has closed the doors
            self.doors.loop.call_soon_threadsafe(self._end)
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
        self.doors.loop.call_soon_threadsafe(self._behaviours.setdefault, contract.behaviour, _Behaviour(contract))

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
        """Passes a behaviour's starts that are held, and all later ones, to the job's actor.

        Args:
            behaviour: its name.
            refusal: reason to refuse them instead, until a start has another contract; empty: pass them.
        """
        self.doors.loop.call_soon_threadsafe(self._decide, behaviour, refusal)

    def _decide(self, name: str, refusal: str) -> None:
        self._behaviours[name].refusal = refusal
        self._behaviours[name].decided.set()

    def _end(self) -> None:
        for behaviour in self._behaviours.values():
            behaviour.decided.set()

    async def _admit(self, start: StepRequest) -> None:
        behaviour = self._behaviour(start)
        if not behaviour.decided.is_set():
            try:
                async with asyncio.timeout(_HELD_S):
                    await behaviour.decided.wait()
            except TimeoutError:
                raise Overloaded(f"the learner has published no weights within {_HELD_S:g} s; try again") from None
        if behaviour.refusal:
            name = behaviour.contract.behaviour
            raise BadBody(f"behaviour {name!r} cannot be learned: {behaviour.refusal}", field="behaviour")
        if self._has_ended:
            raise ServiceFull("the training ended before its model acted: its screen says why")

    def _behaviour(self, start: StepRequest) -> _Behaviour:
        """The behaviour of a start; a new one if the start has its contract and the job's actor would accept it.

        Raises:
            BrayxError: the actor would refuse it, or the contract does not fit the behaviour's, or cannot be learned.
        """
        document: Any = parse_json(start.body) if start.body else None
        contracts = {name: behaviour.contract for name, behaviour in self._behaviours.items() if not behaviour.refusal}
        name = behaviour_of(document, contracts)
        known = self._behaviours.get(name)
        if known is not None and known.decided.is_set() and not known.refusal:
            return known  # the actor checks the start
        if self.job.other_behaviours == "refuse" and name not in self.job.behaviours:
            raise unknown_behaviour(name, self.job.behaviours)
        if start.opponent:
            Actor().ask(start.opponent)
        if start.record and (self.job.recording is None or not self.job.recording.on_request):
            Actor().record()
        is_league = bool(self.job.leagues)  # its players have one model
        expected = next(iter(contracts.values()), None) if is_league else contracts.get(name)
        contract = contract_of(document, expected, self._config.missing)
        ActionLimits.of(contract, document).check_learnable()
        if known is not None and (not known.refusal or known.contract.id == contract.id):
            return known
        if len(contracts) >= MAX_BEHAVIOURS:
            raise unknown_behaviour(name, contracts)
        if self._taken >= MAX_CONTRACTS:
            raise BadBody(
                f"behaviour is {name!r:.80}, and this job has begun to learn {MAX_CONTRACTS} contracts, most of which "
                "it refused: fix the game and start the job again",
                field="behaviour",
            )
        check_parameters(contract, self.job.of_behaviour(name).as_dict())
        return self._take(contract)

    def _take(self, contract: Contract) -> _Behaviour:
        self._taken += 1
        behaviour = self._behaviours[contract.behaviour] = _Behaviour(contract)
        self._arrived.put(contract)
        return behaviour

    def _make_actor(self) -> Actor:
        if self._bound is None:  # a stateless call: only starts are held
            raise Overloaded("no game has sent its contract yet: send a start first")
        return self._bound.make_actor()

    def _describe(self) -> dict[str, Any]:
        if self._bound is not None:
            return self._bound.describe()
        contract = next((behaviour.contract for behaviour in self._behaviours.values()), _ANY)
        return {"mode": "train", "waits_for": "a game's contract", "example": contract_example(contract)}

    def _failed(self, line: str) -> None:
        self._failure = line  # `Gamecores` says it
        self._recorder.add("gamecores_failed", 1.0, note=one_line(line))
