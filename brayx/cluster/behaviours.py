"""The behaviours of a job's games on Ray: a `RayTrainee` for each. Knows nothing of doors or progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from brayx.cluster.hub import numbers_of
from brayx.cluster.self_play import RaySelfPlays
from brayx.cluster.trainee import RayTrainee
from brayx.errors import BrayxError
from brayx.jobs.behaviours import Behaviours, joined_snapshots
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import parse_contract, plain_name
from brayx.jobs.recorded import contract_of_trial, contracts_of_children, with_resumed_contract
from brayx.tracking import Trial

if TYPE_CHECKING:
    from brayx.cluster.lobby import RayLobby
    from brayx.gamecore.contract import Contract
    from brayx.jobs.training import Snapshot
    from brayx.league.training import LeagueTraining
    from brayx.replay.packing import Layout


class RayBehaviours(Behaviours[RayTrainee]):
    """Trains each behaviour on Ray.

    Args:
        job: the job of the first behaviour, with its contract.
        layout: layout of its observations and actions.
        trial: the job's trial.
        lobby: holds the games' starts.
        say: prints a line above the display.

    Attributes:
        jobs: the job of each behaviour, by name.
        hub: the hub of the first behaviour, which also has the samples of the doors.
        numbers: its recorder in this process.
        names: names of the first behaviour's Ray actors, by part.
    """

    def __init__(
        self, job: JobConfig, layout: Layout, trial: Trial, lobby: RayLobby, say: Callable[[str], None]
    ) -> None:
        with contextlib.ExitStack() as stack:
            trainee = RayTrainee(job, layout, trial)
            stack.callback(trainee.close)
            super().__init__(job, trainee, lobby, say)
            self.hub, self.numbers, self.names = trainee.hub, trainee.numbers, trainee.names
            self.jobs, self._self_plays = self._jobs, RaySelfPlays(say, trainee.names["rivals"])
            self._trial, self._stack = trial, stack
            (name,) = self.mains
            lobby.expect(parse_contract(job.contract))
            self._expect(contracts_of_children(trial, name) if trial.resumed else [])
            self._stack = stack.pop_all()

    def _make(self, job: JobConfig, layout: Layout, contract: Contract) -> RayTrainee:
        name, parent = contract.behaviour, self._trial
        trial = Trial.open(job.project, plain_name(name), parent.uri, parent=parent)
        try:
            with_resumed_contract(job, f"{parent.name}/{name}", contract_of_trial(trial))
            trial.log_options(job.options(behaviour=name))
            trainee = RayTrainee(job, layout, trial)
        except BaseException:
            with contextlib.suppress(BrayxError):
                trial.finish("FAILED")
            raise
        self._stack.callback(_end, trainee)
        trainee.names["rivals"] = self.names["rivals"]
        return trainee

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


def _end(trainee: RayTrainee) -> None:
    trainee.close()
    if not trainee.ended:
        trainee.trial.finish("KILLED")
