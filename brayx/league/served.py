"""Opponents for the sessions of a served job, on every host: `brayx.actor.players.RequestedOpponents`.

A service makes one `ServedLeague`, and each process that answers sessions makes its opponents from it. Knows nothing of
doors.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import brayx.clock as clock
from brayx.actor.agent import Services
from brayx.actor.players import RequestedOpponents, SeatedPlayer
from brayx.engines import FROZEN
from brayx.errors import BrayxError, DeadlineExceeded, LeagueError
from brayx.gamecore.protocol import game_of
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.league.config import LeagueConfig
from brayx.league.files import levels_file
from brayx.league.finding import newest_league
from brayx.league.requested import KEYS, ChosenOpponent, ServedPool, levels_of, parse_request, read_pool
from brayx.model.arms import Followed, WeightSource
from brayx.model.config import ModelConfig
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotModel

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_WAIT_S = 1.0
_READ_S = 10.0

Run = Callable[[Callable[[], ServedPool]], Awaitable[ServedPool]]
"""Runs a blocking function that reads the registry: `asyncio.to_thread`, or the same in another process."""


@dataclass(frozen=True)
class ServedLeague:
    """Everything that a process needs to serve the opponents of a job's league; plain values, so that it pickles to any
    node.

    Attributes:
        config: the league's options; None: sessions cannot request opponents.
        name: name of its model in the registry.
        uri: tracking URI.
        project, trial: as for `brayx.league.finding.newest_league`.
        folder: folder of the job's YAML, with the levels file; searched first for scripts.
        refusal: why sessions cannot request opponents.
    """

    config: LeagueConfig | None
    name: str = ""
    uri: str = ""
    project: str = ""
    trial: str = ""
    folder: str = ""
    refusal: str = ""

    @property
    def versions(self) -> dict[str, Followed]:
        """The model whose versions sessions request, for `brayx.jobs.weights.pool_args`; empty: there is none."""
        return {} if self.config is None else {self.config.model: Followed(self.name)}

    def resident(self, models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
        """A job's models, where the league's keeps ``resident`` opponents in memory, besides what aliases point to."""
        if self.config is None:
            return dict(models)
        model = models[self.config.model]
        return {**models, self.config.model: model.model_copy(update={"max_versions": self.config.max_versions})}

    def opponents(self, services: Services, run: Run) -> RequestedOpponents:
        """Opponents for the sessions of one process.

        Args:
            services: services of sessions that request no opponent; the league's model is a `LocalModel` that fetches
                versions.
            run: runs what reads the registry.
        """
        if self.config is None:
            return NoOpponents(self.refusal)
        model: Any = services.models[self.config.model]
        return ServedOpponents(self, self.config, model, services, run)


def served_league(
    job: JobConfig, uri: str, sources: Mapping[str, WeightSource], *, trial: str = "", on_ray: bool = False
) -> ServedLeague:
    """The league whose players the sessions of a job can request; self-play is a league of one player.

    Args:
        job: the job; of one behaviour, if its project has learned several.
        uri: tracking URI of the registry.
        sources: source of each model's weights.
        trial: the league of this trial; empty: the newest.
        on_ray: models run where their ``placement`` says.

    Raises:
        ConfigError: a script cannot be loaded; the levels file cannot be read, or is of another model; or there is no
            league of this trial.
        TrackingError: the store cannot be read.
    """
    if job.leagues:
        config = job.leagues[only("league", job.leagues)]
        name = pool_name(job, config.model)
    elif job.self_plays and job.trainers:
        config = job.self_plays[only("self_play", job.self_plays)].league(
            job.trainers[only("trainer", job.trainers)].model
        )
        name = sources[config.model].name  # the behaviour's
    else:
        return ServedLeague(None, refusal=f"project {job.project!r} has no league")
    model = job.models[config.model]
    refusal = ""
    if model.engine in FROZEN:
        refusal = f"engine {model.engine} of model {config.model!r} takes no other weights"
    elif on_ray and model.placement == "remote":
        refusal = f"placement of model {config.model!r} is remote, expected local"
    elif sources[config.model].name != name:
        acts_with = f"model {config.model!r} acts with {sources[config.model].name!r}"
        refusal = f"{acts_with}, and the league's snapshots are in {name!r}"
    if refusal:
        return ServedLeague(None, refusal=refusal)
    # Checked now: otherwise the first client would get the error.
    scripts_of(config, job.folder)
    levels_of(levels_file(job.folder, config), name)
    if trial:
        newest_league(uri, job.project, trial, model=name)
    return ServedLeague(config, name, uri, job.project, trial, job.folder)


class ServedOpponents:
    """The opponents of a served league: `brayx.actor.players.RequestedOpponents`. Belongs to one event loop.

    Args:
        league: the league.
        config: its options.
        acting: its model; it fetches versions that are not in memory.
        services, run: as for `ServedLeague.opponents`.
    """

    def __init__(
        self, league: ServedLeague, config: LeagueConfig, acting: LocalModel, services: Services, run: Run
    ) -> None:
        self._name = league.name
        self._model = config.model
        self._acting = acting
        self._services = services
        self._scripts = scripts_of(config, league.folder)
        self._levels = levels_file(league.folder, config)
        self._run = run
        scripts = tuple(self._scripts)
        selection = {"project": league.project, "trial": league.trial}
        self._read = functools.partial(read_pool, league.name, league.uri, scripts, **selection)
        self._pool: ServedPool | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._unfinished: asyncio.Task[ServedPool] | None = None

    async def seat(self, session: str, request: Any) -> SeatedPlayer:
        """See `brayx.actor.players.RequestedOpponents.seat`."""
        if isinstance(request, ChosenOpponent):  # a session that moves: a newer pool may give another opponent
            chosen = request
        else:
            want = parse_request(request)
            chosen = (await self._newest()).choose(want, game_of(session) or session)
        models, version, script = dict(self._services.models), chosen.version, self._scripts.get(chosen.player or "")
        if version is not None:
            await self._acting.pin(version)  # refuses the start if the weights are missing or do not fit
            models[self._model], script = SnapshotModel(self._acting, version, chosen.temperature), None
        services = Services(models, self._services.buffers, self._services.recorder)
        return SeatedPlayer(
            chosen.label,
            services,
            script,
            _ignore,
            _ignore,
            self._model,
            chosen.reply,
            explores=True,  # as in the rated games
            delay=chosen.delay,
            request=chosen,
        )

    async def _newest(self) -> ServedPool:
        """The pool. A start that finds it older than `_LOOK_S` has it read again, and waits at most `_WAIT_S` for that;
        others use it as it is. So a registry that does not answer delays only the first start.
        """
        reading = self._reading
        if reading is None and (self._pool is None or clock.now() - self._read_at > _LOOK_S):
            reading = self._reading = asyncio.create_task(self._read_again())
            if self._pool is not None:
                await asyncio.wait([reading], timeout=_WAIT_S)
        if self._pool is None:
            assert reading is not None
            await asyncio.shield(reading)
        assert self._pool is not None
        return self._pool

    async def _read_again(self) -> None:
        """Reads the pool; if that fails, the last one stays. Ends after `_READ_S`, so it need not be stopped.

        A read that takes longer goes on, and the next call waits for the same one: no timeout ends its thread, and each
        further read would take another one.
        """
        reading = self._unfinished = self._unfinished or asyncio.create_task(self._read_now())
        try:
            await asyncio.wait([reading], timeout=_READ_S)
            if not reading.done():
                raise DeadlineExceeded(f"the registry did not answer within {_READ_S:g} s")
            self._unfinished = None
            self._pool = reading.result()
        except BrayxError as error:
            if self._pool is None:
                raise error from None
            _log.warning("opponents stay as they are: %s", error)
        finally:
            self._read_at, self._reading = clock.now(), None

    async def _read_now(self) -> ServedPool:
        pool = await self._run(self._read)
        return replace(pool, levels=await asyncio.to_thread(levels_of, self._levels, self._name))


class NoOpponents:
    """Refuses requests for opponents in a job that serves no league.

    Args:
        why: the reason, for the error's message.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    async def seat(self, session: str, request: Any) -> None:
        """See `brayx.actor.players.RequestedOpponents.seat`; any other value of ``opponent`` belongs to the game.

        Raises:
            LeagueError: the start requests an opponent.
        """
        if isinstance(request, dict) and len(request) == 1 and next(iter(request)) in KEYS:
            raise LeagueError(f"a start cannot request an opponent: {self._why}")


def _ignore(value: Any) -> None:
    """Ignores results and ends, since served games are in no league's books."""
