"""`ContractClient`: a game's client by contract: observations in, actions out.

    contract = Contract.parse({"contract": 1, "observations": {"side": {"shape": [1]}},
                               "actions": {"go": {"kind": "discrete", "size": 2}}, "encoding": "packed"})
    with ContractClient("tcp://127.0.0.1:8101", contract) as client:
        client.start()
        action = client.tick([0.5])                       # {"go": 1}
        client.stop([-0.5], reward=1.0, terminated=True)

Adds the bodies to `brayx.gamecore.client.Client`, and knows as little of what is behind the door.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from brayx.errors import BadBody, ConfigError
from brayx.gamecore.client import Client
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.games import START_S
from brayx.gamecore.transports.local import ServiceThread
from brayx.strict_json import parse_json


class ContractClient:
    """A blocking client of a game with a contract, with one session at a time.

    Args:
        url: as for `brayx.gamecore.client.Client`.
        contract: what the game observes and does; its ``encoding`` is that of the bodies.
        rows: the session has several agents: play with `tick_rows` in place of `tick`.
        **options: as for `brayx.gamecore.client.Client`.

    Raises:
        ConfigError: the URL cannot be used, or the credentials are inconsistent.
    """

    def __init__(self, url: str | ServiceThread, contract: Contract, *, rows: bool = False, **options: Any) -> None:
        self.client = Client(url, **options)
        self._bodies: ContractBodies = RowBodies(contract) if rows else ContractBodies(contract)

    def start(self, session: str | None = None, *, timeout_s: float = START_S, **more: Any) -> dict[str, Any]:
        """Starts a session, which a training may hold until its model acts; returns the service's answer, such as its
        ``policy_version``.

        Args:
            session: the session's id; None: a new one.
            timeout_s: time limit.
            **more: further fields of the start, such as ``forbidden``.

        Raises:
            BadBody: the service has a model for another contract; names the fields.
            ConfigError: the service takes no contracts.
            BrayxError: as for `Client.start`.
        """
        contract = self._bodies.contract
        rows = {"rows": True} if isinstance(self._bodies, RowBodies) else {}
        body = json.dumps({**contract.as_dict(), **rows, **more}).encode()
        reply = self.client.start(body, session, timeout_s=timeout_s)
        try:
            document: Any = parse_json(reply)
        except BadBody:
            document = None
        if isinstance(document, dict) and document.get("id") == contract.id:
            return document
        self.client.stop()
        raise ConfigError(
            f"{self.client.url} takes no contracts (it answers {reply[:40]!r}): expected a job like game.yaml",
            url=self.client.url,
        )

    def tick(self, obs: Any, reward: float | Mapping[str, float] | None = None, **more: Any) -> dict[str, Any]:
        """Sends what the game observes; returns the actions by name, each an ``int`` or a float32 array ``[size]``.

        Args:
            obs, reward, **more: as for `ContractBodies.encode_tick`.

        Raises:
            BadBody: a value does not fit the contract.
            BrayxError: as for `Client.tick`.
        """
        return self._bodies.decode_reply(self.client.tick(self._bodies.encode_tick(obs, reward, **more)))

    def tick_rows(self, agents: Sequence[int], obs: Any, reward: Any = None, **more: Any) -> dict[str, Any]:
        """Sends a row for each of several agents; returns the actions of those that have not ended, by name.

        Each is int64 ``[N]`` or float32 ``[N, size]``.

        Args:
            agents, obs, reward, **more: as for `RowBodies.decoded_rows`.

        Raises:
            ConfigError: the client is one of a single agent.
            BadBody: a value does not fit the contract.
            BrayxError: as for `Client.tick`.
        """
        if not isinstance(self._bodies, RowBodies):
            raise ConfigError("this client has one agent: expected ContractClient(..., rows=True)")
        return self._bodies.decode_reply(
            self.client.tick(bytes(self._bodies.decoded_rows(agents, obs, reward, **more)))
        )

    def stop(self, obs: Any = None, reward: float | Mapping[str, float] | None = None, **more: Any) -> None:
        """Ends the session, with ``terminated=True`` or ``truncated=True`` if the game has ended; arguments and errors
        as for `tick`. With rows it has no body: agents whose episodes go on are broken off."""
        self.client.stop(b"" if isinstance(self._bodies, RowBodies) else self._bodies.encode_tick(obs, reward, **more))

    def __enter__(self) -> Self:
        self.client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.__exit__(kind, error, trace)
