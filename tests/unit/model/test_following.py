"""Shares of canaries: set for one process, or agreed on by several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from brayx.engines.torch import TorchEngine
from brayx.errors import ConfigError
from brayx.model.arms import Followed
from brayx.model.following import AliasFollower
from brayx.model.local import LocalModel


@pytest.fixture
async def models() -> Any:
    engine = TorchEngine(torch.nn.Linear(1, 1), (np.zeros((1, 1), np.float32),))
    made = {name: LocalModel(engine, version=1) for name in ("left", "right", "alone")}
    yield made
    for model in made.values():
        await model.close()


def follower(models: Any, share: float = 0.1) -> AliasFollower:
    canaries = {name: Followed(name, canary="candidate", share=share) for name in ("left", "right")}
    source: Any = None
    return AliasFollower(source, canaries | {"alone": Followed("alone")}, models)


def shares(replica: AliasFollower) -> dict[str, float]:
    return {model: canary["share"] for model, canary in replica.shares().items()}


async def test_a_share_is_set_for_one_canary(models: Any) -> None:
    replica = follower(models)
    replica.set_share("left", 0.5)
    replica.set_share("right", 1)
    replica.set_share("left", 0.25)
    assert shares(replica) == {"left": 0.25, "right": 1.0}
    for model in ("alone", "none"):
        with pytest.raises(ConfigError, match="models with one: left, right"):
            replica.set_share(model, 0.5)
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        replica.set_share("left", 1.5)
    assert shares(replica) == {"left": 0.25, "right": 1.0}


async def test_another_replica_takes_the_agreed_shares_unless_it_was_deployed_with_others(models: Any) -> None:
    first, second, redeployed = follower(models), follower(models), follower(models, share=0.2)
    agreed = {first.check_share("left", 0.5): 0.5}
    assert shares(first) == {"left": 0.1, "right": 0.1}, "checking changes nothing"
    for replica in (first, second, redeployed):
        replica.take_shares(agreed)
    assert shares(first) == shares(second) == {"left": 0.5, "right": 0.1}
    assert shares(redeployed) == {"left": 0.2, "right": 0.2}
    second.take_shares({})
    assert shares(second) == {"left": 0.5, "right": 0.1}, "a directory that has restarted names none for a moment"
