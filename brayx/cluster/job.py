"""A training job on Ray: makes and ends the parts of `brayx.jobs.training`.

Starts (or joins) Ray, opens the trial, and starts hub, weight store and replay buffer. The actor's deployment starts
while the learner does. A job without an actor starts no Serve. Knows nothing of the order in which a training ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pickle
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from brayx.cluster.actor_app import ActorSpec, actor_spec, application
from brayx.cluster.applications import delete_application, start_application
from brayx.cluster.cluster import Cluster, Ingress
from brayx.cluster.console import ReplicaSessions
from brayx.cluster.directory import stop_directory
from brayx.cluster.hub import numbers_of, take_requests
from brayx.cluster.league_seats import check_placement
from brayx.cluster.rollout import Workers
from brayx.cluster.rollout_worker import worker_spec
from brayx.cluster.scale import answer_request, hub_name, tell_where
from brayx.cluster.start import nodes_and_own
from brayx.cluster.teams import SelfPlaySpec
from brayx.cluster.trainee import RayTrainee
from brayx.command_line import say
from brayx.console.job import console_keys, console_of_training
from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.gamecore.contract import Contract
from brayx.jobs.checks import actor_of, check_before_games, check_job, check_weights
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import by_contract, contract_lines, parse_contract
from brayx.jobs.progress import Progress
from brayx.jobs.recorded import contract_to_resume, with_resumed_contract
from brayx.jobs.result import TrainResult
from brayx.jobs.trainee import Trainees
from brayx.jobs.training import JobTraining, Snapshot
from brayx.jobs.watching import READY_TIMEOUT_S
from brayx.jobs.weights import pooled
from brayx.model.arms import WeightSource
from brayx.tracking import Trial, initialise, tracking_uri
from brayx.tracking.in_process import InProcessClerk
from brayx.urls import sqlite_path

if TYPE_CHECKING:
    from brayx.cluster.behaviours import RayBehaviours
    from brayx.cluster.league_seats import LeagueSpec
    from brayx.cluster.league_training import RayLeagueTraining
    from brayx.cluster.lobby import RayLobby
    from brayx.cluster.waiting import WaitingOnRay
    from brayx.jobs.gamecores import Gamecores
    from brayx.jobs.inner_bridge import JobDoors
    from brayx.jobs.trainee import RunningLearner
    from brayx.replay.packing import Layout

_UNDEPLOY_S, _INTERRUPTED_UNDEPLOY_S = 4.0, 2.0
"""Shares of a shutdown for the actor's replicas."""


def train(
    job: JobConfig,
    *,
    trial_name: str | None = None,
    resume: bool = True,
    tracking: str | None = None,
    cluster: str | Cluster = "",
    ingress: Ingress = "haproxy",
    log_interval: int | None = None,
) -> TrainResult:
    """Runs a training job to its end, on a new Ray cluster or a running one.

    Args:
        job: the job.
        trial_name: name of the MLflow run; default: the job's.
        resume: continue an interrupted trial of that name.
        tracking: MLflow URI or path; default: the job's.
        cluster: address of a Ray cluster to join, empty to start one; or one to use and to leave running, whose door
            becomes the job's.
        ingress: Serve's ingress, if Ray is started here.
        log_interval: updates between two lines of progress without a terminal; None: every 5 s.

    Raises:
        BrayxError: the job could not be started, or its learner failed for good.
    """
    layout = layout_of(job)
    check_placement(job)
    console_keys(job)
    uri = initialise(tracking_uri(tracking or job.tracking.uri))
    _check_weights(job, trial_name or job.trial, uri, resume)
    started = cluster_for(job, ingress, cluster) if isinstance(cluster, str) else contextlib.nullcontext(cluster)
    with started as running:
        return train_on(running, job, layout, uri, trial_name=trial_name, resume=resume, log_interval=log_interval)


def layout_of(job: JobConfig) -> Layout | None:
    """Checks a job; returns its layout, or None if that depends on its first game."""
    if job.needs_contract:
        check_before_games(job)
        return None
    return check_job(job)[1]


def _check_weights(job: JobConfig, name: str, uri: str, resume: bool) -> None:
    check_weights(job, name, uri, resume, lambda function, *args: function(*args))


def cluster_for(job: JobConfig, ingress: Ingress, address: str) -> Cluster:
    """The cluster for a job; it checks that all ports of the job's actor are free before Ray starts."""
    name = actor_of(job)
    if not name:
        return Cluster(ingress=None, address=address)
    actor = job.actors[name]
    return Cluster(actor.host, actor.port, ingress, address, actor.ports(name))


