"""A league in an actor's replica: the models of its players, and the games in progress there.

The league's actor draws and counts the games. All sessions of a game are on one replica. A session waits for the draw
of its game but not for its count: ended games are queued and sent one at a time. If a replica is killed, its games do
not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from brayx.actor.players import LearningPlayer, SeatedPlayer, Seating
from brayx.cluster.hub import HubClient
from brayx.cluster.league import THE_LEAGUE, Drawn, Learning
from brayx.cluster.named import ANSWER_S, answer_with_retry, get_actor
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded
from brayx.gamecore.protocol import game_of
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import by_contract
from brayx.league.config import LeagueConfig
from brayx.league.games import Finished, Game
from brayx.league.in_progress import LOST, GamesInProgress
from brayx.logs import limited
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotModel
from brayx.replay.buffer import NullBuffer
from brayx.types import Weights

log = limited(__name__)

_MAX_QUEUED = 10_000
"""Maximum games that wait to be counted; when it is reached, further games are lost."""
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
    """Checks that the model of a league or of several behaviours acts in the replicas, which keep its versions.

    So must that of a job whose first game says the contract: it is made after the replicas.

    Raises:
        ConfigError: its placement is ``remote``.
    """
    jobs = by_contract(job)
    for own in [job] if job.needs_contract else jobs if len(jobs) > 1 else []:
        name = own.trainers[only("trainer", own.trainers)].model
        if own.models[name].placement == "remote":
            where = f"{job.file}: {name}.placement is remote, and the models of several behaviours"
            raise ConfigError(f"{where} act in the actor's replicas: expected local", key="placement")
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

    Attributes:
        config: the league's options.
        weights: fetches the weights of a snapshot, see `snapshot_weights`.
    """

    def __init__(
        self,
        spec: LeagueSpec,
        folder: str,
        models: Mapping[str, LocalModel],
        recorder: Recorder,
    ) -> None:
        self._spec, self.config, self._folder, self._models = spec, spec.config, folder, models
        self._recorder = recorder
        self._league = get_actor(spec.actor, THE_LEAGUE)
        self.weights = functools.partial(snapshot_weights, self._league, "")
        self._open: dict[str, LearningPlayer] = {}
        self._seats: LeagueSeats | None = None

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


async def snapshot_weights(league: Any, player: str, version: int) -> Weights:
    """Fetches the weights of a snapshot from a league's actor; of rivals, those of a player.

    Raises:
        VersionUnknown: the league does not have them.
        DeadlineExceeded, ModelError: the league does not answer, or has ended.
    """

    async def call() -> Weights:
        weights: Weights = await league.weights.remote(version, player)
        return weights

    reply: Weights = await answer_with_retry(call, ANSWER_S, THE_LEAGUE)
    return reply


async def _close(player: LearningPlayer) -> None:
    closing: list[Awaitable[Any]] = [asyncio.to_thread(buffer.close) for buffer in player.buffers.values()]
    await asyncio.gather(*closing)
    assert isinstance(player.numbers, HubClient)
    await asyncio.to_thread(player.numbers.close)


