"""Matchmaking: draws the opponents of a learner. Pure; knows nothing of games or weights.

Prioritised fictitious self-play (PFSP), the shares of each role and the exploiter that is too weak follow Vinyals et
al. 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning".
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brayx.league.config import PlayerConfig, Weighting
from brayx.league.member import Member
from brayx.league.payoff import Payoff

TOO_WEAK = 0.1
"""Win rate below which an exploiter mostly plays the past of the player that it exploits."""

_LIVE_WHILE_WEAK = 0.1  # without any, the league would not notice that it has caught up
_GAMES_TO_BE_WEAK = 20


def pfsp(win_rates: ArrayLike, weighting: Weighting) -> NDArray[np.float64]:
    """Probabilities of opponents in prioritised fictitious self-play.

    Args:
        win_rates: ``[n]``: the learner's win rate p against each opponent, from 0 to 1.
        weighting: ``squared``: (1 - p)^2, hard opponents most; ``linear``: 1 - p; ``variance``: p(1 - p), opponents of
            its own strength most.

    Returns:
        float64 ``[n]``: the weights divided by their sum; uniform if all are 0; empty for no opponents.

    Raises:
        ValueError: not a vector, or not from 0 to 1.
    """
    p = np.asarray(win_rates, dtype=np.float64)
    if p.ndim != 1 or not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"win rates are {p}, expected a vector of numbers from 0 to 1")
    lost = 1 - p
    weights = {"squared": lost * lost, "linear": lost, "variance": p * lost}[weighting]
    if not weights.any():
        weights = np.ones_like(p)
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def choose(shares: Mapping[str, float], point: float) -> str:
    """The name at ``point``, from 0 to 1, on all shares laid end to end; at least one share is above 0."""
    point *= sum(shares.values())
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return next(reversed(list(shares)))  # the subtractions may have rounded


class _Pool:
    """Opponents of one learner with cached probabilities; a new result changes one win rate.

    Args:
        members: opponents, at least one.
        weighting: by win rate; None: all alike.
    """

    def __init__(self, learner: Member, members: Sequence[Member], payoff: Payoff, weighting: Weighting | None) -> None:
        self._learner = learner
        self._members = members
        self._payoff = payoff
        self._weighting = weighting
        self._places = {member: place for place, member in enumerate(members)}
        self._win_rates = np.array([payoff.recent(learner, member) for member in members])
        self._sums: NDArray[np.float64] | None = None

    def changed(self, opponent: Member) -> None:
        place = self._places.get(opponent)
        if place is not None:
            self._win_rates[place] = self._payoff.recent(self._learner, opponent)
            self._sums = None

    def draw(self, rng: random.Random) -> Member:
        if self._weighting is None:
            return self._members[int(rng.random() * len(self._members))]
        if self._sums is None:
            self._sums = np.cumsum(pfsp(self._win_rates, self._weighting))
        place = int(np.searchsorted(self._sums, rng.random() * self._sums[-1], side="right"))
        return self._members[min(place, len(self._members) - 1)]  # a product may round up to the sum


class Matchmaker:
    """Draws opponents by the shares of `PlayerConfig.against`.

    A share whose pool is empty falls to the others in proportion; if all are empty, the learner plays itself. An
    exploiter that wins less than `TOO_WEAK` of its recent games against the live player that it exploits gets nine
    times in ten a past one instead, as hopeless games teach little; the tenth game shows whether it has caught up.

    Args:
        players: all players by name.
        payoff: results; call `played` after each change.
    """

    def __init__(self, players: Mapping[str, PlayerConfig], payoff: Payoff) -> None:
        self._players = dict(players)
        self._payoff = payoff
        self._snapshots: list[Member] = []
        self._champion: Member | None = None
        self._retired: set[str] = set()
        self._pools: dict[tuple[str, str], _Pool | None] = {}
        self.fill([], None)

    def fill(self, snapshots: Sequence[Member], champion: Member | None) -> None:
        """Sets the snapshots that can be drawn, and the champion; forgets what is cached."""
        self._snapshots = sorted(snapshots)
        self._champion = champion
        self._pools = {}

    def retire(self, player: str) -> None:
        """Takes a live learner out of all pools: where a share names it, its newest snapshot plays."""
        self._retired.add(player)
        self._pools = {}

    @property
    def frozen(self) -> list[Member]:
        """Every member that can be drawn and does not learn: scripts, past players and snapshots."""
        fixed = [self.member(name) for name, player in self._players.items() if not player.learns]
        return fixed + self._snapshots

    def member(self, player: str) -> Member:
        """A player's current member: a learner live, a past player at its version."""
        return Member(player, self._players[player].version or 0)

    def played(self, a: Member, b: Member) -> None:
        """Call after a new result of two members."""
        for learner, opponent in ((a, b), (b, a)):
            if not learner.version:
                for share in ("pfsp", "past"):
                    pool = self._pools.get((learner.player, share))
                    if pool is not None:
                        pool.changed(opponent)

    def draw(self, learner: str, rng: random.Random) -> Member:
        """An opponent of a learner."""
        player = self._players[learner]
        shares = {share: weight for share, weight in player.shares.items() if weight and self._pool(learner, share)}
        if not shares:
            return self.member(learner)
        share = choose(shares, rng.random())
        pool = self._pool(learner, share)
        if share == player.of and self._too_weak(learner, player.of) and rng.random() >= _LIVE_WHILE_WEAK:
            pool = self._pool(learner, "past") or pool
        assert pool is not None  # empty ones are not among the shares
        return pool.draw(rng)

    def opponents(self, learner: str) -> list[Member]:
        """All members that a learner's shares can draw, except itself."""
        shares = [share for share, weight in self._players[learner].shares.items() if weight]
        members = {member for share in shares for member in self._members(learner, share)}
        return sorted(members - {self.member(learner)})

    def _pool(self, learner: str, share: str) -> _Pool | None:
        key = (learner, share)
        if key not in self._pools:
            members = self._members(learner, share)
            weighting = self._players[learner].weights if share in ("pfsp", "past") else None
            self._pools[key] = _Pool(self.member(learner), members, self._payoff, weighting) if members else None
        return self._pools[key]

    def _members(self, learner: str, share: str) -> list[Member]:
        if share in ("uniform", "pfsp"):
            return self.frozen
        if share == "champion":
            return [self._champion] if self._champion is not None else []
        if share == "latest":
            return [self.member(learner)]
        if share == "past":
            target = self._players[learner].of
            exploiters = (name for name, player in self._players.items() if player.of == learner)
            players = {target} if target else {learner, *exploiters}
            return [member for member in self._snapshots if member.player in players]
        if share in self._retired:
            return [member for member in self._snapshots if member.player == share][-1:]
        return [self.member(share)]

    def _too_weak(self, learner: str, opponent: str) -> bool:
        pair = self._payoff.pair(self.member(learner), self.member(opponent))
        return pair.games >= _GAMES_TO_BE_WEAK and pair.recent_score < TOO_WEAK * pair.recent_games
