"""The console of a running job: its port, and the process behind it.

The job only listens. The first connection starts the console's process, which inherits the socket and answers. So a job
without visitors pays nothing, and with visitors it does not share its interpreter with web pages. If the process ends,
the next connection starts another. Knows nothing of what the console shows.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from brayx.children import start_module
from brayx.console.link import answer_requests
from brayx.logs import limited
from brayx.ports import listen

logger = limited(__name__)

DEFAULT_PORT = 8110
_BACKLOG = 64
_RESTART_S = 2.0
"""Minimum time between two starts of the process. Without it, one that cannot start would be restarted in a loop."""
_END_S = 3.0


class ConsolePort:
    """Listens on the console's port, from construction until `close`.

    Args:
        host: address to bind.
        port: number of the port; 0: a free one.
        module, words: module of the console's program, and its arguments; the socket's file descriptor is added last.
        answer: as for `brayx.console.link.answer_requests`; called in a thread.

    Attributes:
        url: URL of the console.

    Raises:
        StartupError: as `listen`.
    """

    def __init__(self, host: str, port: int, module: str, words: Sequence[str], answer: Callable[..., Any]) -> None:
        self._module, self._words, self._answer = module, tuple(words), answer
        self._socket = listen(host, port, "console_port", _BACKLOG)
        number = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"
        self._wake, self._waker = os.pipe()
        self._closed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name="brayx-console", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kills the process, which has no state to save, and frees the port. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with contextlib.suppress(OSError):  # the thread has ended
            os.write(self._waker, b"x")
        self._thread.join(_END_S)
        self._socket.close()
        os.close(self._waker)

    def _serve(self) -> None:
        last = -_RESTART_S
        while True:
            # The connection stays in the backlog until the process accepts it.
            ready, _, _ = select.select([self._socket.fileno(), self._wake], [], [])
            if self._wake in ready:
                break
            left_s = last + _RESTART_S - time.monotonic()
            if left_s > 0 and select.select([self._wake], [], [], left_s)[0]:
                break
            last = time.monotonic()
            process = self._start()
            if process is None:
                break
            assert process.stdin is not None
            assert process.stdout is not None
            answer_requests(process.stdout, process.stdin, self._answer)
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
            code = process.wait()
            if not self._closed and code:
                logger.warning("the console's process ended with %d; the next visit starts another", code)
        os.close(self._wake)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            number = self._socket.fileno()
            self._process = start_module(self._module, *self._words, str(number), files=(number,))
            return self._process
