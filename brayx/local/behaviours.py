"""The behaviours of a job's games on the local host. Knows nothing of doors or progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brayx.errors import BrayxError, DeadlineExceeded
from brayx.jobs.behaviours import Behaviours, joined_snapshots
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import plain_name
from brayx.jobs.recorded import contract_of_trial, contracts_of_children, with_resumed_contract
from brayx.jobs.training import Snapshot
from brayx.local.job import in_one_process
from brayx.local.self_play import LocalSelfPlays
from brayx.local.trainee import LocalTrainee
from brayx.replay.buffer import NullBuffer

if TYPE_CHECKING:
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.children import Child
    from brayx.gamecore.contract import Contract
    from brayx.league.training import LeagueTraining
    from brayx.local.lobby import Lobby
    from brayx.replay.packing import Layout
    from brayx.tracking.clerk import Clerk

_CLOSE_S = 5.0


class BehaviourTraining(Behaviours[LocalTrainee]):
    """Trains each behaviour of a job's games in this process.

    Args:
        job: the job, with the first behaviour's contract.
        layout: layout of that model's observations and actions.
        clerk: writes the job's trial.
        lobby: holds the games' starts.
        say: prints a line above the display.
        child: the process of the first behaviour's learner, as for `LocalTrainee`.

    Attributes:
        factories: make the actors of each behaviour's sessions, by name; grows.
        self_plays: the self-play of behaviours with several teams.
    """

    def __init__(
        self,
        job: JobConfig,
        layout: Layout,
        clerk: Clerk,
        lobby: Lobby,
        say: Callable[[str], None],
        child: Child | None = None,
    ) -> None:
        super().__init__(job, LocalTrainee(job, layout, clerk, acts=True, child=child), lobby, say)
        self._clerk, self._doors = clerk, lobby.doors
        (name,) = self.mains
        self._buffers: dict[str, dict[str, Any]] = {}
        self.factories: dict[str, AgentActorFactory] = {}
        self.self_plays = LocalSelfPlays(say)
        self._make_factory: Callable[[JobConfig, LocalTrainee, Mapping[str, Any]], AgentActorFactory]
        self._expect(clerk.call(contracts_of_children, name) if clerk.may_resume else [])

    def open(
        self, make_factory: Callable[[JobConfig, LocalTrainee, Mapping[str, Any]], AgentActorFactory]
    ) -> AgentActorFactory:
        """Takes the function that makes the actors of a behaviour's sessions from its job, model and buffers; returns
        the first behaviour's."""
        self._make_factory = make_factory
        return self._act(self.mains[0])

    def newest(self) -> Snapshot:
        """The numbers and notes of all behaviours, joined as if they were of one training."""
        recorders = {name: trainee.numbers for name, trainee in list(self.trainees.items())}
        return joined_snapshots({name: (numbers.snapshot(), numbers.notes()) for name, numbers in recorders.items()})

    def look(self) -> None:
        """See `Behaviours.look`."""
        self.self_plays.look()
        super().look()

    def league(self, name: str) -> LeagueTraining[LocalTrainee] | None:
        """See `Behaviours.league`."""
        return self.self_plays.league(name)

    def standings(self) -> str:
        """See `Trainees.standings`."""
        return self.self_plays.standings()

    def close(self, finished: bool) -> None:
        """See `Trainees.close`."""
        self.self_plays.close_checks()
        super().close(finished)

    def _fitted(self, job: JobConfig) -> JobConfig:
        return in_one_process(job)[0]

    def _make(self, job: JobConfig, layout: Layout, contract: Contract) -> LocalTrainee:
        name, kept = contract.behaviour, job.trainers[only("trainer", job.trainers)].checkpoints_kept
        clerk = self._clerk.child(plain_name(name), job.options(behaviour=name), kept=kept)
        try:
            if clerk.may_resume:
                with_resumed_contract(job, f"{self._clerk.trial().name}/{name}", clerk.call(contract_of_trial))
            return LocalTrainee(job, layout, clerk, acts=True)
        except BrayxError:
            with contextlib.suppress(BrayxError):  # its trial may never have begun
                clerk.close("FAILED")
            raise

    def _let_in(self, name: str, trainee: LocalTrainee) -> None:
        self._act(name)
        self._doors.export(trainee.numbers, behaviour=name)
        assert trainee.acting is not None
        trainee.acting.build(lambda line: self._say(f"{name!r}: {line}"))

    def _dropped(self, trainee: LocalTrainee) -> None:
        assert trainee.acting is not None
        with contextlib.suppress(DeadlineExceeded):
            self._doors.run(trainee.acting.close(), _CLOSE_S)

    def _act(self, name: str) -> AgentActorFactory:
        """Makes the actors of a behaviour's sessions."""
        trainee = self.trainees[name]
        self._buffers[name] = dict(trainee.buffers)
        factory = self._make_factory(self._jobs[name], trainee, self._buffers[name])
        players = self.self_plays.players(name, self._jobs[name], trainee, factory.services)
        self.factories[name] = replace(factory, players=players)
        return self.factories[name]

    def _retired(self, name: str) -> None:
        self._buffers[name].update(dict.fromkeys(self._buffers[name], NullBuffer()))
