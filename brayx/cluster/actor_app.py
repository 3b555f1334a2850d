"""The actor application: a job's agents and models behind Serve's doors.

A training and a service deploy the same `application`. They differ only in where weights come from (the trial's weight
store, or a registered version) and in whether episodes go to a replay buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray import serve

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.actor.examples import contract_facts
from brayx.actor.serving import tracing_of
from brayx.cluster.hub import HubClient
from brayx.cluster.league_seats import LeagueInReplica, LeagueSpec
from brayx.cluster.lobby import Joining
from brayx.cluster.model import model_application
from brayx.cluster.model_client import ModelClient
from brayx.cluster.named import WEIGHT_STORE, get_actor
from brayx.cluster.pool import PoolClient
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.replica import ActorRuntime, actor_deployment
from brayx.cluster.teams import SelfPlaySpec, TeamsInReplica
from brayx.cluster.weights import WeightSubscriber, fetch_weights
from brayx.engines import refuse_frozen
from brayx.errors import BrayxError, ConfigError, ModelError
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig
from brayx.jobs.weights import followed_by, registered
from brayx.league.config import LeagueConfig
from brayx.league.served import ServedLeague
from brayx.league.teams import TeamPlayers
from brayx.model.arms import Followed, WeightSource
from brayx.model.build import acting_model
from brayx.model.checkpoints import engine_from
from brayx.model.config import ModelConfig
from brayx.model.following import AliasFollower, initial_version
from brayx.model.local import LocalModel, batching
from brayx.model.pool import Aliases
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.recording.recorder import closing, recorders_of
from brayx.types import Weights

_VERSION_EVERY_S = 1.0


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


class _PoolHub:
    """The pool in place of a hub's Ray actor, for a `HubClient`."""

    def __init__(self, pool: PoolClient) -> None:
        self.push = self
        self.remote = pool.push


async def build_runtime(spec: ActorSpec, handles: Mapping[str, Any]) -> ActorRuntime:
    """Builds a replica's models, agents and connections, in its own process.

    Args:
        spec: the spec of the replica.
        handles: Serve handles of the models that are placed ``remote``.
    """
    recorder = HubClient.of(spec.hub)
    if spec.pool is not None and spec.pool.writes_results:
        recorder = HubClient(_PoolHub(spec.pool))
    runtime = ActorRuntime(make_actor=_no_actor, recorder=recorder)

    async def close_recorder() -> None:
        if league is not None:
            await league.close()  # first: it counts the last games
        await asyncio.to_thread(recorder.close)
        if spec.pool is not None and spec.pool.writes_results:
            await spec.pool.flush()

    # The version of the deployment may be outdated or deleted by now.
    aliases = await spec.pool.look() if spec.pool is not None and spec.followed else None
    models: dict[str, LocalModel | ModelClient] = {}
    for name, config in spec.models.items():
        if name in handles:
            models[name] = await _remote_model(config, handles[name], runtime)
        elif name != spec.learned or not (spec.league is not None or spec.waits):
            models[name] = await _local_model(name, spec, aliases, runtime)
    league, league_learners = await _league(spec, runtime)
    learners: dict[str, LocalModel | ModelClient] = {**league_learners}
    players = (
        None if league is None else league.seats(await _snapshots(spec, league.config, runtime, league.weights), models)
    )
    if spec.league is not None:  # requests without a session use the first learner's
        models[spec.learned] = next(iter(learners.values()))
    following = runtime.follower = await _following(spec, models, aliases, runtime)
    buffers = await _buffers(spec, runtime, recorder)
    runtime.close.append(close_recorder)
    tracing = tracing_of(spec.actor, str(spec.config["project"]), recorder)
    recorders = recorders_of(spec.recording, recorder, spec.drawing, tracing)
    runtime.drawing = spec.drawing
    runtime.close[:0] = closing(recorders)
    services = Services(models=models, buffers=buffers, recorder=runtime.recorder)
    behaviours: dict[str, AgentActorFactory] = {}

    async def act(part: ActorSpec) -> None:
        model = await _local_model(part.learned, part, None, runtime)
        parts = {"recorders": recorders, "behaviours": behaviours, "admit": runtime.admit}
        factory = await _of_behaviour(part, {**models, part.learned: model}, runtime, parts)
        name = Contract.parse(part.config["contract"]).behaviour
        behaviours[name], learners[name] = factory, model

    if spec.job is not None:
        joining = Joining(spec.job, spec.actor, spec.hub, act)
        runtime.admit = joining.admission.admit
        runtime.close.insert(0, joining.close)
    run: Any = asyncio.to_thread if spec.pool is None else spec.pool.run
    if spec.waits:
        runtime.make_actor = lambda: next(iter(behaviours.values()), joining.admission.refuse_call)()
    else:
        factory = runtime.make_actor = AgentActorFactory.of(
            spec.actor,
            spec.agents,
            spec.folder,
            spec.config,
            services,
            recorders=recorders,
            arms=following,
            players=players or _teams(spec, services, runtime),
            opponents=None if spec.served_league is None else spec.served_league.opponents(services, run),
            behaviours=behaviours,
            admit=runtime.admit,
        )
    if spec.job is not None and not spec.waits:
        contract = Contract.parse(spec.config["contract"])
        behaviours[contract.behaviour], learners[contract.behaviour] = factory, models[spec.learned]
        joining.acts(contract)

    def versions() -> dict[str, int]:
        acting = {name: model.version for name, model in models.items()}
        if learners:
            acting[spec.learned] = min(model.version for model in learners.values())
        return acting

    def example() -> dict[str, Any]:
        if spec.waits and not behaviours:
            return joining.admission.describe()
        return contract_facts(next((first.config for first in behaviours.values()), spec.config).get("contract"))

    runtime.versions = versions
    runtime.describe = lambda: {
        "mode": spec.config["mode"],
        "policy_versions": runtime.versions(),
        "registered": registered(spec.weights, following.versions() if following is not None else {}),
        **example(),
    }
    return runtime


