"""`brayx replay --resimulate`: plays a recorded game again, and from some tick on lets another version act.

The game is a real gamecore at a door on this machine. Until the tick it gets the recorded replies, which is why it has
to be deterministic: with equal replies it must send equal bodies. Meanwhile the job's agents see its ticks with the
other version, so that they and the model have their memory when their own replies begin to count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from brayx import clock
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.config import GamecoreConfig
from brayx.actor.logs import SessionLog
from brayx.errors import BadRecording, ConfigError, NotDeterministic, StartupError
from brayx.metrics import Recorder
from brayx.recording.config import RecordingConfig
from brayx.recording.reader import Episode
from brayx.recording.recorder import SessionRecorder
from deployments.job import JobConfig, only
from pipelines.gamecores import Gamecores
from pipelines.match_games import Score
from pipelines.opponents import Opponent
from pipelines.playing import check_playable, doors

_LOOK_S = 0.05
_SHOWN = 120
"""Maximum bytes of a body in a message."""


@dataclass(frozen=True)
class Resimulation:
    """A recorded game that was played again.

    Attributes:
        session: id of the recorded session.
        model: the version that played on.
        from_tick: number of the first tick that it answered.
        ticks_before, ticks: length of the recorded game, and of the new one.
        first: number of the first tick with another reply; None: all are as recorded.
        result_before, result: what the agents recorded as the game's return; None: nothing.
        end: why the new session ended.
    """

    session: str
    model: str
    from_tick: int
    ticks_before: int
    ticks: int
    first: int | None
    result_before: float | None
    result: float | None
    end: str

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values, by the names of the attributes."""
        return dict(vars(self))

    def __str__(self) -> str:
        def ended(ticks: int, result: float | None) -> str:
            return f"{ticks} ticks, {'no return' if result is None else f'return {result:g}'}"

        first = "no reply differs" if self.first is None else f"the first different reply is to tick {self.first}"
        return "\n".join(
            [
                f"session {self.session}: the game's inputs were equal up to tick {self.from_tick}",
                f"from there on {self.model} played; {first}",
                f"recorded: {ended(self.ticks_before, self.result_before)}",
                f"now: {ended(self.ticks, self.result)}, end: {self.end}",
            ]
        )


def resimulate(
    episode: Episode,
    side: Opponent,
    job: JobConfig,
    command: str,
    uri: str,
    *,
    from_tick: int = 0,
    actor: str = "",
    model: str = "",
    folder: str = "",
    timeout_s: float = 60.0,
) -> Resimulation:
    """Plays a recorded game again, from a tick on with another version. The job's agents act as in serving.

    The game is the first session whose start has the recorded body; the command may play others before it.

    Args:
        episode: the recorded session.
        side: the version.
        job: the job whose agents play.
        command: the gamecore's command, with placeholders as in ``actor.gamecores``; it has to play the recorded game,
            for example by its seed.
        uri: tracking URI, for the job's other models.
        from_tick: number of the first tick that the version answers.
        actor, model: names of the actor and model component; may be empty if there is only one.
        folder: the new game is recorded here, from that tick on; empty: it is not.
        timeout_s: deadline for the game's next tick.

    Raises:
        NotDeterministic: a body differs from the recorded one although all replies were equal; names the tick.
        BadRecording: the recording does not have every tick up to ``from_tick``, as the game saw it.
        ConfigError: there is no such tick; or the job, its code or the command cannot be used.
        BadWeights: the weights do not fit the job's model.
        StartupError: the command fails, or does not play such a game in time.
    """
    script = _Script(episode, side.label, from_tick)
    actor, model = only("actor", job.actors, actor), only("model", job.models, model)
    config = job.actors[actor].model_copy(
        update={"gamecores": [GamecoreConfig(command=command)], "tick_deadline_ms": None}
    )
    job = job.model_copy(update={"actors": {**job.actors, actor: config}})
    check_playable(job, actor)
    recorder = SessionRecorder(RecordingConfig(folder=folder).absolute(), Recorder()) if folder else None

    def actors(factory: AgentActorFactory) -> Callable[[], _Driven]:
        factory = replace(factory, recorders=[_Ends(script)])
        return lambda: _Driven(factory, script, recorder)

    try:
        with (
            doors(job, actor, uri, model, [side], _Alone(), actors) as urls,
            Gamecores(config.gamecores, urls, job.folder) as cores,
        ):
            _wait(script, cores, timeout_s)
    finally:
        if recorder is not None:
            recorder.close()
    if script.difference is not None:
        raise script.difference
    if script.end == "error":
        raise StartupError(f"the session ended with an error at tick {script.ticks}; the log has it")
    return Resimulation(
        episode.session,
        side.label,
        from_tick,
        len(episode),
        script.ticks,
        script.first,
        episode.result,
        script.result,
        script.end,
    )


def _wait(script: _Script, cores: Gamecores, timeout_s: float) -> None:
    """Waits for the game's end; raises a `StartupError` if it does not come."""
    seen, since = script.seen, clock.now()
    while not script.over.wait(_LOOK_S):
        if script.seen != seen:
            seen, since = script.seen, clock.now()
        said = f": {cores.messages[-1]}" if cores.messages else ""
        if not script.claimed and (cores.restarts or cores.failures):
            raise StartupError(
                f"the command ended without a session that starts as the recorded one{script.expected_start}{said}"
            )
        if clock.now() - since > timeout_s:
            what = f"tick {script.ticks} of the game" if script.claimed else "session that starts as the recorded one"
            raise StartupError(
                f"no {what} came within {timeout_s:g} s{'' if script.claimed else script.expected_start}{said}"
            )