class LeagueSeats:
    """Gives the sessions of a replica their players: `brayx.actor.players.Players`.

    Args:
        league: Ray's handle of the league's actor.
        config: the league's options.
        seating: models and buffers of each player; a player's games are not learned from until its buffers are open.
        follow: opens a player's buffers and recorder, at the first draw and after each restart of the player.
        numbers: the league's recorder; counts games by outcome.
        timeout_s: deadline of a draw, which leaves time for a restart of the actor.
    """

    def __init__(
        self,
        league: Any,
        config: LeagueConfig,
        seating: Seating,
        follow: Callable[[str, Learning], Awaitable[LearningPlayer]],
        numbers: Recorder,
        *,
        timeout_s: float = ANSWER_S,
    ) -> None:
        self._league, self._seating, self._timeout_s = league, seating, timeout_s
        self._games = GamesInProgress(config)
        self._learning: dict[str, Learning] = {}
        self._learners: set[str] = set()
        self._follow = follow
        self._following = asyncio.Lock()
        self._draws: dict[str, asyncio.Task[Game]] = {}
        self._numbers = numbers
        self._ended = EndedGames(league, self._record, timeout_s)

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        game = game_of(session) or session
        drawn: Game | None = None
        if game not in self._games:  # sessions of a game that start at the same time share its draw
            drawing = self._draws.get(game)
            if drawing is None:
                drawing = self._draws[game] = asyncio.create_task(self._draw(game))
                drawing.add_done_callback(lambda _: self._draws.pop(game, None))
            drawn = await asyncio.shield(drawing)

        def draw(_: str) -> Game:
            assert drawn is not None
            return drawn

        member = self._games.assign(game, session, draw)
        return self._seating.seated(
            member.player,
            member.version,
            learns=self._games.learns(session, self._learners),
            report=functools.partial(self._games.result, session),
            leave=functools.partial(self._leave, session),
        )

    async def open(self) -> None:
        """Opens the players' buffers, which the start of the first game would have to wait for."""
        with contextlib.suppress(BrayxError):  # that start tries again
            await self._draw("")

    async def close(self, timeout_s: float) -> None:
        """Sends the ended games for up to ``timeout_s``; counts the rest as lost."""
        await self._ended.close(timeout_s)

    async def _draw(self, game: str) -> Game:
        async def call() -> Any:
            return await self._league.drawn.remote(game)

        drawn: Drawn = await answer_with_retry(call, self._timeout_s, THE_LEAGUE)
        async with self._following:
            for player, parts in drawn.learning.items():
                known = self._learning.get(player)
                if known is not None and parts.life <= known.life:
                    continue
                try:
                    opened = await self._follow(player, parts)
                except BrayxError as error:  # the player is restarting: a later draw names its new actors
                    log.warning("player %r learns from no game until it has restarted: %s", player, error.message)
                    continue
                self._seating.learn(player, opened)
                self._learning[player] = parts
        self._learners = set(drawn.learning)
        return drawn.game

    def _record(self, finished: Finished | None, note: str) -> None:
        self._numbers.add("league_games", 1.0, label=LOST if finished is None else finished.outcome, note=note)

    def _leave(self, session: str, reason: str) -> None:
        game = self._games.ended(session, reason)
        if game is not None:
            self._ended.put(game)


class EndedGames:
    """The queue of games to count. Sends one at a time, and repeats the call while the league does not answer.

    Args:
        league: Ray's handle of the league's actor.
        record: records a game that was counted; None and the reason: it is lost.
        timeout_s: deadline of a call.
    """

    def __init__(
        self, league: Any, record: Callable[[Finished | None, str], None], timeout_s: float = ANSWER_S
    ) -> None:
        self._league, self._record, self._timeout_s = league, record, timeout_s
        self._queue: deque[Game] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    def put(self, game: Game) -> None:
        """Queues a game; returns at once."""
        if self._closed or len(self._queue) >= _MAX_QUEUED:
            self._lose("no room for it" if not self._closed else "the replica ends")
            return
        self._queue.append(game)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def close(self, timeout_s: float) -> None:
        """Sends the queue for up to ``timeout_s``; counts the rest as lost."""
        self._closed = True
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=timeout_s)
            self._sending.cancel()
        while self._queue:
            self._queue.popleft()
            self._lose("the replica ends")

    async def _send(self) -> None:
        while self._queue:
            game = self._queue[0]
            try:
                self._record(await self._finish(game), "")
            except BrayxError as error:
                self._lose(error.message)
            self._queue.popleft()

    async def _finish(self, game: Game) -> Finished:
        again = False

        async def call() -> Finished:
            nonlocal again
            before, again = again, True
            finished: Finished = await self._league.finish.remote(game, again=before)
            return finished

        while True:
            try:
                reply: Finished = await answer_with_retry(call, self._timeout_s, THE_LEAGUE)
                return reply
            except DeadlineExceeded as error:
                log.warning("game %s is not counted yet: %s", game.id, error.message)

    def _lose(self, reason: str) -> None:
        self._record(None, reason)
