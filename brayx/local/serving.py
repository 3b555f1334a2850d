"""Serves a job's actor in this process: registered versions act behind the job's doors, and aliases are followed.

The same pool, arms and doors as under ``serve run``, without Ray. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.doors.ports import OPEN, open_to_all
from brayx.actor.examples import contract_facts
from brayx.actor.host import LocalHost
from brayx.actor.logs import SessionLogOpener
from brayx.actor.models import ArmLike, Arms
from brayx.actor.serving import Runtime, tracing_of
from brayx.command_line import say
from brayx.console.job import ConsoleJob, console_keys, open_console, served_facts, with_refusals
from brayx.console.live import LiveSessions
from brayx.gamecore.auth import Keys
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import check_served_limits
from brayx.jobs.env_door import with_door
from brayx.jobs.handles import offer
from brayx.jobs.served import ServedModel, served_models
from brayx.jobs.watching import Returns
from brayx.jobs.weights import acting_from, followed_by, pool_args, registered
from brayx.league.served import ServedLeague, served_league
from brayx.metrics.numbers import LocalNumbers
from brayx.model.following import AliasFollower
from brayx.model.local import LocalModel
from brayx.model.pool import Pool
from brayx.ports import check_ports
from brayx.recording.recorder import closing, recorders_of
from brayx.replay.buffer import NullBuffer
from brayx.types import PinnedHandle

_log = logging.getLogger(__name__)

_START_S = 30.0
_CLOSE_S = 5.0
_RECORD_S = 1.0
_WITHOUT_RETURN = 3
"""Games without a return until a hint: a person may play a few only."""


class Serving:
    """Serves an actor of a job from its construction to `close`; a context manager.

    Its models act with torch until their engines are built.

    Args:
        job: the job that was trained; one with only environments gets a door, see `brayx.jobs.env_door`.
        uri: tracking URI of the registry.
        actor: name of the component; may be empty if there is only one.
        models: version that each model serves, as for `deployments.actor.ServeArgs.models`.
        trial: clients ask for opponents of the league of this trial; empty: of the newest league.
        say: called with a line when a model acts with its engine, or why it keeps acting with torch.

    Attributes:
        actor: name of the actor.
        config: its options.
        urls: URL of each door by name: ``http``, ``ws``, ``tcp``, ``grpc``.

    Raises:
        ConfigError: the job's code cannot be loaded, or there is no league of this trial.
        StartupError: a port is taken.
        TrackingError: the registry cannot be read, or has no version that ``models`` names.
    """

    def __init__(
        self,
        job: JobConfig,
        uri: str,
        *,
        actor: str = "",
        models: Mapping[str, str] | None = None,
        trial: str = "",
        say: Callable[[str], None] = _log.info,
    ) -> None:
        job = with_door(job)
        self.actor = actor = only("actor", job.actors, actor)
        self.config = config = job.actors[actor]
        check_code(job, [actor], mode="serve")
        check_ports(config.ports(actor))
        served = served_models(job, uri, models or {})
        check_served_limits([model.job for model in served.values() if model.job.contract is not None])
        self._sources = {name: model.source for name, model in served.items()}
        job = next((model.job for model in served.values()), job)
        self._job, self._uri, self._console = job, uri, ""
        leagues = {
            name: served_league(model.job, uri, {model.component: model.source}, trial=trial)
            for name, model in served.items()
            if model.behaviour
        } or {"": served_league(job, uri, self._sources, trial=trial)}
        versions = {name or model: of for name, league in leagues.items() for model, of in league.versions.items()}
        of_registry = pool_args(job, uri, self._sources, versions)
        self._pool = pool = Pool(*of_registry)
        self._recorder = recorder = LocalNumbers({}, "seconds")
        recorder.listen(pool.add)
        fetches = {name: functools.partial(pool.weights, name) for name in of_registry[2]}
        acting = {
            name: acting_from(
                model.source,
                model.job.model_copy(
                    update={"models": leagues.get(name, next(iter(leagues.values()))).resident(model.job.models)}
                ),
                model.component,
                model.job.in_mode("serve").as_dict(),
                recorder,
                fetch=fetches.get(name),
            )
            for name, model in served.items()
        }
        self._returns = Returns(_WITHOUT_RETURN)
        self._models: dict[str, LocalModel] = {name: acting_model.model for name, acting_model in acting.items()}
        followed = followed_by(self._sources)
        self._follower = AliasFollower(pool, followed, self._models) if followed else None
        self._work: list[asyncio.Task[None]] = []
        tracing = tracing_of(config, job.project, recorder)
        self._recorders = recorders = recorders_of(job.recording, recorder, job.drawing, tracing)
        keys = Keys.configured(config.keys_file)
        self._host = LocalHost(
            config,
            Runtime(
                self._make_actor(served, leagues, recorders),
                recorder,
                self._facts,
                [self._end_work, *closing(recorders), *(acting_model.close for acting_model in acting.values())],
            ),
            name=actor,
            keys=keys,
        )
        self._host.export(recorder)
        self._offered = contextlib.ExitStack()
        self._host.open()
        self._host.run(self._start_work(), _START_S)
        self._offered.enter_context(offer(self._models, dict.fromkeys(job.buffers, NullBuffer()), self._host.loop))
        self.urls = self._host.urls
        for name, acting_model in acting.items():
            acting_model.build(functools.partial(_say_of, name, say))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        acting = ", ".join(
            f"{name} acts with {' or '.join(versions) or 'weights as built'}"
            for name, versions in self.registered.items()
        )
        return f"{', '.join(self.urls.values())}: {acting}"

    @property
    def url(self) -> str:
        """Base URL of the main HTTP door."""
        return self._host.url

    @property
    def registered(self) -> dict[str, list[str]]:
        """The registered versions that a new session may get, by model: ``models:/NAME/VERSION``; none: as built."""
        return registered(self._sources, self._follower.versions() if self._follower is not None else {})

    @contextlib.contextmanager
    def console(self, say: Callable[[str], None]) -> Iterator[None]:
        """The console of this service while the context lasts; see `brayx.console.job.open_console`."""
        set_share = None if self._follower is None else self._follower.set_share
        live = LiveSessions(self._host, self._job.drawing)
        parts = ConsoleJob(self._console_facts, live, set_share)
        with contextlib.closing(live), open_console(self._job, self._uri, parts, say) as self._console:
            yield

    def hint(self) -> str:
        """Advice, once, if games stop without a return; empty otherwise."""
        return self._returns.hint(self._recorder.snapshot(), self._recorder.notes())

    def drain(self, timeout_s: float) -> int:
        """Refuses new sessions and waits for the running ones, see `LocalHost.drain`; returns how many still run."""
        return self._host.drain(timeout_s)

    def close(self) -> None:
        """Ends every session and the doors, and writes the last results. May be called again."""
        self._offered.close()
        self._host.close(_CLOSE_S)
        for recorder in self._recorders:  # which may need longer than a door
            recorder.close()

    def _make_actor(
        self,
        served: Mapping[str, ServedModel],
        leagues: Mapping[str, ServedLeague],
        recorders: Sequence[SessionLogOpener],
    ) -> AgentActorFactory:
        """Makes the actors of sessions, of each behaviour with its own model and contract."""
        factories: dict[str, AgentActorFactory] = {}

        def factory(
            job: JobConfig, models: Mapping[str, LocalModel], arms: Arms | None, behaviour: str = ""
        ) -> AgentActorFactory:
            services = Services(models, {}, self._recorder)
            return AgentActorFactory.of(
                job.actors[self.actor],
                job.agents,
                job.folder,
                job.in_mode("serve").as_dict(),
                services,
                recorders=recorders,
                arms=arms,
                opponents=leagues[behaviour].opponents(services, asyncio.to_thread),
                behaviours=factories,
            )

        for behaviour in [name for name, model in served.items() if model.behaviour]:
            names = {model.component: name for name, model in served.items() if model.behaviour in ("", behaviour)}
            models = {component: self._models[name] for component, name in names.items()}
            arms = None if self._follower is None else _BehaviourArms(self._follower, names)
            factories[behaviour] = factory(served[behaviour].job, models, arms, behaviour)
        return next(iter(factories.values()), None) or factory(self._job, self._models, self._follower)

    def _facts(self) -> dict[str, Any]:
        versions = {name: model.version for name, model in self._models.items()}
        facts = {"mode": "serve", "policy_versions": versions, "registered": self.registered, "console": self._console}
        return facts | contract_facts(self._job.contract)

    def _console_facts(self) -> dict[str, Any]:
        head = {"project": self._job.project, "doors": dict(self.urls), "league": bool(self._job.leagues)}
        return {**head, **with_refusals(served_facts(self._facts(), self._follower, self._recorder))}

    async def _start_work(self) -> None:
        if self._follower is not None:
            await self._follower.start()
            self._work.append(asyncio.create_task(self._pool.run()))
        self._work.append(asyncio.create_task(self._record()))

    async def _end_work(self) -> None:
        if self._follower is not None:
            await self._follower.stop()
        for task in self._work:
            task.cancel()
        self._recorder.drain()
        await asyncio.to_thread(self._pool.finish)

    async def _record(self) -> None:
        """Sends metrics to the pool."""
        while True:
            await asyncio.sleep(_RECORD_S)
            self._recorder.drain()


class _BehaviourArms:
    """The arms of one behaviour's sessions.

    Args:
        arms: of all models that are served, by name.
        names: names of the models that the behaviour plays with, by component.
    """

    def __init__(self, arms: Arms, names: Mapping[str, str]) -> None:
        self._arms, self._names = arms, names

    def choose(self, session: str) -> Mapping[str, ArmLike]:
        """See `Arms.choose`."""
        chosen = self._arms.choose(session)
        return {component: chosen[name] for component, name in self._names.items() if name in chosen}

    async def pinned(self, model: str, arm: Any) -> PinnedHandle:
        """See `Arms.pinned`."""
        return await self._arms.pinned(self._names[model], arm)


def serve(
    job: JobConfig, uri: str, *, actor: str = "", models: Mapping[str, str] | None = None, trial: str = ""
) -> None:
    """Serves an actor of a job until SIGINT or SIGTERM; then sessions have ``drain_timeout_s`` to finish.

    Arguments and errors are those of `Serving`.
    """
    console_keys(job)
    with (
        Serving(job, uri, actor=actor, models=models, trial=trial, say=say) as serving,
        serving.console(say),
        _signals() as stopped,
    ):
        say(f"actor {serving.actor!r} of project {job.project!r} is served:")
        for door, url in serving.urls.items():
            say(f"  {door:<4}  {url}")
        for engine in dict.fromkeys(filter(None, (gamecore.engine for gamecore in serving.config.gamecores))):
            url = serving.urls.get("tcp", serving.urls["http"])
            more = " --time-scale 1" * (engine == "unity")
            more += " --key ID --keys-file FILE" * (serving.config.keys_file is not None)
            say(f"to play in {engine.capitalize()}: brayx bridge {engine} --url {url}{more}")
        if open_to_all(serving.config):
            say(OPEN)
        if serving.config.num_workers > 1:
            say(f"{serving.actor}.num_workers is {serving.config.num_workers}: replicas need Ray, see `serve run`")
        shown: dict[str, list[str]] = {}
        while not stopped.is_set():
            if shown != (shown := serving.registered):
                acting = {name: " or ".join(versions) or "weights as built" for name, versions in shown.items()}
                say("; ".join(f"{name} acts with {what}" for name, what in acting.items()))
            if hint := serving.hint():
                say(hint)
            stopped.wait(_RECORD_S)
        say(f"ending: sessions have {serving.config.drain_timeout_s:g} s to finish; Ctrl-C ends them now")
        if left := serving.drain(serving.config.drain_timeout_s):
            say(f"ended; {left} session{' was' if left == 1 else 's were'} cut off")


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """The event that the first SIGINT or SIGTERM sets; the next one acts as it did before."""
    stopped = threading.Event()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: Any) -> None:
        restore()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, end)
    try:
        yield stopped
    finally:
        restore()


def _say_of(name: str, say: Callable[[str], None], line: str) -> None:
    say(f"{name!r}: {line}")
