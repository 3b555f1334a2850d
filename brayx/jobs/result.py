"""The result of a training job: its numbers, its summary, and the version that it registered.

It is the same for every host. Knows nothing of where a job ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, Protocol

from brayx.errors import BrayxError, ModelError, ModelNotFound
from brayx.jobs.champion import best_of, register_best, without_champion
from brayx.jobs.config import JobConfig, pool_name
from brayx.jobs.progress import error_lines, milliseconds, number, standing
from brayx.logs import one_line
from brayx.metrics import games_text, significant
from brayx.metrics.totals import FAILED_IN_WINDOW, GAMES, SECONDS
from brayx.model.build import build_model
from brayx.tracking import Trial
from brayx.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from brayx.tracking.clerk import Clerk
    from brayx.tracking.in_process import InProcessClerk
    from brayx.trainer.loop import TrainingSummary

LATE = "after training, while its results were written: the same command resumes this trial"
"""Note of a late interrupt: when it came, and what to do."""
STEPS_THIS_RUN = "rollout_steps_this_run"
"""Transitions that rollout workers have collected since this command started."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training job.

    Attributes:
        trial: the trial in MLflow.
        numbers: the last snapshot of every metric.
        finished: False if it was interrupted; it can be resumed.
        pool_name, version: the registered version; version None if no checkpoint was good enough.
        seconds: time spent playing and learning by this command, without start and shutdown. ``numbers["seconds"]`` is
            that of the whole trial, by the learner's clock.
        curve: ``(env steps, mean return of the last 100 games)``.
        outcome: a message that says whether the version is the champion, and if not, why; empty if interrupted. For a
            league, its standings, also if interrupted.
        reason: ``num_steps``, ``target_return`` or ``stream_ended``; empty if interrupted.
        began: start of ``seconds``, on the monotonic clock.
        errors: losses, one line per cause, see `brayx.jobs.progress.error_lines`.
        ended: why training ended, in one line, see `end_reason`.
    """

    trial: Trial
    numbers: dict[str, float]
    finished: bool
    pool_name: str
    version: int | None
    seconds: float
    curve: list[tuple[int, float]]
    outcome: str
    reason: str = ""
    began: float = 0.0
    errors: tuple[str, ...] = ()
    ended: str = ""

    def __repr__(self) -> str:
        return self.summary()

    @property
    def reference(self) -> str:
        """The registered version as ``models:/NAME/VERSION``, to serve it even if another version is champion.

        Raises:
            ModelNotFound: no version was registered.
        """
        if self.version is None:
            raise ModelNotFound(f"trial {self.trial.name!r} registered no version: {self.outcome or self.ended}")
        return f"models:/{self.pool_name}/{self.version}"

    def plot(self) -> Figure:
        """The mean return of the last 100 games over env steps, as a matplotlib figure."""
        from brayx.jobs.evaluate import draw_curve

        return draw_curve(self.curve, title=self.trial.project)

    def summary(self) -> str:
        """The summary for the user; its last line is the reason why training ended."""
        get = self.numbers.get
        state = "finished" if self.finished else "interrupted (the same command resumes it)"
        took = f"{get(SECONDS, 0):.0f} s of training, start-up not counted"
        lines = [
            f"trial {self.trial.name!r} of project {self.trial.project!r}: {state} after {took}",
            f"  {get('env_steps', 0):,.0f} env steps, {get(GAMES, 0):,.0f} games",
        ]
        shown = ("; ".join([*self._rates(), *self._lag()]), *self.errors, *self.conclusion().splitlines())
        lines += [f"  {line}" for line in shown if line]
        return "\n".join(lines)

    def conclusion(self) -> str:
        """The end of the summary: what is registered, whether it is champion, and the reason why training ended."""
        return "\n".join(filter(None, (self.outcome, self._ended())))

    def _lag(self) -> list[str]:
        lag = self.numbers.get("lag_versions")  # missing in imitation, where no version of the model acted
        return [] if lag is None else [f"weights were {number(lag, '.1f')} versions old when learned from"]

    def _ended(self) -> str:
        """Why training ended, and how many of the last 100 games failed, which have no return."""
        failed = self.numbers.get(FAILED_IN_WINDOW, 0)
        if not (self.finished and failed):
            return self.ended
        return f"{self.ended}; {failed:.0f} more {'game' if failed == 1 else 'games'} failed"

    def _rates(self) -> list[str]:
        get, seconds = self.numbers.get, max(self.seconds, 1e-9)
        ticks, steps = get("ticks_this_run", 0), get(STEPS_THIS_RUN, 0)
        rollouts = [f"{steps / seconds:,.0f} env steps/s of rollout workers"] if steps else []
        door = (
            f"{ticks / seconds:,.0f} ticks/s through the door; "
            f"a tick took the actor {milliseconds(get('tick_seconds.run.p50'))} ms (p50), "
            f"{milliseconds(get('tick_seconds.run.p99'))} ms (p99)"
        )
        return [*rollouts, *([door] if ticks else [])]


class Goal(Protocol):
    """Options that say when a training ends, see `brayx.trainer.config.TrainerConfig`."""

    @property
    def num_steps(self) -> int: ...
    @property
    def target_return(self) -> float | None: ...
    @property
    def target_games(self) -> int: ...


def training_facts(
    project: str,
    trial: str,
    clerk: Clerk | InProcessClerk,
    goal: Goal,
    numbers: Mapping[str, float],
    notes: Mapping[str, str],
) -> dict[str, Any]:
    """What a console shows of any training: values of `brayx.console.overview.JobDocument`.

    Args:
        project, trial: their names.
        clerk: writes the trial.
        goal: when it ends.
        numbers, notes: the newest snapshot of its metrics.
    """
    return {
        "mode": "train",
        "project": project,
        "trial": trial,
        "run_id": clerk.trial().run_id if clerk.opened() else "",
        "early_curve": clerk.early_curve(),
        "num_steps": goal.num_steps,
        "target_return": goal.target_return,
        "target_games": goal.target_games,
        "numbers": dict(numbers),
        "errors": error_lines(numbers, notes),
    }


@dataclass
class Ending:
    """How a training ends, for its console, which shows it before it closes.

    Attributes:
        facts: the last facts, from when the doors close; empty until then.
        state, text: how it has ended, and the words for the user; an empty state until then.
        shown: all open pages show it.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    state: Literal["", "finished", "interrupted", "failed"] = ""
    text: str = ""
    shown: Event = field(default_factory=Event)

    def say(self, state: Literal["finished", "interrupted", "failed"], text: str) -> None:
        """Says how it has ended; may be called from any thread."""
        self.text = text
        self.state = state  # last, since other threads look at it


