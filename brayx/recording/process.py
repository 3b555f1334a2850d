"""The writer's process: compresses and writes recordings outside the serving process, whose interpreter ticks need.

`WriterProcess` starts the process and sends it ticks; `main` runs in it. They exchange pickles over pipes.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from brayx.children import start_module
from brayx.errors import BrayxError
from brayx.recording.bodies import BodyBuffer
from brayx.recording.columns import Columns
from brayx.recording.drawing import Drawing
from brayx.recording.part import Part

if TYPE_CHECKING:
    from brayx.recording.packer import Packer

logger = logging.getLogger(__name__)

_END_S = 30.0
_NICE = 5
_DRAW_S = 0.5
"""Time limit for drawing the ticks of a message: the sender waits, and further ticks fill its memory meanwhile."""


class Pack(NamedTuple):
    """Ticks of sessions.

    Attributes:
        rows: their parts, as plain rows of `brayx.recording.part.FIELDS`, which pickle quickly.
        columns: the ticks in the order of the parts, without bodies.
        input, output: bodies and replies, in buffers, which pickle quickly and let the sender free the bodies.
        states: for `Drawer.drawn`; empty: the ticks are not drawn.
    """

    rows: list[Sequence[Any]]
    columns: Columns
    input: BodyBuffer
    output: BodyBuffer
    states: bytes


Message = list[Pack]
"""Packs to write. After each message, even an empty one, the process writes the chunks that are due."""


class Reply(NamedTuple):
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


class WriterProcess:
    """Starts the process and sends it ticks. Belongs to one thread.

    Args:
        address, max_bytes, fps: as for `Folder`.
        flush_s: as for `Packer`.
        drawing: draws the frames.
    """

    def __init__(
        self, address: str, max_bytes: int, flush_s: float, fps: int = 30, drawing: Drawing | None = None
    ) -> None:
        options = json.dumps([max_bytes, flush_s, fps, drawing])
        self._process = start_module("brayx.recording.process", address, options)

    def send(self, message: Message) -> Reply:
        """Sends ticks.

        Raises:
            OSError, EOFError: the process has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump([tuple(pack) for pack in message], self._process.stdin, protocol=5)
        self._process.stdin.flush()
        return Reply(*pickle.load(self._process.stdout))

    def close(self) -> Reply | None:
        """Waits until the process has written everything and ends; kills it after 30 s.

        Returns:
            Its last reply; None: it died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:  # it has died
            pass
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._process.stdout as replies:
            try:
                return Reply(*pickle.load(replies))
            except (EOFError, pickle.UnpicklingError):
                return None


def main(address: str, options: str, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Handles messages until the pipe closes, then writes the rest."""
    from brayx.recording.drawing import Drawer, Drawing
    from brayx.recording.packer import Packer  # imports Arrow, which is slow: not in the job's process
    from brayx.recording.writer import Folder

    max_bytes, flush_s, fps, drawing = json.loads(options)
    drawer = None if drawing is None else Drawer(Drawing(*drawing))
    packer = Packer(lambda: Folder(address, max_bytes, fps), flush_s, drawer)
    while True:
        try:
            message = [Pack(*each) for each in pickle.load(requests)]  # without the class, as in the reply below
        except (EOFError, pickle.UnpicklingError):  # the sender ended, or was killed while it wrote
            break
        if drawer is not None:
            drawer.left_s = _DRAW_S
        for pack in message:
            columns = replace(pack.columns, input=pack.input.split(), output=pack.output.split())
            try:
                packer.add([Part(*row) for row in pack.rows], columns, pack.states)
            except BrayxError as error:
                packer.failure = error.message
        packer.write_due()
        replies.write(_reply(packer))
        replies.flush()
    packer.close()
    try:
        os.write(replies.fileno(), _reply(packer))
    except OSError:  # the sender was killed
        if packer.failure:
            logger.warning("the last ticks of recordings are lost, since they cannot be written: %s", packer.failure)


def _reply(packer: Packer) -> bytes:
    """A pickled `Reply`, without the class: this process has it in the module __main__."""
    return pickle.dumps((packer.lost, packer.failure, packer.frames_lost, packer.frames_failure))


if __name__ == "__main__":
    # A service manager may signal all processes, but this one has to write everything first: it ends with its pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # prints of libraries must not mix with the replies
    main(sys.argv[1], sys.argv[2], sys.stdin.buffer, out)
