"""`brayx replay --resimulate`: plays a recorded game again, and lets another version act from some tick on.

The game is a real gamecore at a door on this machine. Before that tick its seats get the recorded replies. So the game
has to be deterministic: given the same replies, it must send the same bodies. Meanwhile the job's agents handle its
ticks with the other version, so that agents and model have the right memory when they take over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from brayx import clock
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.config import GamecoreConfig
from brayx.actor.logs import SessionLog
from brayx.errors import BadRecording, ConfigError, StartupError
from brayx.jobs.checks import missing_of
from brayx.jobs.config import JobConfig, only
from brayx.jobs.gamecores import Gamecores
from brayx.league.match import MatchScore
from brayx.league.named import Opponent
from brayx.league.playing import check_playable, doors
from brayx.metrics import Recorder
from brayx.recording.config import RecordingConfig, is_named, pattern_hint
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.regression.game import RecordedGame, RecordedSeat, game_name
from brayx.tables import aligned

_POLL_S = 0.05
_MESSAGE_S = 10.0


@dataclass(frozen=True)
class PlayedSeat:
    """One session of a recorded game that was played again.

    Attributes:
        session: id of the recorded session.
        player: the version or the other player, whoever took over; empty: it got its recorded replies to the end.
        ticks_before, ticks: number of ticks in the recorded session, and in the new one.
        first: number of the first tick with another reply; None: all replies are as recorded.
        result_before, result: what the agents recorded as the game's return; None: nothing.
        end: why the new session ended; empty: it did not start.
    """

    session: str
    player: str
    ticks_before: int
    ticks: int
    first: int | None
    result_before: float | None
    result: float | None
    end: str


@dataclass(frozen=True)
class Resimulation:
    """A recorded game that was played again.

    Attributes:
        model: the version that took over.
        from_tick: number of the first tick that it answered.
        sessions: the game's sessions, in the order in which they began.
    """

    model: str
    from_tick: int
    sessions: Sequence[PlayedSeat]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values, by the names of the attributes."""
        return {**vars(self), "sessions": [dict(vars(session)) for session in self.sessions]}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("session", "first other reply", "ticks then", "now", "return then", "now", "end", "played on by")
        ]
        for session in self.sessions:
            first = "-" if session.first is None else str(session.first)
            returns = ["-" if value is None else f"{value:g}" for value in (session.result_before, session.result)]
            end = (session.end or "did not start", session.player or "its recording")
            rows.append((session.session, first, str(session.ticks_before), str(session.ticks), *returns, *end))
        return "\n".join(
            [
                f"the game's inputs were equal up to tick {self.from_tick}; from there on {self.model} played",
                *aligned(rows),
            ]
        )


def sessions_of(episodes: Sequence[Recording], name: str = "") -> tuple[list[Recording], set[str]]:
    """The recorded sessions of one game, and the ids of those that the version plays.

    Args:
        episodes: recorded sessions of any games.
        name: id of a session, and the version plays only this one; or a game, and it plays all its sessions. Empty:
            the only game.

    Raises:
        BadRecording: there is no such session.
        ConfigError: these are several games.
    """
    named = [episode for episode in episodes if not name or is_named(episode.session, name)]
    games = {game_name(episode.session) for episode in named}
    if not games:
        raise BadRecording(f"no session {name!r} is recorded{pattern_hint(name)}")
    if len(games) > 1:
        raise ConfigError(f"--resimulate plays one game, and the recording has {len(games)}: name one with --session")
    (game,) = games
    of_game = [episode for episode in episodes if game_name(episode.session) == game]
    return of_game, {episode.session for episode in named}