def check_store_reachable(uri: str, in_process: bool, nodes: Iterable[Mapping[str, Any]], here: str) -> None:
    """Makes sure that a learner on any machine of the cluster can reach the tracking store.

    Args:
        uri: URI of the tracking store.
        in_process: whether the learner is in this process; otherwise Ray places it.
        nodes: as from `ray.nodes`.
        here: id of this process's node.

    Raises:
        ConfigError: the store is a file of this machine, and there are others.
    """
    alive = [node for node in nodes if node["Alive"]]
    own_addresses = {node["NodeManagerAddress"] for node in alive if node["NodeID"] == here}
    others = sorted({node["NodeManagerAddress"] for node in alive} - own_addresses)
    if not in_process and others and (sqlite_path(uri) is not None or uri.startswith("file:")):
        raise ConfigError(
            f"{uri} is a file of this machine, and a learner on {others[0]} could not reach it: start `mlflow server "
            "--host 0.0.0.0` and name it with --tracking http://HOST:5000, or keep the learner here with "
            "trainer.where process",
            key="tracking",
        )


def train_on(
    cluster: Cluster,
    job: JobConfig,
    layout: Layout | None,
    uri: str,
    *,
    trial_name: str | None = None,
    resume: bool = True,
    log_interval: int | None = None,
) -> TrainResult:
    """Runs a training job on a running cluster; other arguments are those of `train`.

    Args:
        layout: from `check_job`; None: the job has no contract, and its first game says it.
    """
    check_store_reachable(uri, job.trainers[only("trainer", job.trainers)].in_process, *nodes_and_own())
    events = job.tracking.tensorboard_folder(uri)
    name = trial_name or job.trial
    if resume and (job.contract is not None or job.has_contract):
        job = with_resumed_contract(job, name, contract_to_resume(job.project, name, uri))
    trial = Trial.open(job.project, name, uri, resume=resume, tensorboard=events)
    whole, waiting = job, None
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_finish, trial))
        if job.needs_contract:
            waiting = stack.enter_context(_waiting(job, trial, uri, cluster))
            job = waiting.wait()
        first, notes = (by_contract(job) or [job])[0], []
        if layout is None:
            _, layout = check_job(first)
            _check_weights(first, name, uri, resume)
            notes = contract_lines(first)
        parts = first, actor_of(first), layout, trial.name, uri, InProcessClerk(trial), log_interval, notes
        return _RayTraining(*parts, cluster=cluster, whole=whole, waiting=waiting).run()


def _waiting(job: JobConfig, trial: Trial, uri: str, cluster: Cluster) -> WaitingOnRay:
    """The open doors of a job whose first game says the contract."""
    from brayx.cluster.waiting import WaitingOnRay

    actor = actor_of(job)
    names = {part: f"{trial.run_id}/{part}" for part in ("weights", "sessions", "league", "rivals")} | {
        "hub": hub_name(trial)
    }

    def open_doors() -> dict[str, str]:
        tell_where(trial)
        say("Ray is up; the timer starts now. Starting the actors")
        spec = dataclasses.replace(_spec(job, actor, uri, names, ()), job=job)
        deploy(application(spec, name=actor, directory=names["sessions"]), actor)
        with urllib.request.urlopen(f"{cluster.url}/", timeout=READY_TIMEOUT_S) as reply:
            return {**json.load(reply)["doors"], **cluster.urls}

    def close_doors() -> None:
        _undeploy(actor, _UNDEPLOY_S, say)
        stop_directory(names["sessions"])

    return WaitingOnRay(job, actor, trial, open_doors, close_doors)


def _finish(trial: Trial, kind: type[BaseException] | None, *_: object) -> None:
    """Ends the trial of a job that an error or Ctrl-C has ended before its training began."""
    with contextlib.suppress(BrayxError):
        if kind is not None and trial.status == "RUNNING":
            trial.finish("FAILED" if issubclass(kind, Exception) else "KILLED")


