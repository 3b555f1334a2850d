"""Records the sessions of a process without delaying their ticks.

A tick costs one append, and each pack of ticks becomes columns. A thread sends the packs to the writer's process.
Memory is bounded: ticks that do not fit are lost, and counted in the recording and the metrics. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

import brayx.clock as clock
from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.logs import limited
from brayx.metrics import Recorder
from brayx.recording.columns import ERROR, Columns, Forwarded, Tick, columns_of
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.recording.frames import check_video
from brayx.recording.gather import value_at, without_image
from brayx.recording.part import Part
from brayx.recording.process import Message, WriterProcess
from brayx.types import Forward

logger = limited(__name__)

PACK = 64
"""Ticks that a session hands over at once."""
PACK_BYTES = 2**18
"""Size of a session's ticks at which it hands them over early."""
_FRAMES_BYTES = 2**21
"""As `PACK_BYTES`, with frames, which are large."""
_GATHER_S = 0.02
_MAX_GATHERED = 256
_MESSAGE_BYTES = 2**20
"""Size at which a message with frames is sent: the writer takes some 20 ms to encode them."""
_IDLE_S = 1.0
_AGAIN_S = 5.0
_END_S = 10.0
_ATTRIBUTES_BYTES = 512
"""Estimated size of what agents set on a tick."""
_OWN = frozenset(("session", "game", "agent", "tick", "kind", "input", "output", "end", "_waiters", "_seat", "_board"))

Pack = tuple[Part, Columns, "list[State | None]", int]
"""Ticks of a session, their states to draw, and their size in memory."""


def recorders_of(
    config: RecordingConfig | None, metrics: Recorder, drawing: Drawing | None = None
) -> list[SessionRecorder]:
    """The recorder of a job, as a list; empty: the job has no recording. `closing` ends it."""
    return [] if config is None else [SessionRecorder(config, metrics, drawing=drawing)]


def closing(recorders: Sequence[SessionRecorder]) -> list[Callable[[], Awaitable[None]]]:
    """Coroutine functions that end recorders, each in a thread, since it waits for the last writes."""
    return [functools.partial(asyncio.to_thread, each.close) for each in recorders]


