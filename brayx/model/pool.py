"""Serving from the model registry: versions of aliases, weights of registered versions, results by arm.

Asyncio and MLflow; knows nothing of what serves the models. A registered version never changes, so the version that a
session started with can be fetched again at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from brayx.engines.base import check_finite, load_weights
from brayx.errors import BadWeights, ModelNotFound, TrackingError, VersionUnknown, first_line
from brayx.metrics import Metric, Part
from brayx.metrics.charts import SERVING_CHARTS
from brayx.model.arms import Arm, Followed, Results, results_of
from brayx.model.versions import version_unknown
from brayx.tracking import Trial, aliases, files_of, find, local_files, tag
from brayx.types import Weights

_log = logging.getLogger(__name__)

_WRITE_S = 10.0
_LOOK_S = 10.0
_MAX_FILES = 10_000
"""Maximum weight files of which the path is remembered; as many as a league's pool may have snapshots."""

Aliases = dict[str, dict[str, int]]
"""Version by alias, by model component; an alias without a version is absent."""


class AliasSource(Protocol):
    """The source of an `AliasFollower`: a `Pool`, or a client of one in another process."""

    async def newer(self, than: Aliases | None, timeout_s: float) -> Aliases | None:
        """Waits until the aliases differ from ``than``; None: they do not yet."""

    async def weights(self, model: str, version: int) -> Weights:
        """The weights of a registered version."""


