"""A behaviour that a replica does not know: the job learns it once, and each replica that asks can act for it then."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.cluster import lobby as module
from brayx.cluster.lobby import Joining, RayLobby
from brayx.errors import BadBody, DeadlineExceeded, ServiceFull
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from tests.unit.local.test_self_play import CONTRACT, LEARNER, choosing, finish, tick
from tests.unit.replay.made import Box
from tests.waiting import until_awaited

OTHER = {**CONTRACT, "observations": {"side": {"shape": [2]}}}


def contract(behaviour: str, document: dict[str, Any] = CONTRACT) -> Contract:
    return Contract.parse({**document, "behaviour": behaviour})


@pytest.fixture
def job() -> JobConfig:
    return JobConfig.load(TEMPLATES / "game.yaml")


def test_the_job_answers_all_replicas_once_it_can_be_acted_for_a_behaviour(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, Any] = {}
    lobby = RayLobby(job, answers.__setitem__)
    lobby.spec_of = str.encode
    lobby.expect(contract("agent"))
    for key, asked in (("1", contract("runner")), ("2", contract("runner")), ("3", contract("agent"))):
        lobby.meet(key, asked)
    assert [arrived.behaviour for arrived in lobby.arrived()] == ["runner"]
    assert lobby.arrived() == []
    lobby.admit("agent")
    assert answers == {"3": b"agent"}
    lobby.admit("runner")
    lobby.meet("4", contract("runner", OTHER))
    assert answers == {"3": b"agent", "1": b"runner", "2": b"runner", "4": b"runner"}
    lobby.meet("5", contract("keeper"))
    lobby.admit("keeper", "no network for it")
    lobby.meet("6", contract("keeper"))
    assert [answers[key].message for key in "56"] == ["no network for it"] * 2
    lobby.meet("7", contract("keeper", OTHER))
    assert [arrived.id for arrived in lobby.arrived()] == [contract("keeper").id, contract("keeper", OTHER).id]
    monkeypatch.setattr(module, "MAX_BEHAVIOURS", 3)
    lobby.meet("8", contract("jumper"))
    assert "has 3 behaviours" in answers["8"].message


def start(document: dict[str, Any]) -> StepRequest:
    return StepRequest(StepKind.START, "a", json.dumps(document).encode())


async def test_a_replica_holds_starts_until_it_acts_and_asks_again_if_the_job_is_late(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    opened: list[str] = []

    def ask_job(hub: str, request: Contract, timeout_s: float) -> bytes:
        asked.append(request.behaviour)
        if len(asked) == 1:
            raise DeadlineExceeded("the job did not take the request")
        if request.behaviour == "keeper":
            raise BadBody("no network for it")
        return pickle.dumps(request.behaviour)

    async def act(spec: Any) -> None:
        if spec == "thrower":
            raise ValueError("no such layer")
        opened.append(spec)

    monkeypatch.setattr(module, "ask_job", ask_job)
    joining = Joining(job, job.actors["actor"], "hub", act)
    joining.acts(contract("agent"))
    admit = joining.admission.admit
    await admit(start(CONTRACT))
    await admit(start({**OTHER, "behaviour": "runner"}))
    await admit(start({**OTHER, "behaviour": "runner"}))
    assert (asked, opened) == (["runner"] * 2, ["runner"])
    with pytest.raises(BadBody, match="behaviour 'keeper' cannot be learned: no network for it"):
        await admit(start({**CONTRACT, "behaviour": "keeper"}))
    with pytest.raises(BadBody, match=r"behaviour 'thrower' cannot be learned: .*ValueError: no such layer"):
        await admit(start({**CONTRACT, "behaviour": "thrower"}))
    monkeypatch.setattr(module, "ask_job", lambda *request: asyncio.run(asyncio.sleep(0.01)) or ask_job(*request))
    held = asyncio.create_task(admit(start({**CONTRACT, "behaviour": "jumper"})))
    await until_awaited(lambda: joining._tasks, "it asks")
    await joining.close()
    with pytest.raises(ServiceFull, match="the training ended"):
        await held


async def test_a_session_that_moves_to_a_replica_that_does_not_know_its_behaviour_goes_on() -> None:
    behaviours: dict[str, AgentActorFactory] = {}
    starts: list[StepRequest] = []

    def factory(behaviour: str, admit: Any = None) -> AgentActorFactory:
        agent = AgentConfig.model_validate({"module": "brayx.actor.contract_agent", "class": "ContractAgent"})
        document = {**CONTRACT, "behaviour": behaviour}
        job = {"seed": 0, "mode": "train", "agent": {"options": {}}, "contract": document}
        services = Services({"model": choosing(LEARNER, 7)}, {"buffer": Box()}, Recorder())
        config = ActorConfig(agents=["agent"], serialize="contract", episode_length=4)
        return AgentActorFactory.of(config, {"agent": agent}, ".", job, services, behaviours=behaviours, admit=admit)

    async def admit(request: StepRequest) -> None:
        starts.append(request)
        behaviours["runner"] = factory("runner")

    begun = factory("runner")()
    await begun.start("a", start({**CONTRACT, "behaviour": "runner"}).body)
    assert await tick(begun) == LEARNER
    snapshot = await begun.snapshot()
    assert snapshot is not None
    await begun.on_end("moved")
    behaviours["agent"] = factory("agent", admit)
    moved = behaviours["agent"]()
    await moved.restore("a", snapshot)
    assert await tick(moved) == LEARNER
    await finish(moved)
    assert [json.loads(request.body)["behaviour"] for request in starts] == ["runner"]
