"""The league in an actor's replica: a model for each player that learns, one for all snapshots, and the seats.

Knows nothing of drawing or counting games.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from brayx.actor.players import LearningPlayer, Seating
from brayx.cluster.hub import HubClient
from brayx.cluster.league import THE_LEAGUE, Learning
from brayx.cluster.league_seats import LeagueSeats
from brayx.cluster.named import ANSWER_S, answer_with_retry, get_actor
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.errors import ConfigError
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig
from brayx.league.config import LeagueConfig
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotModel
from brayx.replay.buffer import NullBuffer
from brayx.types import Weights

LAST_GAMES_S = 1.5
"""Deadline for a replica that shuts down to send its ended games."""


@dataclass(frozen=True)
class LeagueSpec:
    """Everything that a replica needs to take part in a league; pickles to any node.

    Attributes:
        actor: name of the league's Ray actor.
        config: the league's options.
        stores: weight store of each player that learns; a restart keeps it.
        buffers: names of these players' buffers.
    """

    actor: str
    config: LeagueConfig
    stores: Mapping[str, str]
    buffers: Collection[str]


def check_placement(job: JobConfig) -> None:
    """Checks that a league's model acts in the replicas, which keep its versions.

    Raises:
        ConfigError: its placement is ``remote``.
    """
    for name, league in job.leagues.items():
        if job.models[league.model].placement == "remote":
            where = f"{job.file}: {league.model}.placement is remote, and the model of a league"
            raise ConfigError(f"{where} ({name}) acts in the actor's replicas: expected local", key="placement")


class LeagueInReplica:
    """The league's part of a replica.

    Args:
        spec: the league's spec.
        folder: folder of the job's YAML, searched first for scripts.
        models: acting model of each player that learns; it follows the player's weight store.
        recorder: the replica's recorder.
    """

    def __init__(
        self,
        spec: LeagueSpec,
        folder: str,
        models: Mapping[str, LocalModel],
        recorder: Recorder,
    ) -> None:
        self._spec, self._folder, self._models = spec, folder, models
        self._recorder = recorder
        self._league = get_actor(spec.actor, THE_LEAGUE)
        self._open: dict[str, LearningPlayer] = {}
        self._seats: LeagueSeats | None = None

    async def weights(self, version: int) -> Weights:
        """Fetches the weights of a snapshot.

        Raises:
            VersionUnknown: the league does not have them.
            DeadlineExceeded, ModelError: the league does not answer, or has ended.
        """

        async def call() -> Weights:
            weights: Weights = await self._league.weights.remote(version)
            return weights

        found: Weights = await answer_with_retry(call, ANSWER_S, THE_LEAGUE)
        return found

    def seats(self, snapshots: LocalModel, others: Mapping[str, Any]) -> LeagueSeats:
        """Gives sessions their players. The players' buffers are opened with the first draw, which names them.

        Args:
            snapshots: the model that acts with the weights of snapshots.
            others: the job's other models by name.
        """
        spec = self._spec
        scripts = scripts_of(spec.config, self._folder)
        nothing = {name: NullBuffer() for name in spec.buffers}
        snapshot = functools.partial(SnapshotModel, snapshots)
        seating = Seating(spec.config.model, snapshot, others, scripts, self._recorder, nothing)
        for player, model in self._models.items():
            seating.act(player, model)
        self._seats = LeagueSeats(self._league, spec.config, seating, self._follow, self._recorder)
        return self._seats

    async def close(self) -> None:
        """Sends the last games, fragments and metrics."""
        if self._seats is not None:
            await self._seats.close(LAST_GAMES_S)
        await asyncio.gather(*(_close(player) for player in self._open.values()))

    async def _follow(self, player: str, parts: Learning) -> LearningPlayer:
        """Opens a player's buffers and recorder, and closes those from before its restart."""
        recorder = await asyncio.to_thread(HubClient.of, parts.hub)
        buffers: dict[str, RemoteBuffer] = {}
        opened = LearningPlayer(self._models[player], buffers, recorder)
        try:
            for name, actor in parts.buffers.items():
                buffers[name] = await asyncio.to_thread(RemoteBuffer.attach, actor, recorder=recorder)
        except BaseException:
            await _close(opened)
            raise
        before, self._open[player] = self._open.get(player), opened
        if before is not None:
            await _close(before)
        return opened


async def _close(player: LearningPlayer) -> None:
    closing: list[Awaitable[Any]] = [asyncio.to_thread(buffer.close) for buffer in player.buffers.values()]
    await asyncio.gather(*closing)
    assert isinstance(player.numbers, HubClient)
    await asyncio.to_thread(player.numbers.close)
