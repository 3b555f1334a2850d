"""Contracts at an actor's doors: a start says one, and its session's bodies are decoded by it.

Knows nothing of agents or models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from brayx.actor.codec import Codec, dumps_json
from brayx.actor.limits import ActionLimits, limits_for
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import VERSION, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import Decoded, RowBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.gamecore.contract_values import ObservationValues
from brayx.gamecore.fields import check_names
from brayx.strict_json import parse_json

_MAX_OPENED = 64
"""Maximum number of parsed starts that are cached."""
_MAX_START_BYTES = 2**16


def contract_of(start: Any, expected: Contract | None, missing: Collection[str] = ()) -> Contract:
    """The contract of a start.

    Args:
        start: the start's decoded body: a contract; or ``{"contract": ID}`` for the expected one.
        expected: the contract that the job's model was made for; None: none yet.
        missing: observations of the expected contract that the game's may lack.

    Raises:
        BadBody: it is no contract, or it does not fit the expected one; names the fields.
    """
    if not isinstance(start, Mapping) or start.get("contract") is None:
        raise BadBody(
            "the start has no contract, expected one in JSON: `GET /` of this service has it as `example.start`, and "
            "`brayx check JOB.yaml --env ID` prints that of an environment",
            field="contract",
        )
    if expected is None:
        if isinstance(start, Mapping) and isinstance(start.get("contract"), str):
            raise BadBody("contract is an id, but no contract is known yet: send the whole one", field="contract")
        return Contract.parse(start)
    if isinstance(start, Mapping) and start.get("contract") == expected.id:
        return expected
    if isinstance(start, Mapping) and isinstance(start.get("contract"), str):
        raise BadBody(
            f"contract is {start['contract']!r:.80}, not the one of this service: expected the whole contract, or "
            f"{expected.id!r}",
            field="contract",
            expected=expected.id,
        )
    contract = Contract.parse(start)
    given = {spec.name for spec in contract.observations}
    wanted = tuple(spec for spec in expected.observations if spec.name in given or spec.name not in missing)
    differences = contract.differences(replace(expected, observations=wanted))
    if contract.behaviour != expected.behaviour:
        differences.insert(0, f'behaviour is "{contract.behaviour}", expected "{expected.behaviour}"')
        if len(differences) == 1:
            raise BadBody(f'{differences[0]}: send "behaviour": "{expected.behaviour}"', field="behaviour")
    if differences:
        lacks = [f"{spec.name}: 0" for spec in wanted if spec.name not in given]
        serve = f"; it serves this game as it is with --set 'actor.missing={{{', '.join(lacks)}}}'"
        raise BadBody(
            f"the game's contract does not fit the model's: {'; '.join(differences)}. On brayx's machine, `brayx "
            f"train` with --new or --set project=NAME trains a model for it{serve * (len(lacks) == len(differences))}",
            differences=differences,
            expected=expected.id,
        )
    return contract


def missing_arrays(contract: Contract, missing: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a model gets for observations that a game lacks.

    Args:
        contract: the model's.
        missing: by observation a number, for all its values, or a value as a tick has it.

    Raises:
        ConfigError: the contract has no such observation, or the value does not fit it.
    """
    specs = {spec.name: spec for spec in contract.observations}
    arrays = {}
    try:
        for name, value in check_names(missing, specs).items():
            values = ObservationValues(specs[name])
            whole = np.full(specs[name].shape, value) if isinstance(value, int | float) else value
            arrays[name] = values.model_array(values.read(whole))
    except BadBody as error:
        raise ConfigError(f"actor.missing: {error.message}", **error.details) from None
    return arrays


def behaviour_of(start: Any, contracts: Mapping[str, Contract]) -> str:
    """Name of the behaviour that a start is of; it need not be a known one.

    Args:
        start: the start's decoded body: a contract; or ``{"contract": ID}``, which may have a ``behaviour``, too.
        contracts: the known ones by behaviour.

    Raises:
        BadBody: it names none, or its id is that of several.
    """
    if isinstance(start, Mapping) and isinstance(start.get("contract"), str) and "behaviour" not in start:
        named = [name for name, contract in contracts.items() if contract.id == start["contract"]]
        if len(named) > 1:
            raise BadBody(
                f'several behaviours have this contract: add "behaviour" to the start, one of {_quoted(named)}',
                field="behaviour",
            )
        return next(iter(named or contracts), Contract.behaviour)
    behaviour = start.get("behaviour", Contract.behaviour) if isinstance(start, Mapping) else Contract.behaviour
    if not isinstance(behaviour, str):
        raise BadBody(f"behaviour is {behaviour!r:.80}, expected a name", field="behaviour")
    return behaviour


