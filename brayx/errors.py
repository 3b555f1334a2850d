"""The typed errors of brayx, each with its code and HTTP status.

    BrayxError                          internal            500
    ├── ProtocolError                   bad_request         400
    │   ├── BadBody                     bad_body            400
    │   │   ├── BadLimits               bad_limits          400
    │   │   └── BadResult               bad_result          400
    │   ├── BodyTooLarge                body_too_large      413
    │   └── HeaderTooLarge              header_too_large    431
    ├── Unauthorized                    unauthorized        401
    ├── Forbidden                       forbidden           403   (raised by the console only)
    ├── SessionError                    session_error       409
    │   ├── SessionUnknown              session_unknown     404
    │   ├── SessionExists               session_exists      409
    │   ├── SessionLost                 session_lost        410
    │   ├── SessionResumed              session_resumed     409
    │   └── OutOfSequence               out_of_sequence     409
    ├── AgentError                      agent_error         500
    ├── Overloaded                      overloaded          503
    │   ├── ServiceFull                 service_full        503
    │   ├── TooManyConnections          too_many_connections 503
    │   └── QueueFull                   queue_full          503
    ├── DeadlineExceeded                deadline_exceeded   504
    ├── ModelError                      model_error         500
    │   ├── ShapeMismatch               shape_mismatch      422
    │   ├── EngineMismatch              engine_mismatch     500
    │   ├── WeightsFrozen               weights_frozen      409
    │   ├── BadWeights                  bad_weights         422
    │   ├── Diverged                    diverged            422
    │   └── VersionUnknown              version_unknown     404
    ├── ReplayError                     replay_error        500
    │   └── BadFragment                 bad_fragment        422
    ├── LeagueError                     league_error        409
    ├── BadRecording                    bad_recording       422
    │   └── RecordingUnknown            recording_unknown   404
    ├── NotDeterministic                not_deterministic   409
    ├── PromotionRefused                promotion_refused   409
    ├── EnvironmentFailed               environment_failed  500
    ├── ConfigError                     bad_config          400
    ├── TrackingError                   tracking_error      500
    │   ├── ModelNotFound               model_not_found     404
    │   └── TrialNotFound               trial_not_found     404
    ├── StartupError                    startup_error       500
    ├── JobNotRunning                   job_not_running     404
    └── TransportError                  transport_error     502   (raised by clients only)
        ├── ConnectFailed               connect_failed      502
        └── ConnectionLost              connection_lost     502

An error carries a one-line ``message`` for people and ``details`` (JSON values) for programs. It pickles, and it
crosses a door as ``{"error": code, "message": ..., "details": {...}}``; `from_wire` restores the same class on the
client's side. Knows nothing of HTTP servers, Ray or torch.
"""

from __future__ import annotations

import json
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

Json = Any

_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parent}/",
    "<",  # as of "<frozen importlib>"
)
"""Prefixes of the paths of library code, as opposed to the user's own."""
_GRPC_STATUS = {
    401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "FAILED_PRECONDITION", 410: "DATA_LOSS",
    502: "UNAVAILABLE", 503: "RESOURCE_EXHAUSTED", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""gRPC's status by HTTP's; of others, INVALID_ARGUMENT below 500, else INTERNAL."""


class BrayxError(Exception):
    """Base of all typed errors.

    Args:
        message: one line that names the field, what came and what was expected.
        **details: JSON values that let a program react without parsing the message.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls) -> None:
        if "http_status" in vars(cls) and "grpc_status" not in vars(cls):
            cls.grpc_status = _GRPC_STATUS.get(
                cls.http_status, "INVALID_ARGUMENT" if cls.http_status < 500 else "INTERNAL"
            )

    def __init__(self, message: str, **details: Json) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Json] = details

    def __reduce__(self) -> tuple[Callable[..., BrayxError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.details)

    def __str__(self) -> str:
        return self.message

    def to_wire(self) -> bytes:
        """The error as the UTF-8 JSON document that every door sends."""
        document = {"error": self.code, "message": self.message, "details": self.details}
        return json.dumps(document, default=str).encode()


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "without a message")