async def _of_behaviour(
    spec: ActorSpec, models: Mapping[str, Any], runtime: ActorRuntime, parts: Mapping[str, Any]
) -> AgentActorFactory:
    """Makes the actors of a further behaviour's sessions, which have its own hub and buffers."""
    recorder = await asyncio.to_thread(HubClient.of, spec.hub)
    buffers = await _buffers(spec, runtime, recorder)
    runtime.close.append(functools.partial(asyncio.to_thread, recorder.close))
    services = Services(models, buffers, recorder)
    players = _teams(spec, services, runtime)
    return AgentActorFactory.of(spec.actor, spec.agents, spec.folder, spec.config, services, players=players, **parts)


async def _buffers(spec: ActorSpec, runtime: ActorRuntime, recorder: HubClient) -> dict[str, Any]:
    """The buffers that the agents push to."""
    buffers: dict[str, Any] = {}
    for name, actor_name in spec.buffers.items():
        rollout = _normalising(spec.config)
        if rollout is not None:
            buffers[name] = _Refused(f"rollout {rollout!r} normalises the observations that the model learns from")
            continue
        buffers[name] = await asyncio.to_thread(RemoteBuffer.attach, actor_name, recorder=recorder)
        runtime.close.append(functools.partial(asyncio.to_thread, buffers[name].close))
    return buffers


async def _league(spec: ActorSpec, runtime: ActorRuntime) -> tuple[LeagueInReplica | None, dict[str, LocalModel]]:
    """The replica's part of the league, and the acting model of each player that learns; None and empty: no league."""
    if spec.league is None:
        return None, {}
    name, models = spec.league.config.model, {}
    for player, store in spec.league.stores.items():
        player_spec = dataclasses.replace(spec, weights={**spec.weights, name: WeightSource(store=store)})
        models[player] = await _local_model(name, player_spec, None, runtime)
    return LeagueInReplica(spec.league, spec.folder, models, runtime.recorder), models


async def _snapshots(
    spec: ActorSpec, league: LeagueConfig, runtime: ActorRuntime, fetch: Callable[[int], Awaitable[Weights]]
) -> LocalModel:
    """The model that acts with the weights of snapshots."""
    config = spec.models[league.model]
    module, example = acting_model(spec.folder, config.module, league.model, spec.config)
    engine, version = await asyncio.to_thread(engine_from, config, module, example, None, "", None)
    model = LocalModel(
        engine, version=version, max_versions=league.max_versions, fetch=fetch, **batching(config, runtime.recorder)
    )
    runtime.close.append(model.close)
    return model


