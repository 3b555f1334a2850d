"""Questions to a weight store, which are asked again while it is being restarted, and Ray's errors as typed ones.

Knows nothing of weights.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from brayx.errors import BrayxError, DeadlineExceeded, ModelError, first_line

ANSWER_S = 30.0
"""What a question to a part of a model may take."""

_AWAY_S = 0.1
_DIED_S = 0.2
_DIED_TIMES = 3
"""So often Ray says that the store died before that is for good: to whom had a call under way it says so of one that is
being restarted, too."""


class Restarts:
    """What one question has seen of its store's restarts."""

    def __init__(self) -> None:
        self._died = 0

    def wait_s(self, error: RayActorError) -> float:
        """Seconds until it is worth asking again, after ``error``.

        Raises:
            ModelError: the store has ended for good.
        """
        if not isinstance(error, ActorDiedError):
            return _AWAY_S
        self._died += 1
        if self._died >= _DIED_TIMES:
            raise ModelError(f"the weight store has ended: {first_line(error)}") from error
        return _DIED_S


def asked(call: Any, *args: Any, timeout_s: float = ANSWER_S) -> Any:
    """What a weight store answers to ``call``, a method of its handle; one that is being restarted is asked again.

    Blocking. A call may be made twice: what it does must bear that.

    Raises:
        DeadlineExceeded: it did not answer in time, a restart included.
        ModelError: it has ended for good.
    """
    deadline, restarts = time.monotonic() + timeout_s, Restarts()
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ray.get(call.remote(*args), timeout=max(left_s, 0.001))
        except RayActorError as error:
            wait_s = restarts.wait_s(error)
            if wait_s > left_s:
                raise DeadlineExceeded(f"the weight store was not there for {timeout_s:g} s") from error
            time.sleep(wait_s)
        except RayError as error:
            raise typed(error, timeout_s) from error


def typed(error: RayError, timeout_s: float) -> BaseException:
    """The typed error for what Ray raised of a question that might take ``timeout_s``."""
    cause = unwrap(error)
    if cause is not error:
        return cause
    if isinstance(error, GetTimeoutError):
        return DeadlineExceeded(f"the weight store did not answer in {timeout_s:g} s")
    return ModelError(f"the weight store failed: {first_line(error)}")


def unwrap(error: BaseException) -> BaseException:
    """The typed error that Ray carried from another process, or ``error`` itself."""
    cause: Any = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BrayxError) else error
