"""The behaviours of a job's games on Ray, whose contracts the job names: a `RayTrainee` for each.

A replica is built from the job, so a behaviour that the job does not name is refused there. Knows nothing of doors or
progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from brayx.cluster.hub import numbers_of
from brayx.cluster.self_play import RaySelfPlays
from brayx.cluster.trainee import RayTrainee
from brayx.jobs.behaviours import Behaviours, further_job, joined_snapshots
from brayx.jobs.checks import check_learning
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import by_contract, contract_lines, parse_contract, plain_name
from brayx.jobs.recorded import contract_of_trial, record_contract, with_resumed_contract
from brayx.jobs.sources import Sources
from brayx.tracking import Trial

if TYPE_CHECKING:
    from brayx.gamecore.contract import Contract
    from brayx.jobs.training import Snapshot
    from brayx.league.training import LeagueTraining
    from brayx.replay.packing import Layout


class RayBehaviours(Behaviours[RayTrainee]):
    """Trains each behaviour on Ray.

    Args:
        job: the job, with the contract of each behaviour.
        layout: layout of the first one's observations and actions.
        trial: the job's trial.
        say: prints a line above the display.

    Attributes:
        jobs: the job of each behaviour, by name.
        hub: the hub of the first behaviour, which also has the samples of the doors.
        numbers: its recorder in this process.
        names: names of the first behaviour's Ray actors, by part.

    Raises:
        ConfigError: the job's contract is not the one that a resumed trial has learned.
    """

    def __init__(self, job: JobConfig, layout: Layout, trial: Trial, say: Callable[[str], None]) -> None:
        first = by_contract(job)[0]
        with contextlib.ExitStack() as stack:
            trainee = RayTrainee(first, layout, trial)
            stack.callback(trainee.close)
            super().__init__(first, trainee, say)
            self.hub, self.numbers, self.names = trainee.hub, trainee.numbers, trainee.names
            for contract in map(parse_contract, job.contracts[1:]):
                self._add(further_job(job, contract, self.trainees), contract, trial, stack)
            self._stack = stack.pop_all()
        self.jobs, self._self_plays = self._jobs, RaySelfPlays(say)

    def _add(self, job: JobConfig, contract: Contract, parent: Trial, stack: contextlib.ExitStack) -> None:
        name, layout = contract.behaviour, check_learning(job)
        trial = Trial.open(job.project, plain_name(name), parent.uri, parent=parent)
        stack.callback(self._finish, name, trial)
        with_resumed_contract(job, f"{parent.name}/{name}", contract_of_trial(trial))
        trial.log_params({"behaviour": name, **job.as_dict()})
        record_contract(trial, contract.as_dict())
        trainee = RayTrainee(job, layout, trial)
        stack.callback(trainee.close)
        self._jobs[name], self.trainees[name] = job, trainee
        self.mains.append(name)
        self._sources[name] = Sources(job, trainee.buffers, layout.env)
        for line in (f"behaviour {name!r} begins to learn", *contract_lines(contract)):
            self._say(line)

    def _finish(self, name: str, trial: Trial) -> None:
        if name not in self.trainees or not self.trainees[name].ended:
            trial.finish("KILLED")

    def look(self) -> None:
        """See `Behaviours.look` and `RaySelfPlays.look`."""
        self._self_plays.look(self._jobs, self.trainees)
        super().look()

    def league(self, name: str) -> LeagueTraining[RayTrainee] | None:
        """See `Behaviours.league`."""
        return self._self_plays.league(name)

    def standings(self) -> str:
        """See `Trainees.standings`."""
        return self._self_plays.standings()

    def feed(self) -> None:
        """Starts the sources of all behaviours but the first."""
        for sources in self._sources.values():
            sources.__enter__()

    def newest(self) -> Snapshot | None:
        """The numbers and notes of all behaviours, joined as if they were of one training; None: a hub is slow."""
        snapshots = {name: numbers_of(trainee.hub) for name, trainee in self.trainees.items()}
        known = {name: snapshot for name, snapshot in snapshots.items() if snapshot is not None}
        return joined_snapshots(known) if len(known) == len(snapshots) else None

    def settle(self, within: Callable[[float], float]) -> Snapshot:
        """As `RayTrainee.settle`, for all of them."""
        return joined_snapshots({name: trainee.settle(within) for name, trainee in self.trainees.items()})

    def end(self) -> None:
        """Ends all actors; idempotent."""
        self._self_plays.close()
        self._stack.close()
