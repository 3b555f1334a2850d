"""A training job in this process, from its first line to its last: reads top to bottom. Ray is never imported.

Checks the job, opens the trial in another process, opens the doors, starts the learner and, once its weights act, the
gamecores, rollouts and sources. Shows progress. Then ends all parts in an order that loses no data: games, learner (an
interrupted one saves a last checkpoint), sessions and doors, MLflow. A job without an actor has no door.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from brayx.console.job import ConsoleJob, console_keys, open_console
from brayx.errors import BrayxError, StartupError
from brayx.jobs.champion import champion_of, drawn_curve
from brayx.jobs.checks import check_job, check_weights, ports_of
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.jobs.environments import lag_notes
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.progress import Progress, error_lines, tracebacks
from brayx.jobs.result import LATE, STEPS_THIS_RUN, TrainResult, end_reason, keep_after_error, keep_recordings
from brayx.jobs.sources import Sources
from brayx.jobs.watching import Watch, last_of
from brayx.logs import one_line
from brayx.ports import check_ports
from brayx.remote import offer
from brayx.shutdown import INTERRUPTED_S, Deadline, running_parts, wait_to_save
from brayx.temporary import temporary_files
from brayx.tracking import Trial, check_writable, tracking_uri
from brayx.tracking.clerk import Clerk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brayx.actor.agent import State
    from brayx.local.acting import ActingModel
    from brayx.local.host import LocalHost
    from brayx.local.league_training import LocalLeagueTraining
    from brayx.model.local import LocalModel
    from brayx.recording.render import EpisodeRenderer
    from brayx.trainer.loop import Summary

_READY_TIMEOUT_S = 180.0
"""Deadline of the learner's first weights."""
_LOOK_S = 0.25
_END_S = 20.0
"""Deadline for all parts together to end, apart from the learner of a finished training."""
_DOORS_END_S = 2.0
"""Share of `_END_S` for sessions, and the same for doors."""
_INTERRUPTED_END_TIMEOUT_S = 4.0
"""Share of `_END_S` for an interrupted learner and its last checkpoint."""
_COPY_S = 2.0
"""Share of `_END_S` to copy recordings of an interrupted training to its trial."""
_OPENED_S = 2.0
"""Share of `_END_S` to wait for MLflow if it is still starting."""
_OPENED_ON_ERROR_S = 60.0
"""Time to wait for MLflow after an error: otherwise the trial would stay marked as running."""


def beyond_local(job: JobConfig) -> list[str]:
    """Parts of a job that the local host cannot run, one short clause each; empty: it can run all of it."""
    found, cpus = [], len(os.sched_getaffinity(0))
    for name, rollout in job.rollouts.items():
        wanted = rollout.num_workers * rollout.cpus_per_worker
        if wanted > cpus:
            found.append(f"the workers of {name} reserve {wanted:g} CPUs, and this machine has {cpus}")
    remote = {name: model for name, model in job.models.items() if model.placement == "remote"}
    for group in (job.actors, job.trainers, remote):
        workers = {name: int(getattr(part, "num_workers", 1)) for name, part in group.items()}
        found += [f"{name}.num_workers is {count}" for name, count in workers.items() if count > 1]
    return found


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
    config = job.trainers[only("trainer", job.trainers)]
    name, uri = trial_name or job.trial, check_writable(tracking_uri(tracking or job.tracking.uri))
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporary_files())
        # First, since MLflow takes longest to import, in another process.
        clerk = Clerk(
            job.project,
            name,
            uri,
            job.as_dict(),
            resume=resume,
            kept=config.checkpoints_kept,
            x_axis=config.x_axis,
            tensorboard=job.tracking.tensorboard_folder(uri),
        )
        stack.callback(clerk.end)
        stack.push(lambda _, error, __: _mark_unfinished(clerk, error))
        return _Training(job, name, uri, clerk, log_interval, stack).run()


