"""Runs the trials of a search with Ray Tune, on all machines of a cluster. Knows nothing of what a trial trains."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from brayx.cluster.start import join_ray, start_ray
from brayx.search.competition import Asha, Competition, Options, Population, ReportListener, TrialReport, Work
from brayx.temporary import temporary_folder

_END_S = 60
"""Deadline for a stopped trial to end, including a run that it is collecting."""
_OUTPUT = "RAY_AIR_NEW_OUTPUT"


def run_trials(
    work: Work,
    drawn: Sequence[Options],
    competition: Competition,
    listener: ReportListener,
    *,
    deadline_s: float,
    address: str = "",
) -> None:
    """Runs all trials to their ends; arguments as for `brayx.search.local.run_trials`.

    Args:
        address: address of a running cluster; empty: use this process's connection to Ray, or else start Ray.
    """
    started = not ray.is_initialized()
    if started:
        _start(address)
    try:
        with temporary_folder("search") as folder, _quiet():
            _fit(work, drawn, competition, listener, deadline_s, str(folder))
    finally:
        if started:
            ray.shutdown()


def _fit(
    work: Work,
    drawn: Sequence[Options],
    competition: Competition,
    listener: ReportListener,
    deadline_s: float,
    folder: str,
) -> None:
    cpus = float(sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]))  # type: ignore[no-untyped-call]
    cpus_each, at_once = shares(competition, len(drawn), cpus)
    train = tune.with_parameters(_train, work=work, path=tuple(sys.path))
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": cpus_each}),
        param_space={"options": tune.grid_search([dict(options) for options in drawn])},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            scheduler=scheduler(competition),
            max_concurrent_trials=at_once,
            reuse_actors=True,
            time_budget_s=deadline_s,
        ),
        run_config=tune.RunConfig(
            # Stop a finished trial before the scheduler sees it, or it could continue as a copy.
            stop=lambda _, result: bool(result.get("over")),
            storage_path=folder,
            name="tune",
            verbose=0,
            callbacks=[_Callback(listener)],
            failure_config=tune.FailureConfig(1),
        ),
    )
    with _handlers_kept():
        tuner.fit()


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores the handlers of signals: Tune leaves its own, which would swallow the next Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # it was not set by Python
                signal.signal(number, handler)


def shares(competition: Competition, num_trials: int, cpus: float) -> tuple[float, int | None]:
    """CPUs of a trial, and the number of concurrent trials; None: all. A population runs concurrently, because swapping
    trials would cost a process start each time."""
    if isinstance(competition, Population):
        return min(1.0, cpus / num_trials), None
    return min(1.0, cpus), max(1, min(num_trials, int(cpus)))


def scheduler(competition: Competition) -> Any:
    """Ray Tune's scheduler for these rules."""
    if isinstance(competition, Asha):
        return ASHAScheduler(
            # Steps, not the number of reports: trials with long games have fewer reports at the same age.
            time_attr="env_steps",
            max_t=competition.max_steps,
            grace_period=competition.grace_steps,
            reduction_factor=competition.reduction,
            # Otherwise a trial whose first report is at a later rung would afterwards count at an earlier one, too old.
            stop_last_trials=False,
        )
    change = competition.change
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        burn_in_period=1,
        # Tune requires at least one. `change` makes all changes, because Tune's own changes leave the ranges.
        hyperparam_mutations={"unused": lambda: 0},
        custom_explore_fn=lambda config: {**config, "options": change(config["options"])},
        synch=False,
    )


def _train(config: dict[str, Any], work: Work, path: tuple[str, ...]) -> None:
    """Trains one trial in a process of Ray Tune."""
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    # A stopped trial closes its environments before another one uses its process.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(_END_S)

    def send_report(report: TrialReport, folder: Path) -> None:
        tune.report(
            {"env_steps": report.env_steps, "score": report.score, "over": report.over, "trial_report": report},
            checkpoint=tune.Checkpoint.from_directory(str(folder)),
        )

    number = int(tune.get_context().get_trial_id().rsplit("_", 1)[-1])
    checkpoint = tune.get_checkpoint()
    with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as begun:
        work(number, config["options"], send_report, None if begun is None else Path(begun))


class _Callback(tune.Callback):
    """Passes Tune's reports on trials to the listener."""

    def __init__(self, listener: ReportListener) -> None:
        self._listener = listener

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Handles a trial's report."""
        if "trial_report" in result:
            checkpoint = None if trial.checkpoint is None else Path(trial.checkpoint.path)
            self._listener.on_report(_number(trial), result["trial_report"], checkpoint)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Handles the end of a trial: it is done, or stopped because others are better."""
        self._listener.on_end(_number(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Handles the failure of a trial."""
        self._listener.on_error(_number(trial), _why(trial))


def _number(trial: Any) -> int:
    return int(trial.trial_id.rsplit("_", 1)[-1])


def _why(trial: Any) -> str:
    """A failed trial's error in one line: brayx's errors by their message, others by their last line."""
    text = Path(trial.error_file).read_text() if trial.error_file else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no report"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides Tune's first output, which it prints at any verbosity: folders that are deleted at the end."""
    before = os.environ.get(_OUTPUT)
    os.environ[_OUTPUT] = "0"
    try:
        yield
    finally:
        os.environ.pop(_OUTPUT)
        if before is not None:
            os.environ[_OUTPUT] = before


def _start(address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        join_ray(address, **options)
    else:
        start_ray(num_cpus=os.cpu_count() or 1, include_dashboard=False, **options)
