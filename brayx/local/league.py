"""The league of a training in one process: gives each session its player, and is the league for its job.

Sessions are on the event loop, and snapshots are frozen by the job's thread: a lock guards the league. Knows nothing of
MLflow: whoever freezes a snapshot registers it.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

from brayx.actor.players import LearningPlayer, SeatedPlayer, Seating
from brayx.errors import LeagueError
from brayx.gamecore.protocol import game_of
from brayx.league.in_progress import LOST, GamesInProgress
from brayx.league.league import League
from brayx.league.training import RunningLeague
from brayx.metrics import Recorder
from brayx.model.local import LocalModel


class LocalLeague(RunningLeague):
    """Gives sessions their players: `brayx.actor.players.Players`.

    Args:
        league: draws the players, and keeps the books.
        games: the games in progress.
        numbers: the league's recorder.
    """

    _seating: Seating

    def __init__(self, league: League, games: GamesInProgress, numbers: Recorder) -> None:
        self._league, self._games = league, games
        self._numbers = numbers
        self._lock = threading.Lock()
        self._acting: dict[str, Any] = {}
        self._replaced: list[LocalModel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, seating: Seating) -> None:
        """Sets what each player acts with, before the first session."""
        self._seating = seating

    async def seat(self, session: str) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            member = self._games.assign(game_of(session), session, self._league.draw)
            learns = self._games.learns(session, self._league.learners)
            player = self._seating.seated(
                member.player,
                member.version,
                learns=learns,
                report=functools.partial(self._report, session),
                leave=functools.partial(self._leave, session),
                release=functools.partial(self._release, session),
            )
            self._acting[session] = player.services.models.get(self._seating.model)
            return player

    def replace(self, name: str, before: LocalModel, player: LearningPlayer) -> None:
        """Gives a restarted player its parts: see `Seating.learn` and `League.void_games`.

        Args:
            name: the player.
            before: the model that it acted with; closed when the last session that acts with it has ended.
            player: its parts in sessions that start from now on.
        """
        with self._lock:
            self._seating.learn(name, player)
            self._league.void_games(name)
            self._replaced.append(before)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close_unused)

    @property
    def replaced(self) -> list[LocalModel]:
        """The replaced models that are not closed yet."""
        with self._lock:
            return list(self._replaced)

    def call(self, method: str, *args: Any) -> Any:
        """See `RunningLeague.call`."""
        with self._lock:
            return getattr(self._league, method)(*args)

    def _release(self, session: str) -> None:
        with self._lock:
            self._acting.pop(session, None)
            any_replaced = bool(self._replaced)
        if any_replaced:
            self._close_unused()

    def _close_unused(self) -> None:
        """Closes the replaced models that no session acts with. Runs on the event loop."""
        with self._lock:
            used = set(map(id, self._acting.values()))
            unused = [model for model in self._replaced if id(model) not in used]
            self._replaced = [model for model in self._replaced if id(model) in used]
        for model in unused:
            closing = asyncio.create_task(model.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _report(self, session: str, value: Any) -> None:
        with self._lock:
            self._games.result(session, value)

    def _leave(self, session: str, reason: str) -> None:
        with self._lock:
            game = self._games.ended(session, reason)
            if game is None:
                return
            outcome, note = LOST, ""
            try:
                outcome = self._league.finish(game).outcome
            except LeagueError as error:  # the session has ended all the same
                note = error.message
        self._numbers.add("league_games", 1.0, label=outcome, note=note)
