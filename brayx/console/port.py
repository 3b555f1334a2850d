"""The console of a running job: its port, and the process behind it.

The job only listens. The first connection starts the console's process, which inherits the socket and answers. So a job
without visitors pays nothing, and with visitors it does not share its interpreter with web pages. If the process ends,
the next connection starts another. Knows nothing of what the console shows.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from brayx.children import Child, ChildDied
from brayx.logs import limited
from brayx.ports import listen

logger = limited(__name__)

PORT = 8110
"""The console's usual port, the default of ``console_port`` in a job."""
_BACKLOG = 64
_RESTART_S = 2.0
_END_S = 3.0


class ConsolePort:
    """Listens on the console's port, from construction until `close`.

    Args:
        host: address to bind.
        port: number of the port; 0: a free one.
        module, words: module of the console's program, and its arguments; the socket's file descriptor is added last.
        answer: answers the process's requests, see `brayx.children.Channel.serve`; called in a thread.

    Attributes:
        url: URL of the console.

    Raises:
        StartupError: as `listen`.
    """

    def __init__(self, host: str, port: int, module: str, words: Sequence[str], answer: Callable[..., Any]) -> None:
        self._answer = answer
        self._socket = listen(host, port, "console_port", _BACKLOG)
        number = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"
        self._wake, self._waker = os.pipe()
        self._closed = False
        descriptor = self._socket.fileno()
        self._child = Child(module, *words, str(descriptor), files=(descriptor,), restart_s=_RESTART_S)
        self._thread = threading.Thread(target=self._serve, name="brayx-console", daemon=True)
        self._thread.start()

    @property
    def is_visited(self) -> bool:
        """Whether the process runs."""
        return self._child.runs

    def close(self) -> None:
        """Kills the process, which has no state to save, and frees the port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._child.close()
        with contextlib.suppress(OSError):  # the thread has ended
            os.write(self._waker, b"x")
        self._thread.join(_END_S)
        self._socket.close()
        os.close(self._waker)

    def _serve(self) -> None:
        while True:
            # The connection stays in the backlog until the process accepts it.
            ready, _, _ = select.select([self._socket.fileno(), self._wake], [], [])
            if self._wake in ready:
                break
            try:
                self._child.start()
            except ChildDied:  # closed
                break
            self._child.serve(self._answer)
            if not self._closed:
                logger.warning("the console's process %s; the next visit starts another", self._child.death)
        os.close(self._wake)
