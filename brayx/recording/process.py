"""The writer's process: packs and writes recordings, so that neither competes with ticks for the interpreter.

`WriterProcess` starts the process and sends it ticks; `main` runs in it. They exchange pickles over pipes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import IO

from brayx.children import start_module
from brayx.errors import BrayxError
from brayx.recording.columns import Columns
from brayx.recording.part import Part

_END_S = 10.0
_NICE = 5

Message = list[tuple[Part, Columns]]
"""Ticks of sessions. After each message, even an empty one, the process writes what is due."""


class WriterProcess:
    """Starts the process and sends it ticks. Belongs to one thread.

    Args:
        address, max_bytes: as for `Folder`.
        flush_s: as for `Packer`.
    """

    def __init__(self, address: str, max_bytes: int, flush_s: float) -> None:
        self._process = start_module("brayx.recording.process", address, str(max_bytes), str(flush_s))

    def send(self, message: Message) -> tuple[int, str]:
        """Sends ticks; returns how many ticks were lost so far, and why the last write failed (empty: it succeeded).

        Raises:
            OSError, EOFError: the process has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(message, self._process.stdin, protocol=5)
        self._process.stdin.flush()
        lost, failure = pickle.load(self._process.stdout)
        return int(lost), str(failure)

    def close(self) -> None:
        """Ends the process once it has written everything, or kills it after 10 s."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # it has died
            pass
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main(address: str, max_bytes: int, flush_s: float, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Takes messages until the pipe closes, then writes what is left."""
    from brayx.recording.packer import Packer  # imports Arrow, which is slow, so only this process does
    from brayx.recording.writer import Folder

    packer = Packer(lambda: Folder(address, max_bytes), flush_s)
    while True:
        try:
            message: Message = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):  # the sender ended, or was killed while it wrote
            break
        for part, columns in message:
            try:
                packer.add(part, columns)
            except BrayxError as error:
                packer.failure = error.message
        packer.write_due()
        pickle.dump((packer.lost, packer.failure), replies)
        replies.flush()
    packer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process, too; only the sender ends it
    os.nice(_NICE)
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # prints of libraries must not mix with the replies
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.stdin.buffer, out)
