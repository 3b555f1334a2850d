"""What an application that serves from the registry follows: where aliases point, the weights of versions, results.

One actor looks for all its replicas, so that they agree, and one process writes to MLflow. It ends when nobody has
asked for a while. A version of the registry never changes, so any that a session began with can be had again.
`Pool` is asyncio and MLflow; the actor around it and `PoolSubscriber` are Ray's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from brayx.cluster.asking import unwrap
from brayx.engines.base import check_finite, load_weights
from brayx.errors import (
    BadWeights,
    BrayxError,
    DeadlineExceeded,
    ModelError,
    ModelNotFound,
    TrackingError,
    VersionUnknown,
    first_line,
)
from brayx.metrics import Metric, Part
from brayx.model.arms import Arm, Followed, Results, results_of
from brayx.model.versions import version_unknown
from brayx.tracking import Trial, aliases, files_of, tag
from brayx.types import Weights

_log = logging.getLogger(__name__)

_MARGIN_S = 10.0
_ASK_S = 10.0
_AGAIN_S = 0.2
_ALONE_S = 60.0
"""Replicas ask every `_ASK_S`."""
_WRITE_S = 10.0
_FIRST_LOOK_S = 20.0
"""How long a replica that starts waits for where aliases point."""
_KEPT = 4

Aliases = dict[str, dict[str, int]]
"""Version by alias, by model component; aliases without a version are not there."""


class Pool:
    """Looks where the aliases of some models point, gives their weights, and books results by arm.

    `write` and `finish` are for threads, any number of them; the rest is for the event loop.

    Attributes:
        failures: bookings of an arm that failed so far.

    Args:
        uri: tracking URI.
        project: MLflow experiment of the results; empty: they are not booked.
        followed: models by component name.
    """

    def __init__(self, uri: str, project: str, followed: Mapping[str, Followed]) -> None:
        self._uri = uri
        self._project = project
        self._followed = dict(followed)
        self._at: Aliases = {}
        self._generation = 0
        self._changed = asyncio.Event()
        self._failing = False
        self._refused: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}
        self._counting = threading.Lock()  # for what `add` has on the event loop: never held for long
        self._results: dict[Arm, Results] = {}
        self._fresh: set[Arm] = set()
        self._writing = threading.Lock()
        self._trials: dict[Arm, Trial] = {}
        self._begun: set[Arm] = set()
        self.failures = 0

    async def look(self) -> None:
        """Looks once; a registry that cannot be read leaves things as they were."""
        try:
            found = {model: await asyncio.to_thread(self._aliases, of) for model, of in self._followed.items()}
        except Exception as error:  # what ended the task that looks would end following without a word
            if not self._failing:
                _log.warning("the aliases stay as they are: %s: %s", type(error).__name__, error)
            self._failing = True
            return
        self._failing = False
        if found != self._at or not self._generation:
            self._at = found
            self._generation += 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def newer(self, than: int, timeout_s: float) -> tuple[int, Aliases] | None:
        """Where the aliases point and the number of that news, once it is above ``than``; None: not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._generation <= than:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._generation, self._at

    async def weights(self, model: str, version: int) -> Weights:
        """The weights of a version.

        Raises:
            VersionUnknown: the registry does not have it; names the nearest that it has.
            BadWeights: they hold NaN or infinity.
            BadWeights, TrackingError: its files cannot be read.
        """
        name = self._followed[model].name
        if (model, version) not in self._refused:  # it never changes, and who follows the alias asks every second
            weights = await asyncio.to_thread(self._read, name, version)
            try:
                await asyncio.to_thread(check_finite, weights)
                return weights
            except BadWeights as error:
                self._refused[model, version] = error.message, error.details
        # A new one for each who asks: an error that is raised again and again gathers a longer traceback each time.
        message, details = self._refused[model, version]
        raise BadWeights(f"version {version} of model {name!r}: {message}", **details)

    def add(self, part: tuple[Part, dict[str, Metric]]) -> None:
        """Adds what a replica counted."""
        with self._counting:
            for arm, results in results_of(part).items():
                if arm.model in self._followed:
                    self._fresh.add(arm)
                    self._results.setdefault(arm, Results()).join(results)

    def write(self) -> None:
        """Books what has come: a run for each arm's version, and the numbers as tags of the version. Blocking.

        What cannot be booked is logged, counted in `failures`, and tried again with the next.
        """
        with self._writing:
            with self._counting:
                fresh, self._fresh = self._fresh, set()
            for arm in fresh if self._project else ():
                try:
                    self._write(arm)
                except Exception as error:  # whatever it is: one arm's must end neither the others nor the task
                    with self._counting:
                        self._fresh.add(arm)  # its numbers are totals: the next write has all of them
                    self.failures += 1
                    why = f"{type(error).__name__}: {first_line(error)}"
                    _log.warning("results of %s are not written for now: %s", arm.label, why)

    def finish(self) -> None:
        """Books the last, and that the runs have ended. Blocking."""
        self.write()
        with self._writing:
            for trial in self._trials.values():
                with contextlib.suppress(TrackingError):
                    trial.finish()

    def _read(self, name: str, version: int) -> Weights:
        try:
            with files_of(f"models:/{name}/{version}", self._uri) as folder:
                return load_weights(folder / "weights.npz")
        except ModelNotFound as error:
            if known := error.details.get("known"):
                raise version_unknown(version, known) from None
            raise VersionUnknown(error.message, version=version, known=[]) from None

    def _aliases(self, of: Followed) -> dict[str, int]:
        return {alias: v for alias, v in aliases(of.name, self._uri).items() if alias in (of.alias, of.canary)}

    def _write(self, arm: Arm) -> None:
        name = self._followed[arm.model].name
        if arm not in self._trials:
            title = f"serving {_searchable(name)} {arm.version} as {arm.alias}"
            try:
                self._trials[arm] = Trial.open(self._project, title, self._uri)
            except TrackingError:  # another service has it at work
                self._trials[arm] = Trial.open(self._project, title, self._uri, resume=False)
        trial = self._trials[arm]
        if arm not in self._begun:
            trial.log_params({"serving": {"model": name, "version": arm.version, "alias": arm.alias}})
            before = Results.of(trial.metrics()) if trial.resumed else Results()
            with self._counting:
                self._results[arm].join(before)
            self._begun.add(arm)  # last: however often this is tried, what was there before is added once
        with self._counting:
            numbers = self._results[arm].numbers()
        trial.log_metrics(numbers, int(numbers["sessions"]))
        if arm.version:
            tag(name, arm.version, {f"serving.{key}": f"{value:g}" for key, value in numbers.items()}, self._uri)


