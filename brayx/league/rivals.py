"""Rivals: the league of behaviours that play different teams, each one player with its own model. Pure.

Members of one player never meet: they play against other players' members, and only their ratings are compared. Each
player has a champion. Knows nothing of weights or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from brayx.league import snapshots
from brayx.league.config import LeagueConfig
from brayx.league.games import Game
from brayx.league.gates import Verdict
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.matchmaking import choose, pfsp
from brayx.league.member import Member


class Rivals(League):
    """A league whose players play different teams.

    Args:
        configs: the options of each player, see `SelfPlayConfig.league`; one player or more.
        ledger, seed: as for `League`.
    """

    def __init__(self, configs: Mapping[str, LeagueConfig], ledger: Ledger, *, seed: int = 0) -> None:
        self._configs = dict(configs)
        first = next(iter(configs.values()))
        players = {name: config.players[name] for name, config in configs.items()}
        super().__init__(first.model_copy(update={"players": players}), ledger, seed=seed)

    def join(self, player: str, config: LeagueConfig) -> None:
        """Adds a player with its options."""
        self._configs[player] = config
        self._config = self._config.model_copy(update={"players": {**self._config.players, **config.players}})
        self._read()

    def meet(self, game: str, players: Sequence[str], opponents: Sequence[str]) -> Game:
        """See `League.meet`: the players as they are, and opponents by the shares of the first of them."""
        rng = self._seats.rng(game)
        live, shares = Member(players[0]), self._config.players[players[0]].shares
        members = [Member(player) for player in players]
        for opponent in opponents:
            frozen = [member for member in self.pool if member.player == opponent]
            champion = self.champion_of(opponent)
            pools = {"latest": [Member(opponent)], "uniform": frozen, "pfsp": frozen}
            pools["champion"] = [] if champion is None else [champion]
            filled = {share: weight for share, weight in shares.items() if weight and pools[share]}
            share = choose(filled, rng.random()) if filled else "latest"
            rates = [self.payoff.recent(live, member) for member in pools[share]]
            weights = pfsp(rates, "squared").tolist() if share == "pfsp" else None
            members += rng.choices(pools[share], weights)
        return Game(game, players[0], members)

    def champion_of(self, player: str) -> Member | None:
        """See `League.champion_of`: each player has its own."""
        return self._champions.get(player)

    def candidates_of(self, player: str) -> list[Member]:
        """A player's strongest snapshot, if the gate lets it become champion; without a champion its first one."""
        own = [member for member in self.pool if member.player == player and member not in self._unfit]
        if self.champion_of(player) is not None:
            own = sorted(own, key=self.ratings.points, reverse=True)
        return [member for member in own if self.judge(member).passed][:1]

    def judge(self, candidate: Member) -> Verdict:
        """Whether a candidate may replace its player's champion: after `GateConfig.min_games` games its rating must be
        above the champion's, with `GateConfig.confidence`. Without a champion every snapshot may.

        This takes both ratings as normally distributed and independent. They are not quite independent: a snapshot
        inherits the rating of its player. But the games after it are its own.
        """
        champion, gate = self.champion_of(candidate.player), self._configs[candidate.player].gate
        if champion is None:
            return Verdict(True, "there is no champion yet")
        if champion == candidate:
            return Verdict(False, f"{candidate.label} is the champion already")
        rating, other = self.ratings[candidate], self.ratings[champion]
        if rating.games < gate.min_games:
            return Verdict(False, f"{candidate.label} played {rating.games} games, expected {gate.min_games} or more")
        above = NormalDist().cdf((rating.mu - other.mu) / math.hypot(rating.sigma, other.sigma))
        reason = f"its {rating.points:.0f} points are above the {other.points:.0f} of {champion.label} with a "
        reason += f"probability of {above:.3f} ({rating.games} games)"
        return Verdict(above >= gate.confidence, reason)

    def crown(self, candidate: Member) -> Verdict:
        """Makes a candidate its player's champion if the gate lets it."""
        verdict = self.judge(candidate)
        if verdict.passed:
            self._ledger.crown(candidate, candidate.player)
            self._champions[candidate.player] = candidate
        return verdict

    def _read(self) -> None:
        super()._read()
        champions = {player: self._ledger.champion(player) for player in self._configs}
        self._champions = {player: champion for player, champion in champions.items() if champion is not None}

    def _to_drop(self, pool: Sequence[Member], player: str) -> list[Member]:
        own = [member for member in pool if member.player == player]
        champion, size = self.champion_of(player), self._configs[player].pool_size
        return snapshots.to_drop(own, self.ratings.points, champion, size)
