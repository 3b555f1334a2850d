"""The behaviours of a job's games, on any host: each a model in training, with its own network, learner, replay, trial
and champion.

The first one's trial is the job's; the others' trials are its children. A host makes them, and takes in those that
first appear while others train, if it can. Knows nothing of doors or progress.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from brayx.errors import BrayxError, ConfigError
from brayx.jobs.champion import behaviour_pool, drawn_curve
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import parse_contract, plain_name
from brayx.jobs.result import promote
from brayx.jobs.sources import Sources
from brayx.jobs.trainee import T, Trainees
from brayx.jobs.watching import IDLE_S, Idle
from brayx.metrics.totals import joined

if TYPE_CHECKING:
    from brayx.gamecore.contract import Contract
    from brayx.jobs.training import Snapshot


class Behaviours(Trainees[T]):
    """Trains each behaviour of a job's games.

    Args:
        job: the job of the first behaviour, with its contract.
        trainee: its model in training.
        say: prints a line above the display.
    """

    def __init__(self, job: JobConfig, trainee: T, say: Callable[[str], None]) -> None:
        super().__init__(job, trainee)
        self._say = say
        name = parse_contract(job.contract).behaviour
        self.trainees, self.mains = {name: trainee}, [name]
        self._jobs = {name: job}
        self._sources: dict[str, Sources] = {}
        """Of all behaviours but the first, whose sources are the job's."""
        self._starting: dict[str, float] = {}
        """Deadline of the first weights of each behaviour that appeared in mid-run and does not act yet."""
        self._idle, self._ended, self._complete = Idle(), set[str](), set[str]()
        self._pool = ""

    def look(self) -> None:
        """Does regular work.

        Raises:
            BrayxError: a behaviour's learner or source failed.
        """
        for name, trainee in list(self.trainees.items()):
            if name not in self._starting and not trainee.learner.running:
                self._completed(name, trainee)
        for error in (error for sources in self._sources.values() for error in sources.errors):
            raise error
        self._end_idle()

    def is_over(self, no_more: bool) -> bool:
        """See `Trainees.is_over`."""
        ended = [trainee.is_over(no_more) for trainee in self.trainees.values()]  # asks all: it ends their buffers
        return all(ended)

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """Registers the best of each behaviour; returns the first one's version, and a message for each."""
        versions: dict[str, int | None] = {}
        lines: list[str] = []
        several = len(self.trainees) > 1
        for name, trainee in self.trainees.items():
            clerk, config = trainee.clerk, trainee.config
            clerk.settle()
            if (league := self.league(name)) is not None:
                pool = league.pool
                versions[pool], table = league.register(say)
                outcome = f"champion: {pool} version {versions[pool]}, by the games of its self-play\n{table}"
            else:
                pool = clerk.call(behaviour_pool, several)
                versions[pool], outcome = promote(self._jobs[name], config, say, clerk.call, pool)
            lines += [f"{name}: {line}" if several else line for line in outcome.splitlines()]
            if trainee is not self._trainee:
                title = f"{self._job.project} / {name}"
                clerk.call(drawn_curve, title, config.target_return, config.x_axis)
        self._pool = next(iter(versions))
        return versions[self._pool], "\n".join(lines)

    def league(self, name: str) -> Trainees[T] | None:
        """The league of a behaviour that plays itself; None: it does not."""
        return None

    @property
    def pool(self) -> str:
        """See `Trainees.pool`: of the first behaviour."""
        return self._pool or super().pool

    def close(self, finished: bool) -> None:
        """See `Trainees.close`."""
        for sources in self._sources.values():
            sources.stop()
        for trainee in self.trainees.values():
            if trainee is not self._trainee:
                trainee.end("FINISHED" if finished else "KILLED")

    def _retired(self, name: str) -> None:
        """Called once when a behaviour has all its steps while others learn."""

    def _completed(self, name: str, trainee: T) -> None:
        """Lets a behaviour that has all its steps play on while others learn.

        Raises:
            BrayxError: its learner failed.
        """
        try:
            trainee.learner.result(0.0)
        except BrayxError as error:
            raise type(error)(f"behaviour {name!r}: {error.message}", **error.details) from error
        if self.running and name not in self._complete:
            self._complete.add(name)
            self._retired(name)
            if name not in self._ended:
                self._say(f"behaviour {name!r} has all its steps: it plays on while others learn")

    def _end_idle(self) -> None:
        """Ends the learners of behaviours that no game plays, once another one has all its steps, which would
        otherwise keep the training running."""
        running = [name for name, trainee in self.trainees.items() if trainee.learner.running]
        if len(running) == len(self.trainees):
            return
        learning = [name for name in running if name not in self._starting and name not in self._ended]
        sums = {name: self.trainees[name].numbers.newest() for name in learning}
        # Not ticks: the first behaviour's numbers have those of all sessions.
        idle = self._idle.names(
            {name: counts.get("env_steps", 0.0) + counts.get("games", 0.0) for name, counts in sums.items()}
        )
        for name in idle:
            self._ended.add(name)
            self._say(
                f"behaviour {name!r} ends early: no game has played it for {IDLE_S:g} s, "
                "and another behaviour has finished"
            )
            self.trainees[name].learner.stop()


def further_job(job: JobConfig, contract: Contract, names: Collection[str]) -> JobConfig:
    """The job of a further behaviour, which does not begin with the first one's weights.

    Args:
        job: the whole job.
        contract: the behaviour's.
        names: the other behaviours.

    Raises:
        ConfigError: its trial and model would be named like another one's.
    """
    name = contract.behaviour
    if plain_name(name) in map(plain_name, names):
        raise ConfigError(f"its trial and model would be named {plain_name(name)!r}, like another behaviour's")
    own = job.of_behaviour(name)
    trainer = only("trainer", own.trainers)
    if own.trainers[trainer].initial_weights == job.trainers[only("trainer", job.trainers)].initial_weights:
        own = own.with_initial_weights(None)
    return own.model_copy(update={"contract": contract.as_dict()})


def joined_snapshots(snapshots: Mapping[str, Snapshot]) -> Snapshot:
    """The numbers and notes of behaviours, joined as if they were of one training: see `joined`."""
    notes: dict[str, str] = {}
    for _, more in snapshots.values():
        notes = {**more, **notes}
    return joined({name: numbers for name, (numbers, _) in snapshots.items()}), notes
