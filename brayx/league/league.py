"""League: draws the players of games, counts results, freezes snapshots and names a champion.

Joins matchmaking, payoff, ratings, gates and snapshots with the ledger that keeps them. Synchronous; called from one
thread. Knows nothing of weights, of games in progress and their sessions (`GamesInProgress`), or of how a request
arrives.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from brayx.errors import LeagueError
from brayx.league import gates, snapshots
from brayx.league.config import GateConfig, LeagueConfig, PlayerConfig
from brayx.league.games import Finished, Game
from brayx.league.gates import Verdict
from brayx.league.ledger import Ledger
from brayx.league.matchmaking import Matchmaker
from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff, pair_results
from brayx.league.ratings import Ratings
from brayx.league.seats import Seats
from brayx.league.snapshots import Snapshot


class Standing(NamedTuple):
    """A row of the league's table; fields as in `Rating`.

    Attributes:
        drawn: seats that the member got in games that have ended, counted or not.
    """

    member: Member
    points: float
    mu: float
    sigma: float
    elo: float
    games: int
    drawn: int


class League:
    """A running league.

    Attributes:
        payoff: results of every pair in the pool.
        ratings: ratings of all members.
        snapshots: all snapshots, the oldest first.

    Args:
        config: the component's options.
        ledger: the books; the league continues from what they hold.
        seed: makes the draws repeatable, with the games' ids and the results so far.

    Raises:
        LeagueError: the books cannot be read.
    """

    payoff: Payoff
    ratings: Ratings
    snapshots: list[Snapshot]
    _champion: Member | None
    _incumbents: list[Member]
    _candidates: list[Member] | None

    def __init__(self, config: LeagueConfig, ledger: Ledger, *, seed: int = 0) -> None:
        self._config = config
        self._ledger = ledger
        self._seats = Seats(config, seed)
        self._retired: dict[str, str] = {}
        self._unfit: dict[Member, str] = {}
        self._voided_s: dict[Member, float] = {}
        self._read()

    @property
    def learners(self) -> list[str]:
        """Names of the players that learn and have not retired."""
        return [name for name in self._config.learners if name not in self._retired]

    # Games

    def draw(self, game: str) -> Game:
        """Draws a game: its learner by the players' shares, the learner's team uniformly, and an opponent for each
        other team. A share of the games is for the gate, see `GateConfig.share`. The draw is a function of the seed,
        the id and the results so far.
        """
        rng = self._seats.rng(game)
        share = self._config.gate.share
        if share and rng.random() < share:
            candidates, gate = self.candidates(), self._gate
            rng.shuffle(candidates)
            for candidate in candidates:
                opponents = gates.opponents(candidate, *gate, len(self._seats.teams) - 1, rng)
                if opponents:
                    player = gates.plays(candidate, self._champion, self.payoff, opponents, self._config.gate)
                    return self._seats.decide(game, player, opponents, rng)
        return self._seats.draw(game, self._matchmaker, rng)

    def meet(self, game: str, players: Sequence[str], opponents: Sequence[str]) -> Game:
        """Draws the members of a stretch of self-play (`brayx.league.sides`), as `draw`.

        Args:
            game: id of the draw.
            players: who plays the team that learns.
            opponents: who plays the other teams.

        Returns:
            A game with a member for each player, then for each opponent. The learner is the first, if there is one.
        """
        drawn = self.draw(game)
        if not drawn.learner or drawn.members[0] == Member(drawn.learner):
            return drawn
        return replace(drawn, members=drawn.members[::-1])

    def finish(self, game: Game, *, again: bool = False) -> Finished:
        """Takes a game that has ended; it is counted if every seat has a result.

        If one of its players has restarted since it was drawn, it changes neither payoff nor ratings: those weights no
        longer play.

        Args:
            game: the game.
            again: this game was given before, by a call whose answer was lost. If that call has counted it, it is not
                counted again, and the answer is the lost one.

        Raises:
            LeagueError: the books cannot be written; the game counts for nothing.
        """
        finished = Finished.of(game, game.teams or self._seats.teams)
        if self._ledger.has(game.id):
            return finished if again else finished.repeated()
        pairs: dict[tuple[Member, Member], Pair] = {}
        if finished.ranks and not any(game.drawn_s <= self._voided_s.get(member, -math.inf) for member in game.members):
            for a, b, score in pair_results(finished.teams, finished.ranks):
                if a in self._known and b in self._known:  # one may have left the pool since the game began
                    self.payoff.add(a, b, score)
                    self._matchmaker.played(a, b)
                    first, second = sorted((a, b))
                    pairs[first, second] = self.payoff.pair(first, second)
            self.ratings.rate(finished.teams, finished.ranks)
            if not game.learner:
                self._candidates = None  # its result may decide
        drawn = Counter(game.members)
        ratings = {member: self.ratings[member] for member in drawn}
        counters = {finished.outcome: 1, "refused": game.refused}
        self._write(lambda: self._ledger.count_game(game.id, pairs, ratings, drawn, counters))
        self._drawn.update(drawn)
        return finished

    def counters(self) -> dict[str, int]:
        """Games by outcome (``counted``, ``broken_off``, ``contradictory``), and ``refused`` results.

        Refused results are written with the next game, so a crash may lose a few.
        """
        return self._ledger.counters()

    # Snapshots

    def due(self, player: str, env_steps: int) -> str:
        """Why a snapshot of a learner is due at these env steps; empty: it is not."""
        if player in self._retired:
            return ""
        live = Member(player)
        win_rates = [self.payoff.recent(live, other) for other in self._matchmaker.opponents(player)]
        return snapshots.due(self._learner(player), env_steps - self.frozen_steps(player), win_rates)

    def freeze(self, player: str, version: int, digest: str, env_steps: int) -> Member:
        """Adds a snapshot to the pool. It inherits its player's rating; the pool may drop others.

        If the player `restarts`, its live results and rating are forgotten, since it starts again from its first
        weights.

        Args:
            player: a learner.
            version: version under which the weights are registered, 1 or more.
            digest: hash of the weights.
            env_steps: env steps of the player.

        Raises:
            LeagueError: the player does not learn, the version or the same weights were frozen before, or the books
                cannot be written.
        """
        restarts = self.restarts(player)
        member, live = Member(player, version), Member(player)
        if version < 1:
            raise LeagueError(f"version is {version}, expected 1 or more", player=player)
        for frozen in self.snapshots:
            if frozen.member == member or frozen.digest == digest:
                same = "this version" if frozen.member == member else "the same weights"
                raise LeagueError(f"{member.label} is not frozen: {frozen.member.label} has {same}", digest=digest)
        last = self._newest(player)
        grew = last is not None and not restarts
        snapshot = Snapshot(member, digest, last.member if last and grew else None, env_steps, time.time())
        self.ratings.inherit(member, live)
        lost = self._to_drop([*self.pool, member], player)
        forgotten = [live] if restarts else []
        for forgotten_member in forgotten:
            self.ratings.forget(forgotten_member)
        changed = {rated: self.ratings[rated] for rated in [member, *forgotten]}
        self._write(lambda: self._ledger.freeze(snapshot, changed, dropped=lost, forgotten=forgotten))
        for removed in [*lost, *forgotten]:
            self.payoff.remove(removed)
        self.snapshots = [frozen._replace(dropped=frozen.dropped or frozen.member in lost) for frozen in self.snapshots]
        self.snapshots.append(snapshot)
        if restarts:
            self.void_games(player)
        self._fill()
        return member

    def void_games(self, player: str) -> None:
        """Voids the games of a learner that were drawn before now: they do not count.

        `freeze` does so if the player `restarts`. Call it again when the restarted learner acts, for games drawn
        meanwhile.
        """
        self._learner(player)
        self._voided_s[Member(player)] = time.monotonic()

    def restarts(self, player: str) -> bool:
        """Whether a learner restarts from its first weights after a snapshot."""
        return self._learner(player).restarts

    def frozen_steps(self, player: str) -> int:
        """Env steps of a player's newest snapshot; 0: it has none."""
        newest = self._newest(player)
        return 0 if newest is None else newest.env_steps

    @property
    def pool(self) -> list[Member]:
        """Snapshots that can be drawn, the oldest first."""
        return [snapshot.member for snapshot in self.snapshots if not snapshot.dropped]

    # Retirement

    def retire(self, player: str, reason: str) -> None:
        """Retires a learner: it is no longer drawn, neither to learn nor as an opponent. Its snapshots stay.

        The books do not store this: a league that is resumed has the player again.

        Args:
            player: a learner; nothing happens if it has already retired.
            reason: why.

        Raises:
            LeagueError: the player does not learn, or it is the last one that does.
        """
        self._learner(player)
        if player in self._retired:
            return
        if self.learners == [player]:
            raise LeagueError(f"player {player!r} ends, and no other one learns: {reason}", player=player)
        self._retired[player] = reason
        self._seats.retire(player)
        self._matchmaker.retire(player)
        self._fill()

    # Champion and table

    def champion(self) -> Member | None:
        """The champion, if there is one. A method, since callers in other threads and processes call methods only."""
        return self._champion

    def champion_of(self, player: str) -> Member | None:
        """The champion that a player's candidates must beat, if there is one."""
        return self._champion

    def has(self, digest: str) -> bool:
        """Whether weights with this digest were frozen before."""
        return any(snapshot.digest == digest for snapshot in self.snapshots)

    def judge(self, candidate: Member) -> Verdict:
        """Whether the gate lets a candidate become champion.

        Raises:
            LeagueError: the candidate is neither a snapshot of the pool nor a ``past`` player.
        """
        if not candidate.version or candidate not in self._matchmaker.frozen:
            raise LeagueError(f"{candidate.label} is not a snapshot of the pool, so it cannot become champion")
        if candidate in self._unfit:
            return Verdict(False, self._unfit[candidate])
        return gates.judge(candidate, *self._gate)

    def refuse(self, candidate: Member, reason: str) -> None:
        """Bars a snapshot from becoming champion, whatever its results. The books do not store this."""
        self._unfit[candidate] = reason
        self._candidates = None

    def crown(self, candidate: Member) -> Verdict:
        """Makes a candidate champion if the gate lets it; arguments and errors as for `judge`."""
        verdict = self.judge(candidate)
        if verdict.passed:
            self._ledger.crown(candidate)
            self._champion = candidate
            self._fill()
        return verdict

    def candidates(self) -> list[Member]:
        """Snapshots that may become champion, at most one of each ``main`` player.

        It is the player's newest, unless that is the champion, was refused (`refuse`) or has `failed`. A snapshot that
        has begun to play the champion stays the candidate until it has won or failed: otherwise frequent snapshots
        would keep any from finishing.
        """
        if self._candidates is None:
            players = [name for name, player in self._config.players.items() if player.role == "main"]
            newest = [gates.candidate_of(player, self.snapshots, *self._gate, self._unfit) for player in players]
            self._candidates = [member for member in newest if member is not None]
        return list(self._candidates)

    @property
    def members(self) -> list[Member]:
        """All that can be drawn now: learners live, scripts, past players, the pool, and champions from elsewhere."""
        return [Member(player) for player in self.learners] + self._matchmaker.frozen + self._incumbents

    def standings(self) -> list[Standing]:
        """The table of `members`, the strongest first."""
        rows = []
        for member in self.members:
            rating = self.ratings[member]
            rows.append(Standing(member, rating.points, *rating, self._drawn[member]))
        return sorted(rows, key=lambda row: (-row.points, row.member))

    def _read(self) -> None:
        self.payoff = Payoff(pairs=self._ledger.pairs())
        self.ratings = Ratings(self._ledger.ratings())
        self.snapshots = self._ledger.snapshots()
        self._drawn = Counter(self._ledger.drawn())
        self._champion = self._ledger.champion()
        self._incumbents = self._ledger.incumbents()
        self._matchmaker = Matchmaker(self._config.players, self.payoff)
        for player in self._retired:
            self._matchmaker.retire(player)
        self._fill()

    def _fill(self) -> None:
        self._matchmaker.fill(self.pool, self._champion)
        self._known = set(self.members)
        self._candidates = None

    @property
    def _gate(self) -> tuple[Member | None, Payoff, list[Member], GateConfig]:
        """Arguments of the functions in `gates`, besides the candidate."""
        return self._champion, self.payoff, self._matchmaker.frozen + self._incumbents, self._config.gate

    def _to_drop(self, pool: Sequence[Member], player: str) -> list[Member]:
        """The snapshots that leave the pool, as one of a player is frozen."""
        return snapshots.to_drop(pool, self.ratings.points, self._champion, self._config.pool_size)

    def _write(self, write: Callable[[], None]) -> None:
        """Writes to the books; if that fails, restores the state in memory from the books."""
        try:
            write()
        except LeagueError:
            self._read()
            raise

    def _learner(self, player: str) -> PlayerConfig:
        if player not in self._config.learners:
            learners = ", ".join(self._config.learners)
            raise LeagueError(f"player is {player!r}, expected one that learns: {learners}")
        return self._config.players[player]

    def _newest(self, player: str) -> Snapshot | None:
        return next((snapshot for snapshot in reversed(self.snapshots) if snapshot.member.player == player), None)
