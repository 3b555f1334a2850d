"""Overriding a model, or starting one with a trial, is one process's turn at a time, in the whole cluster.

A turn is a named actor of Ray's: no two processes can make it, and it goes with the process that did, so one that is
killed leaves no turn behind. It costs a process's start, which is why only those take turns who end what another runs
or open what only one may have at work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from brayx.errors import StartupError

_AGAIN_S = 0.05


class _Turn:
    """Is there; that is all."""


@contextlib.contextmanager
def turn(name: str, namespace: str, until: float) -> Iterator[None]:
    """Has the turn to start or override the model of that name while it lasts. Blocks until others have had theirs.

    Args:
        name: of the model.
        namespace: Ray's.
        until: on the monotonic clock.

    Raises:
        StartupError: another process has it all that time.
    """
    actor: Any = ray.remote(_Turn)
    while True:
        try:
            held = actor.options(name=f"turn/{name}", namespace=namespace, num_cpus=0).remote()
            break
        except ActorAlreadyExistsError as error:
            if time.monotonic() > until:
                raise StartupError(
                    f"another process is starting or overriding model {name!r}, and not done in time", name=name
                ) from error
            time.sleep(_AGAIN_S)
    try:
        yield
    finally:
        ray.kill(held)
