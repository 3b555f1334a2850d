"""`brayx.RemoteModel` and `brayx.RemoteBuffer` in the process of a local host, where Ray cannot be imported."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import brayx
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.engines.torch import TorchEngine
from brayx.errors import BadFragment, ConfigError, DeadlineExceeded, ModelError
from brayx.gamecore.client import Client
from brayx.jobs.handles import JobBuffer, JobModel, offer
from brayx.local.buffer import LocalBuffer
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.replay.buffer import NullBuffer
from brayx.replay.config import BufferConfig

OBS = np.array([1.0, 2.0], np.float32)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.sum(-1) * self.factor


def fragment(**changed: object) -> brayx.Fragment:
    arrays = {
        "obs": np.ones((3, 2), np.float32),
        "action": np.zeros(2, np.int64),
        "log_prob": np.zeros(2, np.float32),
        "reward": np.ones(2, np.float32),
        "policy_version": np.zeros(2, np.int64),
    }
    return brayx.Fragment(**{**arrays, **changed}, terminated=True, truncated=False)  # type: ignore[arg-type]


class Named(brayx.Agent):
    """An agent that finds its job's model and buffer by name."""

    async def on_tick(self, state: brayx.State) -> None:
        model = await brayx.RemoteModel.connect("policy")
        again = brayx.RemoteModel("policy")
        single, many = await again.forward(OBS), await model.forward(np.stack([OBS, 2 * OBS]), batch=True)
        brayx.RemoteBuffer("buffer").push(fragment())
        state.output = {"one": float(single), "many": many.tolist(), "version": model.version}
        try:
            model(OBS)
        except ModelError as error:
            state.output["blocked"] = error.message


class Job:
    """A host with one model and one buffer, and a client of it."""

    def __init__(self, buffers: dict[str, object]) -> None:
        self.model = LocalModel(TorchEngine(Sum(), (np.ones((2, 2), np.float32),)), version=3)
        services = brayx.Services({"policy": self.model}, {}, Recorder())
        factory = AgentActorFactory(agents={"agent": Named}, config={}, services=services)
        self.host = LocalHost(
            ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=None),
            Runtime(factory, services.recorder, close=[self.model.close]),
        )
        self.offered = offer({"policy": self.model}, buffers, self.host.loop)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray", "brayx.cluster.remote_model", "brayx.cluster.remote_buffer"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def buffer() -> LocalBuffer:
    return LocalBuffer(BufferConfig(size=1, batch_size=2, unroll_length=2), None, Recorder())


@pytest.fixture
def job(buffer: LocalBuffer) -> Iterator[Job]:
    job = Job({"buffer": buffer, "empty": LocalBuffer(BufferConfig(unroll_length=2), None, Recorder())})
    job.host.open()
    with job.offered:
        yield job
    job.host.close()


def test_an_agent_finds_its_jobs_model_and_buffer(job: Job, buffer: LocalBuffer) -> None:
    for _ in range(2):
        with Client(job.host.url) as client:
            client.start()
            reply = json.loads(client.tick(b"{}"))
            client.stop()
    blocked = reply.pop("blocked")
    assert reply == {"one": 3.0, "many": [3.0, 6.0], "version": 3}
    assert "await" in blocked
    batch = buffer.pop()
    assert batch is not None
    assert batch["reward"].sum() == 4.0


def test_a_script_in_the_hosts_process_finds_them_too(job: Job) -> None:
    model = brayx.RemoteModel("policy")
    assert isinstance(model, JobModel)
    assert model(OBS) == 3.0
    assert model(np.stack([OBS, OBS]), batch=True).tolist() == [3.0, 3.0]
    assert asyncio.run(model.forward(OBS)) == 3.0
    job.model.load(4, {"factor": np.array([2.0], np.float32)})
    assert (model(OBS), model.version) == (6.0, 4)
    model.close()
    assert model(OBS) == 6.0
    with pytest.raises(AttributeError, match="only its learner publishes"):
        model.publish_weights({})


def test_a_push_that_may_not_drop_waits_for_room(job: Job) -> None:
    buffer = brayx.RemoteBuffer("buffer")
    assert isinstance(buffer, JobBuffer)
    buffer.push(fragment(), fragment(), drop=False, timeout_s=0.0)
    with pytest.raises(DeadlineExceeded, match=r"no room for 4 transitions") as late:
        buffer.push(fragment(), fragment(), drop=False, timeout_s=0.01)
    assert late.value.details == {"left": 4}
    with pytest.raises(DeadlineExceeded):
        asyncio.run(buffer.push_async(fragment(), drop=False, timeout_s=0.01))
    with pytest.raises(BadFragment, match="reward"):
        brayx.RemoteBuffer("empty").push(fragment(reward=np.array([np.nan, 0], np.float32)), drop=False)


def test_options_that_belong_to_the_job_are_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="got Sum, tuple, override_model"):
        brayx.RemoteModel("policy", Sum(), (OBS[None],), override_model=True)
    with pytest.raises(ConfigError, match="got num_workers"):
        brayx.RemoteModel("policy", num_workers=2)
    with pytest.raises(ConfigError, match="got Sum"):
        asyncio.run(brayx.RemoteModel.connect("policy", Sum()))
    for make in (brayx.RemoteBuffer, brayx.RemoteBuffer.attach):
        with pytest.raises(ConfigError, match=r"buffer 'buffer' .* got size"):
            make("buffer", size=8)


def test_a_served_job_discards_pushes() -> None:
    with offer({}, {"buffer": NullBuffer()}, asyncio.new_event_loop()):
        brayx.RemoteBuffer("buffer").push(fragment(), drop=False)


def test_unknown_names_are_looked_up_on_the_cluster(job: Job) -> None:
    for make in (brayx.RemoteModel, brayx.RemoteBuffer):
        with pytest.raises(ImportError, match=r"brayx\.cluster\.remote_\w+ halted"):
            make("other")
