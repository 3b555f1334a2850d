"""`brayx doctor URL`: finds which layer between a gamecore and its agent is broken.

Checks one layer after the other, each with a deadline: host name, connection, protocol, credentials, a session's start,
tick and stop, and the model's version. It uses the same clients as games do, and leaves no session behind. Knows only
what the doors report; standard library only, apart from what the URL's scheme needs.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    ModelError,
    Overloaded,
    ProtocolError,
    ServiceFull,
    SessionError,
    TransportError,
    Unauthorized,
)
from brayx.gamecore.client import Client
from brayx.gamecore.probe import probe
from brayx.gamecore.status import read_status
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.connection import ClientConnection

LAYERS = ("dns", "connect", "protocol", "auth", "start", "tick", "stop", "model version")
"""The layers in the order of the checks; the first one that fails is the cause."""

_QUOTED_BYTES = 60
_WIDTH = max(map(len, LAYERS))

_BRAYX_ANSWERS = (SessionError, Unauthorized, Overloaded, DeadlineExceeded)
"""Errors by which a working (or full) service answers a tick of an unknown session."""

_PORTS = (
    "HTTP and WebSocket are at 8000 (Serve's ingress) and 8100 (native), TCP at 8101, gRPC at 9000, unless configured"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one layer.

    Attributes:
        layer: one of `LAYERS`.
        outcome: the layer works or not; ``skipped``: not checked, or does not apply.
        ms: duration of the check.
        said: what the check observed.
        advice: what to do if it failed.
    """

    layer: str
    outcome: Literal["ok", "failed", "skipped"]
    ms: float = 0.0
    said: str = ""
    advice: str = ""


class _Failed(Exception):
    """A layer does not work."""

    def __init__(self, said: str, advice: str) -> None:
        super().__init__(said)
        self.said = said
        self.advice = advice


class _Skipped(Exception):
    """A layer does not apply."""


def examine(
    url: str,
    *,
    body: bytes | None = None,
    key: str = "",
    secret: bytes = b"",
    timeout_s: float = 5.0,
) -> Iterator[Finding]:
    """Yields a finding per layer as soon as it is known; after a failure the remaining layers are skipped.

    Args:
        url: URL of a door.
        body: body of the tick; None: that of the status page's example, else ``{}``. The start has the example's body,
            unless the job waits for a first game, whose start decides what it learns.
        key, secret: as for `Client`.
        timeout_s: time limit of each layer.

    Raises:
        ConfigError: the URL cannot be used, or its scheme needs a package that is not installed.
    """
    patient = _Patient(url, body, key, secret, timeout_s)
    steps: dict[str, Callable[[], str]] = {
        "dns": patient.resolve,
        "connect": patient.connect,
        "protocol": patient.speak,
        "auth": patient.authorise,
        "start": patient.start,
        "tick": patient.tick,
        "stop": patient.stop,
        "model version": patient.model_version,
    }
    failed = ""
    try:
        for layer in LAYERS:
            # A failed tick may have left its session running; stop it.
            if failed and not (layer == "stop" and patient.has_session):
                yield Finding(layer, "skipped", said=f"after {failed}")
                continue
            began = time.perf_counter()
            said = advice = ""
            outcome: Literal["ok", "failed", "skipped"] = "ok"
            try:
                said = steps[layer]()
            except _Failed as error:
                outcome, said, advice = "failed", error.said, error.advice
                failed = failed or layer
            except _Skipped as reason:
                outcome, said = "skipped", str(reason)
            yield Finding(layer, outcome, round((time.perf_counter() - began) * 1e3, 2), said, advice)
    finally:
        patient.close()