class _Script:
    """The recorded session, and how far the game has followed it. Belongs to the event loop of the doors.

    Attributes:
        label: the version.
        claimed: whether the game has started.
        over: set once it has ended.
        seen: number of requests so far, of all sessions.
        ticks: number of the game's ticks so far.
        first: number of the first tick with another reply.
        difference: the first input that differs; None: there is none.
        end, result: how the session ended.
    """

    def __init__(self, episode: Episode, label: str, from_tick: int) -> None:
        columns = episode.read(names=[])
        if not 0 <= from_tick <= len(episode) - 1:
            raise ConfigError(f"--from-tick is {from_tick}, the session has ticks 0 to {len(episode) - 1}")
        missing = np.flatnonzero(columns.number[: from_tick + 1] != np.arange(from_tick + 1))
        if len(missing):
            raise BadRecording(f"session {episode.session!r} lacks tick {int(missing[0])}: it was not recorded")
        for number, event in enumerate(columns.event[:from_tick]):
            if any(what in event for what in ("error", "fallback", "skipped")):
                raise BadRecording(f"tick {number} has the event {event!r}: the game's reply to it is not recorded")
        self._inputs, self._outputs = episode.inputs(), episode.outputs()
        self._start = episode.start.encode(errors="surrogateescape")
        self._from_tick = from_tick
        self.label = label
        self._other_start = b""
        self._session = ""
        self.over = threading.Event()
        self.claimed = False
        self.seen = self.ticks = 0
        self.first: int | None = None
        self.difference: NotDeterministic | None = None
        self.end = ""
        self.result: float | None = None

    @property
    def expected_start(self) -> str:
        """What was expected of a start, for messages."""
        got = f"; the last start was {_short(self._other_start)}" if self._other_start else ""
        return f", {_short(self._start)}{got}"

    def started(self, session: str, body: bytes) -> None:
        """A session starts."""
        self.seen += 1
        if body != self._start:
            self._other_start = body
        elif not self.claimed:
            self.claimed, self._session = True, session

    def is_it(self, session: str) -> bool:
        """Whether this session is the game."""
        return self.claimed and session == self._session

    def check(self, body: bytes) -> None:
        """The next tick's body; raises `NotDeterministic` if it has to be as recorded, and is not."""
        tick = self.ticks
        if tick <= self._from_tick and body != self._inputs[tick]:
            self.difference = NotDeterministic(
                f"the game is not deterministic: its body at tick {tick} is {_short(body)}, the recorded one is "
                f"{_short(self._inputs[tick])}, and all replies before were as recorded",
                tick=tick,
            )
            self.over.set()
            raise self.difference

    def replied(self, reply: bytes) -> bytes:
        """The reply that the game gets, given that of the agents."""
        tick, self.ticks = self.ticks, self.ticks + 1
        if tick < self._from_tick:
            return self._outputs[tick]
        if self.first is None and (tick >= len(self._outputs) or reply != self._outputs[tick]):
            self.first = tick
        return reply

    @property
    def is_first(self) -> bool:
        """Whether the next tick is the first one that the version answers."""
        return self.ticks == self._from_tick

    def ended(self, reason: str, result: float | None) -> None:
        """The game has ended."""
        self.end, self.result = reason, result
        self.over.set()


class _Driven(AgentActor):
    """The actor of a session that gets recorded replies at first.

    Args:
        factory: as for `AgentActor`.
        script: the recorded session.
        recorder: records the session from the version's first tick on; None: nobody does.
    """

    def __init__(self, factory: AgentActorFactory, script: _Script, recorder: SessionRecorder | None) -> None:
        super().__init__(factory)
        self._script, self._recorder = script, recorder
        self._id, self._body = "", b""

    async def start(self, session: str, body: bytes) -> bytes:
        self._id, self._body = session, body
        self._script.started(session, body)
        return await super().start(session, body)

    async def tick(self, body: bytes) -> bytes:
        script = self._script
        script.seen += 1
        if not script.is_it(self._id):
            return await super().tick(body)
        script.check(body)
        if self._recorder is not None and script.is_first:
            log = self._recorder.open(self._id, self._body, script.label)
            if log is not None:
                self.attach(log)
        return script.replied(await super().tick(body))


class _Ends:
    """Tells the script of its session's end: `brayx.actor.logs.SessionRecorder`."""

    on_request = False

    def __init__(self, script: _Script) -> None:
        self._script = script

    def open(self, session: str, start: bytes, player: str, why: str) -> SessionLog | None:
        return _End(self._script) if self._script.is_it(session) else None


class _End(SessionLog):
    is_taking = False

    def __init__(self, script: _Script) -> None:
        self._script = script

    def end(self, reason: str, result: float | None) -> None:
        self._script.ended(reason, result)


class _Alone:
    """One player in every seat: `pipelines.playing.Seating`."""

    def assign(self, session: str) -> int:
        return 0

    def result(self, session: str, value: object) -> None:
        """Ignored."""

    def ended(self, session: str, reason: str) -> None:
        """Ignored."""

    def score(self) -> Score:
        raise NotImplementedError


def _short(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
