"""The transport interfaces, the endpoint of a URL, and the errors that all transports share.

A transport never sends a request twice: after a lost connection the request may have been applied, so the caller
decides. Knows nothing of the bytes of any door.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from brayx.errors import (
    AgentError,
    BrayxError,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    OutOfSequence,
    SessionError,
    SessionResumed,
)
from brayx.gamecore.doors import BY_SCHEME, SECURE, Door
from brayx.gamecore.protocol import StepRequest

SESSION_ENDING = (SessionError, AgentError)
SESSION_KEEPING = (OutOfSequence, SessionResumed)
"""Errors that do not end the session, although their base class is in `SESSION_ENDING`."""

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Longest reply accepted, so that a wrong peer cannot fill the client's memory."""


class Transport(Protocol):
    """Carries one request at a time; calls from several threads wait for each other."""

    @property
    def holds_session(self) -> bool:
        """Whether a running session can still be reached, as far as this side knows: always, unless a connection holds
        it."""
        return True

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        """The reply's body.

        Raises:
            ConnectFailed: no connection; nothing was sent.
            ConnectionLost: the connection broke; the request may or may not have been applied.
            DeadlineExceeded: ``timeout_s`` passed; the connection is dropped, so that a late reply cannot be mistaken
                for another.
            TransportError: the answer is not from a brayx service.
            BrayxError: the typed error that the service answered.
        """

    def close(self) -> None:
        """Closes the connection. A running session is not stopped. May be called twice."""


class AsyncTransport(Protocol):
    """`Transport` for asyncio; concurrent calls wait for each other."""

    @property
    def holds_session(self) -> bool:
        return True

    async def step(self, request: StepRequest, timeout_s: float) -> bytes: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a service's URL.

    Attributes:
        url: the given URL without a trailing slash; used in messages.
        host, port: address of the socket.
        authority: value of the ``Host`` header.
        prefix: path before the door's path; empty or ``/something``.
        compress: offer compression, over WebSocket.
    """

    url: str
    scheme: str
    host: str
    port: int
    authority: str
    prefix: str
    compress: bool = False

    @classmethod
    def parse(cls, url: str, *, compress: bool = False) -> Endpoint:
        """The endpoint of ``url``.

        Raises:
            ConfigError: unknown scheme, no host, a query, a path where the scheme has none, or compression of another
                door than WebSocket.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"URL {url!r} cannot be used: {error}") from None
        door = BY_SCHEME.get(parts.scheme)
        if door is None or not host:
            raise ConfigError(f"URL {url!r} cannot be used: expected {', '.join(BY_SCHEME)}, as in http://host:port")
        if parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError(f"URL {url!r} cannot be used: expected plain ASCII without query or fragment")
        if parts.path.strip("/") and not door.has_paths:
            raise ConfigError(
                f"URL {url!r} cannot be used: {door.name.upper()} has no paths, expected {door.name}://host:port"
            )
        if compress and not door.compresses:
            raise ConfigError(f"compress=True needs a ws:// URL, got {url!r}: only WebSockets are compressed")
        return cls(
            url=url.rstrip("/"),
            scheme=parts.scheme,
            host=host,
            port=port or door.schemes[parts.scheme],
            authority=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/"),
            compress=compress,
        )

    @property
    def door(self) -> Door:
        """The protocol at the address."""
        return BY_SCHEME[self.scheme]

    @property
    def is_secure(self) -> bool:
        """Whether the scheme asks for TLS."""
        return self.scheme in SECURE

    def door_url(self, door: str) -> str:
        """The URL of another door on the same port, with TLS if this one has it."""
        return f"{door}{'s' if self.is_secure else ''}{self.url[len(self.scheme) :]}"

    def tls(self) -> ssl.SSLContext | None:
        """A context that checks certificates, when the scheme asks for TLS."""
        return ssl.create_default_context() if self.is_secure else None

    def connect_failed(self, error: Exception) -> ConnectFailed:
        """The error for a connection that could not be made because of ``error``."""
        if isinstance(error, ConnectionRefusedError):
            hint = "nothing listens there: is the service running, and is the port right?"
        elif isinstance(error, socket.gaierror):
            hint = f"the host name {self.host!r} does not resolve: is it spelt right?"
        elif isinstance(error, ssl.SSLCertVerificationError):
            hint = "to trust its certificate, name the certificate's file in the environment variable SSL_CERT_FILE"
        elif isinstance(error, ssl.SSLError):
            hint = "the TLS handshake failed: does the service speak TLS on this port?"
        else:
            hint = "check the address, the network and any firewall"
        message = f"cannot connect to {self.url} ({_reason(error)}); {hint}"
        return ConnectFailed(message, url=self.url, may_pass=not isinstance(error, ssl.SSLCertVerificationError))

    def connection_lost(self, request: StepRequest | str, error: Exception, *, started: bool) -> ConnectionLost:
        """The error for a connection that broke because of ``error``, before or after the reply had ``started``.

        ``request`` may be a description for the message.
        """
        what = request if isinstance(request, str) else describe(request)
        when = "in the middle of the reply" if started else "before any of the reply"
        message = f"{self.url}: the connection broke {when} to the {what} ({error}); it may have been applied"
        return ConnectionLost(message, url=self.url)

    def deadline_exceeded(self, awaited: str, timeout_s: float, *, layer: str) -> DeadlineExceeded:
        """The error for ``awaited`` not arriving within ``timeout_s``."""
        return DeadlineExceeded(
            f"{self.url}: no {awaited} within {timeout_s:g} s", url=self.url, layer=layer, timeout_s=timeout_s
        )


def describe(request: StepRequest) -> str:
    """A description of ``request`` for messages."""
    return f"{request.kind.value} of session {request.session}" if request.kind.value else "stateless call"


def ends_session(error: BrayxError) -> bool:
    """Whether ``error`` means that the service has ended the session."""
    return isinstance(error, SESSION_ENDING) and not isinstance(error, SESSION_KEEPING)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
