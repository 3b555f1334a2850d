"""The writer's process: compresses and writes recordings outside the serving process, whose interpreter ticks need.

`WriterProcess` starts the process and sends it ticks; `main` runs in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from brayx.children import Channel, Child, RequestFailed
from brayx.errors import BrayxError
from brayx.recording.bodies import BodyBuffer
from brayx.recording.columns import TickColumns
from brayx.recording.drawing import Drawing
from brayx.recording.index import SessionPart

logger = logging.getLogger(__name__)

_END_S = 30.0
_RESTART_S = 5.0
_DRAW_S = 0.5
"""Time limit for drawing the ticks of a message: the sender waits, and further ticks fill its memory meanwhile."""


class Pack(NamedTuple):
    """Ticks of sessions.

    Attributes:
        rows: their parts, as plain rows of `brayx.recording.index.FIELDS`, which pickle quickly.
        columns: the ticks in the order of the parts, without bodies.
        input, output: bodies and replies, in buffers, which pickle quickly and let the sender free the bodies.
        states: for `Drawer.drawn`; empty: the ticks are not drawn.
    """

    rows: list[Sequence[Any]]
    columns: TickColumns
    input: BodyBuffer
    output: BodyBuffer
    states: bytes


Message = list[Pack]
"""Packs to write. After each message, even an empty one, the process writes the chunks that are due."""


class WriterReport(NamedTuple):
    """The process's report on all messages so far.

    Attributes:
        lost: number of lost ticks.
        failure: why the last write failed; empty: it succeeded.
        frames_lost: number of lost frames by reason.
        frames_failure: why the last ticks could not be drawn; empty: they could.
    """

    lost: int
    failure: str
    frames_lost: dict[str, int]
    frames_failure: str


class WriterProcess(Child):
    """Starts the process and sends it ticks. Belongs to one thread.

    Args:
        address, max_bytes, fps: as for `Folder`.
        flush_s: as for `ChunkPacker`.
        drawing: draws the frames.
    """

    def __init__(
        self, address: str, max_bytes: int, flush_s: float, fps: int = 30, drawing: Drawing | None = None
    ) -> None:
        options = json.dumps([max_bytes, flush_s, fps, drawing])
        super().__init__("brayx.recording.process", address, options, finishes=True, restart_s=_RESTART_S)

    def write(self, message: Message) -> WriterReport:
        """Sends ticks.

        Raises:
            ChildDied: the process has died.
        """
        reply: WriterReport = self.ask(message)
        return reply

    def finish(self) -> WriterReport | None:
        """Lets the process write everything and end; kills it after 30 s.

        Returns:
            Its last reply; None: it died, or was killed.
        """
        try:
            reply: WriterReport | None = self.ask(None, timeout_s=_END_S)
        except (RequestFailed, TimeoutError):
            reply = None
        self.end()
        return reply


def main(parent: Channel, address: str, options: str) -> None:
    """Writes ticks until the pipe closes, then the rest."""
    from brayx.recording.drawing import Drawer
    from brayx.recording.packer import ChunkPacker  # imports Arrow, which is slow: not in the job's process
    from brayx.recording.writer import Folder

    max_bytes, flush_s, fps, drawing = json.loads(options)
    drawer = None if drawing is None else Drawer(Drawing(*drawing))
    packer = ChunkPacker(lambda: Folder(address, max_bytes, fps), flush_s, drawer)
    finished = False

    def write(message: Message | None) -> WriterReport:
        nonlocal finished
        if message is None:
            packer.close()
            finished = True
        else:
            if drawer is not None:
                drawer.left_s = _DRAW_S
            for pack in message:
                columns = replace(pack.columns, input=pack.input.split(), output=pack.output.split())
                try:
                    packer.add([SessionPart(*row) for row in pack.rows], columns, pack.states)
                except BrayxError as error:
                    packer.failure = error.message
            packer.write_due()
        return WriterReport(packer.lost, packer.failure, packer.frames_lost, packer.frames_failure)

    parent.serve(write)
    if not finished:  # the sender was killed
        packer.close()
        if packer.failure:
            logger.warning("the last ticks of recordings are lost, since they cannot be written: %s", packer.failure)
