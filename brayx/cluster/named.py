"""Creates, finds and ends named actors, and calls them within a deadline and across restarts; one of them is a lock.

Ray's errors become brayx's here. Knows nothing of what the actors do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import ray
from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brayx.cluster import NAMESPACE
from brayx.errors import BrayxError, DeadlineExceeded, ModelError, StartupError, first_line

HEAD = "node:__internal_head__"
"""Ray's resource that only the head node has."""
WEIGHT_STORE = "the weight store"
"""Name in messages of the actor that most callers use."""

ANSWER_S = 30.0
"""Default time limit of a call."""

_AWAY_S = 0.1
_DIED_S = 0.2
_DIED_TIMES = 3
"""Number of reports of an actor's death after which it has ended for good. A call in flight gets such a report even if
the actor is being restarted."""
_LOCK_RETRY_S = 0.05


def named_actor(kind: type, name: str, **options: Any) -> Any:
    """Makes the class of a named actor: it takes no CPU, Ray restarts it, and there is one per name.

    Args:
        kind: class of the actor.
        name: name of the actor.
        options: options for Ray's actor, in place of these defaults.

    Returns:
        An actor class of Ray; its ``remote(...)`` starts the actor, or finds it, and returns the handle.
    """
    actor: Any = ray.remote(kind)
    defaults: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "get_if_exists": True}
    return actor.options(name=name, namespace=NAMESPACE, **{**defaults, **options})


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """The scheduling strategy of an actor that must run on the caller's node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def find_actor(name: str, namespace: str = NAMESPACE) -> Any | None:
    """Handle of the named actor; None: there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def get_actor(name: str, what: str) -> Any:
    """Handle of the named actor.

    Raises:
        StartupError: it is not running; the message calls it ``what``.
    """
    actor = find_actor(name)
    if actor is None:
        raise StartupError(f"{what} {name!r} is not running", name=name)
    return actor


def end_actor(actor: Any) -> None:
    """Ends an actor for good. Does nothing if there is none, or if Ray has lost it."""
    if actor is not None:
        with contextlib.suppress(RayError):
            ray.kill(actor)


def is_restarted() -> bool:
    """Whether this process is that of an actor which replaces one that died."""
    if not ray.is_initialized():
        return False
    with warnings.catch_warnings():  # Ray's property calls deprecated functions of Ray
        warnings.simplefilter("ignore")
        context = ray.get_runtime_context()
        return bool(context.get_actor_id() and context.was_current_actor_reconstructed)


def is_done(call: Any) -> bool:
    """Whether a call has its answer, or has failed."""
    return bool(ray.wait([call], timeout=0)[0])


def result(call: Any, timeout_s: float, what: str) -> Any:
    """The answer of a call to an actor; blocks until it is there.

    Args:
        call: Ray's reference of the call.
        timeout_s: longest wait.
        what: the actor, for the message of an error.

    Raises:
        BrayxError: the actor raised it; or `DeadlineExceeded`: no answer in time; or `ModelError`: the actor failed.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except RayError as error:
        raise typed(error, timeout_s, what) from error


def result_or(default: Any, call: Any, timeout_s: float = ANSWER_S) -> Any:
    """The answer of a call, or ``default`` if Ray has none: the actor is slow, is being restarted, or failed."""
    try:
        return ray.get(call, timeout=timeout_s)
    except RayError:
        return default


class Restarts:
    """Counts the restarts of an actor that one call has seen; ``what`` names the actor in messages."""

    def __init__(self, what: str = WEIGHT_STORE) -> None:
        self._what = what
        self._died = 0

    def wait_s(self, error: RayActorError) -> float:
        """Seconds until the next try, after ``error``.

        Raises:
            ModelError: the actor has ended for good.
        """
        if not isinstance(error, ActorDiedError):
            return _AWAY_S
        self._died += 1
        if self._died >= _DIED_TIMES:
            raise ModelError(f"{self._what} has ended: {first_line(error)}") from error
        return _DIED_S


def call_with_retry(method: Any, *args: Any, timeout_s: float = ANSWER_S, what: str = WEIGHT_STORE) -> Any:
    """The result of an actor's ``method``; repeats the call while the actor is being restarted.

    Blocking. The call may be made twice, so it must be safe to repeat.

    Raises:
        DeadlineExceeded: there was no answer in time, a restart included.
        ModelError: the actor has ended for good.
    """
    deadline, restarts = time.monotonic() + timeout_s, Restarts(what)
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ray.get(method.remote(*args), timeout=max(left_s, 0.001))
        except RayActorError as error:
            wait_s = restarts.wait_s(error)
            if wait_s > left_s:
                raise DeadlineExceeded(f"{what} was not running for {timeout_s:g} s") from error
            time.sleep(wait_s)
        except RayError as error:
            raise typed(error, timeout_s, what) from error


async def answer_with_retry(
    call: Callable[[], Awaitable[Any]], timeout_s: float, what: str, *, finds_actor: bool = False
) -> Any:
    """Awaits ``call()``, and makes it again while no actor is there to answer.

    The call may be made twice, so it must be safe to repeat.

    Args:
        call: calls an actor.
        timeout_s: deadline of all calls together.
        what: the actor, for the message of an error.
        finds_actor: each call finds its actor, or starts one, so it is repeated however often the actor has died.

    Raises:
        BrayxError: the actor raised it; or `DeadlineExceeded`: no answer in time; or `ModelError`: the actor failed.
    """
    restarts = Restarts(what)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await call()
                except RayActorError as error:
                    await asyncio.sleep(_AWAY_S if finds_actor else restarts.wait_s(error))
    except (RayError, TimeoutError) as error:
        raise typed(error, timeout_s, what) from error


def typed(error: RayError | TimeoutError, timeout_s: float, what: str) -> BrayxError:
    """brayx's error for a call that Ray reports as failed, or that took too long.

    Args:
        error: error of the call.
        timeout_s: time limit of the call.
        what: the actor, for the message.
    """
    cause = unwrap(error)
    if isinstance(cause, BrayxError):
        return cause
    if isinstance(error, TimeoutError):  # Ray's `GetTimeoutError` is one
        return DeadlineExceeded(f"{what} did not answer in {timeout_s:g} s")
    return ModelError(f"{what} failed: {first_line(error)}")


def unwrap(error: BaseException) -> BaseException:
    """The error of brayx that Ray carried from another process, or ``error`` itself."""
    cause: Any = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BrayxError) else error


class _Lock:
    """A named actor used as a cluster-wide lock: its name can exist only once."""


@contextlib.contextmanager
def named_lock(name: str, until: float) -> Iterator[None]:
    """Holds a lock of the whole cluster; blocks while another process holds it.

    Ray ends the lock's actor with the process that made it, so a process that is killed leaves no lock behind. An
    actor costs a process's start: take the lock only to end what others run, or to open what only one may open.

    Args:
        name: name of the model that is started or overridden.
        until: deadline, on the monotonic clock.

    Raises:
        StartupError: another process held it all that time.
    """
    lock = named_actor(_Lock, f"lock/{name}", max_restarts=0, get_if_exists=False)
    while True:
        try:
            holder = lock.remote()
            break
        except ActorAlreadyExistsError as error:
            if time.monotonic() > until:
                raise StartupError(
                    f"another process is starting or overriding model {name!r}, and did not finish in time", name=name
                ) from error
            time.sleep(_LOCK_RETRY_S)
    try:
        yield
    finally:
        ray.kill(holder)
