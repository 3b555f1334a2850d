"""A recorded game that is played again: which replies its seats get, and how far it follows the recording.

A seat that the version plays gets its recorded replies before some tick; another seat gets them for as long as its
bodies are the recorded ones. A session that moved to another process was recorded as an episode by each, and
`whole_sessions` makes them one again. Knows nothing of agents, doors or processes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from brayx.errors import BadRecording, BrayxError, ConfigError, NotDeterministic
from brayx.gamecore.protocol import agent_of, game_of
from brayx.recording.columns import texts
from brayx.recording.reader import Recording

_MOVED, _RESUMED = "moved", "resumed"
"""Why a session ended here that another process continues without a loss; and the event of that one's first tick."""
_OTHER_REPLY = ("error", "fallback", "skipped")
"""Events of ticks for which the game did not get the recorded reply."""
_CUT = {"": "its process died or it still runs", _MOVED: "it moved to a process that did not record it"}
"""Why a recording has no end, by the reason for its end."""
_SHOWN = 120
"""Maximum bytes of a body in a message."""


def game_name(session: str) -> str:
    """The game in a session's id; an id without an agent is its own game."""
    return game_of(session) or session


class RecordedSeat:
    """A seat of the game: its recorded session, and the progress of the session that plays it now.

    Args:
        episode: the recorded session.
        from_tick: see `RecordedGame`.
        is_played: whether the version plays it from ``from_tick`` on.

    Attributes:
        episode, is_played: as the arguments.
        start: recorded body of the start.
        start_reply: recorded reply to it; None: an older recording lacks it.
        has_started: whether its session has started.
        follows: whether all bodies so far are as recorded.
        forced: the recorded reply, if the current tick gets it; None: it gets the agents' reply.
        ticks: number of its ticks so far.
        first: number of the first tick with another reply than the recorded one; None: there is none.
        end, result: how its session ended.
    """

    def __init__(self, episode: Recording, from_tick: int, is_played: bool) -> None:
        self.episode, self.is_played = episode, is_played
        columns = episode.read(names=[])
        gaps = np.flatnonzero(columns.number != np.arange(len(columns.number)))
        self._seen = int(gaps[0]) if len(gaps) else len(columns.number)
        self._has_gap = len(gaps) > 0
        if self._seen <= from_tick and (self._has_gap or (self.is_cut and is_played)):
            raise self.unknown()
        unknown = (tick for tick, event in enumerate(columns.event) if any(what in event for what in _OTHER_REPLY))
        self._known = min(next(unknown, self._seen), self._seen)
        if self._known < min(from_tick, self._seen):
            event = columns.event[self._known]
            raise BadRecording(
                f"tick {self._known} of session {episode.session!r} has the event {event!r}: "
                "the game's reply to it is not recorded"
            )
        self._inputs, self._outputs = texts(columns.input), texts(columns.output)
        self.start = episode.start.encode(errors="surrogateescape")
        self.start_reply = episode.start_reply.encode(errors="surrogateescape") or None
        self.has_started = False
        self.follows = True
        self.forced: bytes | None = None
        self.ticks = 0
        self.first: int | None = None
        self.end = ""
        self.result: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the session went on after its recording."""
        return self.episode.end in _CUT

    def unknown(self) -> BadRecording:
        """The error that the session is not known from some tick on."""
        first = self._seen
        why = f"has ticks 0 to {first - 1}, since {_CUT.get(self.episode.end)}"
        if self._has_gap:
            why = f"lacks tick {first}, which was not recorded"
        then = f"name a --from-tick up to {first - 1}" if first else "it cannot be played again"
        return BadRecording(f"session {self.episode.session!r} {why}: {then}", tick=first)

    def recorded(self, tick: int) -> bytes | None:
        """The recorded body of a tick; None: there is none."""
        return self._inputs[tick] if tick < self._seen else None

    def reply(self, tick: int) -> bytes | None:
        """The reply that the game got to this tick when it was recorded; None: it is not known."""
        return self._outputs[tick] if tick < self._known else None


class RecordedGame:
    """The seats of a recorded game. Belongs to the event loop of the doors.

    The game begins with the first session whose start has a recorded body; other games may come before it.

    Args:
        episodes: the recorded sessions of the game.
        played: ids of those that the version plays.
        from_tick: number of the first tick of each of these that the version answers.

    Attributes:
        seats: the seats, in the order in which they began.
        over: set once the game has ended.
        failure: why the game cannot go on; None: it can.
        seen: number of requests so far, in all games.
        others: number of sessions so far in other games.

    Raises:
        BadRecording: a session was recorded twice, or a reply before ``from_tick`` is not known.
        ConfigError: no session that the version plays has a tick ``from_tick``.
    """

    def __init__(self, episodes: Sequence[Recording], played: Collection[str], from_tick: int) -> None:
        self._seats: dict[str, RecordedSeat] = {}
        for episode in sorted(episodes, key=lambda episode: episode.began):
            agent = agent_of(episode.session)
            if agent in self._seats:
                if _is_resumed(episode):  # after its process died, so it is not known what the game did in between
                    continue
                raise BadRecording(
                    f"session {episode.session!r} was recorded more than once, since its id was used again: copy the "
                    "episode to play to a trial with `brayx.recording.log`, and replay that"
                )
            self._seats[agent] = RecordedSeat(episode, from_tick, episode.session in played)
        self.seats = list(self._seats.values())
        last = max(len(seat.episode) for seat in self.seats if seat.is_played) - 1
        if not 0 <= from_tick <= last:
            raise ConfigError(f"--from-tick is {from_tick}, the session has ticks 0 to {last}")
        self._from_tick = from_tick
        self._game: str | None = None
        self._running: dict[str, RecordedSeat] = {}
        self._other_start = b""
        self.over = threading.Event()
        self.failure: BrayxError | None = None
        self.seen = self.others = 0

    @property
    def has_started(self) -> bool:
        """Whether the game has started."""
        return self._game is not None

    @property
    def diverged(self) -> bool:
        """Whether the game got a reply that is not the recorded one. From then on its bodies may differ."""
        return any(seat.first is not None for seat in self.seats)

    @property
    def expected_start(self) -> str:
        """The expected start and the last other one, for messages."""
        got = f"; the last start was {_short(self._other_start)}" if self._other_start else ""
        return f", {_short(self.seats[0].start)}{got}"

    def seat(self, session: str) -> RecordedSeat | None:
        """The seat that a running session plays; None: it plays another game, or its seat is not recorded."""
        return self._running.get(session)

    def started(self, session: str, body: bytes) -> bytes | None:
        """Handles the start of a session; returns the recorded reply, if it gets it. None: it gets the agents' reply.

        Raises:
            NotDeterministic: the start of a further seat has another body than the recorded one.
        """
        self.seen += 1
        game, seat = game_name(session), self._seats.get(agent_of(session))
        if self._game is None and seat is not None and body == seat.start:
            self._game = game
        if game != self._game:
            self._other_start, self.others = body, self.others + 1
            return None
        if seat is None or seat.has_started:
            return None  # `tick` refuses it
        if body != seat.start and not self.diverged:
            what = f"the start of session {session!r} is {_short(body)}, the recorded one is {_short(seat.start)}"
            raise self._failed(NotDeterministic(f"the game is not deterministic: {what}", tick=0))
        seat.has_started, seat.follows = True, body == seat.start
        self._running[session] = seat
        return seat.start_reply if seat.follows else None

    def tick(self, session: str, body: bytes) -> RecordedSeat | None:
        """Handles the next tick of a session; returns its seat, as `seat` does.

        Raises:
            NotDeterministic: the body differs from the recorded one although all replies were as recorded.
            BadRecording: the session plays a seat of the game that is not recorded.
        """
        self.seen += 1
        seat = self._running.get(session)
        if seat is None:
            if game_name(session) == self._game and not self.diverged:
                known = ", ".join(repr(seat.episode.session) for seat in self.seats)
                raise self._failed(
                    BadRecording(
                        f"the game has a seat {agent_of(session)!r} that is not recorded, so its replies are "
                        f"unknown; recorded are {known}"
                    )
                )
            return None
        tick, expected = seat.ticks, seat.recorded(seat.ticks)
        if body != expected and tick <= self._from_tick and not self.diverged:
            if expected is None and seat.is_cut:
                raise self._failed(seat.unknown())
            what = "none, since the session had ended" if expected is None else _short(expected)
            raise self._failed(
                NotDeterministic(
                    f"the game is not deterministic: its body at tick {tick} is {_short(body)}, the recorded one is "
                    f"{what}, and all replies before were as recorded",
                    tick=tick,
                )
            )
        seat.follows = seat.follows and body == expected
        is_recorded = seat.follows and (tick < self._from_tick or not seat.is_played)
        seat.forced = seat.reply(tick) if is_recorded else None
        return seat

    def replied(self, seat: RecordedSeat, reply: bytes) -> bytes:
        """The reply that the game gets to the seat's tick, given the agents' reply."""
        tick, seat.ticks = seat.ticks, seat.ticks + 1
        if seat.forced is not None:
            return seat.forced
        if seat.first is None and reply != seat.reply(tick):
            seat.first = tick
        return reply

    def ended(self, session: str, reason: str, result: float | None) -> None:
        """Handles the end of a session; the game ends with its last session."""
        seat = self._running.pop(session, None)
        if seat is not None:
            seat.end, seat.result = reason, result
            if not self._running:
                self.over.set()

    def _failed(self, error: BrayxError) -> BrayxError:
        self.failure = self.failure or error
        self.over.set()
        return error


def _short(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def whole_sessions(episodes: Sequence[Recording]) -> Sequence[Recording]:
    """Joins episodes that ended as ``moved`` with those that continue them.

    A session that was resumed after its process had died stays in parts: what its game did in between is not known.

    Args:
        episodes: recorded sessions of one folder.

    Returns:
        The episodes; the same object if none moved. A joined one has the id and the place of its first part.
    """
    moved = {episode.session for episode in episodes if episode.end == _MOVED}
    if not moved:
        return episodes
    parts: dict[str, list[Recording]] = defaultdict(list)
    for episode in episodes:
        if episode.session in moved:
            parts[episode.session].append(episode)
    whole: dict[str, Recording] = {}
    continued = set()
    for session_parts in parts.values():
        before, *others = sorted(session_parts, key=lambda episode: episode.began)
        for episode in others:
            if (
                before.end == _MOVED
                and _is_resumed(episode)
                and _number(episode, 0) == _number(before, len(before) - 1) + 1
            ):
                before = whole[before.id] = before.followed_by(episode)
                continued.add(episode.id)
            else:
                before = episode
    return [whole.get(episode.id, episode) for episode in episodes if episode.id not in continued]


def _is_resumed(episode: Recording) -> bool:
    """Whether an episode continues a session of another process. Reads its first tick."""
    try:
        return episode.read(0, 1, []).event[0].startswith(_RESUMED)
    except BadRecording:  # reported when its ticks are read
        return False


def _number(episode: Recording, tick: int) -> int:
    return int(episode.read(tick, 1, []).number[0])