class _Training:
    """One training. Its parts are made in the order of their dependencies."""

    def __init__(
        self, job: JobConfig, name: str, uri: str, clerk: Clerk, log_interval: int | None, stack: contextlib.ExitStack
    ) -> None:
        from brayx.local.trainee import Trainee  # torch takes a second to import: MLflow's process has started by now

        self.clerk = clerk
        self.name = name
        self.config = config = job.trainers[only("trainer", job.trainers)]
        self.actor, layout = check_job(job)
        console_keys(job)
        check_weights(job, name, uri, clerk.may_resume, clerk.run)
        self.job, notes = in_one_process(job)
        self.as_dict = job.in_mode("train").as_dict()
        if self.actor:
            check_ports(ports_of(job, self.actor))
        resumed = clerk.may_resume and clerk.trial().resumed
        self.progress = Progress(
            f"{job.project} / {name}" + (" (resumed)" if resumed else ""),
            num_steps=config.num_steps,
            target=config.target_return,
            log_interval=log_interval,
        )
        stack.enter_context(self.progress)
        for note in (*notes, *lag_notes(self.job)):
            self.progress.say(note)
        stack.enter_context(tracebacks(self.progress.say))
        self.trainee: Trainee | LocalLeagueTraining
        if job.leagues:
            from brayx.local.league_training import LocalLeagueTraining

            self.trainee = LocalLeagueTraining(self.job, layout, clerk, self.progress.say)
        else:
            self.trainee = Trainee(self.job, layout, clerk, acts=bool(self.actor))
        trainee = self.trainee
        self.numbers, self.learner = trainee.numbers, trainee.learner
        self.buffers, self.rollouts = trainee.buffers, trainee.rollouts
        self.champions: dict[str, ActingModel] = {}
        self.uri = uri
        self.host = None if trainee.acting is None else self._host(trainee.acting.model, stack)
        self.sources = Sources(job, self.buffers, layout.env)
        self._keep = functools.partial(keep_recordings, self.job, time.time(), self.progress.say, clerk.call)
        self.finished = self.learning = False
        self.end = Deadline(_END_S)

    def _host(self, learned: LocalModel, stack: contextlib.ExitStack) -> LocalHost:
        """The actor behind its doors; its models and buffers have their names in this process until ``stack`` ends.

        Args:
            learned: the acting side of the model that is trained.
        """
        from brayx.actor.agent import Services
        from brayx.actor.parts import actor_factory
        from brayx.actor.serving import Runtime
        from brayx.local.host import LocalHost
        from brayx.recording.recorder import closing, recorders_of

        job = self.job
        actor = job.actors[self.actor]
        self.champions = {name: self._champion(name) for name in job.models if name != self.config.model}
        others = {name: champion.model for name, champion in self.champions.items()}
        models = {self.config.model: learned, **others}
        recorders = recorders_of(job.recording, self.numbers, job.drawing)
        make_actor = actor_factory(
            actor,
            job.agents,
            job.folder,
            self.as_dict,
            Services(models, self.buffers, self.numbers),
            recorders=[*_renderer(job, self.actor, self.clerk), *recorders],
            players=self.trainee.seats(others),
        )
        host = LocalHost(
            actor,
            Runtime(
                make_actor,
                self.numbers,
                lambda: {
                    "mode": "train",
                    "policy_versions": {name: acting.version for name, acting in models.items()},
                },
                [*closing(recorders), self._close_models, *(each.close for each in self.champions.values())],
            ),
            name=self.actor,
            on_hold=self.progress.pause,
        )
        stack.enter_context(offer(models, self.buffers, host.loop))
        return host

    async def _close_models(self) -> None:
        """Closes the models that learn, and those that a league added meanwhile."""
        acting = self.trainee.acting
        for model in (*([] if acting is None else [acting]), *self.trainee.opponents):
            await model.close()

    def run(self) -> TrainResult:
        """Trains; returns the result."""
        job, say = self.job, self.progress.say
        began, seconds, learned = time.monotonic(), 0.0, None
        with contextlib.ExitStack() as served:
            host = self.host
            served.push(self._keep_after_error)
            if host is not None:
                served.callback(lambda: host.close(self.end.left(_DOORS_END_S)))
            try:
                if host is not None:
                    host.open()
                    if job.actors[self.actor].keys_file is not None:
                        say(f"{self.actor}.keys_file: keys are required when the job is served, not while it trains")
                served.enter_context(self._console())
                self.learner.start()
                self._wait_for_weights()
                self._build_engines()
                began, self.learning = time.monotonic(), True
                commands = job.actors[self.actor].gamecores if self.actor else []
                urls = {} if host is None else host.urls
                games = Gamecores(commands, urls, job.folder, self._game_failed, say)
                with running_parts((self.sources, *self.rollouts, games), self.end):
                    if host is not None:
                        say(f"{games}; the door is {host.url}")
                    self._watch(games)
                    seconds = time.monotonic() - began
                with self.end.paused():
                    learned = last_of(self.learner)
                self.finished = True
            except KeyboardInterrupt as error:
                self.end.shorten(INTERRUPTED_S)
                seconds = seconds or (time.monotonic() - began if self.learning else 0.0)
                what = ": the learner saves a last checkpoint" if self.learning else " before training began"
                then = "the same command resumes this trial" if self.clerk.opened() else "MLflow is still starting"
                say(f"interrupted{what}; {then}")
                self._stop_learner()
                if not self._has_opened():
                    error.add_note("before MLflow had started: nothing is kept")
                    raise
            except BaseException:
                self._stop_learner()
                if self.learning:  # record the error in MLflow even if it is still starting
                    self.clerk.opened(_OPENED_ON_ERROR_S)
                raise
        try:
            return self._result(began, seconds, learned)
        except KeyboardInterrupt as error:
            error.add_note(LATE)
            raise

    def _result(self, began: float, seconds: float, learned: Summary | None) -> TrainResult:
        job, config, clerk = self.job, self.config, self.clerk
        numbers = self.numbers.snapshot()
        if self.rollouts:
            numbers[STEPS_THIS_RUN] = float(sum(rollout.collected.steps for rollout in self.rollouts))
        errors = tuple(error_lines(numbers, self.numbers.notes()))
        clerk.settle()
        trial = clerk.trial()
        version, outcome, curve = None, "", []
        if self.finished:  # Ctrl-C does not wait for a picture
            version, outcome = self.trainee.register(self.progress.say)
            self._keep()
            curve = clerk.call(drawn_curve, job.project, config.target_return, config.x_axis)
        elif self.learning:
            outcome = self.trainee.standings()
        self.trainee.close(self.finished)
        if self.learning and not self.finished:
            self._keep_recordings_in_time()
        clerk.close("FINISHED" if self.finished else "KILLED")
        name = pool_name(job, config.model)
        reason, ended = "" if learned is None else learned.reason, end_reason(config, learned)
        return TrainResult(
            trial, numbers, self.finished, name, version, seconds, curve, outcome, reason, began, errors, ended
        )

    def _keep_after_error(self, _: object, error: BaseException | None, __: object) -> None:
        """Copies recordings if an error ended the training; the doors are closed, and the recordings written."""
        keep_after_error(error if self.learning else None, self._keep)

    def _keep_recordings_in_time(self) -> None:
        """Copies recordings of an interrupted training to its trial, which it ends first: slow copies are killed."""
        if self.job.recording is None or not self.job.recording.to_trial:
            return
        self.clerk.call(Trial.finish, "KILLED")
        try:
            self._keep(time.time() + self.end.left(_COPY_S))
        except KeyboardInterrupt:
            self.clerk.end()  # which still copies, and nobody waits for it now
            raise

    @contextlib.contextmanager
    def _console(self) -> Iterator[None]:
        """The console, while the job runs."""
        from brayx.console.live import LiveSessions

        with contextlib.ExitStack() as stack:
            live = None
            if self.host is not None:
                live = stack.enter_context(contextlib.closing(LiveSessions(self.host, self.job.drawing)))
            parts = ConsoleJob(self._facts, live, can_stop=threading.current_thread() is threading.main_thread())
            stack.enter_context(open_console(self.job, self.uri, parts, self.progress.say))
            yield

    def _facts(self) -> dict[str, Any]:
        """What the console shows of the training."""
        numbers = dict(self.numbers.newest())
        return {
            "mode": "train",
            "project": self.job.project,
            "trial": self.name,
            "run_id": self.clerk.trial().run_id if self.clerk.opened() else "",
            "num_steps": self.config.num_steps,
            "target_return": self.config.target_return,
            "waits_for": f"the learner {self.learner.state()}",
            "doors": {} if self.host is None else dict(self.host.urls),
            "numbers": numbers,
            "errors": list(error_lines(numbers, self.numbers.notes())),
        }

    def _wait_for_weights(self) -> None:
        """Waits until the learner's first weights act."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self.learner.ready.wait(_LOOK_S):
            self.clerk.check()
            self.progress.update({}, note="waiting for the learner's first weights")
            if time.monotonic() > deadline:
                raise StartupError(f"no weights came within {_READY_TIMEOUT_S:g} s; the learner {self.learner.state()}")
        if not self.learner.running:
            self.learner.result()

    def _watch(self, games: Gamecores) -> None:
        """Shows progress until the learner's stream is over.

        Raises:
            BrayxError: a source failed, or a rollout failed more often than its options allow; or as `Watch.look`.
        """
        urls = [] if self.host is None or not self.job.needs_games else [*self.host.urls.values()]
        steps, share = self.trainee.batch_steps, self.config.max_lost_share
        watch = Watch(self.progress, self.learner, games, self.rollouts, steps, share, urls)
        while not self.learner.wait(_LOOK_S):
            self.clerk.check()
            failed = [*self.sources.errors, *(each.error for each in self.rollouts if each.error is not None)]
            if failed:
                raise failed[0]
            if self.sources.done and not games.num and not self.rollouts:
                for name in self.config.buffers:
                    self.buffers[name].end(drain=True)
            self.trainee.look()
            watch.look(self.numbers.snapshot(), self.numbers.notes())

    def _game_failed(self, line: str) -> None:
        self.numbers.add("gamecores_failed", 1.0, note=one_line(line))

    def _has_opened(self) -> bool:
        """Whether MLflow has started. If an interrupted training has learned something, this waits for MLflow."""
        if self.clerk.opened(self.end.left(_OPENED_S)) or not self.numbers.snapshot().get("updates"):
            return self.clerk.opened()
        with self.end.paused():
            return wait_to_save(self.clerk.opened, self.progress.say)

    def _stop_learner(self) -> None:
        """Stops the learner, with a few seconds for its last checkpoint."""
        with contextlib.suppress(BrayxError):
            self.learner.stop()
            self.learner.result(self.end.left(_INTERRUPTED_END_TIMEOUT_S if self.learning else 1.0))

    def _build_engines(self) -> None:
        """Starts to build the models' engines; what each acts with becomes a tag of the trial."""

        def record(name: str, acts_with: str) -> None:
            with contextlib.suppress(BrayxError):  # the training may have ended meanwhile
                self.clerk.call(Trial.set_tag, f"brayx.engine.{name}", acts_with)

        self.trainee.build_engines(self.progress.say, functools.partial(record, self.config.model))
        for name, champion in self.champions.items():
            champion.build(functools.partial(self._say_of, name), functools.partial(record, name))

    def _say_of(self, name: str, line: str) -> None:
        self.progress.say(f"{name!r}: {line}")

    def _champion(self, name: str) -> ActingModel:
        """A model that acts but is not trained: the champion of its name, or else the model as built."""
        from brayx.jobs.acting import acting_from

        source = self.clerk.call(champion_of, self.job, name)
        if not source.checkpoint:
            self.progress.say(f"model {name!r} acts untrained: {pool_name(self.job, name)} has no champion")
        return acting_from(source, self.job, name, self.job.as_dict(), self.numbers)


def _renderer(job: JobConfig, actor: str, clerk: Clerk) -> list[EpisodeRenderer]:
    """Draws games in the clerk's process, which has the trial; empty if the job draws none."""
    from brayx.recording.render import EpisodeRenderer, Render, draw_pickled

    every = job.actors[actor].episode_save_interval
    renders = {name: Render(render.module, render.func, render.video) for name, render in job.renders.items()}
    if every is None or not renders:
        return []

    def draw(episode: list[State], returned: float | None) -> Future[Any]:
        return clerk.in_background(draw_pickled, pickle.dumps(episode), returned, renders, job.folder)

    return [EpisodeRenderer(draw, every=every)]


def _mark_unfinished(clerk: Clerk, error: BaseException | None) -> None:
    """Records in MLflow that an error or Ctrl-C ended the trial, if the trial exists by now."""
    if error is not None and clerk.opened():
        with contextlib.suppress(BrayxError):  # the error itself says more
            clerk.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
