"""The pool of registered models as one actor for all replicas of an application, and a replica's client of it.

With one actor the replicas agree, and one process writes to MLflow. The actor ends some time after the last call; the
next call starts another. `brayx.model.pool` has the pool itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from brayx.cluster.named import answer_with_retry, end_actor, find_actor, named_actor
from brayx.cluster.weights import MARGIN_S
from brayx.errors import BrayxError, DeadlineExceeded, ModelError
from brayx.metrics import Metric, Part
from brayx.model.arms import Followed
from brayx.model.pool import Aliases, Pool
from brayx.types import Weights

_ALONE_S = 60.0
"""Seconds without a call after which the actor ends; six times a replica's longest wait for new aliases."""
_FIRST_LOOK_S = 20.0
"""Longest wait of a starting replica for the aliases."""
_KEPT = 4
_MAX_RUNS = 2
"""Maximum functions that run at once: a registry that hangs must not take the threads that read weights and aliases."""

_Result = TypeVar("_Result")


class _PoolActor:
    """The pool as a Ray actor; it ends when no replica has called it for ``alone_s``."""

    def __init__(self, uri: str, project: str, followed: Mapping[str, Followed], alone_s: float) -> None:
        self._pool = Pool(uri, project, followed)
        self._alone_s = alone_s
        self._last_call = time.monotonic()
        self._waiting = 0
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._fetches: dict[tuple[str, int], asyncio.Task[Any]] = {}
        self._running = asyncio.Semaphore(_MAX_RUNS)
        self._task: asyncio.Task[None] | None = None

    async def newer(self, than: Aliases | None, timeout_s: float) -> Aliases | None:
        self._start()
        self._waiting += 1
        try:
            return await self._pool.newer(than, timeout_s)
        finally:
            self._waiting -= 1
            self._last_call = time.monotonic()

    async def weights(self, model: str, version: int) -> list[Any]:
        self._start()
        key = model, version
        if key not in self._kept:
            # When an alias moves, all replicas call at once, and call again after their timeout.
            fetching = self._fetches.get(key)
            if fetching is None:
                fetching = self._fetches[key] = asyncio.create_task(self._fetched(key))
                fetching.add_done_callback(lambda _: self._fetches.pop(key, None))
            return [await asyncio.shield(fetching)]
        return [self._kept[key]]

    async def _fetched(self, key: tuple[str, int]) -> Any:
        reference = self._kept[key] = ray.put(await self._pool.weights(*key))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return reference

    async def run(self, function: Callable[[], Any]) -> Any:
        self._start()
        self._last_call = time.monotonic()
        try:
            async with asyncio.timeout(MARGIN_S):
                await self._running.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"the registry has not answered {_MAX_RUNS} earlier reads") from None
        try:
            return await asyncio.to_thread(function)
        finally:
            self._running.release()

    async def push(self, part: tuple[Part, dict[str, Metric]]) -> None:
        self._start()
        self._pool.add(part)

    async def flush(self) -> None:
        self._start()
        await asyncio.to_thread(self._pool.write)

    def _start(self) -> None:
        """Starts the actor's work at its first call of any kind. A stopping replica may start an actor only to push its
        last results, and that actor must end too."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        running = asyncio.create_task(self._pool.run())
        while self._waiting or time.monotonic() < self._last_call + self._alone_s:
            await asyncio.wait([running], timeout=self._alone_s / 4)
        running.cancel()
        await asyncio.to_thread(self._pool.finish)
        end_actor(ray.get_runtime_context().current_actor)  # `exit_actor` is for methods, this is a task


class PoolClient:
    """A replica's client of the pool. It starts the actor if none runs, also after an earlier one ended. Pickles.

    Attributes:
        actor: the actor's full name. It contains a digest of the arguments, so a service that is deployed again with
            other aliases gets another actor, and the previous one ends after its last replica.
        models: names of the models whose weights it has.

    Args:
        actor: prefix of the name.
        uri, project, followed: as for `Pool`.
        alone_s: the actor ends when no replica has called it for this long.
    """

    def __init__(
        self,
        actor: str,
        uri: str,
        project: str,
        followed: Mapping[str, Followed],
        *,
        alone_s: float = _ALONE_S,
    ) -> None:
        self._made_of = (uri, project, dict(followed), alone_s)
        self.models = frozenset(followed)
        # Replicas choose the share of the canary, not the pool: a larger share starts no new runs of results.
        aliases = sorted(
            (model, target.name, target.alias, target.canary, target.every_s) for model, target in followed.items()
        )
        made_of = repr((uri, project, aliases, alone_s)).encode()
        self.actor = f"{actor}/{hashlib.blake2b(made_of, digest_size=8).hexdigest()}"

    @property
    def writes_results(self) -> bool:
        """Whether results are written to MLflow."""
        return bool(self._made_of[1])

    def push(self, part: tuple[Part, dict[str, Metric]]) -> Any:
        """Sends this process's results; returns Ray's reference of the call."""
        return self.handle().push.remote(part)

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Makes the pool write results now; if it does not answer in time, it writes them later."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(timeout_s):
                await self._call("flush")

    def handle(self) -> Any:
        """Ray's handle of the actor.

        Raises:
            ModelError: Ray is not running; a call would start a new cluster.
        """
        if not ray.is_initialized():
            raise ModelError(f"pool {self.actor!r} does not exist: Ray is not running")
        actor = find_actor(self.actor)
        if actor is not None:
            return actor
        options = {"lifetime": "detached", "max_restarts": 0, "max_concurrency": 10_000}
        return named_actor(_PoolActor, self.actor, **options).remote(*self._made_of)

    async def newer(self, than: Aliases | None, timeout_s: float) -> Aliases | None:
        """See `Pool.newer`.

        Raises:
            DeadlineExceeded, ModelError: the pool does not answer, or failed.
        """
        longest_s, call = timeout_s + MARGIN_S, functools.partial(self._call, "newer", than, timeout_s)
        aliases: Aliases | None = await answer_with_retry(call, longest_s, f"pool {self.actor!r}", finds_actor=True)
        return aliases

    async def look(self, timeout_s: float = _FIRST_LOOK_S) -> Aliases | None:
        """The versions of the aliases; None if the registry was not read within ``timeout_s``."""
        with contextlib.suppress(TimeoutError, BrayxError):
            async with asyncio.timeout(timeout_s):
                return await self.newer(None, timeout_s)
        return None

    async def weights(self, model: str, version: int, timeout_s: float = MARGIN_S) -> Weights:
        """The weights of a version: read-only views of shared memory.

        Raises:
            VersionUnknown: the registry does not have it.
            DeadlineExceeded: the weights did not arrive in time.
            ModelError: they were lost, or cannot be read.
        """

        async def call() -> Weights:
            [reference] = await self._call("weights", model, version)
            return await asyncio.to_thread(ray.get, reference, timeout=timeout_s)

        what = f"pool {self.actor!r} (version {version} of model {model!r})"
        weights: Weights = await answer_with_retry(call, timeout_s, what, finds_actor=True)
        return weights

    async def run(self, function: Callable[[], _Result], timeout_s: float = MARGIN_S) -> _Result:
        """Runs a blocking function in the pool's process: replicas that read the registry there need no MLflow.

        Args:
            function: pickles, and is safe to call twice.
            timeout_s: deadline of the call.

        Raises:
            BrayxError: the function raised it.
            DeadlineExceeded, ModelError: the pool does not answer, or failed.
        """
        call = functools.partial(self._call, "run", function)
        result: _Result = await answer_with_retry(call, timeout_s, f"pool {self.actor!r}", finds_actor=True)
        return result

    async def _call(self, method: str, *args: Any) -> Any:
        """Looks the actor up for each call, since an idle one may have just ended."""
        return await getattr(await asyncio.to_thread(self.handle), method).remote(*args)
