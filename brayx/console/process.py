"""The console's process: serves the control API and the page on a listening socket that it inherits from the job."""

from __future__ import annotations

import json
import socket
import threading

from brayx.children import Channel
from brayx.console.api import create_app
from brayx.console.guard import ConsoleKeys
from brayx.console.serve import serve_app
from brayx.console.source import Source
from brayx.gamecore.auth import Keys
from brayx.tracking.store import import_mlflow


def main(job: Channel, source: str, keys_file: str, descriptor: str) -> None:
    """Serves until the job ends.

    Args:
        job: answers the console's requests.
        source: JSON of the fields of `Source`: what the console shows.
        keys_file: path of the console's keys; empty: it has none.
        descriptor: file descriptor of the listening socket.
    """
    # Import MLflow before a page needs it: that takes seconds, and more beside a busy job.
    threading.Thread(target=import_mlflow, name="brayx-console-imports", daemon=True).start()
    keys = ConsoleKeys(Keys.load(keys_file)) if keys_file else None
    app = create_app(Source(**json.loads(source), channel=job), keys)
    serve_app(socket.socket(fileno=int(descriptor)), app)
