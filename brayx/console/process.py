"""The console's process: serves the control API and the page on a listening socket that it inherits from the job."""

from __future__ import annotations

import json
import socket
import threading

from brayx.children import Channel
from brayx.console.api import create_app
from brayx.console.guard import ConsoleKeys
from brayx.console.link import Link
from brayx.console.serve import serve_app
from brayx.console.source import Source
from brayx.gamecore.auth import Keys
from brayx.tracking.store import import_mlflow


def main(job: Channel, settings: str, descriptor: str) -> None:
    """Serves until the job ends.

    Args:
        job: answers the console's requests.
        settings: JSON, as `brayx.console.job.words_of` makes it.
        descriptor: file descriptor of the listening socket.
    """
    # Import MLflow before a page needs it: that takes seconds, and more beside a busy job.
    threading.Thread(target=import_mlflow, name="brayx-console-imports", daemon=True).start()
    given = json.loads(settings)
    keys = ConsoleKeys(Keys.load(given["keys"])) if given["keys"] else None
    source = Source(
        given["uri"], given["project"], given["recordings"], Link(job), given["board"], trust=given["folder"]
    )
    serve_app(socket.socket(fileno=int(descriptor)), create_app(source, keys))
