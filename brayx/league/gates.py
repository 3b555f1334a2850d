"""Gates: whether a candidate may become champion, and which games decide that. Pure."""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Container, Iterable, Sequence
from itertools import cycle, islice
from statistics import NormalDist
from typing import NamedTuple

from brayx.league.config import GateConfig
from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff
from brayx.league.snapshots import Snapshot

PATIENCE = 4
"""Maximum games of a candidate against the champion, as a multiple of ``min_games``."""


_ENOUGH, _PART = 8, 4
"""Games of the champion against a past player that beats its candidate: at least eight, and a quarter of the
candidate's."""


class Verdict(NamedTuple):
    """The decision of a gate.

    Attributes:
        passed: whether the candidate becomes champion.
        reason: why, with the number that decided it.
    """

    passed: bool
    reason: str


def wilson(wins: int, draws: int, losses: int, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of a win rate; a draw is half a win (Wilson 1927, "Probable inference").

    A draw has less variance than the formula assumes, so with draws the interval is wider than necessary.

    Args:
        wins, draws, losses: number of games.
        confidence: probability that the interval contains the win rate, between 0 and 1.

    Returns:
        Lower and upper bound; 0 and 1 with no games.
    """
    games = wins + draws + losses
    if games == 0:
        return 0.0, 1.0
    z = _deviations(confidence)
    p = (wins + 0.5 * draws) / games
    scale = 1.0 + z * z / games
    middle = (p + z * z / (2 * games)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / games + z * z / (4 * games * games))
    return max(0.0, middle - half), min(1.0, middle + half)


@functools.cache
def _deviations(confidence: float) -> float:
    """Half the width of a normal distribution's two-sided interval, in standard deviations."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)  # 2 µs, which a gate's game would pay for each rival


@functools.cache
def at_every_look(confidence: float) -> float:
    """Confidence of each interval when its lower bound is tested after every game, not once.

    With this confidence, a candidate with a win rate of a half has a lower bound above a half, after any of ``n`` to
    `PATIENCE` times ``n`` games, with probability 1 - ``confidence``. The formula holds for large samples: for a
    Brownian motion W, P(W(t) / sqrt(t) > z for any t from 1 to T) is about (z - 1/z) pdf(z) log(T) / 2 + 2 pdf(z) / z
    (Siegmund 1985, "Sequential analysis", chapter 4; here one-sided, half of the two-sided probability). In simulations
    the probability is a little too large for ``n`` up to 100. The formula is not valid for a confidence below .52.

    Args:
        confidence: from 0 to 1.

    Returns:
        For 0.95: 0.983, where z is 2.39 instead of 1.96.
    """
    normal = NormalDist()
    low, high = 1.0, 8.0
    while high - low > 1e-9:
        z = (low + high) / 2
        passes = normal.pdf(z) * ((z - 1 / z) * math.log(PATIENCE) / 2 + 2 / z)
        low, high = (z, high) if passes > 1 - confidence else (low, z)
    return 2 * normal.cdf(high) - 1


def judge(
    candidate: Member, champion: Member | None, payoff: Payoff, past: Iterable[Member], config: GateConfig
) -> Verdict:
    """Whether a candidate may replace the champion.

    After ``min_games`` games against the champion, the lower bound of its win rate must be above a half. And no past
    player may have regained: beat it, which means that the upper bound of its win rate against that player is below a
    half, without beating the champion as well. A player that beats both, a perfect one for example, would otherwise
    keep the first champion forever. Without a champion, only the past players count.

    A candidate is judged after every game, up to `PATIENCE` times ``min_games``. So the bound against the champion is
    that of `at_every_look`. With the defaults, simulated:

    - 5 % of the candidates that win half of their games pass;
    - 0.1 % of those that win 45 %;
    - 97 % of those that win 60 %, after 160 games on average.

    Args:
        candidate: the candidate.
        champion: the champion; None: there is none.
        payoff: results of all pairs.
        past: players that must not beat it; the candidate and the champion among them are ignored.
        config: the gate's options.
    """
    if champion == candidate:
        return Verdict(False, f"{candidate.label} is the champion already")
    reason = "there is no champion yet"
    if champion is not None:
        pair = payoff.pair(candidate, champion)
        if pair.games < config.min_games:
            needed = f"expected {config.min_games} or more"
            return Verdict(False, f"{candidate.label} played {pair.games} games against {champion.label}, {needed}")
        low, high = _at_every_look(pair, config)
        reason = f"its win rate against {champion.label} is {_spell(low, high, pair, config)}"
        if not low > 0.5:
            return Verdict(False, f"{reason}, expected a lower bound above 0.5")
    opponents = [member for member in past if member not in (candidate, champion)]
    rivals = _rivals(candidate, champion, payoff, opponents, config)
    for rival in rivals:
        if _beats(rival, candidate, payoff, config):
            pair = payoff.pair(candidate, rival)
            spelt = _spell(*_interval(pair, config), pair, config)
            return Verdict(False, f"{rival.label} beats {candidate.label}, whose win rate is {spelt}")
    reason += f", and none of {len(rivals)} past players beats it"
    if champion is not None and len(opponents) > len(rivals):
        reason += f"; {len(opponents) - len(rivals)} more beat {champion.label}, so they do not count"
    return Verdict(True, reason)


def failed(
    candidate: Member, champion: Member | None, payoff: Payoff, past: Iterable[Member], config: GateConfig
) -> bool:
    """Whether a candidate has failed for good; arguments as for `judge`.

    It has failed if

    - after ``min_games`` games against the champion, the upper bound of its win rate is at most a half;
    - after `PATIENCE` times as many games, the lower bound is at most a half;
    - a past player that does not beat the champion beats it after ``min_games`` games. With fewer games, or before the
      champion has met that player (see `plays`), this only delays the candidate.
    """
    if champion is not None:
        pair = payoff.pair(candidate, champion)
        if pair.games >= config.min_games and _interval(pair, config)[1] <= 0.5:
            return True
        if pair.games >= PATIENCE * config.min_games and _at_every_look(pair, config)[0] <= 0.5:
            return True
    met = [rival for rival in past if payoff.games(candidate, rival) >= config.min_games]
    return any(
        _is_known(rival, candidate, champion, payoff) and _beats(rival, candidate, payoff, config)
        for rival in _rivals(candidate, champion, payoff, met, config)
    )


def candidate_of(
    player: str,
    snapshots: Sequence[Snapshot],
    champion: Member | None,
    payoff: Payoff,
    past: Sequence[Member],
    config: GateConfig,
    refused: Container[Member] = (),
) -> Member | None:
    """A player's snapshot that may become champion next; None: there is none.

    Snapshots that are newer than the player's last champion and its last `failed` snapshot qualify. Of these, the one
    with the most games against the champion is the candidate, or the newest if none has any. A snapshot older than
    another player's champion qualifies only if it is the player's newest, since it met the champion, if at all, as an
    opponent.

    Args:
        player: the player.
        snapshots: all snapshots, the oldest first.
        champion, payoff, past, config: as for `judge`.
        refused: snapshots that have failed regardless of their games.
    """
    waiting: list[Member] = []
    since_champion = True
    for member, *_, dropped in reversed(snapshots):
        since_champion = since_champion and member != champion
        if member.player != player or dropped:
            continue
        decided = member == champion or member in refused or failed(member, champion, payoff, past, config)
        if decided or (waiting and not since_champion):
            break
        waiting.append(member)
    if champion is None:
        return waiting[0] if waiting else None
    return max(waiting, key=lambda member: payoff.games(member, champion), default=None)


def opponents(
    candidate: Member,
    champion: Member | None,
    payoff: Payoff,
    past: Iterable[Member],
    config: GateConfig,
    teams: int,
    rng: random.Random,
) -> list[Member]:
    """The next opponents of a candidate that has not `failed`.

    Until the candidate has beaten the champion, half of its games are against the champion. The others are against the
    past player that may beat it most clearly: the one with the lowest lower bound of the candidate's win rate, of equal
    ones the one with fewer games, among those with fewer than ``min_games``. So each is met once, and those that won
    are met again. After that it plays only the past players that beat it so far. Those that beat the champion as well
    are left out; see `plays` for how that is found.

    With the games spread evenly, a large pool hides a past player that has regained. Simulated, with a candidate that
    wins 60 % of its games, but 20 % against one past player: of 10 past players, 37 % passed, and now 4 %; of 50, 96 %
    and 51 %. If it wins half of its games against each of 10, 95 % passed, and now 93 %.

    Args:
        candidate, champion, payoff, past, config: as for `judge`.
        teams: number of opponents, 1 or more; of several, one is the champion.
        rng: chooses between the champion and a past player, and breaks ties.

    Returns:
        ``teams`` members, with repetitions if there are too few; empty if no game is needed.
    """
    rivals = _rivals(candidate, champion, payoff, past, config)
    undecided = champion is not None and not _beaten(champion, candidate, payoff, config)
    if undecided:
        rivals = [rival for rival in rivals if payoff.games(candidate, rival) < config.min_games]
    else:
        rivals = [rival for rival in rivals if _beats(rival, candidate, payoff, config)]

    def danger(rival: Member) -> tuple[float, int, float]:
        games = payoff.games(candidate, rival)
        low = _interval(payoff.pair(candidate, rival), config)[0] if games else 0.0
        return low, games, rng.random()

    chosen = heapq.nsmallest(teams, rivals, key=danger)
    if champion is not None and undecided:
        chosen.insert(0 if teams > 1 or rng.random() < 0.5 else len(chosen), champion)
    return list(islice(cycle(chosen), teams))


def plays(
    candidate: Member, champion: Member | None, payoff: Payoff, rivals: Sequence[Member], config: GateConfig
) -> Member:
    """Who plays the next game against the `opponents` of a candidate: the candidate, or the champion in its place.

    It is the champion if one of them beats the candidate, and the champion has not met it, or a few times only: games
    alone show whether it beats both. The candidate needs most of them, since they show whether it is beaten.

    Args:
        candidate, champion, payoff, config: as for `judge`.
        rivals: the `opponents`.
    """
    if champion is None or champion in rivals:
        return candidate
    unknown = any(
        not _is_known(rival, candidate, champion, payoff) and _beats(rival, candidate, payoff, config)
        for rival in rivals
    )
    return champion if unknown else candidate


def _is_known(rival: Member, candidate: Member, champion: Member | None, payoff: Payoff) -> bool:
    """Whether the champion has met a past player often enough to show whether it loses to it, too."""
    if champion is None:
        return True
    return payoff.games(champion, rival) >= max(_ENOUGH, payoff.games(candidate, rival) / _PART)


def _rivals(
    candidate: Member, champion: Member | None, payoff: Payoff, past: Iterable[Member], config: GateConfig
) -> list[Member]:
    """The past players that count against a candidate: those that do not beat the champion.

    Whether one beats the champion is tested after every game, so the interval is that of `at_every_look`.
    """
    opponents = [member for member in past if member not in (candidate, champion)]
    if champion is None:
        return opponents
    return [
        rival
        for rival in opponents
        if not payoff.games(champion, rival) or _at_every_look(payoff.pair(champion, rival), config)[1] >= 0.5
    ]


def _beaten(champion: Member, candidate: Member, payoff: Payoff, config: GateConfig) -> bool:
    pair = payoff.pair(candidate, champion)
    return pair.games >= config.min_games and _at_every_look(pair, config)[0] > 0.5


def _beats(rival: Member, candidate: Member, payoff: Payoff, config: GateConfig) -> bool:
    return _interval(payoff.pair(candidate, rival), config)[1] < 0.5


def _interval(pair: Pair, config: GateConfig) -> tuple[float, float]:
    return wilson(pair.wins, pair.draws, pair.losses, config.confidence)


def _at_every_look(pair: Pair, config: GateConfig) -> tuple[float, float]:
    return wilson(pair.wins, pair.draws, pair.losses, at_every_look(config.confidence))


def _spell(low: float, high: float, pair: Pair, config: GateConfig) -> str:
    return f"{low:.3f} to {high:.3f} ({config.confidence:.0%} confidence, {pair.games} games)"
