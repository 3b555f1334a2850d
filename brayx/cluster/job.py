"""A training job on Ray from start to end; reads top to bottom.

Starts (or joins) Ray, opens the trial, starts hub, weight store and replay buffer, starts the learner and the actor
deployment concurrently, then the gamecores and the rollout workers. Shows progress. Then ends all parts in an order
that loses no data: games and workers, learner (an interrupted one saves a last checkpoint), actors, trial, the rest. A
job without an actor has no door and starts no Serve.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from brayx.cluster import NAMESPACE
from brayx.cluster.actor_app import actor_spec, application
from brayx.cluster.applications import delete_application, start_application
from brayx.cluster.cluster import Cluster, Ingress
from brayx.cluster.directory import stop_directory
from brayx.cluster.environments import Rollouts
from brayx.cluster.hub import numbers_of
from brayx.cluster.job_console import console_of
from brayx.cluster.league_replica import check_placement
from brayx.cluster.scale import tell_where
from brayx.cluster.start import nodes_and_own
from brayx.console.job import console_keys
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, StartupError
from brayx.jobs.champion import drawn_curve
from brayx.jobs.checks import actor_of, check_job, check_weights, ports_of
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.jobs.environments import lag_notes
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.progress import Progress, error_lines
from brayx.jobs.result import (
    STEPS_THIS_RUN,
    TrainResult,
    end_reason,
    keep_after_error,
    keep_recordings,
    mark_unfinished,
)
from brayx.jobs.sources import Sources
from brayx.jobs.watching import Watch, last_of
from brayx.jobs.weights import WeightSource, pooled
from brayx.logs import one_line
from brayx.shutdown import INTERRUPTED_S, Deadline, running_parts
from brayx.tracking import Trial, initialise, tracking_uri
from brayx.urls import sqlite_path

if TYPE_CHECKING:
    from brayx.cluster.league_training import RayLeagueTraining
    from brayx.cluster.learner import Learner
    from brayx.cluster.remote_buffer import RemoteBuffer
    from brayx.cluster.trainee import RayTrainee
    from brayx.league.training import Learners
    from brayx.replay.packing import Layout
    from brayx.trainer.loop import Summary

_READY_TIMEOUT_S = 180.0
_LOOK_S = 0.25
_END_S = 20.0
"""Deadline for all parts together to end, apart from the learner of a finished training."""
_UNDEPLOY_S = 4.0
"""Share of `_END_S` for the actor's replicas."""
_INTERRUPTED_UNDEPLOY_S = 2.0
_INTERRUPTED_END_TIMEOUT_S = 5.0
"""Share of `_END_S` for an interrupted learner and its last checkpoint."""
_INTERRUPTED_START_TIMEOUT_S = 1.0
_COPY_S = 1.0
"""Share of `_END_S` to copy recordings of an interrupted training to its trial."""


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
    _, layout = check_job(job)
    check_placement(job)
    console_keys(job)
    uri = initialise(tracking_uri(tracking or job.tracking.uri))
    check_weights(job, trial_name or job.trial, uri, resume, lambda function, *args: function(*args))
    started = cluster_for(job, ingress, cluster) if isinstance(cluster, str) else contextlib.nullcontext(cluster)
    with started as running:
        return train_on(running, job, layout, uri, trial_name=trial_name, resume=resume, log_interval=log_interval)


