"""Follows aliases of the model registry for one process, and chooses the version that each new session gets.

A version is made ready before any session gets it, and a session keeps the version it started with. Asyncio; knows
nothing of where the models run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from brayx.errors import BrayxError, ConfigError, first_line
from brayx.model.arms import Arm, Followed
from brayx.model.local import LocalModel
from brayx.model.pool import Aliases, AliasSource
from brayx.types import PinnedHandle, Weights

_log = logging.getLogger(__name__)

_WAIT_S = 10.0
_RETRY_S = 1.0


class RemotelyServed(Protocol):
    """A model that runs in another process, which follows the aliases itself."""

    async def ready(self, version: int) -> None:
        """Makes a version ready there."""

    async def pin(self, version: int) -> PinnedHandle:
        """A handle at that version."""

    def pinned(self, version: int | None = None) -> PinnedHandle:
        """A handle at a version that is ready; None: the newest."""


async def initial_version(
    source: AliasSource, model: str, alias: str, aliases: Aliases | None, version: int | None
) -> tuple[int, Weights] | None:
    """Version and weights that a replica starts with, which may start long after its application was deployed.

    Args:
        source: source of aliases and weights.
        model: component name.
        alias: alias that it is served by.
        aliases: version of each alias; None: the registry cannot be read.
        version: version that the application was deployed with; None: as built.

    Returns:
        None: keep the deployed version, because the alias points to it or is not set, or its version cannot be fetched,
        which is logged.
    """
    now = version if aliases is None else aliases.get(model, {}).get(alias, version)
    if aliases is None:
        _log.warning("model %r starts with its deployed version, not at %r: the registry cannot be read", model, alias)
    if now is None or now == version:
        return None
    try:
        return now, await source.weights(model, now)
    except BrayxError as error:
        _log.warning("model %r starts with its deployed version, not with version %d: %s", model, now, error)
        return None


class AliasFollower:
    """Follows aliases for some models.

    Args:
        source: source of aliases and weights.
        followed: followed models by component name.
        models: models by the same names; a `LocalModel` gets new weights from here, other models follow on their own.
    """

    def __init__(
        self, source: AliasSource, followed: Mapping[str, Followed], models: Mapping[str, LocalModel | RemotelyServed]
    ) -> None:
        self._source = source
        self._followed = dict(followed)
        self._configured = dict(followed)
        self._models = {name: models[name] for name in followed}
        self._held: dict[str, dict[str, PinnedHandle]] = {
            name: {entry.alias: models[name].pinned()} for name, entry in followed.items()
        }
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it follows now."""
        return self._task is not None and not self._task.done()

    async def start(self, aliases: Aliases | None = None) -> None:
        """Makes the aliases' versions ready, as far as they can be fetched, and follows the aliases in a task."""
        if aliases is not None:
            try:
                await self.move(aliases)
            except BrayxError as error:
                _log.warning("cannot follow the registry's aliases yet: %s", error)
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Ends the task; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def versions(self) -> dict[str, set[int]]:
        """The versions that a new session may get, by model."""
        return {model: {handle.version for handle in handles.values()} for model, handles in self._held.items()}

    def choose(self, session: str) -> dict[str, Arm]:
        """The arm of a new session, by model."""
        chosen = {}
        for model, followed in self._followed.items():
            versions = {alias: handle.version for alias, handle in self._held[model].items()}
            alias = followed.choose(session, versions)
            chosen[model] = Arm(model, alias, versions[alias])
        return chosen

    @property
    def canaries(self) -> dict[str, Followed]:
        """What is followed for each model that has a canary."""
        return {name: followed for name, followed in self._followed.items() if followed.canary}

    def shares(self) -> dict[str, dict[str, Any]]:
        """``name``, ``alias`` and ``share`` of each canary by model, as JSON values."""
        return {
            model: {"name": followed.name, "alias": followed.canary, "share": followed.share}
            for model, followed in self.canaries.items()
        }

    def check_share(self, model: str, share: float) -> str:
        """Checks a share before `take_shares`; returns its name there.

        The name has all that is configured of the canary: a service that is deployed again with another share has that.

        Raises:
            ConfigError: the model has no canary, or the share is not from 0 to 1.
        """
        if model not in self.canaries:
            having = ", ".join(self.canaries) or "none"
            raise ConfigError(f"model {model!r} has no canary (`canary` in its job); models with one: {having}")
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"share is {share:g}, expected 0 to 1", key="share")
        return self._share_name(model)

    def take_shares(self, shares: Mapping[str, float]) -> None:
        """Changes the canaries' shares of the sessions that start from now on; one that is not named stays."""
        for model, followed in self._followed.items():
            share = shares.get(self._share_name(model), followed.share)
            if share != followed.share:
                self._followed[model] = replace(followed, share=share)

    def set_share(self, model: str, share: float) -> None:
        """Checks and sets one share; errors as for `check_share`."""
        self.take_shares({self.check_share(model, share): share})

    def _share_name(self, model: str) -> str:
        followed = self._configured[model]
        return f"{model}/{followed.name}/{followed.canary}/{followed.share:g}"

    async def pinned(self, model: str, arm: Arm) -> PinnedHandle:
        """A new handle at an arm's version, which is fetched if it is not ready.

        Raises:
            VersionUnknown: the registry does not have it.
            Overloaded, DeadlineExceeded, ModelError: it cannot be loaded.
        """
        return await self._models[model].pin(arm.version)

    async def move(self, aliases: Aliases) -> None:
        """Makes the versions ready that aliases point to; sessions that start from now on get them.

        Raises:
            BrayxError: one of them could not be fetched; the others were.
        """
        failed: BrayxError | None = None
        for name, followed in self._followed.items():
            for alias in (followed.alias, followed.canary):
                version = aliases.get(name, {}).get(alias)
                try:
                    await self._move(name, alias, version, newest=alias == followed.alias)
                except BrayxError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    async def _move(self, name: str, alias: str, version: int | None, *, newest: bool) -> None:
        handles, model = self._held[name], self._models[name]
        if version is None:
            if not newest:  # no new session gets it; a champion without a version stays until there is another
                handles.pop(alias, None)
            return
        if alias in handles and handles[alias].version == version:
            return
        if not isinstance(model, LocalModel):
            await model.ready(version)
        elif newest:
            weights = await self._source.weights(name, version)
            await asyncio.to_thread(model.load, version, weights)
        handles[alias] = await model.pin(version)

    async def _follow(self) -> None:
        aliases: Aliases | None = None
        failing = False
        while True:
            try:
                if (newer := await self._source.newer(aliases, _WAIT_S)) is not None:
                    await self.move(newer)
                    aliases = newer
                failing = False
            except Exception as error:  # any error: an exception here would end following without notice
                if not failing:
                    why = f"{type(error).__name__}: {first_line(error)}"
                    _log.warning("cannot follow the registry's aliases for now: %s", why)
                failing = True
                await asyncio.sleep(_RETRY_S)