def raised_at(error: BaseException) -> str:
    """``FILE:LINE`` where an error was raised: the innermost line of the user's own code, if any, else of all code.

    Empty for an error that was never raised.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_places = [place for place in places if not place[0].startswith(_LIBRARIES)]
    return "{}:{}".format(*(user_places or places)[-1]) if places else ""


def called_from() -> str:
    """``FILE:LINE`` of the innermost line of the user's own code that led here; empty if there is none."""
    frames = traceback.walk_stack(None)
    places = (f"{frame.f_code.co_filename}:{line}" for frame, line in frames)
    return next((place for place in places if not place.startswith(_LIBRARIES)), "")


def nearest_version(version: int, known: Iterable[int]) -> tuple[str, dict[str, Json]]:
    """Message and details for a version that is not among ``known``.

    Args:
        version: the requested version.
        known: the existing versions; at least one.

    Returns:
        The end of a message, which names the nearest version (the newer one of two equally near), and the details
        ``nearest`` and ``known`` (at most the 256 nearest, in order).
    """
    there = sorted(known)
    near = sorted(there, key=lambda other: (abs(other - version), -other))[:256]
    listed = ("..., " if there[16:] else "") + ", ".join(map(str, there[-16:]))
    return f"nearest is {near[0]}; there are {listed}", {"nearest": near[0], "known": sorted(near)}


def _rebuild(cls: type[BrayxError], message: str, details: Mapping[str, Json]) -> BrayxError:
    return cls(message, **details)


class ProtocolError(BrayxError):
    """The request itself is malformed: a header, a frame, a step kind."""

    code = "bad_request"
    http_status = 400


class BadBody(ProtocolError):
    """The body does not parse as the format this actor is configured for, or holds an unusable value such as NaN. The
    session continues."""

    code = "bad_body"


class BadLimits(BadBody):
    """A tick or a start forbids or forces what cannot be: no choice is left, or the model learns and has no mask for
    the action. A mistake of the client, which counts as no error of the agent that found it. The session continues."""

    code = "bad_limits"


class BadResult(BadBody):
    """A result that is not a win, draw, loss or finite score, differs from the seat's first one, or is for a session
    that does not run. A running session continues."""

    code = "bad_result"


class BodyTooLarge(ProtocolError):
    """The body is larger than the door allows."""

    code = "body_too_large"
    http_status = 413


class HeaderTooLarge(ProtocolError):
    """A request's header, or one of its fields, is longer than the door allows."""

    code = "header_too_large"
    http_status = 431


class Unauthorized(BrayxError):
    """The service requires keys, and the request's key, time or token is missing, unknown, out of its window or
    wrong."""

    code = "unauthorized"
    http_status = 401


class Forbidden(BrayxError):
    """The caller may not do this: the request may come from a foreign web page, or the console's key may only read."""

    code = "forbidden"
    http_status = 403


class SessionError(BrayxError):
    """A request that does not fit the state of its session."""

    code = "session_error"
    http_status = 409


class SessionUnknown(SessionError):
    """A tick or stop for a session that was never started, or has ended."""

    code = "session_unknown"
    http_status = 404


class SessionExists(SessionError):
    """A start for a session that is running."""

    code = "session_exists"
    grpc_status = "ALREADY_EXISTS"


class SessionLost(SessionError):
    """The session's owner died, or ended it for the reason in ``details["reason"]``. Reported once.
    Numbered ticks and stops get it every time, because they may be retries."""

    code = "session_lost"
    http_status = 410


class SessionResumed(SessionError):
    """The session's owner died, and another replica resumed it from a snapshot.

    The request was not applied. ``details["tick"]`` is the number of the next tick, which no earlier one had, and
    ``details["restored"]`` the number of ticks that the snapshot has. Reported once.
    """

    code = "session_resumed"


class OutOfSequence(SessionError):
    """A numbered tick that is neither the next one nor a repeat of the last; ``expected`` and ``got`` in details."""

    code = "out_of_sequence"


class AgentError(BrayxError):
    """An agent raised. Its session ends; the traceback is in the replica's log, not on the wire."""

    code = "agent_error"


class Overloaded(BrayxError):
    """The service has no room for this request now."""

    code = "overloaded"
    http_status = 503


class ServiceFull(Overloaded):
    """No room for another session. Only starts are refused with it, never ticks."""

    code = "service_full"


class TooManyConnections(Overloaded):
    """The door holds as many connections as it may."""

    code = "too_many_connections"


class QueueFull(Overloaded):
    """A bounded queue inside the service is full."""

    code = "queue_full"


class DeadlineExceeded(BrayxError):
    """A wait exceeded its deadline; the message names what did not arrive."""

    code = "deadline_exceeded"
    http_status = 504


