"""The console's process: serves the control API and the page on a listening socket that it inherits from the job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading

from brayx.console.api import create_app
from brayx.console.guard import ConsoleKeys
from brayx.console.link import Link, own_pipes
from brayx.console.serve import serve_app
from brayx.console.source import Source
from brayx.gamecore.auth import Keys
from brayx.tracking.store import import_mlflow

_NICE = 5
"""Niceness of this process: the job has priority."""


def main(settings: str, descriptor: int) -> None:
    """Serves until the job ends.

    Args:
        settings: JSON, as `brayx.console.job.words_of` makes it.
        descriptor: file descriptor of the listening socket.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    requests, answers = own_pipes()
    link = Link(requests, answers, on_end=lambda: os._exit(0))
    # Import MLflow before a page needs it: that takes seconds, and more beside a busy job.
    threading.Thread(target=import_mlflow, name="brayx-console-imports", daemon=True).start()
    given = json.loads(settings)
    keys = ConsoleKeys(Keys.load(given["keys"])) if given["keys"] else None
    source = Source(given["uri"], given["project"], given["recordings"], link, given["board"], trust=given["folder"])
    serve_app(socket.socket(fileno=descriptor), create_app(source, keys))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