class _Patient:
    """The service under examination, from a client's side."""

    def __init__(self, url: str, body: bytes | None, key: str, secret: bytes, timeout_s: float) -> None:
        self._url = url
        self._endpoint = Endpoint.parse(url)
        self._body = body
        self._key = key
        self._secret = secret
        self._timeout_s = timeout_s
        self._client = Client(url, timeout_s=timeout_s, key=key, secret=secret)
        self._requires_keys = False
        self._status: dict[str, Any] | None = None

    @property
    def has_session(self) -> bool:
        return self._client.session is not None

    def close(self) -> None:
        self._client.close()

    def resolve(self) -> str:
        host, port = self._endpoint.host, self._endpoint.port
        addresses: list[str] = []
        errors: list[OSError] = []

        def look_up() -> None:
            try:
                addresses.extend(
                    str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )
            except OSError as error:
                errors.append(error)

        lookup = threading.Thread(target=look_up, daemon=True)  # the system's resolver takes no deadline
        lookup.start()
        lookup.join(self._timeout_s)
        if errors or lookup.is_alive():
            said = errors[0].strerror if errors else f"no answer within {self._timeout_s:g} s"
            raise _Failed(f"{host!r}: {said}", "is the host name spelt right, and known to this machine's resolver?")
        return ", ".join(dict.fromkeys(addresses))

    def connect(self) -> str:
        try:
            ClientConnection(self._endpoint, self._timeout_s).close()
        except BrayxError as error:
            raise _failed(error) from None
        return f"port {self._endpoint.port}"

    def speak(self) -> str:
        refusal = probe(self._url, timeout_s=self._timeout_s)
        if not isinstance(refusal, _BRAYX_ANSWERS) or _is_of_client(refusal):
            raise _failed(refusal)
        self._requires_keys = isinstance(refusal, Unauthorized)
        self._status = read_status(self._endpoint, self._timeout_s)
        sessions = (self._status or {}).get("sessions")
        return "brayx answers" + (f"; {sessions} sessions at this replica" if sessions is not None else "")

    def authorise(self) -> str:
        if not self._requires_keys:
            return "no key is required" + ("; the given key is ignored" if self._key else "")
        if not self._key:
            raise _Failed("the service requires a key, and none was given", "give --keys-file FILE, perhaps --key ID")
        refusal = probe(self._url, key=self._key, secret=self._secret, timeout_s=self._timeout_s)
        if isinstance(refusal, Unauthorized):
            raise _failed(refusal)
        return f"key {self._key!r} is accepted"

    def start(self) -> str:
        example = self._example()
        try:
            return self._step(lambda: self._client.start(example.get("start", "").encode(), _new_session()))
        except _Failed as failure:
            if example or not isinstance(failure.__cause__, BadBody):
                raise
            raise _Skipped(f"the agent expects another body, so the door works: {failure.__cause__.message}") from None

    def tick(self) -> str:
        if not self.has_session:
            raise _Skipped("no session is running")
        body = self._example().get("tick", "{}").encode() if self._body is None else self._body
        try:
            return self._step(lambda: self._client.tick(body))
        except _Failed as failure:
            cause = failure.__cause__
            if isinstance(cause, BadBody):
                return f"the agent expects another body, so the door works: {cause.message}; give one with --body"
            if self._body is None and isinstance(cause, AgentError | ModelError):
                advice = f"the agent got {body.decode()}: give a body that your game sends with --body"
                raise _Failed(failure.said, f"{advice}; {failure.advice}") from cause
            raise

    def stop(self) -> str:
        if not self.has_session:
            raise _Skipped("no session is running")
        return self._step(self._client.stop)

    def model_version(self) -> str:
        if self._status is None:
            endpoint = self._endpoint
            if endpoint.door.has_status:
                raise _Skipped("the door answered no status page at GET /")
            host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
            raise _Skipped(
                f"{endpoint.scheme} has no status page, and no reply names the model: give doctor the HTTP door, "
                f"http://{host}:PORT (8000 or 8100 unless configured)"
            )
        versions = self._status.get("policy_versions")
        if not isinstance(versions, dict) or not versions:
            raise _Skipped("the status page names no model")
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"{listed} (0: as built, untrained)" if 0 in versions.values() else listed

    def _example(self) -> dict[str, str]:
        """Bodies of a ``start`` and a ``tick`` by the status page; empty: it has none, or they are not this job's."""
        status = self._status or {}
        return {} if "waits_for" in status else status.get("example", {})

    def _step(self, work: Callable[[], bytes]) -> str:
        try:
            reply = work()
        except BrayxError as error:
            raise _failed(error) from error
        quoted = reply[:_QUOTED_BYTES].decode("utf-8", "replace")
        return f"replied {quoted!r}" + ("…" if len(reply) > _QUOTED_BYTES else "")


def _new_session() -> str:
    return f"brayx-doctor-{uuid.uuid4().hex}"


def _is_of_client(error: BrayxError) -> bool:
    """Whether the client raised the error itself, without an answer: it then names the URL in the details."""
    return isinstance(error, TransportError) or "url" in error.details


def _failed(error: BrayxError) -> _Failed:
    return _Failed(f"{error.code}: {error.message}", _advice(error))


def _advice(error: BrayxError) -> str:
    """Advice about an error."""
    if isinstance(error, DeadlineExceeded) and _is_of_client(error):
        if error.details.get("layer") == "connect":
            return "a firewall may drop the packets; is the address right?"
        return f"something accepts connections there but does not answer: is it this door? {_PORTS}"
    if isinstance(error, Unauthorized) and error.details.get("field") == "time":
        return "set this machine's clock, or the service's"
    return next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), _UNKNOWN)


_ADVICE: dict[type[BrayxError], str] = {
    ConnectFailed: f"is the service running (serve status), and is the port right? {_PORTS}",
    ConnectionLost: f"the other side hung up: is it this door? {_PORTS}",
    TransportError: f"what answers is not brayx, or a proxy before it: is the application up (serve status), mounted "
    f"at this path, and the door this one? {_PORTS}",
    Unauthorized: "is the key's line the same in the service's file and in this one? the service reads its file when "
    "it starts",
    ServiceFull: "end sessions, or raise the actor's num_workers or actors_per_worker",
    Overloaded: "wait, then try again; if it stays so, raise the actor's num_workers",
    AgentError: "the replica's log has the exception and where it was raised",
    ModelError: "the message says what the model expects",
    DeadlineExceeded: "the agent or its model takes longer than the actor's tick_timeout_s: is the machine overloaded?",
    SessionError: "the session went between two requests: do two services share this address, or did a replica die? "
    "its log says why",
    ConfigError: "correct the job",
    ProtocolError: "do both sides have the same version of brayx?",
}
"""Advice by class of the error; the first class that fits counts."""

_UNKNOWN = "look the error up in docs/protocol.md"


def report(findings: Iterable[Finding], url: str, *, as_json: bool = False) -> int:
    """Prints the findings as they come; returns the exit code: 1 if a layer failed, else 0.

    Args:
        findings: findings from `examine`.
        url: URL of the service.
        as_json: print one JSON document at the end instead.
    """
    printed: list[Finding] = []
    for finding in findings:
        printed.append(finding)
        if not as_json:
            took = f"{finding.ms:9.1f} ms" if finding.outcome != "skipped" else " " * 12
            print(f"{finding.layer:<{_WIDTH}}  {finding.outcome:<7} {took}  {finding.said}".rstrip(), flush=True)
    failed = next((finding for finding in printed if finding.outcome == "failed"), None)
    if as_json:
        document = {"url": url, "ok": failed is None, "layers": [asdict(finding) for finding in printed]}
        print(json.dumps(document, indent=2))
    elif failed is None:
        print(f"{url} is well")
    else:
        print(f"{url}: {failed.layer} failed. What to do: {failed.advice}")
    return 0 if failed is None else 1