def _searchable(name: str) -> str:
    """A registered model's name for a run's, which may have fewer characters: with a digest where it is another."""
    plain = re.sub(r"[^\w .:+@=,-]", "_", name)[:100]
    return name if plain == name else f"{plain} {hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


class _PoolActor:
    """The pool as a Ray actor, which looks on its own and ends when nobody asks any more."""

    def __init__(self, uri: str, project: str, followed: Mapping[str, Followed], alone_s: float) -> None:
        self._pool = Pool(uri, project, followed)
        self._alone_s = alone_s
        self._every_s = min((of.every_s for of in followed.values()), default=_ASK_S)
        self._asked = time.monotonic()
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._fetches: dict[tuple[str, int], asyncio.Task[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def newer(self, than: int, timeout_s: float) -> tuple[int, Aliases] | None:
        self._asked = time.monotonic()
        self._begin()
        return await self._pool.newer(than, timeout_s)

    async def weights(self, model: str, version: int) -> list[Any]:
        self._begin()
        key = model, version
        if key not in self._kept:
            # When an alias moves all replicas ask at once, and ask again when they have waited for too long.
            fetching = self._fetches.get(key)
            if fetching is None:
                fetching = self._fetches[key] = asyncio.create_task(self._fetched(key))
                fetching.add_done_callback(lambda _: self._fetches.pop(key, None))
            return [await asyncio.shield(fetching)]
        return [self._kept[key]]

    async def _fetched(self, key: tuple[str, int]) -> Any:
        kept = self._kept[key] = ray.put(await self._pool.weights(*key))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept

    async def push(self, part: tuple[Part, dict[str, Metric]]) -> None:
        self._begin()
        self._pool.add(part)

    async def flush(self) -> None:
        self._begin()
        await asyncio.to_thread(self._pool.write)

    def _begin(self) -> None:
        """With the first call, whichever it is: a replica that stops hands over its last results to one made for that,
        which nobody else would ever ask."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._write())]

    async def _look(self) -> None:
        while time.monotonic() - self._asked < self._alone_s:
            await self._pool.look()
            await asyncio.sleep(self._every_s)
        await asyncio.to_thread(self._pool.finish)
        ray.kill(ray.get_runtime_context().current_actor)  # `exit_actor` is for methods, this is a task

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_S)
            await asyncio.to_thread(self._pool.write)


class PoolClient:
    """A replica's end of the pool. It starts the actor if there is none, and again if that has ended. Pickles.

    Attributes:
        actor: the actor's full name: with a digest of what it is made of, so that a service which is deployed anew to
            follow something else has another, and the one before ends with its last replica.

    Args:
        actor: what its name begins with.
        namespace: Ray's.
        uri, project, followed: as of `Pool`.
        alone_s: without a question for so long the actor ends.
    """

    def __init__(
        self,
        actor: str,
        namespace: str,
        uri: str,
        project: str,
        followed: Mapping[str, Followed],
        *,
        alone_s: float = _ALONE_S,
    ) -> None:
        self._namespace = namespace
        self._made_of = (uri, project, dict(followed), alone_s)
        # Whom replicas send where is not the pool's: the canary's share grows without new runs of results.
        of = sorted((model, one.name, one.alias, one.canary, one.every_s) for model, one in followed.items())
        made_of = repr((uri, project, of, alone_s)).encode()
        self.actor = f"{actor}/{hashlib.blake2b(made_of, digest_size=8).hexdigest()}"

    @property
    def books(self) -> bool:
        """Whether results are booked."""
        return bool(self._made_of[1])

    def push(self, part: tuple[Part, dict[str, Metric]]) -> Any:
        """Hands over what this process counted; gives Ray's reference of the call."""
        return self.handle().push.remote(part)

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Has results booked now; one that is not there or too slow will do so in its time."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(timeout_s):
                await (await asyncio.to_thread(self.handle)).flush.remote()

    def handle(self) -> Any:
        """Ray's handle of the actor."""
        try:
            return ray.get_actor(self.actor, namespace=self._namespace)
        except ValueError:
            actor: Any = ray.remote(_PoolActor)
        options = {"lifetime": "detached", "num_cpus": 0, "max_concurrency": 10_000, "get_if_exists": True}
        return actor.options(name=self.actor, namespace=self._namespace, **options).remote(*self._made_of)

    async def look(self, timeout_s: float = _FIRST_LOOK_S) -> Aliases | None:
        """Where the aliases point, as far as the pool knows; None: it has not read the registry in that time."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        found = await (await asyncio.to_thread(self.handle)).newer.remote(0, timeout_s)
                        return None if found is None else found[1]
                    except RayActorError:  # it has just ended, since nobody asked; there is another one now
                        await asyncio.sleep(_AGAIN_S)
        return None

    async def fetch(self, model: str, version: int, timeout_s: float = _MARGIN_S) -> Weights:
        """The weights of a version: read-only views of shared memory.

        Raises:
            VersionUnknown: the registry does not have it.
            DeadlineExceeded: not in time.
            ModelError: they were lost, or cannot be read.
        """
        try:
            async with asyncio.timeout(timeout_s):
                [reference] = await (await asyncio.to_thread(self.handle)).weights.remote(model, version)
            weights: Weights = await asyncio.to_thread(ray.get, reference, timeout=timeout_s)
            return weights
        except (TimeoutError, GetTimeoutError, RayActorError) as error:
            raise DeadlineExceeded(f"version {version} of model {model!r} did not come in {timeout_s:g} s") from error
        except RayTaskError as error:
            cause = unwrap(error)
            raise cause if isinstance(cause, BrayxError) else ModelError(first_line(error)) from error
        except RayError as error:
            raise ModelError(f"version {version} of model {model!r} is lost: {first_line(error)}") from error


class PoolSubscriber:
    """Tells where aliases point when that changes: ``on_aliases`` is awaited, one call at a time.

    What it raises as a typed error is logged, and it is asked again a little later. A pool that is away is asked again
    until `stop`.
    """

    def __init__(self, client: PoolClient, on_aliases: Callable[[Aliases], Awaitable[None]]) -> None:
        self._client = client
        self._on_aliases = on_aliases
        self._task: asyncio.Task[None] | None = None
        self._seen = 0

    @property
    def running(self) -> bool:
        """Whether it follows now."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begins to follow, in a task."""
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Ends the task; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        said = False
        while ray.is_initialized():
            try:
                pool = await asyncio.to_thread(self._client.handle)
                async with asyncio.timeout(_ASK_S + _MARGIN_S):
                    found = await pool.newer.remote(self._seen, _ASK_S)
                if found is not None:
                    generation, at = found
                    await self._on_aliases(at)
                    self._seen = generation
                said = False
            except RayActorError:
                self._seen = 0  # another one counts anew
                await asyncio.sleep(_AGAIN_S)
            except Exception as error:
                # Nobody waits for this task: what ends it would end following without a word.
                if not said:
                    _log.warning("the registry's aliases are not followed for now: %s: %s", type(error).__name__, error)
                said = True
                await asyncio.sleep(1.0)
