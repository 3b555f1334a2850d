"""A training job in this process: makes and ends the parts of `brayx.jobs.training`. Ray is never imported.

MLflow is in another process. Knows nothing of the order in which a training starts and ends.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from brayx import systems
from brayx.command_line import say_after_silence
from brayx.console.job import console_keys, console_of_training
from brayx.errors import StartupError
from brayx.jobs.checks import check_before_games, check_job, check_weights
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.jobs.contracts import contract_lines, parse_contract
from brayx.jobs.handles import offer
from brayx.jobs.recorded import contract_to_resume, with_resumed_contract
from brayx.jobs.result import TrainResult
from brayx.jobs.trainee import Trainees
from brayx.jobs.training import LOOK_S, JobTraining, Snapshot
from brayx.jobs.watching import READY_TIMEOUT_S
from brayx.ports import check_ports
from brayx.temporary import temporary_files
from brayx.threads import NativeThread
from brayx.tracking import Trial, check_writable, tracking_uri
from brayx.tracking.clerk import Clerk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.host import LocalHost
    from brayx.children import Child
    from brayx.console.live import LiveSessions
    from brayx.jobs.gamecores import Gamecores
    from brayx.jobs.inner_bridge import JobDoors
    from brayx.local.behaviours import BehaviourTraining
    from brayx.local.league_training import LocalLeagueTraining
    from brayx.local.lobby import Lobby
    from brayx.local.trainee import LocalTrainee
    from brayx.metrics.numbers import LocalNumbers
    from brayx.model.acting import ActingModel
    from brayx.model.local import LocalModel

_ENGINE_S = 0.5
"""Maximum time that games wait for the engine after the first weights. Small models need less, large ones seconds."""
_DOORS_END_S = 2.0
"""Share of a shutdown for sessions, and another of the same length for doors."""


def beyond_local(job: JobConfig) -> list[str]:
    """Parts of a job that the local host cannot run, one short clause each; empty: it can run all of it."""
    obstacles, cpus = [], systems.cores()
    for name, rollout in job.rollouts.items():
        wanted = rollout.num_workers * rollout.cpus_per_worker
        if wanted > cpus:
            obstacles.append(f"the workers of {name} reserve {wanted:g} CPUs, and this machine has {cpus}")
    remote = {name: model for name, model in job.models.items() if model.placement == "remote"}
    for group in (job.actors, job.trainers, remote):
        workers = {name: int(getattr(part, "num_workers", 1)) for name, part in group.items()}
        obstacles += [f"{name}.num_workers is {count}" for name, count in workers.items() if count > 1]
    return obstacles


def in_one_process(job: JobConfig) -> tuple[JobConfig, list[str]]:
    """Converts a job to one shard per buffer and one thread per rollout; also returns notes about the changes.

    A buffer keeps as many batches as all its shards did. For a Gymnasium id, one worker gets all environments. With a
    function that makes environments, the workers take turns in one thread.
    """
    said, buffers, rollouts = [], dict(job.buffers), dict(job.rollouts)
    for name, buffer in job.buffers.items():
        if buffer.num_workers > 1:
            size = buffer.size * buffer.num_workers
            buffers[name] = buffer.model_copy(update={"num_workers": 1, "size": size})
            said.append(f"{name}.num_workers is {buffer.num_workers}: one buffer keeps their {size} batches")
    for name, rollout in job.rollouts.items():
        num_envs = rollout.num_envs * rollout.num_workers
        if rollout.num_workers > 1:
            said.append(f"{name}.num_workers is {rollout.num_workers}: one thread steps their {num_envs} environments")
        if rollout.func is None:  # a function may make all environments of a worker at once
            rollouts[name] = rollout.model_copy(update={"num_workers": 1, "num_envs": num_envs})
    return job.model_copy(update={"buffers": buffers, "rollouts": rollouts}), said


def train_in_process(
    job: JobConfig,
    *,
    trial_name: str | None = None,
    resume: bool = True,
    tracking: str | None = None,
    log_interval: int | None = None,
) -> TrainResult:
    """Runs a training job to its end in this process; the job must fit it (see `beyond_local`).

    Arguments are those of `brayx.cluster.job.train`.

    Raises:
        BrayxError: the job could not be started, or its learner failed for good.
    """
    from brayx.local.learner_process import learner_child
    from brayx.model.build import warm_up

    config = job.trainers[only("trainer", job.trainers)]
    name, uri = trial_name or job.trial, check_writable(tracking_uri(tracking or job.tracking.uri))
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporary_files())
        child = learner_child(job)
        if child is not None:  # before anything starts a thread, so that it may be a fork
            stack.callback(child.close)
            child.start()
        # Early, since MLflow takes longest to import, in another process.
        clerk = Clerk(
            job.project,
            name,
            uri,
            job.options(),
            resume=resume,
            kept=config.checkpoints_kept,
            x_axis=config.x_axis,
            tensorboard=job.tracking.tensorboard_folder(uri),
        )
        stack.callback(clerk.end)
        if clerk.may_resume and (job.has_contract or job.contract is not None):
            job = with_resumed_contract(job, name, clerk.run(contract_to_resume, job.project, name, uri))
        if job.needs_contract:  # so that no game waits in vain
            check_weights(job, name, uri, clerk.may_resume, clerk.run)
        lobby = stack.enter_context(open_lobby(job)) if job.has_contract else None
        if lobby is not None:
            # While the games start; the model's own build waits for it.
            NativeThread(functools.partial(warm_up, job.models[config.model]), "brayx-warm-up").start()
            job = lobby.wait()
            job = job.of_behaviour(parse_contract(job.contract).behaviour)
        if job.contract is not None:
            clerk.options = job.options()
        say_after_silence(f"{job.file}: imported all packages; trying the model and the games ...")
        actor, layout = check_job(job)
        console_keys(job)
        say_after_silence(f"{job.file}: checked; waiting for MLflow ...")
        check_weights(job, name, uri, clerk.may_resume, clerk.run)
        job, notes = in_one_process(job)
        if job.contract is not None:
            notes += contract_lines(job)
        if actor and lobby is None:
            check_ports(job.actors[actor].ports(actor))
        return _LocalTraining(job, actor, layout, name, uri, clerk, log_interval, notes, lobby, child).run()


def open_lobby(job: JobConfig) -> Lobby:
    """The doors at which a job waits for contracts; checks first what needs none.

    Raises:
        ConfigError, StartupError: a check failed.
    """
    from brayx.local.lobby import Lobby

    actor = check_before_games(job)
    check_ports(job.actors[actor].ports(actor))
    return Lobby(job, actor)


@dataclass
class _LocalTraining(JobTraining):
    """A training in this process. While it runs, its models and buffers can be found by name."""

    clerk: Clerk
    lobby: Lobby | None = None
    child: Child | None = None
    learning: Trainees[LocalTrainee] = field(init=False)
    numbers: LocalNumbers = field(init=False)
    save_s, copy_s = 4.0, 2.0

    def make_parts(self) -> None:
        self._console = ""
        job, layout, clerk = self.job, self.layout, self.clerk
        self._league: LocalLeagueTraining | None = None
        self._behaviours: BehaviourTraining | None = None
        if job.leagues:
            from brayx.local.league_training import LocalLeagueTraining

            self._league = LocalLeagueTraining(job, layout, clerk, self.progress.say)
            self.stack.callback(self._league.close)
            self.learning, self.numbers = self._league.training, self._league.numbers
        elif self.lobby is not None:
            from brayx.local.behaviours import BehaviourTraining

            say = self.progress.say
            self.learning = self._behaviours = BehaviourTraining(job, layout, clerk, self.lobby, say, self.child)
            self.stack.callback(self._behaviours.self_plays.close_books)
            trainee = self.learning.trainees[self.learning.mains[0]]
            self.numbers, self.buffers, self.rollouts = trainee.numbers, trainee.buffers, trainee.rollouts
        else:
            from brayx.local.trainee import LocalTrainee

            trainee = LocalTrainee(job, layout, clerk, acts=bool(self.actor), child=self.child)
            self.learning, self.numbers = Trainees(job, trainee), trainee.numbers
            self.buffers, self.rollouts = trainee.buffers, trainee.rollouts
        self._champions: dict[str, ActingModel] = {}
        self._main = self.learning.trainees[self.learning.mains[0]].acting
        self._doors = None if self._main is None else self._closed_doors(self._main.model)

    def open_doors(self) -> None:
        if self._doors is not None:
            if self.lobby is None:
                self._doors.open()
            self.urls = self._doors.urls

    def wait_for_weights(self) -> None:
        deadline, learning, build = time.monotonic() + READY_TIMEOUT_S, self.learning, None
        if self._main is not None:  # meanwhile, so that games begin with it
            build = self._main.build(self.progress.say, functools.partial(self._record_engine, self.config.model))
        while not all(trainee.learner.ready.wait(LOOK_S) for trainee in learning.trainees.values()):
            self.clerk.check()
            self.progress.update({}, note="waiting for the learner's first weights")
            if time.monotonic() > deadline:
                raise StartupError(f"no weights came within {READY_TIMEOUT_S:g} s; the learner {learning.state()}")
        if not learning.running:
            learning.result()
        if build is not None:  # while it runs, each tick waits for the interpreter's lock several times
            build.join(_ENGINE_S)
        if self._league is not None:
            self._league.build_engines(but=self._main)
        for name, champion in self._champions.items():
            champion.build(functools.partial(self._say_of, name), functools.partial(self._record_engine, name))
        if self.lobby is not None:
            self.lobby.admit(parse_contract(self.job.contract).behaviour)

    def gamecores(self, doors: JobDoors | None = None) -> Gamecores:
        return super().gamecores(doors or self._doors) if self.lobby is None else self.lobby.games

    def close_doors(self) -> None:
        if self._doors is not None:
            self._doors.close(self.end.left(_DOORS_END_S))

    def newest(self) -> Snapshot:
        if self._behaviours is not None:
            return self._behaviours.newest()
        return self.numbers.snapshot(), self.numbers.notes()

    def settle(self) -> Snapshot:
        last = self.newest()
        self.clerk.settle()
        return last

    @contextlib.contextmanager
    def console(self, facts: Callable[[], dict[str, Any]]) -> Iterator[None]:
        from brayx.console.live import LiveSessions

        live: contextlib.AbstractContextManager[LiveSessions | None] = contextlib.nullcontext()
        if self._doors is not None:
            live = contextlib.closing(LiveSessions(self._doors, self.job.drawing))
        given = facts, live, self.progress.say, self.finish, self.ending
        with console_of_training(self.job, self.uri, *given) as self._console:
            yield

    def _closed_doors(self, learned: LocalModel) -> LocalHost:
        """The actor behind doors that are still closed; ``learned`` is the acting side of the model that is trained."""
        from brayx.actor.agent import Services
        from brayx.actor.agent_actor import AgentActorFactory
        from brayx.actor.examples import contract_facts
        from brayx.actor.host import LocalHost
        from brayx.actor.serving import Runtime, tracing_of
        from brayx.gamecore.auth import Keys
        from brayx.recording.recorder import closing, recorders_of

        job, numbers, buffers = self.job, self.numbers, self.buffers
        actor = job.actors[self.actor]
        self._champions = {name: self._champion(name) for name in job.models if name != self.config.model}
        others = {name: champion.model for name, champion in self._champions.items()}
        models = {self.config.model: learned, **others}
        tracing = tracing_of(actor, job.project, numbers)
        recorders = recorders_of(job.recording, numbers, job.drawing, tracing)

        def factory(job: JobConfig, services: Services, **parts: Any) -> AgentActorFactory:
            as_dict, actor = job.in_mode("train").as_dict(), job.actors[self.actor]
            return AgentActorFactory.of(actor, job.agents, job.folder, as_dict, services, recorders=recorders, **parts)

        if self._behaviours is None:
            players = None if self._league is None else self._league.seats(others, actor.longest_wait_s)
            wait = self.learning.trainees[self.learning.mains[0]].caught_up(actor.longest_wait_s)
            make_actor = factory(job, Services(models, buffers, numbers, caught_up=wait), players=players)
        else:
            factories = self._behaviours.factories

            def of_behaviour(job: JobConfig, trainee: LocalTrainee, buffers: Mapping[str, Any]) -> AgentActorFactory:
                assert trainee.acting is not None
                models = {self.config.model: trainee.acting.model, **others}
                services = Services(models, buffers, trainee.numbers, caught_up=trainee.caught_up(actor.longest_wait_s))
                return factory(job, services, behaviours=factories)

            make_actor = self._behaviours.open(of_behaviour)
        runtime = Runtime(
            make_actor,
            numbers,
            lambda: {
                "mode": "train",
                "policy_versions": {name: acting.version for name, acting in models.items()},
                "console": self._console,
                **contract_facts(job.contract),
            },
            [*closing(recorders), self._close_models, *(champion.close for champion in self._champions.values())],
        )
        tags = {}
        if self.lobby is None:
            keys = Keys.configured(actor.keys_file)
            doors = LocalHost(actor, runtime, name=self.actor, keys=keys, on_hold=self.progress.pause)
        else:
            self.lobby.bind(runtime, self.progress.say, self.progress.pause)
            doors = self.lobby.doors
            tags = {} if self._behaviours is None else {"behaviour": self._behaviours.mains[0]}
        doors.export(numbers, **tags)
        self.stack.enter_context(offer(models, buffers, doors.loop))
        return doors

    async def _close_models(self) -> None:
        """Closes the models that learn, and those that a league added meanwhile."""
        acting = [trainee.acting for trainee in self.learning.trainees.values() if trainee.acting is not None]
        opponents = [] if self._league is None else self._league.opponents
        if self._behaviours is not None:
            opponents = self._behaviours.self_plays.opponents
        for model in (*acting, *opponents):
            await model.close()

    def _champion(self, name: str) -> ActingModel:
        """A model that acts but is not trained: the champion of its name, or else the model as built."""
        from brayx.jobs.weights import acting_from, pooled

        source = self.clerk.run(pooled, self.job, name, self.uri)
        if not source.checkpoint:
            self.progress.say(f"model {name!r} acts untrained: {pool_name(self.job, name)} has no champion")
        return acting_from(source, self.job, name, self.job.as_dict(), self.numbers)

    def _record_engine(self, name: str, acts_with: str) -> None:
        self.clerk.later(Trial.set_tag, f"brayx.engine.{name}", acts_with)

    def _say_of(self, name: str, line: str) -> None:
        self.progress.say(f"{name!r}: {line}")
