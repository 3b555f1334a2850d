"""Holds the starts of a training's sessions until the weights of their behaviours act. The first start of a behaviour
says its contract.

So no reply is lost, and no client has to try again. Pure asyncio; knows nothing of doors, learners or Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.contracts import behaviour_of, contract_of, unknown_behaviour
from brayx.actor.examples import contract_example
from brayx.actor.limits import ActionLimits
from brayx.errors import BadBody, Overloaded, ServiceFull
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import StepRequest
from brayx.jobs.config import JobConfig
from brayx.jobs.contract_model import check_network, check_parameters
from brayx.strict_json import parse_json

_HELD_S = 180.0
"""Deadline for a held start: the job builds the agent and the model, and its learner publishes."""
MAX_BEHAVIOURS = 16
"""Maximum number of behaviours in a job: each has its own network and learner. Refused ones do not count."""
MAX_CONTRACTS = 64
"""Maximum number of contracts for which a job starts a learner, including those that it then refuses: each makes a
trial."""

_ANY = Contract.parse(
    {
        "contract": 1,
        "observations": {"position": {"shape": [2]}},
        "actions": {"move": {"kind": "discrete", "size": 4}},
    }
)
"""A contract for the doors' page while none is known: this job learns any."""


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


class Admission:
    """The behaviours that starts have named; use it in one event loop.

    Args:
        job: the job.
        config: options of its actor.
        take: called with the contract of each behaviour that a start is the first of; `decide` follows some time.
    """

    def __init__(self, job: JobConfig, config: ActorConfig, take: Callable[[Contract], None]) -> None:
        self._job, self._config, self._take = job, config, take
        self._behaviours: dict[str, _Behaviour] = {}
        self._taken = 0
        self._has_ended = False

    def describe(self) -> dict[str, Any]:
        """Values of the status page before a behaviour acts."""
        contract = next((behaviour.contract for behaviour in self._behaviours.values()), _ANY)
        return {"waits_for": "a game's contract", "example": contract_example(contract)}

    def refuse_call(self) -> Actor:
        """Makes no actor for a stateless call before a behaviour acts.

        Raises:
            Overloaded: always.
        """
        raise Overloaded("no game has sent its contract yet: send a start first")

    def expect(self, contract: Contract) -> None:
        """Holds the starts of a behaviour that the job learns before its first game comes."""
        self._behaviours.setdefault(contract.behaviour, _Behaviour(contract))

    def decide(self, name: str, refusal: str = "") -> None:
        """Passes the starts of a behaviour, those that are held and all later ones, to the job's actor.

        Args:
            name: the behaviour.
            refusal: reason to refuse them instead, until a start has another contract; empty: pass them.
        """
        self._behaviours[name].refusal = refusal
        self._behaviours[name].decided.set()

    def end(self) -> None:
        """Refuses the starts that are held: the training has ended."""
        self._has_ended = True
        for behaviour in self._behaviours.values():
            behaviour.decided.set()

    async def admit(self, start: StepRequest) -> None:
        """Awaited with each start before its actor is made.

        Raises:
            BrayxError: the start is refused, or was held for too long.
        """
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
        if self._job.other_behaviours == "refuse" and name not in self._job.behaviours:
            advice = "; rename it in the game (in Unity, Behavior Name), or the key in the YAML"
            raise unknown_behaviour(name, self._job.behaviours, advice)
        if start.opponent:
            Actor().ask(start.opponent)
        if start.record and (self._job.recording is None or not self._job.recording.on_request):
            Actor().record()
        is_league = bool(self._job.leagues)  # its players have one model
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
        own = self._job.of_behaviour(name)
        check_network(own)  # on a cluster this process has not loaded its encoders yet
        check_parameters(contract, own.as_dict())
        self._taken += 1
        behaviour = self._behaviours[name] = _Behaviour(contract)
        self._take(contract)
        return behaviour