class SessionRecorder:
    """Records the sessions of this process.

    Args:
        config: the component's options.
        metrics: counts ``recordings``, ``recording_lost`` and ``recording_frames_lost``.
        start: starts the writer's process; None: a `WriterProcess`.
        drawing: draws the frames; None: they are the array ``config.frames``, if that is given.

    Attributes:
        most_bytes: memory limit of waiting ticks; undecided sessions may use half of it.
        most_frame_bytes: memory in use from which on recorded ticks lose their frames, to leave room for others.
        frames: name of the array with the frames; empty: there is none.
        pack_bytes: size of a session's ticks at which it hands them over early.
        taken: bytes of all ticks so far, without those that sessions dropped; only the event loop changes it.
        freed: bytes of all ticks sent so far; only the recorder's thread changes it, so neither needs a lock.
    """

    def __init__(
        self,
        config: RecordingConfig,
        metrics: Recorder,
        start: Callable[[], WriterProcess] | None = None,
        drawing: Drawing | None = None,
    ) -> None:
        if config.frames:
            check_video()
        self.config = config
        self.metrics = metrics
        self.drawing = drawing
        self.frames = config.frames or "" if drawing is None else ""
        self.pack_bytes = _FRAMES_BYTES if self.frames else PACK_BYTES
        max_bytes = round(config.max_mb * 2**20)
        self.start = start or (lambda: WriterProcess(config.folder, max_bytes, config.flush_s, config.fps, drawing))
        self._sessions = 0
        self.most_bytes = round(config.memory_mb * 2**20)
        self.most_frame_bytes = self.most_bytes * 5 // 8
        self.taken = self.freed = 0
        # Bounded by `most_bytes`.
        self._queue: queue.SimpleQueue[Pack | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def on_request(self) -> bool:
        """See `brayx.actor.logs.SessionRecorder`."""
        return self.config.on_request

    def open(self, session: str, start: bytes, player: str = "", why: str = "") -> RecordedSession | None:
        """See `brayx.actor.logs.SessionRecorder.open`; None: the recorder is closed."""
        self._sessions += 1
        chosen = self.config.every > 0 and (self._sessions - 1) % self.config.every == 0
        why = why or ("every" if chosen else "")
        if self._closed:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="brayx-recorder", daemon=True)
            self._thread.start()
        return RecordedSession(self, session, start, player, why)

    def close(self, timeout_s: float = _END_S) -> None:
        """Writes what is left, then ends the thread and the process. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("recordings were not written within %g s: their last ticks may be missing", timeout_s)
            self._thread = None

    def hand_over(self, part: Part, columns: Columns, states: list[State | None], size: int) -> None:
        """Queues ticks; their memory is freed once they have been sent."""
        if self.frames and not columns.frames:
            what = f"no image {self.frames!r}: uint8 [height, width] or [height, width, 3]"
            columns.left_out.setdefault("frames", what)
            logger.warning("ticks of session %s are recorded without frames: their agents set %s", part.session, what)
        self._queue.put((replace(part, left_out=columns.left_out), columns, states, size))

    def lose(self, ticks: int, why: str) -> None:
        """Counts lost ticks."""
        self.metrics.add("recording_lost", ticks, label=why)

    def lose_frames(self, frames: int, why: str) -> None:
        """Counts lost frames of ticks that are recorded."""
        if frames:
            self.metrics.add("recording_frames_lost", frames, label=why)

    def _work(self) -> None:
        """Runs in the recorder's thread: sends packs to the writer's process."""
        writer, ended = _Writer(self), False
        while not ended:
            try:
                items = [self._queue.get(timeout=_IDLE_S)]
                time.sleep(_GATHER_S)  # waking this thread for each pack would interrupt ticks more often
                is_crowded = self.taken - self.freed > self.most_frame_bytes
                items += self._waiting(_MESSAGE_BYTES if self.config.frames and not is_crowded else None)
            except queue.Empty:
                writer.send([])
                continue
            ended = None in items
            packs = [item for item in items if item is not None]
            if self.config.frames and is_crowded:
                self._drop_frames(packs)
            try:
                writer.send([(part, columns, self._pickled(states)) for part, columns, states, _ in packs])
            finally:
                self.freed += sum(size for *_, size in packs)
        writer.close()

    def _pickled(self, states: list[State | None]) -> bytes:
        if not states:
            return b""
        try:
            return pickle.dumps(states, protocol=5)
        except Exception as error:  # agents may set anything
            logger.warning("ticks cannot be drawn: their states do not pickle: %r", error)
            self.lose_frames(sum(state is not None for state in states), "error")
            return b""

    def _waiting(self, most_bytes: int | None) -> list[Pack | None]:
        found: list[Pack | None] = []
        size = 0
        with contextlib.suppress(queue.Empty):
            while len(found) < _MAX_GATHERED and (most_bytes is None or size < most_bytes):
                found.append(item := self._queue.get_nowait())
                size += 0 if item is None else item[-1]
        return found

    def _drop_frames(self, packs: Sequence[Pack]) -> None:
        """Takes the frames from waiting ticks: while they are encoded, further ticks would find no room."""
        for _, columns, states, _ in packs:
            self.lose_frames(sum(each is not None for each in (*columns.frames, *states)), "memory")
            columns.frames = ()
            states.clear()


class _Writer:
    """Starts the writer's process for the first ticks, and restarts it if it dies."""

    def __init__(self, of: SessionRecorder) -> None:
        self._of = of
        self._process: WriterProcess | None = None
        self._down_until = 0.0
        self._lost = 0
        self._frames_lost: dict[str, int] = {}

    def send(self, parts: Message) -> None:
        """Sends ticks, and counts those that were lost."""
        ticks = sum(part.ticks for part, *_ in parts)
        try:
            if self._process is None:
                if not parts:
                    return
                if time.monotonic() < self._down_until:
                    self._of.lose(ticks, "writer")
                    return
                self._process, self._lost, self._frames_lost = self._of.start(), 0, {}
            reply = self._process.send(parts)
        except (OSError, EOFError) as error:
            logger.warning("the writer of recordings has died, its last ticks are lost: %r", error)
            if parts:
                self._of.lose(ticks, "writer")
            self.close()
            self._down_until = time.monotonic() + _AGAIN_S
            return
        except Exception:  # agents may set anything; one bad pack must not end the thread
            logger.exception("ticks of %d sessions cannot be recorded", len(parts))
            self._of.lose(ticks, "error")
            return
        if reply.lost > self._lost:
            self._of.lose(reply.lost - self._lost, "disk")
            self._lost = reply.lost
        for why, frames in reply.frames_lost.items():
            self._of.lose_frames(frames - self._frames_lost.get(why, 0), why)
        self._frames_lost = reply.frames_lost
        if reply.failure:
            logger.warning("cannot write recordings: %s", reply.failure)
        if reply.frames_failure:
            logger.warning("cannot draw frames of recordings: %s", reply.frames_failure)

    def close(self) -> None:
        """Ends the process, which first writes what it has."""
        if self._process is not None:
            self._process.close()
            self._process = None


