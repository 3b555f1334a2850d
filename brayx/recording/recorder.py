"""Records the sessions of a process without delaying their ticks.

A tick costs one append; the ticks of all sessions of an agent are converted to columns together. A thread sends these
to the writer's process. Memory is bounded: ticks that do not fit are lost, and counted in the recording and the
metrics. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from brayx.actor.agent import State
from brayx.children import ChildDied
from brayx.gamecore.protocol import agent_of, game_of
from brayx.logs import limited
from brayx.metrics import Recorder
from brayx.recording.addresses import files_of
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.recording.frames import check_video
from brayx.recording.group import FRAMES_BYTES, PACK_BYTES, TickGroup
from brayx.recording.process import Message, Pack, WriterProcess, WriterReport
from brayx.recording.session import RecordedSession

if TYPE_CHECKING:
    from brayx.actor.tracing import TickTracing

logger = limited(__name__)

_GATHER_S = 0.02
_MAX_GATHERED = 256
_MESSAGE_BYTES = 2**20
"""Size at which a message with frames is sent: the writer takes about 20 ms to encode this much."""
_IDLE_S = 1.0
_END_S = 30.0
_WHY = {
    "disk": "the folder cannot be written",
    "error": "what an agent set cannot be recorded, and the log says why",
    "memory": "they came faster than the writer takes them (`memory_mb`)",
    "slow": "drawing takes longer than playing",
    "writer": "the writer's process died, and is started again",
}
"""Reasons of losses, for people."""
_MAX_GAMES = 1024
"""Games that are remembered, so that their further sessions are recorded, too."""

_Waiting = tuple[Pack, "list[State | None]", int]
"""A pack, the states to draw, and the size of its ticks in memory."""


def recorders_of(
    config: RecordingConfig | None,
    metrics: Recorder,
    drawing: Drawing | None = None,
    tracing: Sequence[TickTracing] = (),
) -> list[SessionRecorder | TickTracing]:
    """The job's recorder, unless it has no component ``recording``, and what makes its spans; `closing` ends them."""
    return [*([] if config is None else [SessionRecorder(config, metrics, drawing=drawing)]), *tracing]


def closing(recorders: Sequence[SessionRecorder | TickTracing]) -> list[Callable[[], Awaitable[None]]]:
    """Coroutine functions that close the recorders. Each runs in a thread, since closing waits for the last writes."""
    return [functools.partial(asyncio.to_thread, recorder.close) for recorder in recorders]