def unknown_behaviour(behaviour: str, contracts: Iterable[str], advice: str = "") -> BadBody:
    """The error for a start of a behaviour that is not among several known ones; ``advice`` ends it."""
    return BadBody(f"behaviour is {behaviour!r:.80}, expected one of {_quoted(contracts)}{advice}", field="behaviour")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@dataclass(frozen=True)
class ContractCodec(Codec):
    """Decodes bodies by a contract: ``state.input`` is a `brayx.gamecore.contract_bodies.Tick`, ``state.output`` the
    actions by name.

    Attributes:
        contract: of a session the game's; before that the job's.
        rows: the session has several agents, with a row for each in its ticks.
        missing: what the model gets for observations that the game's contract lacks; before that, that it may lack.
        limits: the actor's options ``forbidden`` and ``forced``.
        learns: the model learns.
    """

    contract: Contract = field(default_factory=Contract)
    missing: Mapping[str, np.ndarray] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    learns: bool = False
    rows: bool = False
    _opened: dict[bytes, tuple[ContractCodec, dict[str, Any]]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _bodies(self) -> ContractBodies:
        return RowBodies(self.contract) if self.rows else ContractBodies(self.contract)

    def opened(self, start: bytes) -> tuple[ContractCodec, Any]:
        """See `Codec.opened`. A start is JSON in every encoding; in the parsed one, ``contract`` is the `Contract`, and
        ``limits`` are the `ActionLimits` of the session: the job's and its own.

        Games repeat their start for each episode: the newest ones are kept, since parsing takes longer than some ticks.
        """
        opened = self._opened.get(start)
        if opened is None:
            opened = self._open(start)
            if len(self._opened) >= _MAX_OPENED:
                self._opened.clear()
            if len(start) <= _MAX_START_BYTES:
                self._opened[start] = opened
        codec, document = opened
        return codec, dict(document)

    def _open(self, start: bytes) -> tuple[ContractCodec, dict[str, Any]]:
        document: Any = parse_json(start) if start else None
        contract = contract_of(document, self.contract, self.missing)
        given = {spec.name for spec in contract.observations}
        missing = {name: array for name, array in self.missing.items() if name not in given}
        has_rows = document.get("rows", False)
        if not isinstance(has_rows, bool):
            raise BadBody(f"rows is {has_rows!r:.80}, expected true or false", field="rows")
        of_job = ActionLimits.of_job(contract, self.limits, learns=self.learns)
        limits = of_job.with_more(ActionLimits.of(contract, document))
        opened = {**document, "contract": contract, "limits": limits}
        return ContractCodec(contract=contract, missing=missing, limits=self.limits, rows=has_rows), opened

    def started(self, output: Any) -> bytes:
        """See `Codec.started`."""
        contract = self.contract
        head = {"contract": VERSION, "id": contract.id, **output, "encoding": contract.encoding}
        return dumps_json(head | limits_for(contract, self.limits)).encode()

    def decode(self, body: bytes) -> Any:
        """See `Codec.decode`."""
        return self._completed(self._bodies.decode(body))

    def decode_stop(self, body: bytes) -> Any:
        """See `Codec.decode_stop`."""
        stop = self._bodies.decode_stop(body)
        return self._completed(stop) if stop is not None and stop.obs else stop

    def results(self, stop: Any) -> list[Any]:
        """See `Codec.results`."""
        return [] if stop.result is None else [stop.result]

    def _completed(self, tick: Tick) -> Tick:
        """Adds the observations that the game lacks."""
        for name, array in self.missing.items():
            tick.obs[name] = array if tick.agents is None else np.tile(array, (len(tick.agents), *[1] * array.ndim))
        return tick

    def reply(self, output: Any, body: bytes) -> bytes:
        """See `Codec.reply`."""
        if type(body) is Decoded and isinstance(self._bodies, RowBodies):
            return self._bodies.encode_decoded(output)
        return self.encode(output)

    def encode(self, output: Any) -> bytes:
        """See `Codec.encode`."""
        return output if isinstance(output, bytes) else self._bodies.encode(output)
