"""`ModelClient` over a replica in this process: its knowledge of versions, and models that follow an alias."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from brayx.cluster.model import ModelReplica
from brayx.cluster.model_client import ModelClient
from brayx.cluster.pool import PoolClient
from brayx.errors import ConfigError, DeadlineExceeded, ModelError, QueueFull, VersionUnknown
from brayx.model.arms import Followed
from brayx.model.config import ModelConfig
from brayx.model.following import AliasFollower


def build():
    return torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),)


def handle_of(replica):
    """The replica's methods in the form of a Serve handle."""
    names = ("forward", "get_spec", "get_version", "ready")
    return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(replica, name)) for name in names})


@pytest.fixture
async def replica():
    made = ModelReplica(build, ModelConfig(module="unused", engine="torch"))
    yield made
    await made.close()


async def test_the_version_is_known_before_the_first_forward(replica):
    replica.model.load(7, {key: value.numpy() for key, value in build()[0].state_dict().items()})
    remote = await ModelClient.connect(handle_of(replica))
    assert remote.version == 7
    replica.model.load(9, {key: value.numpy() for key, value in build()[0].state_dict().items()})
    assert remote.version == 7
    assert await remote.refresh_version() == remote.version == 9
    assert (await remote.forward(np.zeros(2, np.float32))).policy_version == 9
    await remote.close()


async def test_a_withdrawn_version_is_no_longer_reported_or_pinned(replica):
    remote = await ModelClient.connect(handle_of(replica))
    weights = {key: value.numpy() for key, value in build()[0].state_dict().items()}
    obs = np.zeros(2, np.float32)
    for version in (1, 3, 1):
        replica.model.load(version, weights)
        assert await remote.refresh_version() == remote.version == version
    for version in (3, 1):
        replica.model.load(version, weights)
        await remote.forward(obs)
        assert remote.version == remote.pinned().version == version
    assert (await remote.forward(obs, version=3)).policy_version == 3
    assert remote.version == 1, "a forward of a pinned version does not change the newest one"
    await remote.close()


async def test_connecting_retries_if_a_replica_dies_and_raises_no_ray_error(replica):
    handle = handle_of(replica)
    answers = [RayActorError(), RayActorError(), replica.model.spec]

    async def get_spec():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    handle.get_spec = SimpleNamespace(remote=get_spec)
    await (await ModelClient.connect(handle)).close()
    for error, typed in (
        (BackPressureError(num_queued_requests=3, max_queued_requests=3), QueueFull),
        (RayServeException("no such application"), ModelError),
        (RayTaskError("get_spec", "", ConfigError("no such device")), ConfigError),
    ):
        answers.append(error)
        with pytest.raises(typed):
            await ModelClient.connect(handle)


async def test_a_request_to_a_silent_deployment_ends(replica):
    handle = handle_of(replica)
    remote = await ModelClient.connect(handle)
    handle.get_version = SimpleNamespace(remote=lambda: asyncio.sleep(60))
    with pytest.raises(DeadlineExceeded, match="version"):
        await remote.refresh_version(timeout_s=0.01)
    assert remote.version == 0
    await remote.close()


async def test_a_pinned_client_asks_for_its_version(replica):
    remote = await ModelClient.connect(handle_of(replica))
    pinned = remote.pinned()
    replica.model.load(1, {key: value.numpy() for key, value in build()[0].state_dict().items()})
    obs = np.zeros(2, np.float32)
    mine, newest = await asyncio.gather(pinned.forward(obs), remote.forward(obs))
    assert (pinned.version, mine.policy_version, newest.policy_version) == (0, 0, 1)
    with pytest.raises(VersionUnknown, match="nearest is 1"):
        await remote.forward(obs, version=5)
    await remote.close()


async def test_a_pin_of_a_dropped_version_fails_and_the_nearest_can_be_pinned(replica):
    remote = await ModelClient.connect(handle_of(replica))
    weights = {key: value.numpy() for key, value in build()[0].state_dict().items()}
    replica.model.load(1, weights)
    await remote.refresh_version()
    pinned, obs = remote.pinned(), np.zeros(2, np.float32)
    for version in (2, 3):  # as many as the replica keeps
        replica.model.load(version, weights)
    with pytest.raises(VersionUnknown, match="no policy version 1, nearest is 2") as refused:
        await pinned.forward(obs)
    assert refused.value.details == {"version": 1, "nearest": 2, "known": [2, 3]}
    assert (await remote.pinned(refused.value.details["nearest"]).forward(obs)).policy_version == 2
    assert (await remote.forward(obs)).policy_version == 3
    await remote.close()


async def test_no_session_is_sent_to_a_version_that_the_deployment_lacks(replica):
    remote = await ModelClient.connect(handle_of(replica))
    pool = PoolClient("unused", "", "", {})
    following = AliasFollower(pool, {"model": Followed("policy", canary="candidate", share=0.5)}, {"model": remote})
    replica.model.load(1, {key: value.numpy() for key, value in build()[0].state_dict().items()})
    with pytest.raises(VersionUnknown, match="no policy version 5"):
        await following.move({"model": {"champion": 5, "candidate": 1}})
    assert {following.choose(f"game-{i}")["model"].version for i in range(100)} == {0, 1}
    await remote.close()
