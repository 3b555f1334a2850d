"""The actor application: a job's agents and models behind Serve's doors.

A training and a service deploy the same `application`. They differ only in where weights come from (the trial's weight
store, or a registered version) and in whether episodes go to a replay buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray import serve

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.actor.examples import contract_facts
from brayx.cluster.acting import Acting, recorder_of
from brayx.cluster.league_seats import LeagueSpec
from brayx.cluster.lobby import Joining
from brayx.cluster.model import model_application
from brayx.cluster.pool import PoolClient
from brayx.cluster.replica import ActorRuntime, actor_deployment
from brayx.cluster.teams import SelfPlaySpec
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig
from brayx.jobs.weights import followed_by, registered
from brayx.league.served import ServedLeague
from brayx.model.arms import Followed, WeightSource
from brayx.model.build import acting_model
from brayx.model.config import ModelConfig
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing


@dataclass(frozen=True)
class ActorSpec:
    """Everything a replica needs to build its actors; plain values, so that it pickles to any node.

    Attributes:
        folder: folder of the job's YAML, which is searched first for its modules.
        config: the job as plain dicts, for the agents.
        actor, agents, models: the components by name.
        weights: source of each model's weights.
        buffers: Ray actor of each buffer; empty when serving.
        hub: Ray actor of the trial's hub; empty when serving.
        recording: how sessions are recorded; None: they are not.
        pool: source of aliases for models served by one; None: there are none.
        league: the league in training that the sessions play in; None: there is none.
        self_play: the self-play of teams; None: there is none.
        job: the job of a training whose games say contracts, with all its behaviours; None: it is another one.
        served_league: the league whose players a start can request; None: its request is left to the agents.
    """

    folder: str
    config: Mapping[str, Any]
    actor: ActorConfig
    agents: Mapping[str, AgentConfig]
    models: Mapping[str, ModelConfig]
    weights: Mapping[str, WeightSource]
    buffers: Mapping[str, str] = field(default_factory=dict)
    hub: str = ""
    recording: RecordingConfig | None = None
    drawing: Drawing | None = None
    pool: PoolClient | None = None
    league: LeagueSpec | None = None
    served_league: ServedLeague | None = None
    self_play: SelfPlaySpec | None = None
    job: JobConfig | None = None

    @property
    def followed(self) -> dict[str, Followed]:
        """The models that follow an alias."""
        return {} if self.pool is None else followed_by(self.weights)

    @property
    def waits(self) -> bool:
        """Whether its job waits for its first game's contract."""
        return self.job is not None and self.job.needs_contract

    @property
    def learned(self) -> str:
        """Name of the model that learns; empty: none does."""
        if self.league is not None:
            return self.league.config.model
        return next((name for name, source in self.weights.items() if source.store), "")


async def build_runtime(spec: ActorSpec, handles: Mapping[str, Any]) -> ActorRuntime:
    """Builds a replica's models, agents and connections, in its own process.

    Args:
        spec: the spec of the replica.
        handles: Serve handles of the models that are placed ``remote``.
    """
    acting = Acting(spec, ActorRuntime(make_actor=_no_actor, recorder=recorder_of(spec)))
    await acting.open(handles)
    runtime, joining = acting.runtime, None
    if spec.job is not None:
        joining = Joining(spec.job, spec.actor, spec.hub, acting.act)
        runtime.admit = joining.admission.admit
        runtime.close.insert(0, joining.close)
    if not spec.waits:
        await acting.act(spec, handles)
    if joining is not None and not spec.waits:
        joining.acts(Contract.parse(spec.config["contract"]))

    def make_actor() -> Actor:
        factory = acting.first
        if factory is not None:
            return factory()
        assert joining is not None
        return joining.admission.refuse_call()

    def describe() -> dict[str, Any]:
        factory = acting.first
        waits = {} if joining is None else joining.admission.describe()
        return {
            "mode": spec.config["mode"],
            "policy_versions": acting.versions(),
            "registered": registered(spec.weights, {} if runtime.follower is None else runtime.follower.versions()),
            **(waits if factory is None else contract_facts(factory.config.get("contract"))),
        }

    runtime.make_actor, runtime.versions, runtime.describe = make_actor, acting.versions, describe
    return runtime


def _no_actor() -> Any:
    raise AssertionError("the runtime is not built yet")


def application(spec: ActorSpec, *, name: str, directory: str) -> serve.Application:
    """The Serve application of ``spec``: the actor deployment, and one deployment for each remote model.

    Args:
        spec: the spec of its replicas.
        name: name of the actor deployment.
        directory: name of the session directory's Ray actor.
    """
    handles = {
        model: model_application(
            functools.partial(acting_model, spec.folder, config.module, model, spec.config),
            config,
            spec.weights[model],
            name=model,
            pool=spec.pool,
            hub=spec.hub,
        )
        for model, config in spec.models.items()
        if config.placement == "remote"
    }
    build = functools.partial(build_runtime, spec)
    # The sessions of a league's game are on one replica, whether they share states or not.
    in_games = spec.league is not None or spec.self_play is not None or (spec.job is not None and spec.job.leagues)
    config = spec.actor.model_copy(update={"share": "game"}) if in_games else spec.actor
    return actor_deployment(build, config, name=name, directory=directory, handles=handles)


def actor_spec(
    job: JobConfig,
    actor: str,
    *,
    mode: Literal["train", "serve"],
    weights: Mapping[str, WeightSource],
    buffers: Mapping[str, str] | None = None,
    hub: str = "",
    pool: PoolClient | None = None,
    league: LeagueSpec | None = None,
    self_play: SelfPlaySpec | None = None,
) -> ActorSpec:
    """The spec of one of a job's actors."""
    config = job.actors[actor]
    return ActorSpec(
        folder=job.folder,
        config=job.in_mode(mode).as_dict(),
        actor=config,
        agents={name: job.agents[name] for name in config.agents},
        models=job.models,
        weights=weights,
        buffers=buffers or {},
        hub=hub,
        recording=None if job.recording is None else job.recording.absolute(),
        drawing=job.drawing,
        pool=pool,
        league=league,
        self_play=self_play,
    )