class SessionRecorder:
    """Records the sessions of this process.

    Args:
        config: the component's options.
        metrics: counts ``recordings``, ``recording_lost`` and ``recording_frames_lost``.
        writer: the process that writes, not started; None: a new one.
        drawing: the user's function that draws the frames; None: the frames are the array ``config.frames``, if any.

    Attributes:
        memory_bytes: memory limit for waiting ticks; undecided sessions may use half of it.
        frame_memory_bytes: beyond this memory use, ticks are recorded without their frames, to leave room for ticks.
        frames: name of the array with the frames; empty: there is none.
        pack_bytes: size at which the pack of a few sessions is sent early.
        taken: bytes of all ticks so far, without those that sessions dropped; only the event loop changes it.
        freed: bytes of all ticks sent so far; only the recorder's thread changes it, so neither needs a lock.

    Raises:
        BadRecording: the folder's address is wrong, or its protocol lacks its package.
        ConfigError: frames are configured, and PyAV is missing.
    """

    def __init__(
        self,
        config: RecordingConfig,
        metrics: Recorder,
        writer: WriterProcess | None = None,
        drawing: Drawing | None = None,
    ) -> None:
        if "://" in config.folder:
            files_of(config.folder)  # so that a wrong address fails at the start, not at the first write
        if config.frames:
            check_video()
        self.config = config
        self.metrics = metrics
        self.drawing = drawing
        self.frames = config.frames or "" if drawing is None else ""
        self.pack_bytes = FRAMES_BYTES if self.frames else PACK_BYTES
        max_bytes = round(config.max_mb * 2**20)
        self._writer = writer or WriterProcess(config.folder, max_bytes, config.flush_s, config.fps, drawing)
        self._lost = 0
        self._frames_lost: dict[str, int] = {}
        self._counted = 0
        self._games: dict[str, bool] = {}
        # By agent. Weak references: clients choose the names of agents, so the dict would grow without bound.
        self._groups: weakref.WeakValueDictionary[str, TickGroup] = weakref.WeakValueDictionary()
        self.memory_bytes = round(config.memory_mb * 2**20)
        self.frame_memory_bytes = self.memory_bytes * 5 // 8
        self.taken = self.freed = 0
        # Bounded by `memory_bytes`.
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = self._has_warned = False

    @property
    def on_request(self) -> bool:
        """See `brayx.actor.logs.SessionLogOpener`."""
        return self.config.on_request

    def open(
        self, session: str, start: bytes, player: str = "", why: str = "", reply: bytes = b"", alias: str = ""
    ) -> RecordedSession | None:
        """See `brayx.actor.logs.SessionLogOpener.open`; None: the recorder is closed."""
        why = why or ("every" if self._is_nth(session) else "")
        if self._closed:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="brayx-recorder", daemon=True)
            self._thread.start()
        group = self._groups.setdefault(agent_of(session), TickGroup(self))
        return RecordedSession(self, group, session, start, player, why, reply, alias)

    def _is_nth(self, session: str) -> bool:
        """Whether `RecordingConfig.every` selects this session. The sessions of one game count as one."""
        game = game_of(session)
        if game in self._games:
            return self._games[game]
        chosen = self.config.every > 0 and self._counted % self.config.every == 0
        self._counted += 1
        if game:
            self._games[game] = chosen
            if len(self._games) > _MAX_GAMES:
                del self._games[next(iter(self._games))]
        return chosen

    def close(self, timeout_s: float = _END_S) -> None:
        """Writes the remaining ticks, then ends the thread and the process. Idempotent, also from several threads."""
        self._closed = True
        if (thread := self._thread) is not None:
            self._queue.put(None)
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning("recordings were not written within %g s: their last ticks may be missing", timeout_s)
            self._thread = None

    def send(self, pack: Pack, states: list[State | None], size: int) -> None:
        """Queues ticks for the writer; their memory counts as freed once they are sent."""
        columns = pack.columns
        if self.frames and not columns.frames:
            what = f"no image {self.frames!r}: expected uint8 [height, width] or [height, width, 3]"
            columns.left_out.setdefault("frames", what)
            if not self._has_warned:
                logger.warning("ticks are recorded without frames: their agents set %s", what)
            self._has_warned = True
        self._queue.put((pack, states, size))

    def lose(self, ticks: int, why: str) -> None:
        """Counts lost ticks."""
        self.metrics.add("recording_lost", ticks, label=why, note=_WHY[why])

    def lose_frames(self, frames: int, why: str) -> None:
        """Counts lost frames of recorded ticks."""
        if frames:
            self.metrics.add("recording_frames_lost", frames, label=why, note=_WHY[why])

    def _work(self) -> None:
        """Runs in the recorder's thread: sends packs to the writer's process."""
        ended = False
        while not ended:
            try:
                items = [self._queue.get(timeout=_IDLE_S)]
                time.sleep(_GATHER_S)  # gather more packs: each wake-up of this thread interrupts ticks
                is_crowded = self.taken - self.freed > self.frame_memory_bytes
                items += self._waiting(_MESSAGE_BYTES if self.config.frames and not is_crowded else None)
            except queue.Empty:
                self._write([])
                continue
            ended = None in items
            packs = [item for item in items if item is not None]
            if self.config.frames and is_crowded:
                self._drop_frames(packs)
            try:
                self._write([pack._replace(states=self._pickled(states)) for pack, states, _ in packs])
            finally:
                self.freed += sum(size for *_, size in packs)
        if self._writer.runs and (last := self._writer.finish()) is not None:
            self._take(last)

    def _pickled(self, states: list[State | None]) -> bytes:
        if not states:
            return b""
        try:
            return pickle.dumps(states, protocol=5)
        except Exception as error:  # agents may set anything
            logger.warning("ticks cannot be drawn: their states do not pickle: %r", error)
            self.lose_frames(sum(state is not None for state in states), "error")
            return b""

    def _waiting(self, most_bytes: int | None) -> list[_Waiting | None]:
        waiting: list[_Waiting | None] = []
        size = 0
        with contextlib.suppress(queue.Empty):
            while len(waiting) < _MAX_GATHERED and (most_bytes is None or size < most_bytes):
                waiting.append(item := self._queue.get_nowait())
                size += 0 if item is None else item[-1]
        return waiting

    def _drop_frames(self, packs: Sequence[_Waiting]) -> None:
        """Removes the frames from waiting ticks: while they were encoded, further ticks would not fit into memory."""
        for pack, states, _ in packs:
            self.lose_frames(sum(frame is not None for frame in (*pack.columns.frames, *states)), "memory")
            pack.columns.frames = ()
            states.clear()

    def _write(self, packs: Message) -> None:
        """Sends ticks to the writer, which starts for the first ones, and counts those that were lost."""
        ticks = sum(len(pack.columns.number) for pack in packs)
        try:
            if not self._writer.runs:
                if not packs:
                    return
                if self._writer.wait_s:
                    self.lose(ticks, "writer")
                    return
                self._writer.start()
                self._lost, self._frames_lost = 0, {}
            reply = self._writer.write(packs)
        except (OSError, ChildDied) as error:
            logger.warning("the writer of recordings has died, and its last ticks are lost: it %s", error)
            if packs:
                self.lose(ticks, "writer")
            return
        except Exception:  # agents may set anything; one bad pack must not end the thread
            logger.exception("%d ticks cannot be recorded", ticks)
            self.lose(ticks, "error")
            return
        self._take(reply)

    def _take(self, reply: WriterReport) -> None:
        """Counts what has been lost since the reply before, and says why."""
        if reply.lost > self._lost:
            self.lose(reply.lost - self._lost, "disk")
            self._lost = reply.lost
        for why, frames in reply.frames_lost.items():
            self.lose_frames(frames - self._frames_lost.get(why, 0), why)
        self._frames_lost = reply.frames_lost
        if reply.failure:
            logger.warning("cannot write recordings: %s", reply.failure)
        if reply.frames_failure:
            logger.warning("cannot draw frames of recordings: %s", reply.frames_failure)
