"""Weights for the processes of one machine, without Ray: a message over a socket, and shared memory that comes with it.

Whoever acts is held up while another thread of its process has Python's lock, and a question to an actor of Ray has it
again and again. Here a new version costs that process one message of 16 bytes and the mapping of a file that has no
name; with the last process that holds it, it is gone. Linux only. Knows nothing of Ray, stores or models.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import socket
import struct
import sys
import uuid
from collections.abc import Callable

from brayx.model.encoding import pack_into, unpack
from brayx.types import Weights

_log = logging.getLogger(__name__)

AVAILABLE = sys.platform == "linux"
"""Whether this system has what a relay needs."""

_ASKED = struct.Struct("!q")  # what a line has
_TOLD = struct.Struct("!qq")  # version and step of what comes with it
_PEER = struct.Struct("3i")  # process, user and group of who is at the other end
_BACKLOG = 128


class Relay:
    """Hands the newest weights to each `Line` that asks for something newer than it has.

    One event loop runs it, but for ``newest``. A line that asks has one answer, so what is under way is bounded by the
    lines, and whoever is slow misses versions. Processes of other users are turned away.

    Args:
        newest: version, step and weights of the newest, or None; called in a thread, and only when somebody asks.
    """

    def __init__(self, newest: Callable[[], tuple[int, int, Weights] | None]) -> None:
        self._newest = newest
        self._version = 0  # of the newest that is known to be there
        self._packed: tuple[int, int, int] | None = None  # version, step, descriptor
        self._packing: asyncio.Task[None] | None = None
        self._asking: dict[socket.socket, int | None] = {}  # by line: what it has, once it has asked
        self._loop = asyncio.get_running_loop()
        self._address = f"brayx-weights-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages as they were sent
        self._listener.setblocking(False)
        self._listener.bind("\0" + self._address)  # a name that goes with the process: nothing to remove after a kill
        self._listener.listen(_BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    @property
    def address(self) -> str:
        """What a `Line` on this machine is made with."""
        return self._address

    @property
    def lines(self) -> int:
        """How many there are."""
        return len(self._asking)

    def changed(self, version: int) -> None:
        """There is a newer version to be had from ``newest``."""
        self._version = max(self._version, version)
        self._answer()

    async def close(self) -> None:
        """Ends every line; safe to call twice."""
        if self._packing is not None:
            self._packing.cancel()
            await asyncio.wait([self._packing])
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for line in list(self._asking):
            self._end(line)
        self._hold(None)

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError as error:  # it has gone again, or no descriptor is left
            _log.warning("no line for weights: %s", error)
            return
        if not _same_user(line):
            line.close()
            return
        line.setblocking(False)
        self._asking[line] = None
        self._loop.add_reader(line, self._hear, line)

    def _hear(self, line: socket.socket) -> None:
        try:
            said = line.recv(_ASKED.size)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if len(said) != _ASKED.size:
            self._end(line)
            return
        (self._asking[line],) = _ASKED.unpack(said)
        self._answer()

    def _answer(self) -> None:
        """Gives to each line that asked what is newer than it has, once it is packed."""
        version = 0 if self._packed is None else self._packed[0]
        waiting = [(line, has) for line, has in self._asking.items() if has is not None]
        if self._version > version and any(has < self._version for _, has in waiting):
            if self._packing is None:
                self._packing = self._loop.create_task(self._pack())
            return
        for line, has in waiting:
            if has < version:
                self._send(line)

    def _send(self, line: socket.socket) -> None:
        assert self._packed is not None
        version, step, descriptor = self._packed
        self._asking[line] = None
        try:
            socket.send_fds(line, [_TOLD.pack(version, step)], [descriptor])
        except OSError:  # gone; one answer at a time never fills a socket
            self._end(line)

    async def _pack(self) -> None:
        wanted = self._version
        try:
            self._hold(await asyncio.to_thread(self._file))
        except Exception:
            _log.exception("version %d could not be relayed", wanted)
            self._version = 0 if self._packed is None else self._packed[0]  # not again before there is another
        finally:
            self._packing = None
        self._answer()

    def _file(self) -> tuple[int, int, int] | None:
        """In a thread: the newest weights in shared memory that nobody can change any more."""
        found = self._newest()
        if found is None:
            return None
        version, step, weights = found
        descriptor = os.memfd_create(self._address, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                # Wide ones first, so that every array lies where its dtype may lie.
                pack_into(file, dict(sorted(weights.items(), key=lambda leaf: -leaf[1].dtype.itemsize)))
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(descriptor)
            raise
        return version, step, descriptor

    def _hold(self, packed: tuple[int, int, int] | None) -> None:
        before, self._packed = self._packed, packed
        self._version = max(self._version, 0 if packed is None else packed[0])
        if before is not None:
            os.close(before[2])

    def _end(self, line: socket.socket) -> None:
        self._loop.remove_reader(line)
        del self._asking[line]
        line.close()


class Line:
    """One process's end of a relay; for one task.

    Raises:
        OSError: nobody is there, or it is another user's.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.connect("\0" + address)
            if not _same_user(self._socket):
                raise PermissionError("the relay is another user's")
        except BaseException:
            self._socket.close()
            raise
        self._asked: int | None = None

    async def newer(self, than: int, timeout_s: float) -> tuple[int, int, mmap.mmap] | None:
        """Version, step and content (for `weights_in`) of the newest, once above ``than``; None if not in time.

        Raises:
            OSError: the relay has gone.
        """
        if self._asked != than:
            self._socket.send(_ASKED.pack(than))
            self._asked = than
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable()
        except TimeoutError:
            return None
        told, descriptors, _, _ = socket.recv_fds(self._socket, _TOLD.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(told) != _TOLD.size or not descriptors:  # none: this process may open no more
                raise ConnectionError("the relay has ended")
            content = mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._asked = None
        version, step = _TOLD.unpack(told)
        return version, step, content

    def close(self) -> None:
        """Ends it; safe to call twice."""
        self._socket.close()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._socket, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._socket)


def weights_in(content: mmap.mmap) -> Weights:
    """Read-only views of what a line brought; the memory is mapped as long as one of them is there."""
    return unpack(content)[0]


def _same_user(connected: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
