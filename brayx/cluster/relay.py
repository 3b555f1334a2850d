"""Sends new weights to the processes of one machine without Ray: a message over a socket, with shared memory attached.

A call to a Ray actor holds Python's lock of the calling process several times, and forwards wait meanwhile. Here a new
version costs that process one message of 16 bytes and the mapping of an unnamed file, which is freed with the last
process that holds it. Linux only. Knows nothing of Ray, stores or models.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable

from brayx.model.encoding import pack_into, unpack
from brayx.types import Weights

_log = logging.getLogger(__name__)

_REQUEST = struct.Struct("!q")  # newest version that a line has
_REPLY = struct.Struct("!qq")  # version and step of the attached weights
_PEER = struct.Struct("3i")  # process, user and group at the other end
_BACKLOG = 128
_NO_ROOM_S = 1.0
"""Pause before the next accept when no file descriptor is left."""


@functools.cache
def available() -> bool:
    """Whether this system has what a relay needs; tried once."""
    try:
        descriptor = _sealed({})
        try:
            mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
        finally:
            os.close(descriptor)
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.close()
    except (ImportError, AttributeError, OSError) as error:
        _log.info("no relay of weights on this system: %s", error)
        return False
    return True


class Relay:
    """Sends the newest weights to each `Line` that requests newer ones than it has.

    A request gets one reply, so each line has at most one reply under way, and a slow line misses versions. Refuses
    processes of other users. Use it on the event loop it is made on.

    Args:
        newest: gives version, step and weights of the newest, or None; called only after a request.

    Attributes:
        address: address for a `Line` on this machine.

    Raises:
        OSError: no socket can be opened.
    """

    def __init__(self, newest: Callable[[], Awaitable[tuple[int, int, Weights] | None]]) -> None:
        self._newest = newest
        self._version = 0  # of the newest that is known to be there
        self._packed: tuple[int, int, int] | None = None  # version, step, descriptor
        self._packing: asyncio.Task[None] | None = None
        self._asking: dict[socket.socket, int | None] = {}  # by line: the version of its open request
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.TimerHandle | None = None
        self.address = f"brayx-weights-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages as they were sent
        try:
            self._listener.setblocking(False)
            self._listener.bind("\0" + self.address)  # the name ends with the process, also by a kill
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._loop.add_reader(self._listener, self._accept)

    @property
    def lines(self) -> int:
        """Number of open lines."""
        return len(self._asking)

    def changed(self, version: int) -> None:
        """``newest`` has a newer version."""
        self._version = max(self._version, version)
        self._answer()

    async def close(self) -> None:
        """Ends every line; safe to call twice."""
        if self._opening is not None:
            self._opening.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for line in list(self._asking):
            self._end(line)
        if self._packing is not None:
            await asyncio.wait([self._packing])  # not cancelled: its thread would leave a descriptor behind
        self._hold(None)

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left, and the loop would call this without end
            _log.warning("no line for weights for now: %s", error)
            self._loop.remove_reader(self._listener)
            self._opening = self._loop.call_later(_NO_ROOM_S, self._loop.add_reader, self._listener, self._accept)
            return
        if not _same_user(line):
            line.close()
            return
        line.setblocking(False)
        self._asking[line] = None
        self._loop.add_reader(line, self._hear, line)

    def _hear(self, line: socket.socket) -> None:
        try:
            request = line.recv(_REQUEST.size)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if len(request) != _REQUEST.size:
            self._end(line)
            return
        (self._asking[line],) = _REQUEST.unpack(request)
        self._answer()

    def _answer(self) -> None:
        """Replies to each open request that is older than the newest; packs that first, if needed."""
        if self._packing is not None:
            return
        if self._packed is not None and self._packed[0] >= self._version:
            self._send_packed()
        elif any(has is not None and has < self._version for has in self._asking.values()):
            self._packing = self._loop.create_task(self._pack())

    def _send_packed(self) -> None:
        if self._packed is None:
            return
        version, step, descriptor = self._packed
        for line in [line for line, has in self._asking.items() if has is not None and has < version]:
            self._asking[line] = None
            try:
                socket.send_fds(line, [_REPLY.pack(version, step)], [descriptor])
            except OSError:  # gone; one answer at a time never fills a socket
                self._end(line)

    async def _pack(self) -> None:
        wanted = self._version
        try:
            newest = await self._newest()
            if newest is not None:
                version, step, weights = newest
                self._hold((version, step, await asyncio.to_thread(_sealed, weights)))
        except Exception:
            _log.exception("version %d could not be relayed", wanted)
            for line in [line for line, has in self._asking.items() if has is not None and has < wanted]:
                self._end(line)  # their processes call the store then
        finally:
            self._packing = None
        if self._version == wanted:  # `newest` may have less than was announced: do not pack again and again
            self._version = 0 if self._packed is None else self._packed[0]
        self._send_packed()  # even if there is a newer one: a publisher faster than this would starve all lines
        self._answer()

    def _hold(self, packed: tuple[int, int, int] | None) -> None:
        before, self._packed = self._packed, packed
        self._version = max(self._version, 0 if packed is None else packed[0])
        if before is not None:
            os.close(before[2])

    def _end(self, line: socket.socket) -> None:
        self._loop.remove_reader(line)
        del self._asking[line]
        line.close()


def _sealed(weights: Weights) -> int:
    """A descriptor of sealed, so read-only, shared memory with these weights."""
    import fcntl  # not on every system

    descriptor = os.memfd_create("brayx-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            # Wide dtypes first, so that every array is aligned.
            pack_into(file, dict(sorted(weights.items(), key=lambda leaf: -leaf[1].dtype.itemsize)))
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Line:
    """One process's end of a relay; for one task.

    Raises:
        OSError: no relay has that address, or it is another user's.
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
        self._requested: int | None = None

    async def newer(self, than: int, timeout_s: float) -> tuple[int, int, mmap.mmap] | None:
        """Version, step and content (for `weights_in`) of the newest, once above ``than``; None if not in time.

        Raises:
            OSError: the relay has ended.
        """
        if self._requested != than:
            self._socket.send(_REQUEST.pack(than))
            self._requested = than
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable()
        except TimeoutError:
            return None
        reply, descriptors, _, _ = socket.recv_fds(self._socket, _REPLY.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(reply) != _REPLY.size or not descriptors:  # none: this process may open no more
                raise ConnectionError("the relay has ended")
            # Private, since Linux before 6.7 maps no sealed file as shared. Pages that are only read have one copy.
            content = mmap.mmap(descriptors[0], 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._requested = None
        version, step = _REPLY.unpack(reply)
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
    """Read-only views of a reply's content; the memory stays mapped as long as one of them exists."""
    return unpack(content)[0]


def _same_user(connected: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
