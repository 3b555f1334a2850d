"""The behaviours of a job's games on the local host, where one may first appear while the others train: its games'
starts are held in the lobby until its first weights act. Knows nothing of doors or progress.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brayx.errors import BrayxError, DeadlineExceeded, StartupError
from brayx.jobs.behaviours import Behaviours, further_job, joined_snapshots
from brayx.jobs.checks import check_learning
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import contract_lines, parse_contract, plain_name
from brayx.jobs.document import nearest
from brayx.jobs.recorded import contract_of_trial, contracts_of_children, with_resumed_contract
from brayx.jobs.sources import Sources
from brayx.jobs.training import READY_TIMEOUT_S, Snapshot
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
    from brayx.trainer.loop import TrainingSummary

_CLOSE_S = 5.0
_ANNOUNCED_S = 60.0
"""After so long, the games' behaviours are taken for all that there are."""


class BehaviourTraining(Behaviours[LocalTrainee]):
    """Trains each behaviour of a job's games; `look` takes in new ones.

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
        super().__init__(job, LocalTrainee(job, layout, clerk, acts=True, child=child), say)
        self._clerk, self._lobby = clerk, lobby
        (name,) = self.mains
        self._buffers: dict[str, dict[str, Any]] = {}
        self._announced, self._missing_at = {name}, time.monotonic() + _ANNOUNCED_S
        self.factories: dict[str, AgentActorFactory] = {}
        self.self_plays = LocalSelfPlays(say)
        self._make_factory: Callable[[JobConfig, LocalTrainee, Mapping[str, Any]], AgentActorFactory]
        resumed = clerk.call(contracts_of_children, name) if clerk.may_resume else []
        known = map(parse_contract, (*resumed, *lobby.job.contracts))
        contracts = {contract.behaviour: contract for contract in known}
        for behaviour, contract in contracts.items():  # before games come, or it could end without them
            if behaviour != name:
                lobby.expect(contract)
                self._begin(contract)

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
        """Takes in behaviours that have appeared, and those whose first weights act.

        Raises:
            BrayxError: a behaviour's learner failed.
        """
        if time.monotonic() > self._missing_at:
            self._say_missing()
        for contract in self._lobby.arrived():
            if contract.behaviour not in self.trainees and self._begin(contract):
                self.trainees[contract.behaviour].learner.start()
        for name in list(self._starting):
            self._admit(name, self.trainees[name])
        self.self_plays.look()
        super().look()

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

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """See `Behaviours.register`."""
        self._say_missing()
        return super().register(say)

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

    def _say_missing(self) -> None:
        """Says once which behaviours have options but are in no game."""
        if self._missing_at < math.inf:
            self._missing_at = math.inf
            for name in self._lobby.job.behaviours:
                if name not in self._announced:
                    self._say(
                        f"behaviours.{name} has no effect: no game has this behaviour{nearest(name, self._announced)}"
                    )

    def _begin(self, contract: Contract) -> bool:
        """Makes the learner of a behaviour that has appeared. Returns False if it cannot be learned and is refused."""
        name = contract.behaviour
        self._announced.add(name)
        clerk: Clerk | None = None
        try:
            job, _ = in_one_process(further_job(self._lobby.job, contract, self.trainees))
            layout = check_learning(job)
            kept = job.trainers[only("trainer", job.trainers)].checkpoints_kept
            clerk = self._clerk.child(plain_name(name), {"behaviour": name, **job.as_dict()}, kept=kept)
            if clerk.may_resume:
                with_resumed_contract(job, f"{self._clerk.trial().name}/{name}", clerk.call(contract_of_trial))
            trainee = LocalTrainee(job, layout, clerk, acts=True)
            self._sources[name] = Sources(job, trainee.buffers, layout.env)
        except BrayxError as error:
            self._refuse(name, error, clerk)
            return False
        self._jobs[name], self.trainees[name] = job, trainee
        self.mains.append(name)
        self._starting[name] = time.monotonic() + READY_TIMEOUT_S
        for line in (f"behaviour {name!r} begins to learn", *contract_lines(contract)):
            self._say(line)
        return True

    def _admit(self, name: str, trainee: LocalTrainee) -> None:
        """Lets the games of a behaviour in once its first weights act; refuses it if they never will."""
        learner = trainee.learner
        try:
            if not learner.ready.is_set():
                if time.monotonic() > self._starting[name]:
                    raise StartupError(f"no weights came within {READY_TIMEOUT_S:g} s; the learner {learner.state()}")
                return
            if not learner.running:
                learner.result(0.0)  # its error
        except BrayxError as error:
            self._drop(name, error)
            return
        del self._starting[name]
        self._act(name)
        self._lobby.doors.export(trainee.numbers, behaviour=name)
        assert trainee.acting is not None
        trainee.acting.build(lambda line: self._say(f"{name!r}: {line}"))
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
        assert trainee.acting is not None
        with contextlib.suppress(DeadlineExceeded):
            self._lobby.doors.run(trainee.acting.close(), _CLOSE_S)
        self._refuse(name, error, trainee.clerk)

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

    def _refuse(self, name: str, error: BrayxError, clerk: Clerk | None) -> None:
        """Refuses the starts of a behaviour that cannot be learned; the others go on."""
        self._say(f"behaviour {name!r} is refused, the others go on: {error.message}")
        self._lobby.admit(name, error.message)
        if clerk is not None:
            with contextlib.suppress(BrayxError):  # its trial may never have begun
                clerk.close("FAILED")
