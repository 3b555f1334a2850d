"""What a replica of an actor acts with: models, buffers, and who makes the actors of each behaviour's sessions.

Knows nothing of Serve's application, or of how a replica learns of further behaviours.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.players import Players
from brayx.actor.serving import tracing_of
from brayx.cluster.hub import HubClient
from brayx.cluster.league_seats import LeagueInReplica
from brayx.cluster.model_client import ModelClient
from brayx.cluster.named import WEIGHT_STORE, get_actor
from brayx.cluster.pool import PoolClient
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.replica import ActorRuntime
from brayx.cluster.teams import GroupInReplica, TeamsInReplica
from brayx.cluster.weights import WeightSubscriber, fetch_weights
from brayx.engines import refuse_frozen
from brayx.errors import BrayxError, ConfigError, ModelError
from brayx.gamecore.contract import Contract
from brayx.jobs.models import parts_of
from brayx.league.config import LeagueConfig
from brayx.model.arms import WeightSource
from brayx.model.build import acting_model
from brayx.model.checkpoints import engine_from
from brayx.model.config import ModelConfig
from brayx.model.following import AliasFollower, initial_version
from brayx.model.local import LocalModel, batching
from brayx.model.pool import Aliases
from brayx.recording.recorder import closing, recorders_of
from brayx.types import Weights

if TYPE_CHECKING:
    from brayx.cluster.actor_app import ActorSpec

_VERSION_EVERY_S = 1.0


class Acting:
    """What a replica acts with.

    Args:
        spec: the replica's.
        runtime: gets all that must be closed.

    Attributes:
        runtime: as given.
        behaviours: make the actors of each behaviour's sessions, by name; a job without contracts has one, "".
    """

    def __init__(self, spec: ActorSpec, runtime: ActorRuntime) -> None:
        self._spec, self.runtime = spec, runtime
        self.behaviours: dict[str, AgentActorFactory] = {}
        self._learning: list[LocalModel | ModelClient] = []
        self._counting: list[Callable[[], Awaitable[None]]] = []
        self._recorders = [runtime.recorder]
        self._group: GroupInReplica | None = None

    @property
    def first(self) -> AgentActorFactory | None:
        """Of stateless calls; None: there is none yet."""
        return next(iter(self.behaviours.values()), None)

    def versions(self) -> dict[str, int]:
        """The policy version of each model; of those that learn, the oldest."""
        versions = {name: model.version for name, model in self._models.items()}
        if self._learning:
            versions[self._spec.learned] = min(model.version for model in self._learning)
        return versions

    async def open(self, handles: Mapping[str, Any]) -> None:
        """Makes what all behaviours share: the models that do not learn, and what records their sessions."""
        spec, runtime = self._spec, self.runtime
        runtime.close.append(self._close)
        # The version of the deployment may be outdated or deleted by now.
        aliases = await spec.pool.look() if spec.pool is not None and spec.followed else None
        self._models = {
            name: await _model(name, spec, aliases, runtime, handles) for name in spec.models if name != spec.learned
        }
        runtime.follower = await _following(spec, self._models, aliases, runtime)
        runtime.drawing = spec.drawing
        tracing = tracing_of(spec.actor, str(spec.config["project"]), runtime.recorder)
        self._logs = recorders_of(spec.recording, runtime.recorder, spec.drawing, tracing)
        runtime.close[:0] = closing(self._logs)

    async def act(self, spec: ActorSpec, handles: Mapping[str, Any] | None = None) -> None:
        """Makes what acts for a spec: the replica's own, or that of a behaviour, which has its own hub and buffers."""
        runtime, recorder = self.runtime, self.runtime.recorder
        if spec.hub != self._spec.hub:
            recorder = await asyncio.to_thread(HubClient.of, spec.hub)
            self._recorders.append(recorder)
        buffers = await _buffers(spec, runtime, recorder)
        learners = await self._learners(spec, handles or {})
        models = dict(self._models)
        if learners:  # requests without a session use the first player's
            models[spec.learned] = next(iter(learners.values()))
        longest_s = spec.actor.longest_wait_s
        learned = _learned_buffers(spec.config)
        ahead = [buffer for name, buffer in buffers.items() if name in learned and isinstance(buffer, RemoteBuffer)]
        wait = functools.partial(_caught_up, ahead, longest_s) if longest_s and ahead else None
        services = Services(models, buffers, recorder, caught_up=wait)
        served, run = spec.served_league, asyncio.to_thread if spec.pool is None else spec.pool.run
        contract = spec.config.get("contract")
        behaviour = "" if contract is None else Contract.parse(contract).behaviour
        self.behaviours[behaviour] = AgentActorFactory.of(
            spec.actor,
            spec.agents,
            spec.folder,
            spec.config,
            services,
            recorders=self._logs,
            arms=runtime.follower,
            players=await self._players(spec, behaviour, services, learners),
            opponents=None if served is None else served.opponents(services, run),
            behaviours=self.behaviours,
            admit=runtime.admit,
        )
        self._learning += learners.values()

    async def _learners(self, spec: ActorSpec, handles: Mapping[str, Any]) -> dict[str, Any]:
        """The acting model of each player that learns; of the one that is none of a league, "" is the name."""
        name, runtime = spec.learned, self.runtime
        if spec.league is None:
            return {"": await _model(name, spec, None, runtime, handles)} if name else {}
        stores = {player: WeightSource(store=store) for player, store in spec.league.stores.items()}
        specs = {player: replace(spec, weights={**spec.weights, name: store}) for player, store in stores.items()}
        return {player: await _local_model(name, own, None, runtime) for player, own in specs.items()}

    async def _players(
        self, spec: ActorSpec, behaviour: str, services: Services, learners: Mapping[str, Any]
    ) -> Players | None:
        """Gives sessions their players; None: there is no league, nor self-play."""
        if spec.league is not None:
            league = LeagueInReplica(spec.league, spec.folder, learners, services.recorder)
            self._counting.append(league.close)
            seats = league.seats(await _snapshots(spec, league.config, self.runtime, league.weights), self._models)
            await seats.open()
            return seats
        if spec.self_play is not None:
            opponents = spec.self_play.config.league(spec.learned)
            snapshots = functools.partial(_snapshots, spec, opponents, self.runtime)
            self._group = self._group or GroupInReplica(spec.self_play.config)
            teams = TeamsInReplica(spec.self_play, behaviour, self._group, services, snapshots)
            self._counting.append(teams.close)
            return teams.players
        return None

    async def _close(self) -> None:
        # First: they count the last games.
        failed = await asyncio.gather(*(close() for close in self._counting), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(recorder.close) for recorder in self._recorders))
        if self._spec.pool is not None and self._spec.pool.writes_results:
            await self._spec.pool.flush()
        for error in filter(None, failed):
            raise error


def recorder_of(spec: ActorSpec) -> HubClient:
    """The recorder of a replica's process."""
    if spec.pool is not None and spec.pool.writes_results:
        return HubClient(_PoolHub(spec.pool))
    return HubClient.of(spec.hub)


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


def _learned_buffers(config: Mapping[str, Any]) -> set[str]:
    """The buffers that a job's learner learns from; those of an evaluation are read seldom."""
    return {buffer for trainer in parts_of(config, "trainer").values() for buffer in trainer["buffers"]}


async def _caught_up(buffers: Sequence[RemoteBuffer], longest_s: float) -> None:
    """See `Services.caught_up`."""
    await asyncio.gather(*(buffer.caught_up(longest_s) for buffer in buffers))


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


async def _model(
    name: str, spec: ActorSpec, aliases: Aliases | None, runtime: ActorRuntime, handles: Mapping[str, Any]
) -> LocalModel | ModelClient:
    if name in handles:
        return await _remote_model(spec.models[name], handles[name], runtime)
    return await _local_model(name, spec, aliases, runtime)


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


class _PoolHub:
    """The pool in place of a hub's Ray actor, for a `HubClient`."""

    def __init__(self, pool: PoolClient) -> None:
        self.push = self
        self.remote = pool.push
