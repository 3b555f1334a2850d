"""One model in training on Ray: the cluster's counterpart of `brayx.local.trainee.LocalTrainee`.

Has the model's hub, weight store, replay buffers, moments and learner. A job has one trainee; a job with a league has
one for each player that learns. Knows nothing of doors, games or progress.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from brayx.cluster.hub import create_hub, end_hub
from brayx.cluster.learner import Learner, LearnerSpec, TrialNumbers
from brayx.cluster.named import end_actor, result_or
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.scale import hub_name
from brayx.cluster.shards import flush_metrics
from brayx.cluster.statistics import StoredMoments, create_moments
from brayx.cluster.weight_store import KEPT_VERSIONS, create_weight_store, end_weight_store
from brayx.cluster.weights import fetch_newest
from brayx.jobs.config import JobConfig, only
from brayx.jobs.environments import normalises, policy_lag
from brayx.jobs.recorded import record_contract
from brayx.jobs.stored_models import initial_weights
from brayx.model.build import build_model
from brayx.temporary import temporary_folder
from brayx.tracking import Trial
from brayx.tracking.in_process import InProcessClerk

if TYPE_CHECKING:
    from torch import nn

    from brayx.replay.packing import Layout
    from brayx.tracking.trial import Status
    from brayx.types import Weights

_LAST_COUNTS_S = 5.0
"""Deadline for the buffers to send their last metrics."""
_POLL_S, _LOOK_S = 0.1, 2.0


class RayTrainee:
    """Everything that one learner on Ray needs.

    Args:
        job: the job.
        layout: layout of the model's observations and actions.
        trial: its trial.
        store: name of an existing weight store to use, which the caller ends; empty: create one, named after the trial.
        part_of: a second hub that gets all its samples; empty: none.

    Attributes:
        config: options of its trainer.
        trial, clerk: its trial, and what runs functions with it.
        names: names of its Ray actors, by part.
        hub: Ray's handle of its hub.
        numbers: its recorder in this process.
        buffers: its replay buffers by name.
        learner: the learner.
        ended: whether `end` was called.
    """

    def __init__(self, job: JobConfig, layout: Layout, trial: Trial, *, store: str = "", part_of: str = "") -> None:
        self._job, self.trial = job, trial
        self.config = config = job.trainers[only("trainer", job.trainers)]
        self.clerk = InProcessClerk(trial)
        # First, because an error in them should come before anything is started.
        weights = initial_weights(config, job.files_folder, self.clerk.call, self.module)
        if job.contract is not None:
            record_contract(trial, job.contract)
        run = trial.run_id
        actors = {name: f"{run}/buffer/{name}" for name in (*config.buffers, *config.eval_buffers)}
        parts = "weights", "moments", "sessions", "league", "rivals"
        self.names = {part: f"{run}/{part}" for part in parts} | {"hub": hub_name(trial)}
        self.names |= {f"buffer/{name}": actor for name, actor in actors.items()}
        self.names |= {"weights": store} if store else {}
        shares = zip(config.buffers, config.weights or [1.0] * len(config.buffers), strict=True)
        moments = self.names["moments"] if any(map(normalises, job.rollouts.values())) else ""
        with contextlib.ExitStack() as stack:
            self.hub = create_hub(self.names["hub"], trial, x_axis=config.x_axis, part_of=part_of)
            stack.callback(end_actor, self.hub)
            self._store = create_weight_store(
                self.names["weights"], keep=max(KEPT_VERSIONS, job.models[config.model].max_versions)
            )
            self.numbers = TrialNumbers(self.hub)
            stack.callback(self.numbers.close)
            if not store:
                stack.callback(end_weight_store, self._store)
            if moments:
                stack.callback(end_actor, create_moments(moments))
            self.buffers: dict[str, RemoteBuffer] = {}
            for name, actor in actors.items():
                self.buffers[name] = RemoteBuffer(
                    actor,
                    # Ray Data distributes batches only when it has one for each rank.
                    job.buffers[name].model_copy(
                        update={
                            "max_in_flight": max(job.buffers[name].max_in_flight, config.num_workers),
                            "max_policy_lag": policy_lag(job, name),
                        }
                    ),
                    layout=layout,
                    hub=self.names["hub"],
                    weights=self.names["weights"],
                    learned=name in config.buffers,
                )
                stack.callback(self.buffers[name].shards.kill)
            storage = stack.enter_context(temporary_folder("train"))
            spec = LearnerSpec(
                config=config,
                model_name=config.model,
                model_module=job.models[config.model].module,
                model_folder=job.folder,
                model_config=job.as_dict(),
                buffer={actors[name]: weight for name, weight in shares},
                weight_store=self.names["weights"],
                hub=self.names["hub"],
                trial=trial,
                eval_buffers={name: actors[name] for name in config.eval_buffers},
                normaliser=functools.partial(StoredMoments, moments) if moments else None,
                seed=job.seed,
                about={"job": job.as_dict(), "folder": job.folder},
                initial_weights=weights,
            )
            self.learner = Learner(spec, str(storage), self.numbers)
            self._stack = stack.pop_all()
        self._settled: tuple[dict[str, float], dict[str, str]] | None = None
        self.ended = False

    def module(self) -> nn.Module:
        """The module as the learner builds it."""
        model = self.config.model
        module, _ = build_model(self._job.folder, self._job.models[model].module, model, self._job.as_dict())
        return module

    @property
    def learned(self) -> list[RemoteBuffer]:
        """The buffers that it learns from."""
        return [self.buffers[name] for name in self.config.buffers]

    @property
    def actors(self) -> dict[str, str]:
        """Ray actor of each buffer, by the buffer's name."""
        return {name: self.names[f"buffer/{name}"] for name in self.buffers}

    @property
    def published(self) -> bool:
        """Whether the learner's first weights were published; False while the weight store restarts."""
        version, _ = result_or((0, 0), self._store.standing.remote(), _LOOK_S)
        return bool(version)

    def newest_weights(self) -> Weights | None:
        """The newest published weights; None: there are none yet, or the weight store restarts."""
        return fetch_newest(self._store)

    def start(self, timeout_s: float) -> bool:
        """Starts the learner and waits for its first weights; False: they did not come in time."""
        before, _ = result_or((0, 0), self._store.standing.remote())
        self.learner.start()
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and self.learner.running:
            version, _ = result_or((0, 0), self._store.standing.remote())
            if version > before:
                return True
            time.sleep(_POLL_S)
        return False

    def is_over(self, no_more: bool) -> bool:
        """See `brayx.jobs.trainee.Trainee.is_over`."""
        for buffer in self.learned:
            if no_more:  # at each call, since a restarted buffer has forgotten it
                buffer.shards.end(drain=True, timeout_s=_LOOK_S)
            if buffer.shards.stopped(_LOOK_S):
                return True
        return False

    def settle(self, within: Callable[[float], float]) -> tuple[dict[str, float], dict[str, str]]:
        """Makes buffers and hub write their last metrics; returns the hub's last snapshot and notes.

        Args:
            within: shortens the seconds that a step may take.
        """
        if self._settled is None:
            flush_metrics([buffer.shards for buffer in self.buffers.values()], within(_LAST_COUNTS_S))
            self._settled = end_hub(self.hub, self.numbers, within)
        return self._settled

    def end(self, status: Status) -> None:
        """Writes the last metrics, ends all its actors, and then its trial."""
        self.settle(lambda at_most: at_most)
        self.close()
        self.trial.finish(status)
        self.ended = True

    def close(self) -> None:
        """Ends all its actors; idempotent."""
        self._stack.close()
