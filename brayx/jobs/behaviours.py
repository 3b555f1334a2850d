"""The behaviours of a job's games, on any host: each a model in training, with its own network, learner, replay, trial
and champion.

The first one's trial is the job's; the others' trials are its children. One may first appear while the others train:
its games' starts are held in the lobby until its first weights act. Knows nothing of doors or progress.
"""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.jobs.champion import behaviour_pool, drawn_curve
from brayx.jobs.checks import check_learning
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import check_limits, contract_lines, parse_contract, plain_name, unused_limits
from brayx.jobs.document import nearest
from brayx.jobs.result import promote
from brayx.jobs.sources import Sources
from brayx.jobs.trainee import T, Trainees, fills_buffers
from brayx.jobs.training import Snapshot
from brayx.jobs.watching import IDLE_S, READY_TIMEOUT_S, Idle
from brayx.metrics.totals import joined

if TYPE_CHECKING:
    from brayx.gamecore.contract import Contract
    from brayx.replay.packing import Layout
    from brayx.trainer.loop import TrainingSummary

_ANNOUNCED_S = 60.0
"""After so long, the games' behaviours are taken for all that there are."""


class HeldStarts(Protocol):
    """Holds the starts of behaviours that do not act yet."""

    @property
    def job(self) -> JobConfig:
        """The job with all its behaviours."""

    def expect(self, contract: Contract) -> None:
        """Holds the starts of a behaviour that the job learns before its first game comes."""

    def arrived(self) -> list[Contract]:
        """The contracts of further behaviours that have come since the last call."""

    def admit(self, behaviour: str, refusal: str = "") -> None:
        """See `brayx.jobs.admission.Admission.decide`."""


