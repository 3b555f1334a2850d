"""The client of a game with a contract, against an actor that plays by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import ActionPart, Contract, ObservationSpec
from brayx.gamecore.contract_client import ContractClient
from tests.unit.bridges.by_contract import ByContract, playing_by_contract
from tests.unit.bridges.contract_service import serving_contracts
from tests.unit.gamecore.echo_server import EchoApp, serving

CONTRACT = Contract(
    observations=(ObservationSpec("side", shape=(2,)),),
    actions=(ActionPart("go", "discrete", 3, start=1, mask=True),),
)


@pytest.mark.parametrize("encoding", ["json", "msgpack", "packed"])
def test_a_game_by_contract(encoding: str) -> None:
    contract = replace(CONTRACT, encoding=encoding)  # type: ignore[arg-type]
    with playing_by_contract() as url, ContractClient(url, contract) as client:
        assert client.start("game-a")["id"] == contract.id
        assert client.tick([0.5, 1.0]) == {"go": 3}
        assert client.tick(np.float32([1, 2]), 0.5, mask=[1, 1, 0], extras={"info": {"speed": 2.0}}) == {"go": 2}
        with pytest.raises(BadBody, match=r"obs\.side has shape \[3\]"):
            client.tick([1, 2, 3])
        client.stop([3, 4], 1.0, terminated=True)
        assert client.client.session is None
    first, second, last = ByContract.ticks["a"]
    assert ByContract.contracts["a"] == contract
    assert [tick.reward for tick in (first, second, last)] == [0.0, 0.5, 1.0]
    assert (second.obs["action_mask"].tolist(), second.info) == ([1, 1, 0], {"speed": 2.0})
    assert (last.terminated, last.obs["side"].tolist()) == (True, [3.0, 4.0])


@pytest.mark.parametrize("encoding", ["json", "packed"])
def test_a_game_of_several_agents(encoding: str) -> None:
    contract = replace(CONTRACT, encoding=encoding)  # type: ignore[arg-type]
    with serving_contracts() as service, ContractClient(service.urls["ws"], contract, rows=True) as client:
        assert client.start()["id"] == contract.id
        assert client.tick_rows([4, 9], [[0, 1], [2, 3]])["go"].tolist() == [3, 3]
        ended = {"terminated": [True, False, False]}
        actions = client.tick_rows([4, 4, 9], [[0, 1], [4, 5], [2, 3]], [1.0, 0, 0.5], mask=[[1, 0, 1]] * 3, **ended)
        assert actions["go"].tolist() == [3, 3]
        with pytest.raises(BadBody, match=r"obs\.side has shape"):
            client.tick_rows([4, 9], [[0, 1]])
        client.stop()
    assert [(len(played.ticks), played.last is not None) for played in service.sessions] == [
        (1, True),
        (2, False),
        (1, False),
    ]
    with ContractClient(service.urls["ws"], contract) as single, pytest.raises(ConfigError, match="rows=True"):
        single.tick_rows([0], [[0, 1]])


@pytest.mark.parametrize("reply", [b"Game Started", b"[]", b'{"id": "sha256:other"}'])
def test_a_service_without_contracts_is_named(reply: bytes) -> None:
    app = EchoApp()
    with serving(app) as address, ContractClient(f"http://{address}", CONTRACT) as client:
        step = app.step
        app.step = lambda request: step(request) and reply  # type: ignore[method-assign,misc]
        with pytest.raises(ConfigError, match="takes no contracts"):
            client.start()
        assert not app.running, "no session is left"