def _teams(spec: ActorSpec, services: Services, runtime: ActorRuntime) -> TeamPlayers | None:
    """Gives the sessions of teams their players in self-play; None: there is no self-play."""
    if spec.self_play is None:
        return None
    league = spec.self_play.config.league(spec.self_play.model)
    teams = TeamsInReplica(spec.self_play, services, functools.partial(_snapshots, spec, league, runtime))
    runtime.close.append(teams.close)
    return teams.players


def _normalising(config: Mapping[str, Any]) -> str | None:
    """The rollout of a job that normalises observations; None: there is none."""
    rollouts = [(name, part) for name, part in config.items() if isinstance(part, Mapping)]
    return next((name for name, part in rollouts if part.get("kind") == "rollout" and part.get("normalise_obs")), None)


class _Refused:
    """A buffer that refuses pushes of agents, because their raw observations differ from the training data."""

    def __init__(self, why: str) -> None:
        self._why = why

    def push(self, *fragments: Any) -> None:
        raise ConfigError(f"{self._why}, but agents record what games send: agents of this job cannot push")


async def _following(
    spec: ActorSpec, models: Mapping[str, LocalModel | ModelClient], aliases: Aliases | None, runtime: ActorRuntime
) -> AliasFollower | None:
    """Follows the models that are served by an alias, if there are any."""
    if spec.pool is None or not spec.followed:
        return None
    following = AliasFollower(spec.pool, spec.followed, models)
    await following.start(aliases)
    runtime.close.insert(0, following.stop)

    def check(check_others: Callable[[], None] = runtime.check) -> None:
        check_others()
        if not following.running:
            raise ModelError("the registry's aliases are no longer followed")

    runtime.check = check
    return following


async def _remote_model(config: ModelConfig, handle: Any, runtime: ActorRuntime) -> ModelClient:
    model = await ModelClient.connect(
        handle, max_calls=config.num_workers, **batching(config, runtime.recorder, "model_call_size", "model_call")
    )

    async def follow() -> None:
        """Keeps the version that the status page shows; forwards carry their own."""
        while True:
            with contextlib.suppress(BrayxError):
                await model.refresh_version()
            await asyncio.sleep(_VERSION_EVERY_S)

    following = asyncio.create_task(follow())

    async def stop() -> None:
        following.cancel()
        await model.close()

    runtime.close.append(stop)
    return model


async def _local_model(name: str, spec: ActorSpec, aliases: Aliases | None, runtime: ActorRuntime) -> LocalModel:
    config, source = spec.models[name], spec.weights[name]
    module, example = acting_model(spec.folder, config.module, name, spec.config)
    if source.store:
        refuse_frozen(config.engine)
    named: tuple[int, Weights] | None = None
    if spec.pool is not None and source.followed is not None:
        named = await initial_version(spec.pool, name, source.followed.alias, aliases, source.version)
    deployed = source.checkpoint or None, source.tracking, source.version
    engine, version = await asyncio.to_thread(engine_from, config, module, example, *deployed, named)
    store = get_actor(source.store, WEIGHT_STORE) if source.store else None
    fetch: Callable[[int], Awaitable[Weights]] | None = None
    if store is not None:
        fetch = functools.partial(fetch_weights, store)
    elif spec.pool is not None and name in spec.pool.models:
        fetch = functools.partial(spec.pool.weights, name)
    model = LocalModel(
        engine,
        version=version,
        max_versions=config.max_versions,
        fetch=fetch,
        **batching(config, runtime.recorder),
    )
    if store is not None:
        subscriber = WeightSubscriber(store, model.load)
        await subscriber.start_abreast()
        runtime.close.append(subscriber.stop)

        def check(check_others: Callable[[], None] = runtime.check) -> None:
            check_others()
            if not subscriber.running:
                raise ModelError(f"the weights of model {name!r} are no longer followed")

        runtime.check = check
    runtime.close.append(model.close)
    return model


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
    # A training's own gamecores have no keys: these are for clients of a service.
    requires_keys = spec.config["mode"] != "train"
    # The sessions of a league's game are on one replica, whether they share states or not.
    in_games = spec.league is not None or spec.self_play is not None
    config = spec.actor.model_copy(update={"share": "game"}) if in_games else spec.actor
    return actor_deployment(build, config, name=name, directory=directory, handles=handles, requires_keys=requires_keys)


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
