"""A start and a tick that a service accepts, for the page of its doors: by its contract, or as a game has sent them.

Knows nothing of pages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.actor.service import Reply
from brayx.errors import BrayxError
from brayx.gamecore.contract import Contract, ObservationSpec
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.strict_json import parse_json

_MAX_BYTES = 4096
"""Maximum size of a body that is shown."""


def contract_example(contract: Contract) -> dict[str, str]:
    """A start and a tick of a game with a contract, under ``start`` and ``tick``, as JSON whatever its encoding is.

    A body of more than `_MAX_BYTES` is left out.
    """
    shown = dataclasses.replace(contract, encoding="json")
    tick = ContractBodies(shown).encode_tick({spec.name: _value(spec) for spec in shown.observations})
    bodies = {"start": json.dumps(shown.as_dict(), ensure_ascii=False), "tick": json.dumps(json.loads(tick))}
    return {kind: body for kind, body in bodies.items() if len(body) <= _MAX_BYTES}


def contract_facts(contract: Mapping[str, Any] | None) -> dict[str, Any]:
    """The example for the status page of a job with a contract; empty without one."""
    return {"example": contract_example(Contract.parse(contract))} if contract else {}


def _value(spec: ObservationSpec) -> Any:
    if spec.kind == "text":
        return ""
    if spec.kind == "entities":
        return [[0] * spec.shape[1]]
    return np.full(spec.shape, spec.start).tolist()


class AcceptedBodies:
    """Keeps the bodies of a start, and of a tick of the same session, that a service has answered.

    Attributes:
        example: like that of `contract_example`; empty: none was answered yet.
        wanted: whether it still needs requests.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.example: dict[str, str] = {}
        self.wanted = wanted
        self._started: StepRequest | None = None

    def watch(self, request: StepRequest, reply: Reply) -> Reply:
        """A reply to use in place of ``reply``: it keeps the request's body if the service accepts it."""
        if request.kind not in (StepKind.START, StepKind.TICK):
            return reply

        def watched(result: bytes | BrayxError) -> None:
            if self.wanted and not isinstance(result, BrayxError):
                self._take(request)
            reply(result)

        return watched

    def _take(self, request: StepRequest) -> None:
        if request.kind is StepKind.START:
            self._started, self.example = request, _by_contract(request.body)
            self.wanted = not self.example
        elif self._started is not None and self._started.session == request.session:
            self.wanted = False
            bodies = {"start": _text(self._started.body), "tick": _text(request.body)}
            self.example = {kind: body for kind, body in bodies.items() if body is not None}


def _by_contract(start: bytes) -> dict[str, str]:
    """The example by the contract in a start; empty: it has none."""
    try:
        return contract_example(Contract.parse(parse_json(start))) if start else {}
    except BrayxError:
        return {}


def _text(body: bytes) -> str | None:
    """A body as text; None: it is not UTF-8, or too long."""
    try:
        return body.decode() if len(body) <= _MAX_BYTES else None
    except UnicodeDecodeError:
        return None
