"""Requests of an HTTP door that are no steps: its page, its status, and leave for scripts of other origins (CORS).

Both HTTP doors take these answers from here. Knows nothing of how a door reads or writes.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from brayx.errors import ProtocolError
from brayx.gamecore.protocol import SESSION_PATH, STEP_PATH

if TYPE_CHECKING:
    from brayx.actor.service import Service

ANY = "*"
"""An origin that stands for all."""
_METHODS = b"GET, POST, OPTIONS"
_HEADERS = b"content-type, session, step_kind, step-kind, key, time, token, seq"
_MAX_AGE_S = b"600"
"""How long a browser may go by the answer to a preflight."""


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    content_type: bytes
    body: bytes


class Cors:
    """Which origins' scripts may call the HTTP doors, as browsers ask it (the Fetch standard, 3.2).

    Args:
        origins: like ``https://play.example.com``; `ANY`: all; none: doors name no origin and take no ``OPTIONS``.

    Attributes:
        is_on: some origin may.
    """

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self.is_on = bool(self._origins)

    def headers(self, origin: str | None, method: str) -> list[tuple[bytes, bytes]]:
        """Headers of every answer to a request that came with ``origin``."""
        if not self._origins:
            return []
        allowed = ANY in self._origins or origin in self._origins
        found = [] if ANY in self._origins else [(b"vary", b"origin")]
        if origin is not None and allowed:
            shown = ANY if ANY in self._origins else origin
            found += [
                (b"access-control-allow-origin", shown.encode("latin-1")),
                (b"access-control-expose-headers", b"retry-after"),
            ]
            if method == "OPTIONS":
                found += [
                    (b"access-control-allow-methods", _METHODS),
                    (b"access-control-allow-headers", _HEADERS),
                    (b"access-control-max-age", _MAX_AGE_S),
                ]
        return found


def is_preflight(service: Service, method: str) -> bool:
    """Whether a request asks what scripts may send; where no origin is named, ``OPTIONS`` is a method as any other."""
    return method == "OPTIONS" and service.cors.is_on


def other(service: Service, method: str, path: str, accept: str) -> Answer:
    """The answer to a request that is no step; an error in it is counted.

    Args:
        service: behind the door.
        method, path: of the request.
        accept: its Accept header; empty without one.
    """
    if is_preflight(service, method) and path in ("", "/", STEP_PATH):
        return Answer(200, b"text/plain", b"")
    if path in ("", "/"):
        status = service.status()
        if "text/html" in accept.lower():
            return Answer(200, b"text/html; charset=utf-8", page(status).encode())
        return Answer(200, b"application/json", json.dumps(status).encode())
    code, error = wrong_path(path)
    service.refused(error)
    return Answer(code, b"application/json", error.to_wire())


def wrong_path(path: str) -> tuple[int, ProtocolError]:
    """Status and error for a plain HTTP request to a ``path`` that does not answer any."""
    if path == SESSION_PATH:
        message = f"{SESSION_PATH} is for WebSockets only: send 'Connection: Upgrade' and 'Upgrade: websocket'"
        return 426, ProtocolError(f"{message}; a proxy without WebSocket support drops both")
    return 404, ProtocolError(f"no such path {path!r}: POST {STEP_PATH}, or WebSocket {SESSION_PATH}")


def page(status: Mapping[str, Any]) -> str:
    """The page of a door, for people: what it serves, and how to call it.

    Args:
        status: JSON facts, as the status page gives them.
    """
    facts = {name: value for name, value in status.items() if name not in ("service", "application", "doors")}
    name = html.escape(str(status.get("application", "")))
    doors = "".join(f"<li><code>{html.escape(url)}</code></li>" for url in status.get("doors", {}).values())
    rows = "".join(
        f"<tr><th>{html.escape(fact.replace('_', ' '))}</th><td>{html.escape(_shown(value))}</td></tr>"
        for fact, value in facts.items()
    )
    return _PAGE.format(name=name, rows=rows, doors=doors and f"<p>Native doors:</p><ul>{doors}</ul>")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(of)}" for name, of in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return {True: "yes", False: "no"}.get(value, "") if isinstance(value, bool) else str(value)


_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>brayx: {{name}}</title>
<style>
body {{{{ font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em }}}}
th {{{{ text-align: left; padding-right: 2em }}}}
pre {{{{ background: #8882; padding: 1em; overflow-x: auto }}}}
</style>
<h1>brayx: {{name}}</h1>
<p>A game plays here: it starts a session, sends ticks and gets actions.</p>
<table>{{rows}}</table>
<p>With <code>URL</code> for the address of this page, one session is:</p>
<pre>curl -X POST URL{STEP_PATH} -H 'session: game-1' -H 'step_kind: start'
curl -X POST URL{STEP_PATH} -H 'session: game-1' -H 'step_kind: tick' -d '{{{{"obs": [0, 0, 0, 0], "reward": 0}}}}'
curl -X POST URL{STEP_PATH} -H 'session: game-1' -H 'step_kind: stop'</pre>
<p>A WebSocket at <code>URL{SESSION_PATH}</code> is a session by itself: each message is a tick, each reply an action.
<code>brayx doctor URL</code> tries both. What a tick contains is the agent's to say.</p>
{{doors}}
<p>A program gets these facts as JSON: <code>curl URL/</code></p>
</html>
"""
