"""A real door whose actor takes any game's contract, and keeps what the game's sessions sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.errors import BadBody, BrayxError
from brayx.gamecore.auth import Keys
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.contract_ticks import Tick


@dataclass
class Played:
    """One session, or one episode of an agent of a session with rows.

    Attributes:
        contract: of its game.
        ticks: what it sent, in order.
        last: its stop; None until then, or if it had no body.
        ended: why it ended; empty: it has not.
    """

    contract: Contract
    ticks: list[Tick] = field(default_factory=list)
    last: Tick | None = None
    ended: str = ""


@dataclass
class ContractService:
    """What the actors of a host share.

    Attributes:
        urls: of each door.
        host: what it is behind.
        expected: the contract that games have to fit; None: any.
        failures: errors with which the next ticks are answered, one each.
        takes_contracts: false: a start is answered as by an actor that knows none.
        sessions: all sessions and episodes of agents, in the order of their starts.
    """

    urls: dict[str, str] = field(default_factory=dict)
    host: LocalHost | None = None
    expected: Contract | None = None
    failures: list[BrayxError] = field(default_factory=list)
    takes_contracts: bool = True
    sessions: list[Played] = field(default_factory=list)


class _ContractActor(Actor):
    def __init__(self, service: ContractService) -> None:
        self._service = service

    async def start(self, session: str, body: bytes) -> bytes:
        if not self._service.takes_contracts:
            return b"Game Started"
        contract = Contract.parse(json.loads(body))
        if self._service.expected is not None and (differences := contract.differences(self._service.expected)):
            raise BadBody("; ".join(differences))
        self._contract, self._has_rows = contract, json.loads(body).get("rows", False)
        self._bodies = RowBodies(contract) if self._has_rows else ContractBodies(contract)
        self._running: dict[int, Played] = {}
        if not self._has_rows:
            self._agent(0)
        return json.dumps({"contract": 1, "id": contract.id}).encode()

    def _agent(self, number: int) -> Played:
        if number not in self._running:
            self._running[number] = Played(self._contract)
            self._service.sessions.append(self._running[number])
        return self._running[number]

    async def tick(self, body: bytes) -> bytes:
        if self._service.failures:
            raise self._service.failures.pop()
        tick = self._bodies.decode(body)
        action = action_of(self._contract)
        if tick.agents is None:
            self._agent(0).ticks.append(tick)
            return self._bodies.encode(action)
        acting = 0
        for row, agent in enumerate(tick.agents.tolist()):
            played, of_agent = self._agent(agent), tick.row(row)
            if of_agent.terminated or of_agent.truncated:
                played.last, played.ended = of_agent, "stop"
                del self._running[agent]
            else:
                played.ticks.append(of_agent)
                acting += 1
        return self._bodies.encode({name: [value] * acting for name, value in action.items()} if acting else {})

    async def stop(self, body: bytes) -> bytes:
        if not self._has_rows:
            self._agent(0).last = self._bodies.decode_stop(body)
        return b""

    async def on_end(self, reason: str) -> None:
        for played in getattr(self, "_running", {}).values():
            played.ended = reason


def action_of(contract: Contract) -> dict[str, Any]:
    """What the actor answers to each tick: half of what is possible, and the last choice."""
    numbers = {part.name: [0.5] * part.size for part in contract.continuous}
    return numbers | {part.name: part.start + part.size - 1 for part in contract.discrete}


@contextmanager
def serving_contracts(keys: Keys | None = None, tcp_port: int = 0) -> Iterator[ContractService]:
    """Open doors of a `ContractService`, which may require keys."""
    service = ContractService()
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=tcp_port)  # type: ignore[call-arg]
    host = LocalHost(config, Runtime(lambda: _ContractActor(service)), keys=keys)
    host.open()
    service.urls, service.host = dict(host.urls), host
    try:
        yield service
    finally:
        host.close()