class Behaviours(Trainees[T]):
    """Trains each behaviour of a job's games; `look` takes in new ones.

    Args:
        job: the job of the first behaviour, with its contract.
        trainee: its model in training.
        lobby: holds the games' starts.
        say: prints a line above the display.
    """

    def __init__(self, job: JobConfig, trainee: T, lobby: HeldStarts, say: Callable[[str], None]) -> None:
        super().__init__(job, trainee)
        self._lobby, self._say = lobby, say
        name = parse_contract(job.contract).behaviour
        self.trainees, self.mains = {name: trainee}, [name]
        self._jobs = {name: job}
        self._sources: dict[str, Sources] = {}
        """Of all behaviours but the first, whose sources are the job's."""
        self._starting: dict[str, float] = {}
        """Deadline of the first weights of each behaviour that appeared in mid-run and does not act yet."""
        self._idle, self._ended, self._complete = Idle(), set[str](), set[str]()
        self._pool = ""
        self._announced, self._missing_at = {name}, time.monotonic() + _ANNOUNCED_S

    @abc.abstractmethod
    def _make(self, job: JobConfig, layout: Layout, contract: Contract) -> T:
        """Makes the trainee of a further behaviour, in a child of the job's trial; an error leaves nothing behind."""

    def _fitted(self, job: JobConfig) -> JobConfig:
        """A behaviour's job as the host runs it."""
        return job

    def _let_in(self, name: str, trainee: T) -> None:
        """Called before the starts of a behaviour whose first weights act are let in."""

    def _dropped(self, trainee: T) -> None:
        """Called with a trainee whose weights have never acted, before its end."""

    def _expect(self, resumed: Iterable[Mapping[str, Any]]) -> None:
        """Begins the behaviours of the job's contracts, and of those of the trial that it resumes; says which limits
        have no effect yet.

        It does so before games come, or the training could end without them.
        """
        known = map(parse_contract, (*resumed, *self._lobby.job.contracts))
        for behaviour, contract in {contract.behaviour: contract for contract in known}.items():
            if behaviour not in self.trainees:
                self._lobby.expect(contract)
                self._begin(contract)
        for line in unused_limits([*self._jobs.values()], so_far=True).values():
            self._say(line)

    def look(self) -> None:
        """Takes in behaviours that have appeared, and those whose first weights act.

        Raises:
            BrayxError: a behaviour's learner or source failed.
        """
        if time.monotonic() > self._missing_at:
            self._say_missing()
        for contract in self._lobby.arrived():
            if contract.behaviour not in self.trainees and self._begin(contract):
                self.trainees[contract.behaviour].learner.start()
        for name in list(self._starting):
            self._admit(name, self.trainees[name])
        for name, trainee in list(self.trainees.items()):
            if name not in self._starting and not trainee.learner.running:
                self._completed(name, trainee)
        for error in (error for sources in self._sources.values() for error in sources.errors):
            raise error
        self._end_idle()

    def result(self, timeout_s: float | None = None) -> TrainingSummary | None:
        """See `Trainees.result`. One that failed before its weights acted, since the last `look`, is refused."""
        for name in list(self._starting):
            learner = self.trainees[name].learner
            if not learner.running:
                try:
                    learner.result(0.0)
                except BrayxError as error:
                    self._drop(name, error)
        return super().result(timeout_s)

    def is_over(self, *, read: bool, games_play: bool) -> bool:
        """See `Trainees.is_over`; each behaviour has its own sources and agents."""

        def no_more(name: str) -> bool:
            own = self._sources.get(name)
            is_read = read if own is None else own.done and name not in self._starting
            return is_read and not (games_play and fills_buffers(self._jobs[name]))

        ended = [trainee.is_over(no_more(name)) for name, trainee in self.trainees.items()]  # it ends their buffers
        return all(ended)

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """Registers the best of each behaviour; returns the first one's version, and a message for each."""
        self._say_missing()
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

    def _say_missing(self) -> None:
        """Says once which behaviours have options but are in no game, and which limits are of no game's action."""
        if self._missing_at < math.inf:
            self._missing_at = math.inf
            for name in self._lobby.job.behaviours:
                if name not in self._announced:
                    self._say(
                        f"behaviours.{name} has no effect: no game has this behaviour{nearest(name, self._announced)}"
                    )
            for line in unused_limits([*self._jobs.values()]).values():
                self._say(line)

    def _begin(self, contract: Contract) -> bool:
        """Makes the learner of a behaviour that has appeared. Returns False if it cannot be learned and is refused."""
        name, trainee = contract.behaviour, None
        self._announced.add(name)
        try:
            job = self._fitted(further_job(self._lobby.job, contract, self.trainees))
            layout = check_learning(job)
            trainee = self._make(job, layout, contract)
            self._sources[name] = Sources(job, trainee.buffers, layout.env)
        except BrayxError as error:
            self._refuse(name, error, trainee)
            return False
        self._jobs[name], self.trainees[name] = job, trainee
        self.mains.append(name)
        self._starting[name] = time.monotonic() + READY_TIMEOUT_S
        for line in (f"behaviour {name!r} begins to learn; its games wait until its model acts", *contract_lines(job)):
            self._say(line)
        return True

    def _admit(self, name: str, trainee: T) -> None:
        """Lets the games of a behaviour in once its first weights act; refuses it if they never will."""
        learner = trainee.learner
        try:
            if not learner.running:
                learner.result(0.0)  # its error
            elif not trainee.published:
                if time.monotonic() > self._starting[name]:
                    raise StartupError(f"no weights came within {READY_TIMEOUT_S:g} s; the learner {learner.state()}")
                return
        except BrayxError as error:
            self._drop(name, error)
            return
        del self._starting[name]
        self._let_in(name, trainee)
        self._sources[name].__enter__()
        self._lobby.admit(name)

    def _drop(self, name: str, error: BrayxError) -> None:
        """Ends a behaviour whose weights have never acted, and refuses it."""
        del self._starting[name]
        trainee = self.trainees.pop(name)
        trainee.learner.stop()
        self._jobs.pop(name)
        self._sources.pop(name)
        self.mains.remove(name)
        self._dropped(trainee)
        self._refuse(name, error, trainee)

    def _refuse(self, name: str, error: BrayxError, trainee: T | None) -> None:
        """Refuses the starts of a behaviour that cannot be learned; the others go on."""
        self._say(f"behaviour {name!r} is refused, the others go on: {error.message}")
        self._lobby.admit(name, error.message)
        if trainee is not None:
            with contextlib.suppress(BrayxError):  # its trial may never have begun
                trainee.end("FAILED")

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
        ConfigError: its trial and model would be named like another one's, or limits of the job do not fit it.
    """
    name = contract.behaviour
    if plain_name(name) in map(plain_name, names):
        raise ConfigError(f"its trial and model would be named {plain_name(name)!r}, like another behaviour's")
    own = job.of_behaviour(name)
    trainer = only("trainer", own.trainers)
    if own.trainers[trainer].initial_weights == job.trainers[only("trainer", job.trainers)].initial_weights:
        own = own.with_initial_weights(None)
    own = own.model_copy(update={"contract": contract.as_dict()})
    check_limits(own, learns=True)
    return own


def joined_snapshots(snapshots: Mapping[str, Snapshot]) -> Snapshot:
    """The numbers and notes of behaviours, joined as if they were of one training: see `joined`."""
    notes: dict[str, str] = {}
    for _, more in snapshots.values():
        notes = {**more, **notes}
    return joined({name: numbers for name, (numbers, _) in snapshots.items()}), notes
