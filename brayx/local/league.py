"""The league of a training in one process: gives each session its player, and is the league that its job sees.

Sessions are on the event loop, and snapshots are frozen by the job's thread: a lock guards the league. Knows nothing of
MLflow: whoever freezes a snapshot registers it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from brayx.actor.players import SeatedPlayer
from brayx.actor.seating import LearningPlayer, Seating
from brayx.gamecore.protocol import game_of
from brayx.league.gates import Verdict
from brayx.league.in_progress import GamesInProgress
from brayx.league.league import League, Standing
from brayx.league.member import Member
from brayx.metrics import Recorder


class LocalLeague:
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

    def open(self, seating: Seating) -> None:
        """Sets what each player acts with, before the first session."""
        self._seating = seating

    async def seat(self, session: str) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        with self._lock:
            member = self._games.assign(game_of(session), session, self._league.draw)
            learns = self._games.learns(session, self._league.learners)
            return self._seating.seated(
                member.player,
                member.version,
                learns=learns,
                report=functools.partial(self._report, session),
                leave=functools.partial(self._leave, session),
            )

    def learn(self, name: str, player: LearningPlayer) -> None:
        """See `Seating.learn`."""
        with self._lock:
            self._seating.learn(name, player)

    def retire(self, player: str, reason: str) -> None:
        """Takes a player that failed out of further games; see `League.retire`."""
        with self._lock:
            self._league.retire(player, reason)

    def frozen(self, player: str, version: int, digest: str, env_steps: int) -> Member:
        """Adds a registered snapshot of a player to the pool; see `League.freeze`."""
        with self._lock:
            return self._league.freeze(player, version, digest, env_steps)

    def due(self, player: str, env_steps: int) -> str:
        """Why a snapshot of a player is due; empty: it is not."""
        with self._lock:
            return self._league.due(player, env_steps)

    def has(self, digest: str) -> bool:
        """Whether weights with this digest were frozen before."""
        with self._lock:
            return any(snapshot.digest == digest for snapshot in self._league.snapshots)

    def frozen_steps(self, player: str) -> int:
        """See `League.frozen_steps`."""
        with self._lock:
            return self._league.frozen_steps(player)

    def candidates(self) -> list[Member]:
        """See `League.candidates`."""
        with self._lock:
            return self._league.candidates()

    def crown(self, candidate: Member) -> Verdict:
        """Makes a snapshot champion if the gate lets it; see `League.crown`."""
        with self._lock:
            return self._league.crown(candidate)

    def refuse(self, candidate: Member, reason: str) -> None:
        """Never lets a snapshot become champion; see `League.refuse`."""
        with self._lock:
            self._league.refuse(candidate, reason)

    @property
    def champion(self) -> Member | None:
        """The champion, if there is one."""
        with self._lock:
            return self._league.champion

    def standings(self) -> list[Standing]:
        """See `League.standings`."""
        with self._lock:
            return self._league.standings()

    def _report(self, session: str, value: Any) -> None:
        with self._lock:
            self._games.result(session, value)

    def _leave(self, session: str, reason: str) -> None:
        with self._lock:
            game = self._games.ended(session, reason)
            finished = None if game is None else self._league.finish(game)
        if finished is not None:
            self._numbers.add("league_games", 1.0, label=finished.outcome)
