"""A training job in this process, from its first line to its last: reads top to bottom. Ray is never imported.

Checks the job, opens the trial in another process, opens the doors, starts the learner and, once its weights act, the
gamecores, rollouts and sources. Shows progress. Then ends all parts in an order that loses no data: games, learner (an
interrupted one saves a last checkpoint), sessions and doors, MLflow. A job without an actor has no door.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from brayx.errors import BrayxError, StartupError
from brayx.faults import AGENTS_LOGGER
from brayx.logs import one_line
from brayx.ports import check_ports
from brayx.remote import offer
from brayx.temporary import temporary_files
from brayx.tracking import Trial, check_writable, tracking_uri
from deployments.job import JobConfig, only, pool_name
from pipelines.champion import champion_of, drawn_curve
from pipelines.checks import check_job, ports_of
from pipelines.clerk import Clerk
from pipelines.environments import lag_notes, normalises, policy_lag, spec_of
from pipelines.gamecores import Gamecores
from pipelines.progress import Progress, error_lines
from pipelines.result import STEPS_THIS_RUN, TrainResult, end_reason, promote
from pipelines.shutdown import INTERRUPTED_S, Deadline, running_parts
from pipelines.sources import Sources
from pipelines.watching import Watch, last_of

if TYPE_CHECKING:
    from brayx.actor.agent import State
    from brayx.local.acting import ActingModel
    from brayx.local.host import LocalHost
    from brayx.model.local import LocalModel
    from brayx.trainer.loop import Summary
    from deployments.render import EpisodeRenderer

_READY_TIMEOUT_S = 180.0
"""Deadline of the learner's first weights."""
_LOOK_S = 0.25
_END_S = 20.0
"""Deadline for all parts together to end, apart from the learner of a finished training."""
_DOORS_END_S = 2.0
"""Share of `_END_S` for sessions, and the same for doors."""
_INTERRUPTED_END_TIMEOUT_S = 4.0
"""Share of `_END_S` for an interrupted learner and its last checkpoint."""
_OPENED_S = 2.0
"""Share of `_END_S` to wait for MLflow if it is still starting."""
_OPENED_ON_ERROR_S = 10.0
"""The same after an error."""


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

    Arguments are those of `pipelines.train.train`.

    Raises:
        BrayxError: the job could not be started, or its learner failed for good.
    """
    config = job.trainers[only("trainer", job.trainers)]
    name, uri = trial_name or job.trial, check_writable(tracking_uri(tracking or job.tracking))
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
        )
        stack.callback(clerk.end)
        stack.push(lambda _, error, __: _mark_unfinished(clerk, error))
        return _Training(job, name, clerk, log_interval, stack).run()


class _Training:
    """One training. Its parts are made in the order of their dependencies."""

    def __init__(
        self, job: JobConfig, name: str, clerk: Clerk, log_interval: int | None, stack: contextlib.ExitStack
    ) -> None:
        import torch

        from brayx.local.acting import ActingModel
        from brayx.local.buffer import LocalBuffer
        from brayx.local.learner import LocalLearner
        from brayx.local.numbers import LocalNumbers
        from brayx.local.rollouts import LocalMoments, LocalRollout
        from brayx.local.stream import Batches
        from brayx.rollout.worker import Newest
        from brayx.trainer.fits import built_to_learn
        from brayx.trainer.hooks import Hooks, load_hooks

        self.clerk = clerk
        self.config = config = job.trainers[only("trainer", job.trainers)]
        self.actor, layout = check_job(job)
        self.job, notes = in_one_process(job)
        model, self.as_dict = job.models[config.model], job.in_mode("train").as_dict()
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
        shown = logging.getLogger(AGENTS_LOGGER)
        shown.disabled = True  # the display has these
        stack.callback(setattr, shown, "disabled", False)
        totals = clerk.totals()
        self.numbers = LocalNumbers(totals, config.x_axis)
        self.numbers.listen(clerk.push)
        torch.manual_seed(job.seed)
        module, forward_args, _ = built_to_learn(config, config.model, model.module, job.folder, self.as_dict)
        self.acting = ActingModel(model, module, forward_args, self.numbers) if self.actor else None
        self.buffers = {
            name: LocalBuffer(
                self.job.buffers[name].model_copy(update={"max_policy_lag": policy_lag(self.job, name)}),
                layout,
                self.numbers,
                learned=name in config.buffers,
            )
            for name in (*config.buffers, *config.eval_buffers)
        }
        moments = LocalMoments() if any(map(normalises, job.rollouts.values())) else None
        newest = Newest()
        self.rollouts = [
            LocalRollout(
                spec_of(self.job, name, int(totals.get("env_steps", 0))),
                newest=newest,
                buffer=self.buffers[rollout.buffer],
                numbers=self.numbers,
                moments=moments,
            )
            for name, rollout in self.job.rollouts.items()
        ]
        weights = dict(zip(config.buffers, config.weights or [1.0] * len(config.buffers), strict=True))
        self.learner = LocalLearner(
            config,
            module,
            forward_args,
            followers=[newest.put] if self.acting is None else [self.acting.model.load, newest.put],
            batches=Batches({name: self.buffers[name] for name in config.buffers}, weights),
            numbers=self.numbers,
            keeper=clerk,
            about={"job": self.as_dict, "folder": job.folder},
            hooks=load_hooks(config.hooks, job.folder) if config.hooks else Hooks(),
            normaliser=moments,
            eval_batches={name: Batches({name: self.buffers[name]}, {name: 1.0}) for name in config.eval_buffers},
        )
        self.champions: dict[str, ActingModel] = {}
        self.host = None if self.acting is None else self._host(self.acting.model, stack)
        self.sources = Sources(job, self.buffers)
        self.finished = self.learning = False
        self.end = Deadline(_END_S)

    def _host(self, learned: LocalModel, stack: contextlib.ExitStack) -> LocalHost:
        """The actor behind its doors; its models and buffers have their names in this process until ``stack`` ends.

        Args:
            learned: the acting side of the model that is trained.
        """
        from brayx.actor.agent import Services
        from brayx.actor.agent_actor import AgentActorFactory
        from brayx.actor.games import Games
        from brayx.actor.parts import agents_of, codec_of
        from brayx.actor.serving import Runtime
        from brayx.local.host import LocalHost

        job = self.job
        actor = job.actors[self.actor]
        self.champions = {name: self._champion(name) for name in job.models if name != self.config.model}
        models = {self.config.model: learned, **{name: champion.model for name, champion in self.champions.items()}}
        make_actor = AgentActorFactory(
            agents=agents_of({name: job.agents[name] for name in actor.agents}, job.folder),
            config=self.as_dict,
            services=Services(models, self.buffers, self.numbers),
            codec=codec_of(actor, job.folder),
            episode_length=actor.episode_length,
            keeper=_renderer(job, self.actor, self.clerk),
            games=Games() if actor.share == "game" else None,
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
                [acting.close for acting in models.values()],
            ),
            name=self.actor,
            on_hold=self.progress.pause,
        )
        stack.enter_context(offer(models, self.buffers, host.loop))
        return host

    def run(self) -> TrainResult:
        """Trains; returns the result."""
        job, say = self.job, self.progress.say
        began, seconds, learned = time.monotonic(), 0.0, None
        with contextlib.ExitStack() as served:
            host = self.host
            if host is not None:
                served.callback(lambda: host.close(self.end.left(_DOORS_END_S)))
            try:
                if host is not None:
                    host.open()
                    if job.actors[self.actor].keys_file is not None:
                        say(f"{self.actor}.keys_file: keys are required when the job is served, not while it trains")
                self.learner.start()
                self._wait_for_weights()
                self._build_engines()
                began, self.learning = time.monotonic(), True
                commands = job.actors[self.actor].gamecores if self.actor else []
                urls = {} if host is None else host.urls
                games = Gamecores(commands, urls, job.folder, self._game_failed)
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
                if not self.clerk.opened(self.end.left(_OPENED_S)):
                    error.add_note("before MLflow had started: nothing is kept")
                    raise
            except BaseException:
                self._stop_learner()
                if self.learning:  # record the error in MLflow even if it is still starting
                    self.clerk.opened(self.end.left(_OPENED_ON_ERROR_S))
                raise
        try:
            return self._result(began, seconds, learned)
        except KeyboardInterrupt as error:
            error.add_note("after training, while its results were written")
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
            version, outcome = promote(job, config, self.progress.say, clerk.call)
            curve = clerk.call(drawn_curve, job.project, config.target_return, config.x_axis)
        clerk.close("FINISHED" if self.finished else "KILLED")
        name = pool_name(job, config.model)
        reason, ended = "" if learned is None else learned.reason, end_reason(config, learned)
        return TrainResult(
            trial, numbers, self.finished, name, version, seconds, curve, outcome, reason, began, errors, ended
        )

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
        learned = [self.job.buffers[name] for name in self.config.buffers]
        enough = max(buffer.batch_size * buffer.unroll_length for buffer in learned)
        watch = Watch(self.progress, self.learner, games, self.rollouts, enough, self.config.max_lost_share)
        while not self.learner.wait(_LOOK_S):
            self.clerk.check()
            failed = [*self.sources.errors, *(each.error for each in self.rollouts if each.error is not None)]
            if failed:
                raise failed[0]
            if self.sources.done and not games.num and not self.rollouts:
                for name in self.config.buffers:
                    self.buffers[name].end(drain=True)
            watch.look(self.numbers.snapshot(), self.numbers.notes())

    def _game_failed(self, line: str) -> None:
        self.numbers.add("gamecores_failed", 1.0, note=one_line(line))

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

        if self.acting is not None:
            self.acting.build(self.progress.say, functools.partial(record, self.config.model))
        for name, champion in self.champions.items():
            champion.build(functools.partial(self._say_of, name), functools.partial(record, name))

    def _say_of(self, name: str, line: str) -> None:
        self.progress.say(f"{name!r}: {line}")

    def _champion(self, name: str) -> ActingModel:
        """A model that acts but is not trained: the champion of its name, or else the model as built."""
        from pipelines.acting import acting_from

        source = self.clerk.call(champion_of, self.job, name)
        if not source.checkpoint:
            self.progress.say(f"model {name!r} acts untrained: {pool_name(self.job, name)} has no champion")
        return acting_from(source, self.job, name, self.job.as_dict(), self.numbers)


def _renderer(job: JobConfig, actor: str, clerk: Clerk) -> EpisodeRenderer | None:
    """Draws games in the clerk's process, which has the trial; None if the job draws none."""
    from deployments.render import EpisodeRenderer, draw_pickled

    every = job.actors[actor].episode_save_interval
    renders = {name: (render.module, render.func) for name, render in job.renders.items()}
    if every is None or not renders:
        return None

    def draw(episode: list[State], returned: float | None) -> Future[Any]:
        return clerk.aside(draw_pickled, pickle.dumps(episode), returned, renders, job.folder)

    return EpisodeRenderer(draw, every=every)


def _mark_unfinished(clerk: Clerk, error: BaseException | None) -> None:
    """Records in MLflow that an error or Ctrl-C ended the trial, if the trial exists by now."""
    if error is not None and clerk.opened():
        with contextlib.suppress(BrayxError):  # the error itself says more
            clerk.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
