"""The behaviours that games of a training on Ray name before its replicas can act for them.

A replica asks the job, through the hub of its trial. The job begins to learn a behaviour that it does not know, and
answers once its weights act, with all that a replica needs to act for it; or with why it is refused. A replica that
starts later asks for the behaviours that its sessions name, too. Knows nothing of learners or models.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from brayx.actor.config import ActorConfig
from brayx.cluster.hub import ask_job
from brayx.errors import BadBody, DeadlineExceeded
from brayx.faults import report
from brayx.gamecore.contract import Contract
from brayx.jobs.admission import MAX_BEHAVIOURS, Admission
from brayx.jobs.config import JobConfig

if TYPE_CHECKING:
    from brayx.cluster.actor_app import ActorSpec

_ASK_S = 10.0
"""Time after which a replica asks again: the job does not take requests while its first learner starts."""


@dataclass
class _Held:
    """A behaviour that replicas wait for: its contract's id, and the keys of their requests."""

    contract: str
    keys: list[str] = field(default_factory=list)


class RayLobby:
    """The job's side: a `brayx.jobs.behaviours.HeldStarts`.

    Args:
        job: the job with all its behaviours.
        answer: answers the request of a key.

    Attributes:
        spec_of: returns the pickled spec by which a replica acts for a behaviour, by its name; the job sets it.
    """

    spec_of: Callable[[str], bytes]

    def __init__(self, job: JobConfig, answer: Callable[[str, object], object]) -> None:
        self.job, self._answer = job, answer
        self._held: dict[str, _Held] = {}
        self._arrived: deque[Contract] = deque()
        self._acting = set[str]()
        self._refused: dict[str, tuple[str, BadBody]] = {}
        """The contract's id, and the reason, of each behaviour that cannot be learned."""

    def meet(self, key: str, contract: Contract) -> None:
        """Takes the request of a replica, which has met a game of this contract."""
        name = contract.behaviour
        refused_id, refusal = self._refused.get(name, ("", None))
        if name in self._acting:
            self._answer(key, self.spec_of(name))  # it tells a game whose contract is another one
        elif refused_id == contract.id:
            self._answer(key, refusal)
        elif name in self._held:
            self._held[name].keys.append(key)
        elif (count := len(self._acting) + len(self._held)) >= (1 if self.job.leagues else MAX_BEHAVIOURS):
            self._answer(key, BadBody(f"the job has {count} behaviours, the most it can have"))
        else:
            self._held[name] = _Held(contract.id, [key])
            self._arrived.append(contract)

    def expect(self, contract: Contract) -> None:
        """See `HeldStarts.expect`."""
        self._held.setdefault(contract.behaviour, _Held(contract.id))

    def arrived(self) -> list[Contract]:
        """See `HeldStarts.arrived`."""
        arrived = []
        while (contract := self.next()) is not None:
            arrived.append(contract)
        return arrived

    def next(self) -> Contract | None:
        """The first of them; None: there is none."""
        return self._arrived.popleft() if self._arrived else None

    def admit(self, behaviour: str, refusal: str = "") -> None:
        """See `HeldStarts.admit`."""
        held = self._held.pop(behaviour)
        error = BadBody(refusal, field="behaviour")
        if refusal:
            self._refused[behaviour] = held.contract, error
        else:
            self._acting.add(behaviour)
        for key in held.keys:
            self._answer(key, error if refusal else self.spec_of(behaviour))


class Joining:
    """A replica's side: holds the starts of behaviours until the replica can act for them.

    Args:
        job: the job with all its behaviours.
        config: options of its actor.
        hub: name of its trial's hub.
        act: makes what the replica needs to act for a behaviour.

    Attributes:
        admission: holds the starts.
    """

    def __init__(
        self, job: JobConfig, config: ActorConfig, hub: str, act: Callable[[ActorSpec], Awaitable[None]]
    ) -> None:
        self.admission = Admission(job, config, self._take)
        self._hub, self._act, self._show_text = hub, act, config.show_errors is not False
        self._tasks = set[asyncio.Task[None]]()

    def acts(self, contract: Contract) -> None:
        """Lets in the starts of a behaviour that the replica acts for from its beginning."""
        self.admission.expect(contract)
        self.admission.decide(contract.behaviour)

    async def close(self) -> None:
        """Refuses the starts that are held."""
        for task in self._tasks:
            task.cancel()
        self.admission.end()

    def _take(self, contract: Contract) -> None:
        task = asyncio.create_task(self._join(contract))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, contract: Contract) -> None:
        refusal = ""
        try:
            await self._act(pickle.loads(await self._built(contract)))
        except Exception as error:  # also an unexpected one: the starts would be held in vain
            whose = f"behaviour {contract.behaviour!r}"
            refusal = report(error, "a replica cannot act for it", whose, show_text=self._show_text).message
        self.admission.decide(contract.behaviour, refusal)

    async def _built(self, contract: Contract) -> bytes:
        while True:
            try:
                return await asyncio.to_thread(ask_job, self._hub, contract, _ASK_S)
            except DeadlineExceeded:
                continue  # a start has its own deadline
