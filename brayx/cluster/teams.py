"""The teams of self-play in an actor's replica: which weights play the sessions there.

Each replica has its own sides (`brayx.league.sides`), so ``swap_every`` counts its own steps. The league's actor, which
the job starts once games have named two teams, draws the opponents and counts the games. No session waits for it:
stretches begin in the background. Behaviours that play different teams share their sides, and one league. Knows nothing
of learners.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from brayx.actor.agent import Services
from brayx.actor.players import LearningPlayer, SeatedPlayer, Seating
from brayx.cluster.league import THE_LEAGUE, LeagueProgress
from brayx.cluster.league_seats import LAST_GAMES_S, EndedGames, snapshot_weights
from brayx.cluster.named import ANSWER_S, answer_with_retry, find_actor
from brayx.errors import BrayxError, first_line
from brayx.gamecore.protocol import game_of
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.games import Finished, Game
from brayx.league.member import Member
from brayx.league.sides import Sides, Stretch
from brayx.league.teams import TeamGroup, TeamPlayers, record_result, record_warning, services_of
from brayx.logs import limited
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotModel
from brayx.replay.buffer import NullBuffer
from brayx.types import Weights

log = limited(__name__)

_LOOK_S = 0.5
Snapshots = Callable[[Callable[[int], Awaitable[Weights]]], Awaitable[LocalModel]]
"""Makes the model that acts with the weights of snapshots, which it fetches by version."""


@dataclass(frozen=True)
class SelfPlaySpec:
    """Everything that a replica needs to take part in a behaviour's self-play; pickles to any node.

    Attributes:
        actor: name of the league's Ray actor.
        rivals: that of the league of all behaviours that play different teams.
        config: the options.
        model: name of the model component.
    """

    actor: str
    rivals: str
    config: SelfPlayConfig
    model: str


class GroupInReplica(TeamGroup):
    """The behaviours of a replica, some of which may play against each other.

    Attributes:
        turn: held while a stretch of their common sides begins.
    """

    def __init__(self, config: SelfPlayConfig) -> None:
        super().__init__(config)
        self.turn = asyncio.Lock()
        self._all: list[TeamPlayers] = []

    def add(self, players: TeamPlayers) -> None:
        """Adds a behaviour, which plays alone until `take_in`."""
        self._all.append(players)

    @property
    def all_teams(self) -> set[int]:
        """The teams that games of any behaviour have named."""
        return set[int]().union(*(players.teams for players in self._all))


class TeamsInReplica:
    """A behaviour's self-play in a replica: a `brayx.league.teams.TeamLeague`.

    Args:
        spec: its spec.
        behaviour: the behaviour.
        group: all behaviours of the replica.
        services: the models, buffers and recorder of a session that learns.
        snapshots: makes the model of the opponents, when there are some.

    Attributes:
        players: gives sessions their players.
    """

    def __init__(
        self, spec: SelfPlaySpec, behaviour: str, group: GroupInReplica, services: Services, snapshots: Snapshots
    ) -> None:
        self._spec, self._behaviour, self._group = spec, behaviour, group
        self._services, self._make_snapshots = services, snapshots
        self.players = TeamPlayers(spec.config, services)
        group.add(self.players)
        self._turn = asyncio.Lock()
        self._league: Any = None
        self._champions: Mapping[str, Member] = {}
        self._seating: Seating
        self._ended: EndedGames
        self._following = asyncio.create_task(self._follow())

    @property
    def _sides(self) -> Sides:
        return self.players.sides

    async def seat(self, session: str) -> SeatedPlayer:
        """See `TeamLeague.seat`."""
        member = self._sides.assign(game_of(session), session, None)
        return self._seating.seated(
            member.player,
            member.version,
            learns=self._sides.learns(session, [self.players.name]),
            report=functools.partial(self._sides.result, session),
            leave=functools.partial(self._leave, session),
        )

    def stretch(self) -> Stretch:
        """See `TeamLeague.stretch`."""
        return self._sides.stretch(None)

    def services(self, stretch: Stretch, team: int) -> tuple[Services, bool]:
        """See `TeamLeague.services`."""
        return services_of(self._seating, stretch, team, self.players.name)

    def count(self, game: Game) -> None:
        """See `TeamLeague.count`."""
        self._ended.put(game)

    async def close(self) -> None:
        """Sends the last games."""
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        if self._league is not None:
            await self._ended.close(LAST_GAMES_S)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except (BrayxError, RayError) as error:  # Ray's: its head is away
                log.warning("self-play goes on with the same sides: %s", first_line(error))

    async def look(self) -> None:
        """Begins the next stretch, if it is time.

        Raises:
            BrayxError, RayError: the league does not answer, or cannot be looked up.
        """
        numbers = self._services.recorder
        for team in self.players.teams:
            numbers.add("self_play_teams", 1.0, label=str(team))  # each time: the hub may have restarted
        record_warning(numbers, self._sides)
        if not self._sides.running_teams or len(self._group.all_teams) < 2:
            return
        if self._league is None:
            await self._find(numbers)
        sides = self._sides
        if self._league is None or len(sides.teams) < 2:
            return
        now: LeagueProgress = await self._ask("progress")
        self._champions = now.champions
        sides.env_steps = sides.env_steps if now.env_steps is None else now.env_steps
        sides.done.update(now.done)
        async with self._turn:
            if not sides.running_teams:
                return
            if (wanted := sides.next_draw()) is not None:
                sides.begin(wanted, await self._ask("meet", wanted.id, wanted.players, wanted.opponents))
            self.players.league = self

    async def _find(self, numbers: Recorder) -> None:
        """Opens the behaviour's league once it has begun: its own, or that of the rivals that it belongs to."""
        if len(self.players.teams) > 1:
            league = await asyncio.to_thread(find_actor, self._spec.actor)
            if league is not None:
                await self._open(league, MAIN, numbers)
                return
        league = await asyncio.to_thread(find_actor, self._spec.rivals)
        if league is not None:
            players: Mapping[str, str] = await _answer(league, "players")
            if self._behaviour in players:
                await self._open(league, players[self._behaviour], numbers)

    async def _open(self, league: Any, player: str, numbers: Recorder) -> None:
        model, buffers = self._spec.model, self._services.buffers
        snapshots = await self._make_snapshots(functools.partial(snapshot_weights, league, player))
        if player != MAIN:
            self.players.name, self._turn = player, self._group.turn
            self._group.take_in(self.players)
        others = {name: other for name, other in self._services.models.items() if name != model}
        nothing = {name: NullBuffer() for name in buffers}
        self._seating = Seating(model, functools.partial(SnapshotModel, snapshots), others, {}, numbers, nothing)
        self._seating.learn(player, LearningPlayer(self._services.models[model], buffers, numbers))
        self._ended = EndedGames(league, self._record)
        self._league = league

    async def _ask(self, method: str, *args: Any) -> Any:
        return await _answer(self._league, method, *args)

    def _record(self, finished: Finished | None, note: str) -> None:
        record_result(self._services.recorder, finished, self._champions.get)

    def _leave(self, session: str, reason: str) -> None:
        game = self._sides.ended(session, reason)
        if game is not None:
            self._ended.put(game)


async def _answer(league: Any, method: str, *args: Any) -> Any:
    async def call() -> Any:
        return await getattr(league, method).remote(*args)

    return await answer_with_retry(call, ANSWER_S, THE_LEAGUE)