def cluster_for(job: JobConfig, ingress: Ingress, address: str) -> Cluster:
    """The cluster for a job; it checks that all ports of the job's actor are free before Ray starts."""
    name = actor_of(job)
    if not name:
        return Cluster(ingress=None, address=address)
    actor = job.actors[name]
    return Cluster(actor.host, actor.port, ingress, address, ports_of(job, name))


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
    own = {node["NodeManagerAddress"] for node in alive if node["NodeID"] == here}
    others = sorted({node["NodeManagerAddress"] for node in alive} - own)
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
    layout: Layout,
    uri: str,
    *,
    trial_name: str | None = None,
    resume: bool = True,
    log_interval: int | None = None,
) -> TrainResult:
    """Runs a training job on a running cluster; ``layout`` is from `check_job`, other arguments as for `train`."""
    actor = actor_of(job)
    config = job.trainers[only("trainer", job.trainers)]
    check_store_reachable(uri, config.in_process, *nodes_and_own())
    events = job.tracking.tensorboard_folder(uri)
    trial = Trial.open(job.project, trial_name or job.trial, uri, resume=resume, tensorboard=events)
    progress = Progress(
        f"{trial.project} / {trial.name}" + (" (resumed)" if trial.resumed else ""),
        num_steps=config.num_steps,
        target=config.target_return,
        log_interval=log_interval,
    )
    before = max((checkpoint.step for checkpoint in trial.checkpoints()), default=0)
    began, learning, finished, seconds, steps = time.monotonic(), False, False, 0.0, 0
    ended: Summary | None = None
    end = Deadline(_END_S)
    with contextlib.ExitStack() as stack:
        stack.push(lambda _, error, __: mark_unfinished(trial, error, learning))
        stack.enter_context(progress)
        trial.log_params(job.as_dict())
        tell_where(trial)
        trainee = _trainee(job, layout, trial, progress.say)
        stack.callback(trainee.close)
        learner, recorder, names = trainee.learner, trainee.numbers, trainee.names
        for note in lag_notes(job):
            progress.say(note)
        progress.say(
            "Ray is up, and these seconds count from here; the learner is starting"
            + (", and the actors" if actor else "")
        )
        learner.start()
        served = stack.enter_context(contextlib.ExitStack())
        keep = functools.partial(
            keep_recordings, job, time.time(), progress.say, lambda function, *args: function(trial, *args)
        )
        served.push(lambda _, error, __: keep_after_error(error if learning else None, keep))
        try:
            urls: dict[str, str] = {}
            served.enter_context(
                console_of(job, trainee, urls, has_actor=bool(actor), say=progress.say),
            )
            if actor:
                served.callback(stop_directory, names["sessions"])
                served.callback(
                    lambda: _undeploy(
                        actor, end.left(_UNDEPLOY_S if finished else _INTERRUPTED_UNDEPLOY_S), progress.say
                    )
                )
                if job.actors[actor].keys_file is not None:
                    progress.say(f"{actor}.keys_file: keys are required when the job is served, not while it trains")
                _deploy(job, actor, trainee)
                doors = _wait_for_weights(cluster.url, learner, config.model, progress)
                urls |= {**doors, "http": cluster.door("http"), "ws": cluster.door("ws")}
            began, learning = time.monotonic(), True
            sources = Sources(job, trainee.buffers, layout.env)
            games = Gamecores(
                job.actors[actor].gamecores if actor else [],
                urls,
                job.folder,
                lambda line: recorder.add("gamecores_failed", 1.0, note=one_line(line)),
                progress.say,
            )
            rollouts = Rollouts(job, names, NAMESPACE, recorder, before)
            with running_parts((sources, games, rollouts), end, stopping=lambda: _close(trainee.buffers.values())):
                if actor:
                    progress.say(f"{games}; the door is {cluster.url}")
                if rollouts.num:
                    progress.say(f"{rollouts.num} rollout workers step environments")
                enough, share = trainee.batch_steps, config.max_lost_share
                must_connect = [*urls.values()] if job.needs_games else []
                watch = Watch(progress, learner, games, [rollouts], enough, share, must_connect)
                _watch(watch, trainee, sources, rollouts, games_play=games.num > 0, say=progress.say)
                seconds = time.monotonic() - began
            steps = rollouts.collected.steps
            with end.paused():
                ended = last_of(learner)
            finished = True
        except KeyboardInterrupt:
            seconds = seconds or (time.monotonic() - began if learning else 0.0)
            what = ": the learner saves a last checkpoint" if learning else " before training began"
            progress.say(f"interrupted{what}; the same command resumes this trial")
            end.shorten(INTERRUPTED_S)
            _end(learner, learning, end)
        except BaseException:
            _end(learner, learning, end)  # before Ray goes: a thread that still calls it would start another one
            raise
        served.close()  # before the trial: replicas hand over their last metrics when they end
        numbers, notes = trainee.settle(end.left)
        numbers[STEPS_THIS_RUN] = float(steps)
        version, outcome = None, ""
        if finished:
            version, outcome = trainee.register(progress.say)
            keep()
        elif learning:
            outcome = trainee.standings()
        trainee.close_trials(finished)
        curve = drawn_curve(trial, job.project, config.target_return, config.x_axis)
        trial.finish("FINISHED" if finished else "KILLED")
        if learning and not finished:  # last, since slow copies are killed
            keep(time.time() + end.left(_COPY_S))
    name = pool_name(job, config.model)
    errors, reason = tuple(error_lines(numbers, notes)), "" if ended is None else ended.reason
    return TrainResult(
        trial,
        numbers,
        finished,
        name,
        version,
        seconds,
        curve,
        outcome,
        reason,
        began,
        errors,
        end_reason(config, ended),
    )


