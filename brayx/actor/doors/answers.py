"""Answers of the HTTP doors: page, status, metrics, preflights of scripts of other origins; and responses as bytes.

Requests that are steps are answered elsewhere.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools

from brayx.actor.service import Service
from brayx.errors import BrayxError, ProtocolError
from brayx.gamecore.browser import document
from brayx.gamecore.protocol import SESSION_PATH, STEP_PATH
from brayx.metrics.openmetrics import CONTENT_TYPE

JSON = b"application/json"
KEEP_IMPLICIT = b""
KEEP_EXPLICIT = b"connection: keep-alive\r\n"
"""Header for clients of HTTP/1.0, which otherwise expect the connection to close."""
CLOSE = b"connection: close\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n%b"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
METRICS_PATH = "/metrics"
_ICON = "/favicon.ico"
"""Browsers request it unasked, so it does not count as a refusal."""


class Refused(Exception):
    """Ends the reading of a request. A ``status`` other than 0 replaces the error's HTTP status."""

    def __init__(self, error: BrayxError, status: int = 0) -> None:
        super().__init__(str(error))
        self.error = error
        self.status = status


def response(status: int, body: bytes, connection: bytes, content_type: bytes = JSON, *, retry: bool = False) -> bytes:
    """A whole response. ``connection`` has further header lines, the Connection header first; it may be empty."""
    more = (b"retry-after: 1\r\n" if retry else b"") + connection
    if status == HTTPStatus.UPGRADE_REQUIRED:
        more += b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
    phrase = HTTPStatus(status).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
    return head % (status, phrase, content_type, len(body), more) + body


def origin_form(url: bytes) -> bytes:
    """Path and query of an absolute URI, which clients send to proxies; any other target unchanged."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return url
    if not parsed.schema:
        return url
    path: bytes = parsed.path or b"/"
    return path if parsed.query is None else path + b"?" + parsed.query


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    content_type: bytes
    body: bytes


def is_preflight(service: Service, method: str) -> bool:
    """Whether a request asks what scripts may send. Without configured origins no ``OPTIONS`` does."""
    return method == "OPTIONS" and service.cors.is_on


def other(service: Service, method: str, path: str, headers: Mapping[str, str]) -> Answer:
    """Answers a request that is not a step; counts an error in the answer.

    Args:
        service: the service behind the door.
        method, path: method and path of the request.
        headers: headers of the request, by their names in lower case.
    """
    if is_preflight(service, method) and path in ("", "/", STEP_PATH):
        return Answer(200, b"text/plain", b"")
    if path in ("", "/"):
        status = service.status()
        if "text/html" in headers.get("accept", "").lower():
            return Answer(200, b"text/html; charset=utf-8", page(status).encode())
        return Answer(200, b"application/json", json.dumps(status).encode())
    if path == METRICS_PATH:
        try:
            text = service.metrics(headers.get("authorization", ""))
        except BrayxError as refusal:
            service.refused(refusal)
            return Answer(refusal.http_status, JSON, refusal.to_wire())
        if text is not None:
            return Answer(200, CONTENT_TYPE.encode(), text.encode())
    if path == _ICON:
        return Answer(404, b"text/plain", b"")
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
    """The page of a door for browsers: it shows what the door serves, and how to call it.

    Args:
        status: JSON values of the status page. Its ``example`` has the bodies of a ``start`` and a ``tick``, in text.
    """
    apart = ("service", "application", "doors", "example", "console")
    facts = {name.replace("_", " "): html.escape(_shown(value)) for name, value in status.items() if name not in apart}
    urls = dict(status.get("doors", {}))
    doors = {door: f"<code>{html.escape(url)}</code>" for door, url in urls.items()}
    if console := html.escape(status.get("console", "")):
        doors["console"] = f'<a href="{console}">{console}</a>'
    listed = doors and f"<p>Doors, as reached from this machine:</p>{_table(doors)}"
    body = f"<p>{_WHAT}</p>\n{_table(facts)}\n{_calls(urls, status)}\n{listed}"
    return document(str(status.get("application", "")), body)


def _table(rows: Mapping[str, str]) -> str:
    """A table of names and HTML."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{row}</td></tr>" for name, row in rows.items())
    return f"<table>{cells}</table>"


def _calls(doors: Mapping[str, str], status: Mapping[str, Any]) -> str:
    """How to call a door, with the bodies of the status's example."""
    example: Mapping[str, str] = status.get("example", {})
    url = doors.get("http", doors.get("native", "URL"))
    bodies = example or {"tick": '{"obs": [0, 0, 0, 0], "reward": 0}'}
    calls = "\n".join(
        f"curl -X POST {url}{STEP_PATH} -H 'session: game-1' -H 'step_kind: {kind}'"
        + (f" \\\n  -d {shlex.quote(bodies[kind])}" if bodies.get(kind) else "")
        for kind in ("start", "tick", "stop")
    )
    whose = "This job accepts this session:" if example else "The agent decides what a tick contains. A session may be:"
    if "waits_for" in status:
        whose = "The start of the first game decides what this job learns. A session may be:"
    shown = "".join(
        f"<p>The body of its {kind}:</p><pre>{html.escape(_indented(body), quote=False)}</pre>"
        for kind, body in example.items()
        if body
    )
    return f"<p>{whose}</p>\n<pre>{html.escape(calls, quote=False)}</pre>\n{shown}<p>{_FURTHER}</p>"


def _indented(body: str) -> str:
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return body


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return {True: "yes", False: "no"}.get(value, "") if isinstance(value, bool) else str(value)


_WHAT = "A game plays here: it starts a session, sends ticks and gets actions."
_FURTHER = f"""A WebSocket at <code>{SESSION_PATH}</code> is a session by itself: each message is a tick, each reply an
action. <code>brayx doctor URL</code> tries both, where <code>URL</code> is the address of this page."""