@dataclass
class _RayTraining(JobTraining):
    """A training on a running cluster.

    Attributes:
        cluster: the cluster.
        whole: the job with all its behaviours; ``job`` is that of the first.
        waiting: its open doors, if its first game has said the contract.
    """

    clerk: InProcessClerk
    learning: Trainees[RayTrainee] = field(init=False)
    cluster: Cluster = field(kw_only=True)
    whole: JobConfig = field(kw_only=True)
    waiting: WaitingOnRay | None = field(default=None, kw_only=True)
    save_s, copy_s = 5.0, 1.0

    def make_parts(self) -> None:
        job, trial, say = self.job, self.clerk.trial(), self.progress.say
        trial.log_options(job.options())
        tell_where(trial)
        learned = max((checkpoint.step for checkpoint in trial.checkpoints()), default=0)
        self._parts: RayTrainee | RayLeagueTraining | RayBehaviours
        self._seats: LeagueSpec | None = None
        self._behaviours: RayBehaviours | None = None
        self._lobby: RayLobby | None = None if self.waiting is None else self.waiting.lobby
        if job.leagues:
            from brayx.cluster.league_training import RayLeagueTraining

            self._parts = league = RayLeagueTraining(job, self.layout, trial, say)
            self.learning, self._seats = league.training, league.seats
            self.stack.callback(league.close)
        elif job.has_contract:
            from brayx.cluster.behaviours import RayBehaviours
            from brayx.cluster.lobby import RayLobby

            self._lobby = self._lobby or RayLobby(self.whole, self._answer)
            parts = job, self.layout, trial, self._lobby, say
            self._parts = self.learning = self._behaviours = RayBehaviours(*parts)
            self.buffers = self.learning.trainees[self.learning.mains[0]].buffers
            self.stack.callback(self._behaviours.end)
        else:
            self._parts = trainee = RayTrainee(job, self.layout, trial)
            self.learning = Trainees(job, trainee)
            self.buffers = trainee.buffers
            self.stack.callback(trainee.close)
        if self._lobby is not None:
            self._lobby.spec_of = self._spec_of
        self.numbers, self._hub, self._names = self._parts.numbers, self._parts.hub, self._parts.names
        self._live: ReplicaSessions | None = None
        self._rollouts = {
            name: Workers(worker_spec(job, name, self._names, learned), self.numbers) for name in job.rollouts
        }
        self.rollouts = list(self._rollouts.values())
        self._is_deployed = False
        if self.waiting is None:
            starting = "the learner and the actors" if self.actor else "the learner"
            say(f"Ray is up; the timer starts now. Starting {starting}")
        else:
            self.waiting.say = say

    def open_doors(self) -> None:
        pass  # a deployment takes long: it starts while the learner does

    def wait_for_weights(self) -> None:
        if self.actor:
            self._is_deployed = True
            if self.waiting is None:
                self._deploy()
            parts = self.cluster.url, self.learning, self.config.model, self.progress
            doors = _wait_for_weights(*parts, self._has_published)
            self.urls = {**doors, **self.cluster.urls}
        if self._lobby is not None:
            self._lobby.admit(parse_contract(self.job.contract).behaviour)
        if self.rollouts:
            self.progress.say(
                f"{sum(workers.num for workers in self._rollouts.values())} rollout workers step environments"
            )

    def _has_published(self) -> bool:
        """Whether replicas that join later find weights, too."""
        return self._lobby is None or self.learning.trainees[self.learning.mains[0]].published

    def gamecores(self, doors: JobDoors | None = None) -> Gamecores:
        if self.waiting is None:
            return super().gamecores(doors)
        self.waiting.failed = self._game_failed
        return self.waiting.games

    def close_doors(self) -> None:
        if self._is_deployed:
            timeout_s = self.end.left(_UNDEPLOY_S if self.finished else _INTERRUPTED_UNDEPLOY_S)
            _undeploy(self.actor, timeout_s, self.progress.say)
            stop_directory(self._names["sessions"])

    def newest(self) -> Snapshot | None:
        return numbers_of(self._hub) if self._behaviours is None else self._behaviours.newest()

    def settle(self) -> Snapshot:
        for trainee in self.learning.trainees.values():
            trainee.settle(self.end.left)
        return self._parts.settle(self.end.left)

    @contextlib.contextmanager
    def console(self, facts: Callable[[], dict[str, Any]]) -> Iterator[None]:
        live: contextlib.AbstractContextManager[ReplicaSessions | None] = contextlib.nullcontext()
        if self.actor:
            self._live = ReplicaSessions(self._names["sessions"])
            live = contextlib.closing(self._live)
        given = facts, live, self.progress.say, self.finish, self.ending
        with console_of_training(self.job, self.uri, *given) as url:
            if self._live is not None and url:
                self._live.tell(url)
            yield

    def facts(self) -> dict[str, Any]:
        """The numbers of sessions on the replicas that answer: 0 until the first one has started."""
        if self._live is None:
            return {}
        facts = self._live.facts()
        return {name: facts.get(name, 0) for name in ("sessions", "silent")}

    def carry_out_requests(self) -> list[str]:
        said: list[str] = []
        for key, request in take_requests(self._hub):
            if isinstance(request, Contract):
                assert self._lobby is not None  # only its replicas ask
                self._lobby.meet(key, request)
            else:
                said += answer_request(self._hub, key, request, self._rollouts)
        return said

    def end_waits(self) -> None:
        for trainee in self.learning.trainees.values():
            for buffer in trainee.buffers.values():  # a source may wait for a hanging shard
                buffer.close(0.0)

    def _deploy(self) -> None:
        """Serves the job's actor: the trained model follows its weight store, other models their champions."""
        actor, names = self.actor, self._names
        spec = _spec(self.job, actor, self.uri, names, self.buffers, league=self._seats)
        if self._behaviours is not None:
            spec = dataclasses.replace(spec, job=self.whole)
        deploy(application(spec, name=actor, directory=names["sessions"]), actor)

    def _spec_of(self, behaviour: str) -> bytes:
        """What a replica needs to act for a behaviour; pickled, since the hub that passes it on must not load torch."""
        job, names, buffers = self.job, self._names, self.buffers
        if self._behaviours is not None:
            job, part = self._behaviours.jobs[behaviour], self._behaviours.trainees[behaviour]
            names, buffers = part.names, part.buffers
        return pickle.dumps(_spec(job, self.actor, self.uri, names, buffers, league=self._seats))

    def _answer(self, key: str, answer: object) -> None:
        self._hub.answer.remote(key, answer)