_Kept = tuple[State, bytes, bytes, float, float, float, str, "tuple[Forwarded, ...]", int]
"""A tick in memory: state, body, reply, arrival, begin, end, event, forwards, size. A plain tuple: each tick creates
one."""


class RecordedSession(SessionLog):
    """The ticks of one session. Belongs to the session's event loop.

    Args:
        of: the recorder.
        session, start, player: as in `brayx.recording.part.Part`.
        why: why the session is recorded; empty: undecided.
    """

    __slots__ = (
        "_began", "_began_at", "_bytes", "_episode", "_event", "_forwards", "_limit", "_lost", "_of", "_player",
        "_reported", "_sent", "_session", "_start", "_stop", "_ticks", "is_taking", "why",
    )  # fmt: skip

    def __init__(self, of: SessionRecorder, session: str, start: bytes, player: str, why: str) -> None:
        self.why = why
        self.is_taking = bool(why) or of.config.before > 0
        self._of = of
        self._session = session
        self._start = start
        self._player = player
        self._episode = uuid.uuid4().hex
        self._began = clock.now()
        self._began_at = time.time()
        self._ticks: deque[_Kept] = deque()
        self._bytes = 0
        self._limit = of.most_bytes if why else of.most_bytes // 2
        self._sent = 0
        self._lost = 0
        self._event = ""
        self._forwards: tuple[Forwarded, ...] = ()
        self._reported = ""
        self._stop = b""

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        """See `brayx.actor.logs.SessionLog.tick`."""
        of, ticks, now = self._of, self._ticks, clock.now()
        size = len(body) + len(reply) + _ATTRIBUTES_BYTES
        if of.frames:
            state, size = self._with_room(state, size)
        if of.taken - of.freed + size > self._limit and not self._make_room(size):
            return
        of.taken += size
        self._bytes += size
        ticks.append((state, body, reply, arrived, began or now, now, self._event, self._forwards, size))
        self._event, self._forwards = "", ()
        if not self.why:
            if len(ticks) > (of.config.before or 1):  # a failed tick comes also if none is kept
                self._drop()
        elif len(ticks) > PACK or self._bytes > of.pack_bytes or now - ticks[0][5] > of.config.flush_s:
            self._hand_over(len(ticks) - 1)

    def _with_room(self, state: State, size: int) -> tuple[State, int]:
        """A state and its size with its frame; without it if other frames leave no room."""
        of = self._of
        image = value_at(vars(state), of.frames)
        taken = image.nbytes if isinstance(image, np.ndarray) else 0
        if not taken or not self.why or of.taken - of.freed + size + taken <= of.most_frame_bytes:
            return state, size + taken
        of.lose_frames(1, "memory")
        slim = State.__new__(State)  # the agent may still hold the state itself
        vars(slim).update(without_image(vars(state), of.frames))
        return slim, size

    def _make_room(self, size: int) -> bool:
        """Drops the oldest ticks of an undecided session; returns whether the new tick fits now."""
        of = self._of
        while of.taken - of.freed + size > self._limit:
            self._lost += 1
            if self.why or not self._ticks:
                return False
            self._drop()  # keep the newest ticks: they explain an error
        return True

    def _drop(self) -> None:
        size = self._ticks.popleft()[-1]
        self._bytes -= size
        self._of.taken -= size

    def forward(self, model: str, found: Forward, seconds: float) -> None:
        """See `brayx.actor.logs.SessionLog.forward`."""
        self._forwards = (*self._forwards, Forwarded(model, *found, seconds))

    def event(self, what: str, *, last: bool = False) -> None:
        """See `brayx.actor.logs.SessionLog.event`."""
        if last and self._ticks:
            *tick, event, forwards, size = self._ticks[-1]
            self._ticks[-1] = (*tick, f"{event}, {what}" if event else what, forwards, size)  # type: ignore[assignment]
        else:
            self._event = f"{self._event}, {what}" if self._event else what

    def stop(self, body: bytes) -> None:
        """See `brayx.actor.logs.SessionLog.stop`."""
        if not self._ticks:
            return
        if self._of.taken - self._of.freed + len(body) > self._limit:
            self._lost += 1
            return
        *tick, size = self._ticks[-1]
        self._ticks[-1] = (*tick, size + len(body))  # type: ignore[assignment]
        self._of.taken += len(body)
        self._bytes += len(body)
        self._stop = body

    def keep(self, why: str) -> None:
        """Decides to record the session, with its ticks that are still in memory."""
        self.why, self._limit, self.is_taking = self.why or why, self._of.most_bytes, True

    def reported(self, result: str | float) -> None:
        """See `brayx.actor.logs.SessionLog.reported`."""
        self._reported = str(result)

    def end(self, reason: str, result: float | None) -> None:
        """Ends the session; an undecided one is dropped."""
        if reason == "error" and self._of.config.errors:
            self.keep("error")
        if self.why:
            self._hand_over(len(self._ticks), reason, result)
            self._of.metrics.add("recordings", 1.0, label=self.why)
        else:
            self._of.taken -= self._bytes
        self._ticks.clear()

    def _hand_over(self, count: int, end: str = "", result: float | None = None) -> None:
        """Hands over the oldest ticks. `tick` keeps at least one, so that the last pack has the session's end."""
        kept = [self._ticks.popleft() for _ in range(count)]
        if not kept:
            return
        size = sum(tick[-1] for tick in kept)
        self._bytes -= size
        since = self._began
        ticks = [
            Tick(
                state.tick,
                began - since,
                ended - began,
                body,
                reply,
                vars(state),
                event,
                b"",
                began - arrived,
                forwards,
            )
            for state, body, reply, arrived, began, ended, event, forwards, _ in kept
        ]
        if end:
            ticks[-1] = ticks[-1]._replace(stop=self._stop)
        part = Part(
            self._episode,
            self._session,
            self._began_at,
            self._sent,
            len(ticks),
            self._start.decode(errors="surrogateescape"),
            self.why,
            self._player,
            end,
            result,
            sum(bool(tick.event) for tick in ticks),
            self._lost,
            reported=self._reported,
        )
        if self._lost:
            self._of.lose(self._lost, "memory")
        self._sent, self._lost = self._sent + len(ticks), 0
        try:
            columns = columns_of(ticks, without=_OWN, frames=self._of.frames)
        except Exception:  # agents may set anything; one bad pack must not end the session
            logger.exception("ticks of session %s cannot be recorded", self._session)
            self._of.lose(len(ticks), "error")
            self._of.taken -= size
            return
        states = []
        if self._of.drawing is not None:  # a failed tick's state may be incomplete
            states = [None if ERROR in tick[6] else tick[0] for tick in kept]
        self._of.hand_over(part, columns, states, size)