class Pool:
    """Reads the aliases of some models, reads weights, and logs results by arm to MLflow.

    `add`, `write` and `finish` may be called from any thread; the rest belongs to one event loop.

    Attributes:
        failures: writes of an arm's results that failed so far.

    Args:
        uri: tracking URI.
        project: MLflow experiment of the results; empty: results are not logged.
        followed: models by component name.
    """

    def __init__(self, uri: str, project: str, followed: Mapping[str, Followed]) -> None:
        self._uri = uri
        self._project = project
        self._followed = dict(followed)
        self._at: Aliases | None = None
        self._changed = asyncio.Event()
        self._failing = False
        self._files: dict[tuple[str, int], Path] = {}
        self._refused: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}
        self._counting = threading.Lock()  # guards what `add` changes on the event loop: never held for long
        self._results: dict[Arm, Results] = {}
        self._fresh: set[Arm] = set()
        self._writing = threading.Lock()
        self._trials: dict[Arm, Trial] = {}
        self._begun: set[Arm] = set()
        self.failures = 0

    async def run(self) -> None:
        """Reads aliases and writes results at their intervals until it is cancelled; `finish` is the caller's."""

        async def write() -> None:
            while True:
                await asyncio.sleep(_WRITE_S)
                await asyncio.to_thread(self.write)

        every_s = min((followed.every_s for followed in self._followed.values()), default=_LOOK_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            while True:
                await self.look()
                await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Reads the aliases once; if the registry cannot be read, the last known ones stay."""
        try:
            current = {
                model: await asyncio.to_thread(self._aliases, followed) for model, followed in self._followed.items()
            }
        except Exception as error:  # any error: an exception here would end `run` without notice
            if not self._failing:
                _log.warning("the aliases stay as they are: %s: %s", type(error).__name__, error)
            self._failing = True
            return
        self._failing = False
        if current != self._at:
            self._at = current
            self._changed.set()
            self._changed = asyncio.Event()

    async def newer(self, than: Aliases | None, timeout_s: float) -> Aliases | None:
        """The versions of the aliases, once they are known and differ from ``than``; None: not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._at is None or self._at == than:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._at

    async def weights(self, model: str, version: int) -> Weights:
        """The weights of a version.

        Raises:
            VersionUnknown: the registry does not have it; names the nearest version that it has.
            BadWeights: they hold NaN or infinity.
            BadWeights, TrackingError: its files cannot be read.
        """
        name = self._followed[model].name
        if (model, version) not in self._refused:  # a version never changes, and followers ask every second
            weights = await asyncio.to_thread(self._read, name, version)
            try:
                await asyncio.to_thread(check_finite, weights)
                return weights
            except BadWeights as error:
                self._refused[model, version] = error.message, error.details
        # A new error for each caller: re-raising one exception makes its traceback longer each time.
        message, details = self._refused[model, version]
        raise BadWeights(f"version {version} of model {name!r}: {message}", **details)

    def add(self, part: tuple[Part, dict[str, Metric]]) -> None:
        """Adds a recorder's metrics."""
        with self._counting:
            for arm, results in results_of(part).items():
                if arm.model in self._followed:
                    self._fresh.add(arm)
                    self._results.setdefault(arm, Results()).join(results)

    def write(self) -> None:
        """Logs new results: a run for each arm's version, and the numbers as tags of the version. Blocking.

        An arm that fails is logged, counted in `failures`, and retried by the next call.
        """
        with self._writing:
            with self._counting:
                fresh, self._fresh = self._fresh, set()
            for arm in fresh if self._project else ():
                try:
                    self._write(arm)
                except Exception as error:  # any error: one arm must stop neither the others nor `run`
                    with self._counting:
                        self._fresh.add(arm)  # its numbers are totals: the next write has all of them
                    self.failures += 1
                    why = f"{type(error).__name__}: {first_line(error)}"
                    _log.warning("results of %s are not written for now: %s", arm.label, why)

    def finish(self) -> None:
        """Writes remaining results and ends the runs. Blocking."""
        self.write()
        with self._writing:
            for trial in self._trials.values():
                with contextlib.suppress(TrackingError):
                    trial.finish()

    def _read(self, name: str, version: int) -> Weights:
        """Reads a version's weights. Where their file is local, only the first read asks the registry, which takes
        tens of milliseconds."""
        if (name, version) in self._files:
            with contextlib.suppress(BadWeights):  # its files may have moved
                return load_weights(self._files[name, version])
        reference = f"models:/{name}/{version}"
        try:
            if (local := local_files(find(reference, self._uri), self._uri)) is not None:
                weights = load_weights(local / "weights.npz")
                if len(self._files) < _MAX_FILES:
                    self._files[name, version] = local / "weights.npz"
                return weights
            with files_of(reference, self._uri) as folder:
                return load_weights(folder / "weights.npz")
        except ModelNotFound as error:
            if known := error.details.get("known"):
                raise version_unknown(version, known) from None
            raise VersionUnknown(error.message, version=version, known=[]) from None

    def _aliases(self, followed: Followed) -> dict[str, int]:
        served = (followed.alias, followed.canary)
        return {alias: version for alias, version in aliases(followed.name, self._uri).items() if alias in served}

    def _write(self, arm: Arm) -> None:
        followed = self._followed[arm.model]
        name = followed.name
        if arm not in self._begun:
            for alias in {followed.alias, followed.canary} - {"", arm.alias}:
                self._begin(arm._replace(alias=alias), name, is_new=False)  # of before a restart
            self._begin(arm, name, is_new=True)
        trial = self._trials[arm]
        with self._counting:
            numbers = self._results[arm].numbers()
            of_version = Results()
            for other, results in self._results.items():
                if (other.model, other.version) == (arm.model, arm.version):
                    of_version.join(results)
        shown = {SERVING_CHARTS[name]: value for name, value in numbers.items()}
        trial.log_metrics(shown, int(numbers["sessions"]))
        if arm.version:
            tag(
                name,
                arm.version,
                {f"serving.{key}": f"{value:g}" for key, value in of_version.numbers().items()},
                self._uri,
            )

    def _begin(self, arm: Arm, name: str, *, is_new: bool) -> None:
        """Opens an arm's run, and adds the results that it has from before a restart.

        Args:
            arm: the arm.
            name: its model's name in the registry.
            is_new: whether to start a run if there is none that was interrupted.
        """
        if arm in self._begun:
            return
        if arm not in self._trials:
            title = f"serving {_searchable(name)} {arm.version} as {arm.alias}"
            if not is_new and Trial.interrupted(self._project, title, self._uri) is None:
                return
            try:
                self._trials[arm] = Trial.open(self._project, title, self._uri)
            except TrackingError:  # another service has this run open
                if not is_new:
                    return
                self._trials[arm] = Trial.open(self._project, title, self._uri, resume=False)
        trial = self._trials[arm]
        trial.log_params({"serving": {"model": name, "version": arm.version, "alias": arm.alias}})
        shown = trial.metrics() if trial.resumed else {}
        before = Results.of({name: shown[chart] for name, chart in SERVING_CHARTS.items() if chart in shown})
        with self._counting:
            self._results.setdefault(arm, Results()).join(before)
        self._begun.add(arm)  # last: however often this is retried, earlier results are added once


def _searchable(name: str) -> str:
    """A registered model's name with the characters that a run's name allows; a digest tells replaced names apart."""
    plain = re.sub(r"[^\w .:+@=,-]", "_", name)[:100]
    return name if plain == name else f"{plain} {hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