def _trainee(
    job: JobConfig, layout: Layout, trial: Trial, say: Callable[[str], None]
) -> RayTrainee | RayLeagueTraining:
    """Everything that learns in a job: one model, or the players of a league."""
    if job.leagues:
        from brayx.cluster.league_training import RayLeagueTraining

        return RayLeagueTraining(job, layout, trial, say)
    from brayx.cluster.trainee import RayTrainee

    return RayTrainee(job, layout, trial)


def _close(buffers: Iterable[RemoteBuffer]) -> None:
    """Ends this process's waits for room in a buffer, since a source may wait for a hanging shard."""
    for buffer in buffers:
        buffer.close(0.0)


def _deploy(job: JobConfig, actor: str, trainee: RayTrainee | RayLeagueTraining) -> None:
    """Serves the job's actor: the trained model follows its weight store, other models their champions."""
    learned, names = trainee.config.model, trainee.names
    weights = {name: pooled(job, name, trainee.trial.uri) for name in job.models if name != learned}
    weights[learned] = WeightSource(store=names.get("weights", ""))
    # The end of a training does not wait for games: replicas send their last episodes at once.
    hasty = job.actors[actor].model_copy(update={"drain_timeout_s": 0.0})
    job = job.model_copy(update={"actors": {**job.actors, actor: hasty}})
    spec = actor_spec(
        job,
        actor,
        mode="train",
        weights=weights,
        buffers=trainee.actors,
        hub=names["hub"],
        trial=trainee.trial,
        league=trainee.seats,
    )
    deploy(application(spec, name=actor, directory=names["sessions"]), actor)


def deploy(application: Any, actor: str) -> None:
    """Runs a Serve application at the door's root, replacing a running one; errors as for `start_application`."""
    start_application(application, actor, "/", time.monotonic() + _READY_TIMEOUT_S, what=f"the actor {actor!r}")


def _undeploy(actor: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Deletes the job's application, and says so if its replicas take too long to end."""
    if not delete_application(actor, timeout_s):
        say(f"the actor {actor!r} did not end within {timeout_s:g} s: its last metrics may be missing")


def _wait_for_weights(url: str, learner: Learner | Learners, model: str, progress: Progress) -> dict[str, str]:
    """Waits until the door answers with published weights of the learner; returns the native doors' URLs."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    said = "nothing"
    while time.monotonic() < deadline:
        if not learner.running:
            learner.result()
            return {}
        try:
            with urllib.request.urlopen(f"{url}/", timeout=5.0) as reply:
                status = json.load(reply)
            if status["policy_versions"].get(model, 1) >= 1:
                return dict(status["doors"])
            said = "that it has no weights yet"
        except (OSError, ValueError, KeyError) as error:
            said = str(error)
        progress.update({}, note="waiting for the learner's first weights")
        time.sleep(0.1)
    raise StartupError(
        f"the service at {url} was not ready within {_READY_TIMEOUT_S:g} s; it said {said}; "
        f"the learner {learner.state()}"
    )


def _watch(
    watch: Watch,
    trainee: RayTrainee | RayLeagueTraining,
    sources: Sources,
    rollouts: Rollouts,
    *,
    games_play: bool,
    say: Callable[[str], None],
) -> None:
    """Watches until the learner's stream is over; ends the stream when no more data can arrive.

    Raises:
        StartupError: the learner publishes no weights.
        BrayxError: a source failed, or a rollout failed permanently; or as `Watch.look`.
    """
    began, hub, learner = time.monotonic(), trainee.hub, trainee.learner
    while not learner.wait(_LOOK_S):
        if sources.errors:
            raise sources.errors[0]
        if rollouts.error is not None:
            raise rollouts.error
        with contextlib.suppress(DeadlineExceeded):  # a buffer or the league is slow, or being restarted
            if trainee.is_over(sources.done and not games_play and not rollouts.num):
                return
            trainee.look()
        for line in rollouts.answer(hub):
            say(line)
        if (found := numbers_of(hub)) is not None:
            if "policy_version" not in found[0] and time.monotonic() - began > _READY_TIMEOUT_S:
                raise StartupError(f"no weights came within {_READY_TIMEOUT_S:g} s; the learner {learner.state()}")
            watch.look(*found)


def _end(learner: Learner | Learners, learning: bool, end: Deadline) -> None:
    """Stops a learner and waits, within the deadline, for the last checkpoint of one that has started to learn."""
    with contextlib.suppress(BrayxError):
        learner.stop()
        learner.result(end.left(_INTERRUPTED_END_TIMEOUT_S if learning else _INTERRUPTED_START_TIMEOUT_S))