def _spec(
    job: JobConfig,
    actor: str,
    uri: str,
    names: Mapping[str, str],
    buffers: Iterable[str],
    league: LeagueSpec | None = None,
) -> ActorSpec:
    """What a replica needs to act for a model in training, whose Ray actors have these names."""
    learned = job.trainers[only("trainer", job.trainers)].model
    weights = {name: pooled(job, name, uri) for name in job.models if name != learned}
    weights[learned] = WeightSource(store=names.get("weights", ""))
    # The end of a training does not wait for games: replicas send their last episodes at once.
    hasty = job.actors[actor].model_copy(update={"drain_timeout_s": 0.0})
    self_plays = [
        SelfPlaySpec(names["league"], names["rivals"], options, learned) for options in job.self_plays.values()
    ]
    return actor_spec(
        job.model_copy(update={"actors": {**job.actors, actor: hasty}}),
        actor,
        mode="train",
        weights=weights,
        buffers={name: names[f"buffer/{name}"] for name in buffers},
        hub=names["hub"],
        league=league,
        self_play=next(iter(self_plays), None),
    )


def deploy(application: Any, actor: str) -> None:
    """Runs a Serve application at the door's root, replacing a running one; errors as for `start_application`."""
    start_application(application, actor, "/", time.monotonic() + READY_TIMEOUT_S, what=f"the actor {actor!r}")


def _undeploy(actor: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Deletes the job's application, and says so if its replicas take too long to end."""
    if not delete_application(actor, timeout_s):
        say(f"the actor {actor!r} did not end within {timeout_s:g} s: its last metrics may be missing")


def _wait_for_weights(
    url: str, learner: RunningLearner, model: str, progress: Progress, has_published: Callable[[], bool] = lambda: True
) -> dict[str, str]:
    """Waits until the door answers with published weights of the learner; returns the native doors' URLs."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    said = "nothing"
    while time.monotonic() < deadline:
        if not learner.running:
            learner.result()
            return {}
        try:
            with urllib.request.urlopen(f"{url}/", timeout=5.0) as reply:
                status = json.load(reply)
            if status["policy_versions"].get(model, 1) >= 1 and has_published():
                return dict(status["doors"])
            said = "that it has no weights yet"
        except (OSError, ValueError, KeyError) as error:
            said = str(error)
        progress.update({}, note="waiting for the learner's first weights")
        time.sleep(0.1)
    raise StartupError(
        f"the service at {url} was not ready within {READY_TIMEOUT_S:g} s; it said {said}; "
        f"the learner {learner.state()}"
    )
