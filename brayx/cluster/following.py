"""The models of one process that are served by an alias: what the alias points to, when that moves, and by session.

A version is made ready before anybody gets it, and who has one keeps it. Asyncio; Ray comes in with the `PoolClient`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from brayx.cluster.model_client import ModelClient
from brayx.cluster.pool import Aliases, PoolClient, PoolSubscriber
from brayx.errors import BrayxError
from brayx.model.arms import Arm, Followed
from brayx.model.local import LocalModel, PinnedModel
from brayx.types import Weights

_log = logging.getLogger(__name__)


async def begins(
    client: PoolClient, model: str, alias: str, at: Aliases | None, version: int | None
) -> tuple[int, Weights] | None:
    """Version and weights that a replica begins with, which may start long after its application was deployed.

    Args:
        client: of the pool.
        model: component name.
        alias: that it is served by.
        at: where aliases point; None: the registry does not tell.
        version: that the application was deployed with; None: as built.

    Returns:
        None: what it was deployed with. That is what the alias names, or it names none, or it cannot be had, which is
        logged.
    """
    now = version if at is None else at.get(model, {}).get(alias, version)
    if at is None:
        _log.warning("model %r begins as it was deployed: the registry does not tell where %r points", model, alias)
    if now is None or now == version:
        return None
    try:
        return now, await client.fetch(model, now)
    except BrayxError as error:
        _log.warning("model %r begins as it was deployed, not with version %d: %s", model, now, error)
        return None


class Following:
    """Follows aliases for some models.

    Args:
        client: of the pool.
        followed: by component name.
        models: of the same names; those of this process are given new weights here, others follow by themselves.
    """

    def __init__(
        self, client: PoolClient, followed: Mapping[str, Followed], models: Mapping[str, LocalModel | ModelClient]
    ) -> None:
        self._client = client
        self._followed = dict(followed)
        self._models = {name: models[name] for name in followed}
        self._held: dict[str, dict[str, PinnedModel]] = {
            name: {of.alias: models[name].pinned()} for name, of in followed.items()
        }
        self._subscriber = PoolSubscriber(client, self.move)

    @property
    def running(self) -> bool:
        """Whether it follows now."""
        return self._subscriber.running

    async def start(self, at: Aliases | None = None) -> None:
        """Moves where aliases point, as far as those versions can be had, and goes on to follow in a task."""
        if at is not None:
            try:
                await self.move(at)
            except BrayxError as error:
                _log.warning("not where the registry's aliases point yet: %s", error)
        self._subscriber.start()

    async def stop(self) -> None:
        """Ends the task."""
        await self._subscriber.stop()

    def versions(self) -> dict[str, set[int]]:
        """The versions that a session which begins now may get, by model."""
        return {model: {held.version for held in of.values()} for model, of in self._held.items()}

    def choose(self, session: str) -> dict[str, Arm]:
        """The arm of a session that begins, by model."""
        chosen = {}
        for model, of in self._followed.items():
            at = {alias: held.version for alias, held in self._held[model].items()}
            alias = of.choose(session, at)
            chosen[model] = Arm(model, alias, at[alias])
        return chosen

    async def pinned(self, model: str, arm: Arm) -> PinnedModel:
        """A handle of its own at an arm's version, which is fetched if it is not ready.

        Raises:
            VersionUnknown: the registry does not have it.
            Overloaded, DeadlineExceeded, ModelError: it cannot be made ready.
        """
        return await self._models[model].pin(arm.version)

    async def move(self, at: Aliases) -> None:
        """Makes the versions ready that aliases point to; sessions that begin from now on get them.

        Raises:
            BrayxError: one of them could not be had; the others were.
        """
        failed: BrayxError | None = None
        for name, of in self._followed.items():
            for alias in (of.alias, of.canary):
                version = at.get(name, {}).get(alias)
                try:
                    await self._move(name, alias, version, newest=alias == of.alias)
                except BrayxError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    async def _move(self, name: str, alias: str, version: int | None, *, newest: bool) -> None:
        held, model = self._held[name], self._models[name]
        if version is None:
            if not newest:  # nobody begins there any more; a champion that is taken away stays until there is another
                held.pop(alias, None)
            return
        if alias in held and held[alias].version == version:
            return
        if isinstance(model, ModelClient):
            await model.ready(version)
        elif newest:
            weights = await self._client.fetch(name, version)
            await asyncio.to_thread(model.load, version, weights)
        held[alias] = await model.pin(version)
