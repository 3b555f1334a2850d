"""A service that plays any contract, for tests of bridges."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import numpy as np

from brayx.actor.actor import Actor
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_ticks import Tick
from tests.unit.gamecore.echo_server import serving


class ByContract(Actor):
    """Takes the last choice that is allowed; keeps contracts and ticks by the end of the session's id, an agent's
    name."""

    contracts: dict[str, Contract] = {}
    ticks: dict[str, list[Tick]] = {}

    async def start(self, session: str, body: bytes) -> bytes:
        contract = Contract.parse(json.loads(body))
        self.bodies = ContractBodies(contract)
        self.agent = session.rpartition("-")[2]
        self.contracts[self.agent] = contract
        self.ticks[self.agent] = []
        return json.dumps({"contract": 1, "id": contract.id}).encode()

    async def tick(self, body: bytes) -> bytes:
        tick = self.bodies.decode(body)
        self.ticks[self.agent].append(tick)
        part = self.bodies.contract.discrete[0]
        allowed = tick.obs.get("action_mask", np.ones(part.size))
        return self.bodies.encode({part.name: part.start + int(allowed.nonzero()[0][-1])})

    async def stop(self, body: bytes) -> bytes:
        tick = self.bodies.decode_stop(body)
        assert tick is not None
        self.ticks[self.agent].append(tick)
        return b""


@contextlib.contextmanager
def playing_by_contract() -> Iterator[str]:
    """The URL of such a service."""
    ByContract.contracts.clear()
    ByContract.ticks.clear()
    with serving(DoorApp(SessionTable(ByContract))) as address:
        yield f"http://{address}"
