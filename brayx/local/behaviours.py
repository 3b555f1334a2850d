"""The behaviours of a job's games, each a model in training: with its own network, learner, replay, trial and champion.

The first one's trial is the job's; the others' trials are its children. A behaviour may first appear while the
others train: its games' starts are held in the lobby until its first weights act. Knows nothing of doors or progress.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, StartupError
from brayx.jobs.champion import behaviour_pool, drawn_curve
from brayx.jobs.checks import check_learning
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import contract_lines, parse_contract, plain_name
from brayx.jobs.document import nearest
from brayx.jobs.recorded import contract_of_trial, contracts_of_children, with_resumed_contract
from brayx.jobs.result import promote
from brayx.jobs.sources import Sources
from brayx.jobs.trainee import Trainees
from brayx.jobs.training import READY_TIMEOUT_S
from brayx.jobs.watching import IDLE_S, Idle
from brayx.local.job import in_one_process
from brayx.local.self_play import SelfPlays
from brayx.local.trainee import LocalTrainee
from brayx.metrics.totals import joined
from brayx.replay.buffer import NullBuffer

if TYPE_CHECKING:
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.children import Child
    from brayx.gamecore.contract import Contract
    from brayx.local.lobby import Lobby
    from brayx.replay.packing import Layout
    from brayx.tracking.clerk import Clerk
    from brayx.trainer.loop import TrainingSummary

_CLOSE_S = 5.0
_ANNOUNCED_S = 60.0
"""After so long, the games' behaviours are taken for all that there are."""


class BehaviourTraining(Trainees[LocalTrainee]):
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
        super().__init__(job, LocalTrainee(job, layout, clerk, acts=True, child=child))
        self._clerk, self._lobby, self._say = clerk, lobby, say
        name = parse_contract(job.contract).behaviour
        self.trainees, self.mains = {name: self._trainee}, [name]
        self._jobs = {name: job}
        self._buffers: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, Sources] = {}
        """Of all behaviours but the first, whose sources are the job's."""
        self._starting: dict[str, float] = {}
        """Deadline of the first weights of each behaviour whose starts are still held."""
        self._idle, self._ended = Idle(), set[str]()
        self._announced, self._missing_at = {name}, time.monotonic() + _ANNOUNCED_S
        self._pool = ""
        self.factories: dict[str, AgentActorFactory] = {}
        self.self_plays = SelfPlays(clerk, say)
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

    def newest(self) -> tuple[dict[str, float], dict[str, str]]:
        """The numbers and notes of all behaviours, joined as if they were of one training."""
        recorders = {name: trainee.numbers for name, trainee in list(self.trainees.items())}
        notes: dict[str, str] = {}
        for recorder in recorders.values():
            notes = {**recorder.notes(), **notes}
        return joined({name: recorder.snapshot() for name, recorder in recorders.items()}), notes

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
        for name, trainee in list(self.trainees.items()):
            if name in self._starting:
                self._admit(name, trainee)
            elif not trainee.learner.running:
                self._complete(name, trainee)
        for error in (error for sources in self._sources.values() for error in sources.errors):
            raise error
        self.self_plays.look()
        self._end_idle()

    def is_over(self, no_more: bool) -> bool:
        """See `Trainees.is_over`."""
        ended = [trainee.is_over(no_more) for trainee in self.trainees.values()]
        return all(ended)

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
        """Registers the best of each behaviour; returns the first one's version, and a message for each."""
        self._say_missing()
        versions: dict[str, int | None] = {}
        lines: list[str] = []
        several = len(self.trainees) > 1
        for name, trainee in self.trainees.items():
            clerk, config = trainee.clerk, trainee.config
            clerk.settle()
            if (league := self.self_plays.league(name)) is not None:
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

    @property
    def pool(self) -> str:
        """See `Trainees.pool`: of the first behaviour."""
        return self._pool or super().pool

    def standings(self) -> str:
        """See `Trainees.standings`."""
        return self.self_plays.standings()

    def close(self, finished: bool) -> None:
        """See `Trainees.close`."""
        for sources in self._sources.values():
            sources.stop()
        self.self_plays.close_checks()
        for trainee in self.trainees.values():
            if trainee is not self._trainee:
                trainee.end("FINISHED" if finished else "KILLED")

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
        job, _ = in_one_process(self._lobby.job.of_behaviour(name))
        trainer = only("trainer", job.trainers)
        if job.trainers[trainer].initial_weights == self._lobby.job.trainers[trainer].initial_weights:
            job = job.with_initial_weights(None)  # which are the first behaviour's
        job = job.model_copy(update={"contract": contract.as_dict()})
        clerk: Clerk | None = None
        try:
            if plain_name(name) in map(plain_name, self.trainees):
                raise ConfigError(f"its trial and model would be named {plain_name(name)!r}, like another behaviour's")
            layout = check_learning(job)
            kept = job.trainers[trainer].checkpoints_kept
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

    def _complete(self, name: str, trainee: LocalTrainee) -> None:
        """Lets a behaviour that has all its steps play on while others learn.

        Raises:
            BrayxError: its learner failed.
        """
        try:
            trainee.learner.result(0.0)
        except BrayxError as error:
            raise type(error)(f"behaviour {name!r}: {error.message}", **error.details) from error
        buffers = self._buffers[name]
        if self.running and not all(isinstance(buffer, NullBuffer) for buffer in buffers.values()):
            buffers.update(dict.fromkeys(buffers, NullBuffer()))
            if name not in self._ended:
                self._say(f"behaviour {name!r} has all its steps: it plays on while others learn")

    def _end_idle(self) -> None:
        """Ends the learners of behaviours that no game plays, once another one has all its steps: they alone would
        keep the training from its end."""
        running = [name for name, trainee in self.trainees.items() if trainee.learner.running]
        if len(running) == len(self.trainees):
            return
        learning = [name for name in running if name not in self._starting and name not in self._ended]
        sums = {name: self.trainees[name].numbers.snapshot() for name in learning}
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

    def _refuse(self, name: str, error: BrayxError, clerk: Clerk | None) -> None:
        """Refuses the starts of a behaviour that cannot be learned; the others go on."""
        self._say(f"behaviour {name!r} is refused, the others go on: {error.message}")
        self._lobby.admit(name, error.message)
        if clerk is not None:
            with contextlib.suppress(BrayxError):  # its trial may never have begun
                clerk.close("FAILED")
