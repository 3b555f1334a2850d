"""Responses of the native HTTP door as bytes, and the refusal that ends a connection."""

from __future__ import annotations

from http import HTTPStatus

import httptools

from brayx.errors import BrayxError

JSON = b"application/json"
KEEP_IMPLICIT = b""
KEEP_EXPLICIT = b"connection: keep-alive\r\n"
"""Header for clients of HTTP/1.0, which otherwise expect the connection to close."""
CLOSE = b"connection: close\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n%b"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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
