"""One model in training on the local host: its trial, numbers, replay buffers, rollouts, acting model and learner. A
job has one; a job with a league has one for each player that learns. Knows nothing of doors, games or progress.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from brayx.engines.layers import layer_table
from brayx.jobs.config import JobConfig, only
from brayx.jobs.environments import normalises, policy_lag, spec_of
from brayx.jobs.recorded import record_contract
from brayx.jobs.stored_models import initial_weights
from brayx.local.buffer import LocalBuffer
from brayx.local.learner import LocalLearner, Loop
from brayx.local.learner_process import ChildLoop, learner_child
from brayx.local.rollouts import LocalMoments, LocalRollout
from brayx.local.stream import Batches
from brayx.metrics.numbers import LocalNumbers
from brayx.model.acting import ActingModel
from brayx.rollout.worker import Newest
from brayx.tracking import Trial
from brayx.tracking.clerk import Clerk
from brayx.tracking.tensorboard import LAYERS_FILE
from brayx.trainer.checkpoint import start_from
from brayx.trainer.fits import built_to_learn
from brayx.trainer.hooks import Hooks, load_hooks
from brayx.trainer.loop import LearnerLoop
from brayx.trainer.ranks import Alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from brayx.children import Child
    from brayx.replay.packing import Layout
    from brayx.tracking.trial import Status
    from brayx.types import Weights


class LocalTrainee:
    """Everything that one learner needs: a `brayx.jobs.trainee.Trainee`; its thread starts with ``learner.start()``.

    Args:
        job: the job, in one process (`brayx.local.job.in_one_process`).
        layout: layout of the model's observations and actions.
        clerk: writes its trial.
        acts: make an acting model, for an actor's sessions.
        child: the learner's process, from `learner_child`, if it was started early.

    Attributes:
        config: options of its trainer.
        layout, clerk: the same.
        numbers: its recorder.
        acting: the acting model, which gets each published version; None: nothing acts but rollouts.
        buffers: its replay buffers by name.
        batches: what is learned from.
        rollouts: rollouts that fill the buffers.
        newest: the newest published weights.
        learner: the learner.
    """

    def __init__(self, job: JobConfig, layout: Layout, clerk: Clerk, *, acts: bool, child: Child | None = None) -> None:
        import torch

        self.layout = layout
        self.config = config = job.trainers[only("trainer", job.trainers)]
        self.clerk = clerk
        model, as_dict = job.models[config.model], job.in_mode("train").as_dict()
        totals = clerk.totals()
        self.numbers = LocalNumbers(totals, config.x_axis)
        self.numbers.listen(clerk.push)
        torch.set_num_threads(config.threads or 1)
        torch.manual_seed(job.seed)
        module, forward_args, _ = built_to_learn(config, config.model, model.module, job.folder, as_dict)
        if (weights := initial_weights(config, job.files_folder, clerk.call, lambda: module)) is not None:
            start_from(module, weights)
        clerk.later(Trial.log_text, layer_table(module, forward_args), LAYERS_FILE)
        if job.contract is not None:
            clerk.later(record_contract, job.contract)
        self.acting = ActingModel(model, module, forward_args, self.numbers) if acts else None
        self.buffers = {
            name: LocalBuffer(
                job.buffers[name].model_copy(update={"max_policy_lag": policy_lag(job, name)}),
                layout,
                self.numbers,
                learned=name in config.buffers,
            )
            for name in (*config.buffers, *config.eval_buffers)
        }
        moments = LocalMoments() if any(map(normalises, job.rollouts.values())) else None
        self.newest = Newest()
        self.rollouts = [
            LocalRollout(
                spec_of(job, name, int(totals.get("env_steps", 0))),
                newest=self.newest,
                buffer=self.buffers[rollout.buffer],
                numbers=self.numbers,
                moments=moments,
            )
            for name, rollout in job.rollouts.items()
        ]
        shares = dict(zip(config.buffers, config.weights or [1.0] * len(config.buffers), strict=True))
        self.batches = batches = Batches({name: self.buffers[name] for name in config.buffers}, shares)
        eval_batches = {name: Batches({name: self.buffers[name]}, {name: 1.0}) for name in config.eval_buffers}
        parts: dict[str, Any] = {
            "about": {"job": as_dict, "folder": job.folder},
            "batches": batches,
            "numbers": self.numbers,
            "keeper": clerk,
            "feedback": batches.update_priorities,
            "resumed": batches.skip,
        }
        child = child or learner_child(job)
        if child is not None:
            loop: Callable[..., Loop] = functools.partial(ChildLoop, child, weights=weights, **parts)
        else:
            hooks = load_hooks(config.hooks, job.folder) if config.hooks else Hooks()
            parts |= {"ranks": Alone(config.use_gpu), "hooks": hooks}
            parts |= {"normaliser": moments, "eval_batches": eval_batches}
            loop = functools.partial(LearnerLoop, config, module, forward_args, **parts)
        self.learner = LocalLearner(
            lambda publisher: loop(publisher=publisher),
            [self.newest.put] if self.acting is None else [self.acting.model.load, self.newest.put],
            batches,
            eval_batches,
        )

    def caught_up(self, longest_s: float) -> Callable[[], Awaitable[None]] | None:
        """See `Services.caught_up`; waits at most ``longest_s``, and 0 gives None."""
        return functools.partial(self.batches.caught_up, longest_s) if longest_s else None

    @property
    def published(self) -> bool:
        """Whether the learner's first weights act, or it has failed."""
        return self.learner.ready.is_set()

    def newest_weights(self) -> Weights | None:
        """The newest published weights; None before the first."""
        published = self.newest.get(0)
        return None if published is None else published[1]

    def start(self, timeout_s: float) -> bool:
        """Starts the learner, and waits for its first weights; False: they did not come in time."""
        self.learner.start()
        return self.learner.ready.wait(timeout_s)

    def end(self, status: Status) -> None:
        """Ends its trial."""
        self.clerk.close(status)

    def is_over(self, no_more: bool) -> bool:
        """See `brayx.jobs.trainee.Trainee.is_over`. Always False: the learner ends at once with its stream."""
        if no_more:
            for name in self.config.buffers:
                self.buffers[name].end(drain=True)
        return False