def end_reason(
    config: TrainerConfig,
    learned: TrainingSummary | None,
    numbers: Mapping[str, float],
    *,
    trainer: str = "trainer",
    on_request: bool = False,
) -> str:
    """One line on why a training ended, with the return and the number of games of its last checkpoint; of a league,
    with its standing.

    After ``target_return`` that checkpoint is the best one, which `promote` registers. Otherwise an earlier one may be
    better, and the message of `promote` names both.

    Args:
        config: options of the trainer.
        learned: the learner's summary; None: it was interrupted, and the same command resumes it.
        numbers: the last numbers of the training.
        trainer: name of the component.
        on_request: a viewer of the console has ended it.
    """
    if learned is None and standing(numbers):
        return f"interrupted: {standing(numbers)}; the same command resumes this trial"
    if learned is None:
        register = f"with --set {trainer}.num_steps=1 it registers the best version so far"
        return f"interrupted, so no version is registered; the same command resumes this trial, {register}"
    over = f"over the last {games_text(learned.return_games)}"
    few = f"the last checkpoint has fewer than {config.target_games} games (`target_games`), so no return"
    played = f"mean return {significant(learned.return_mean)} {over}" if learned.return_games else few
    played = standing(numbers) or played
    if learned.reason == "target_return":
        return f"target_return {config.target_return:g} reached {over}: mean return {significant(learned.return_mean)}"
    if learned.reason == "num_steps":
        return f"num_steps {config.num_steps:,} reached: {played}"
    return f"{'ended from the console' if on_request else 'no more transitions to learn from'}: {played}"


def keep_recordings(
    job: JobConfig,
    since_s: float,
    say: Callable[[str], None],
    call: Callable[..., Any],
    until_s: float = math.inf,
) -> None:
    """Copies the recordings that ``recording.to_trial`` chooses to the artifacts of the trial. Does not raise.

    Args:
        job: the job.
        since_s: start of the training, in seconds since 1970.
        say: prints a line: what was copied, or why nothing was.
        call: runs ``function(trial, *args)`` in the process that has the trial, and returns its result.
        until_s: as for `log_extremes`.
    """
    config = job.recording
    if config is None or not config.to_trial:
        return
    from brayx.recording.trials import log_extremes  # imports Arrow, which is slow

    try:
        sessions, left, address = call(log_extremes, config.absolute().folder, config.to_trial, since_s, until_s)
        more = f"; there was no time for {left} more" if left else ""
        say(f"{sessions} recorded sessions are artifacts of the trial: {address}{more}")
    except (BrayxError, OSError) as error:  # a training with a result must not fail here
        say(f"no recorded session is copied to the trial: {one_line(str(error))}")


def promote(
    job: JobConfig, config: TrainerConfig, say: Callable[[str], None], call: Callable[..., Any], name: str = ""
) -> tuple[int | None, str]:
    """Registers the trial's best checkpoint, as champion unless the current champion has a higher return.

    A model that cannot be exported is registered without its ONNX file; brayx itself does not need that file.

    Args:
        job: the trained job.
        config: options of its trainer.
        say: called with a line before the export, which may take long, and if it fails.
        call: runs ``function(trial, *args)`` in the process that has the trial, and returns its result.
        name: name of the registered model; empty: that of `pool_name`.

    Returns:
        The version, None if no checkpoint had enough games; and a message for the user.
    """
    from brayx.engines.base import load_weights
    from brayx.engines.onnx import standalone
    from brayx.engines.torch import describe, with_weights

    model, best_checkpoint = config.model, call(best_of)
    if best_checkpoint is None:
        if job.sources and not (job.actors or job.rollouts):
            return None, "not registered: nothing played, so no checkpoint has a return; `runs:/TRIAL` names the newest"
        return None, call(without_champion, config.target_games)
    best, folder = best_checkpoint
    module, example = build_model(job.folder, job.models[model].module, model, job.as_dict())
    module = with_weights(module, load_weights(folder / "weights.npz"))
    onnx = None
    try:
        say(f"writing the best checkpoint, after {best.env_steps:,} env steps, as ONNX")
        onnx = standalone(module, example)
    except ModelError as error:
        say(f"the best checkpoint is registered without an ONNX file: {error.message}")
    version, outcome = call(register_best, best, name or pool_name(job, model), onnx, describe(module, example))
    return version, outcome