class ModelError(BrayxError):
    """A model could not be built, run or fed."""

    code = "model_error"


class ShapeMismatch(ModelError):
    """Inputs do not have the structure, shape or dtype that the model expects, or a whole number is out of bounds."""

    code = "shape_mismatch"
    http_status = 422


class EngineMismatch(ModelError):
    """An engine's outputs differ from the torch reference by more than the tolerance."""

    code = "engine_mismatch"


class WeightsFrozen(ModelError):
    """A frozen engine was given weights other than those it was built with."""

    code = "weights_frozen"
    http_status = 409


class BadWeights(ModelError):
    """Weights that do not fit the model, or hold NaN or infinity; the message names the leaf."""

    code = "bad_weights"
    http_status = 422


class Diverged(ModelError):
    """The loss is not finite, or none of the collected data is; the message names the value."""

    code = "diverged"
    http_status = 422


class VersionUnknown(ModelError):
    """A policy version that is not kept, or never was; ``nearest`` and ``known`` in details."""

    code = "version_unknown"
    http_status = 404


class ReplayError(BrayxError):
    """The replay buffer or its stream failed."""

    code = "replay_error"


class BadFragment(ReplayError):
    """A fragment refused at push: wrong structure, shape, dtype, or not finite."""

    code = "bad_fragment"
    http_status = 422


class LeagueError(BrayxError):
    """A request that does not fit the state of the league, or books that cannot be read or written."""

    code = "league_error"
    http_status = 409


class BadRecording(BrayxError):
    """A file is not a recording, is broken, or does not fit its use; names the file."""

    code = "bad_recording"
    http_status = 422


class RecordingUnknown(BadRecording):
    """There is no recording with this id."""

    code = "recording_unknown"
    http_status = 404


class NotDeterministic(BrayxError):
    """A game that got its recorded replies sent inputs that differ from the recording; ``tick`` in details."""

    code = "not_deterministic"
    http_status = 409


class PromotionRefused(BrayxError):
    """A version did not pass a gate; the message has the number that decided."""

    code = "promotion_refused"
    http_status = 409


class EnvironmentFailed(BrayxError):
    """A Python environment raised. Names the method, and on a cluster the environment and the worker."""

    code = "environment_failed"


class ConfigError(BrayxError):
    """A configuration that cannot be used; the message names file, key and the nearest right name."""

    code = "bad_config"
    http_status = 400


class TrackingError(BrayxError):
    """MLflow could not be reached, read or written."""

    code = "tracking_error"


class ModelNotFound(TrackingError):
    """The pool has no such model, alias or version; the message names the nearest, or what to run."""

    code = "model_not_found"
    http_status = 404


class TrialNotFound(TrackingError):
    """There is no trial with this id."""

    code = "trial_not_found"
    http_status = 404


class StartupError(BrayxError):
    """A part of the system did not start: a port taken, a folder not writable, a process that died."""

    code = "startup_error"


class JobNotRunning(BrayxError):
    """A request to a training that has ended, or never existed."""

    code = "job_not_running"
    http_status = 404


class TransportError(BrayxError):
    """The client could not deliver a request, or did not get its reply."""

    code = "transport_error"
    http_status = 502


class ConnectFailed(TransportError):
    """No connection to the service: nothing was sent."""

    code = "connect_failed"


class ConnectionLost(TransportError):
    """The connection broke with a request on its way: it may or may not have been applied."""

    code = "connection_lost"


def _tree(cls: type[BrayxError]) -> list[type[BrayxError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


BY_CODE: dict[str, type[BrayxError]] = {cls.code: cls for cls in _tree(BrayxError)}


def from_wire(data: bytes, *, http_status: int = 500) -> BrayxError:
    """The typed error in a door's answer.

    Args:
        data: the error document; anything else, such as a proxy's error page, becomes a `TransportError` that quotes
            it.
        http_status: status of the answer, used only if ``data`` is not a brayx error document.
    """
    try:
        document = json.loads(data)
        cls = BY_CODE[document["error"]]
        return cls(str(document["message"]), **document.get("details", {}))
    except (ValueError, KeyError, TypeError):
        quoted = data[:200].decode("utf-8", "replace").strip()
        return TransportError(
            f"the service answered status {http_status} without a brayx error document: {quoted!r}",
            http_status=http_status,
        )