def resimulate(
    episodes: Sequence[Recording],
    played: set[str],
    side: Opponent,
    job: JobConfig,
    command: str,
    uri: str,
    *,
    others: Opponent | None = None,
    from_tick: int = 0,
    actor: str = "",
    model: str = "",
    folder: str = "",
    timeout_s: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> Resimulation:
    """Plays a recorded game again, with another version from some tick on. The job's agents act as in serving.

    The game begins with the first session whose start has a recorded body; the command may play other games before it.

    Args:
        episodes: the recorded sessions of one game, of all its seats.
        played: ids of the sessions that the version plays. Each other one gets its recorded replies for as long as its
            bodies are the recorded ones.
        side: the version.
        job: the job whose agents play.
        command: the gamecore's command, with placeholders as in ``actor.gamecores``; it must play the recorded game,
            for example by using its seed.
        uri: tracking URI, for the job's other models.
        others: the player that then takes over the other sessions; None: the version.
        from_tick: number of the first tick of its sessions that the version answers.
        actor, model: names of the actor and model component; may be empty if there is only one.
        folder: records each session here, from the first tick that a player answers; empty: records none.
        timeout_s: deadline for the game's next tick.
        say: prints a line now and then while the command plays only other games.

    Raises:
        NotDeterministic: a body differs from the recorded one although all replies were equal; names the tick.
        BadRecording: the recording lacks a seat, or a reply before ``from_tick``.
        ConfigError: there is no such tick; or the job, its code or the command cannot be used.
        BadWeights: the weights do not fit the job's model.
        StartupError: the command fails, or does not play the game in time.
    """
    game = RecordedGame(episodes, played, from_tick)
    sides = [side, others or side]
    if not job.actors:
        raise ConfigError(f"{job.file} has no actor to play with: name a job that has one, with --job")
    if missing := list(missing_of(command, job.files_folder)):
        raise ConfigError(f"--resimulate: {'; '.join(missing)}")
    actor, model = only("actor", job.actors, actor), only("model", job.models, model)
    config = job.actors[actor].model_copy(
        update={"gamecores": [GamecoreConfig(command=command)], "tick_deadline_ms": None}
    )
    job = job.model_copy(update={"actors": {**job.actors, actor: config}})
    check_playable(job, actor)
    recorder = SessionRecorder(RecordingConfig(folder=folder).absolute(), Recorder()) if folder else None

    def actors(factory: AgentActorFactory) -> Callable[[], _ReplayedActor]:
        factory = replace(factory, recorders=[_EndRecorder(game)])
        return lambda: _ReplayedActor(factory, game, recorder)

    try:
        with (
            doors(job, actor, uri, model, sides, _Seating(game), actors) as urls,
            Gamecores(config.gamecores, urls, job.files_folder, say=say) as cores,
        ):
            _wait(game, cores, timeout_s, say)
    finally:
        if recorder is not None:
            recorder.close()
    if game.failure is not None:
        raise game.failure
    for seat in game.seats:
        if seat.end == "error":
            raise StartupError(
                f"the session of {seat.episode.session!r} ended with an error at tick {seat.ticks}; the log has it"
            )
    return Resimulation(side.label, from_tick, [_played(seat, sides) for seat in game.seats])


def _played(seat: RecordedSeat, sides: Sequence[Opponent]) -> PlayedSeat:
    before = seat.episode
    player = sides[_side(seat)].label if seat.is_played or not seat.follows else ""
    return PlayedSeat(before.session, player, len(before), seat.ticks, seat.first, before.result, seat.result, seat.end)


def _side(seat: RecordedSeat | None) -> int:
    """Index of the seat's player: 0 for the version, 1 for the other player."""
    return 0 if seat is None or seat.is_played else 1


def _wait(game: RecordedGame, cores: Gamecores, timeout_s: float, say: Callable[[str], None]) -> None:
    """Waits until the game ends; raises a `StartupError` if it does not start or stops sending ticks."""
    seen = 0
    since = said_at = clock.now()
    while not game.over.wait(_POLL_S):
        cores.check()
        if game.seen != seen:
            seen, since = game.seen, clock.now()
        said = f": {cores.messages[-1]}" if cores.messages else ""
        if not game.has_started and clock.now() - said_at > _MESSAGE_S:
            said_at = clock.now()
            say(f"{game.others} sessions so far, and none starts as the recorded one{game.expected_start}")
        if not game.has_started and (cores.restarts or cores.failures):
            raise StartupError(
                f"the command ended without a session that starts as the recorded one{game.expected_start}{said}"
            )
        if clock.now() - since > timeout_s:
            ticks = sum(seat.ticks for seat in game.seats)
            what = (
                f"tick after the game's first {ticks}"
                if game.has_started
                else "session that starts as the recorded one"
            )
            raise StartupError(
                f"no {what} came within {timeout_s:g} s{'' if game.has_started else game.expected_start}{said}"
            )


class _ReplayedActor(AgentActor):
    """The actor of a session, whose replies are replaced by the recorded ones at first.

    Args:
        factory: as for `AgentActor`.
        game: the recorded game.
        recorder: records the session from its player's first tick on; None: the session is not recorded.
    """

    def __init__(self, factory: AgentActorFactory, game: RecordedGame, recorder: SessionRecorder | None) -> None:
        super().__init__(factory)
        self._game, self._recorder = game, recorder
        self._id, self._body, self._reply = "", b"", b""

    def ask(self, opponent: str) -> None:
        """Ignored, since the seat has its player."""

    def record(self) -> None:
        """Ignored, since ``--out`` decides what is recorded."""

    async def start(self, session: str, body: bytes) -> bytes:
        self._id, self._body = session, body
        recorded = self._game.started(session, body)
        reply = await super().start(session, body)
        self._reply = reply if recorded is None else recorded
        return self._reply

    async def tick(self, body: bytes) -> bytes:
        seat = self._game.tick(self._id, body)
        if seat is None:
            return await super().tick(body)
        if seat.forced is None and self._recorder is not None:
            log = self._recorder.open(self._id, self._body, self.facts()["player"], reply=self._reply)
            if log is not None:
                self.attach(log)
            self._recorder = None
        return self._game.replied(seat, await super().tick(body))


class _EndRecorder:
    """Tells the game when its sessions end; a `brayx.actor.logs.SessionLogOpener`."""

    on_request = False

    def __init__(self, game: RecordedGame) -> None:
        self._game = game

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog | None:
        return _EndLog(self._game, session)


class _EndLog(SessionLog):
    is_taking = False

    def __init__(self, game: RecordedGame, session: str) -> None:
        self._game, self._session = game, session

    def end(self, reason: str, result: float | None) -> None:
        self._game.ended(self._session, reason, result)


class _Seating:
    """Gives each seat of the game its player; a `brayx.league.playing.MatchSeating`."""

    def __init__(self, game: RecordedGame) -> None:
        self._game = game

    def assign(self, session: str) -> int:
        return _side(self._game.seat(session))

    def result(self, session: str, value: object) -> None:
        """Ignored."""

    def ended(self, session: str, reason: str) -> None:
        """Ignored."""

    def score(self) -> MatchScore:
        raise NotImplementedError
