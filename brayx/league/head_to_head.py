"""A match between two players, each in both seats, and its result. Knows nothing of learning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig, only
from brayx.league.match import MatchGames, MatchScore, Tally
from brayx.league.named import Opponents
from brayx.league.playing import check_playable, play
from brayx.tables import aligned


@dataclass(frozen=True)
class MatchResult:
    """The games of a match.

    Attributes:
        a, b: labels of the two players.
        wanted: number of games that were to be played.
        score: what was played; tallies are of ``a``.
        predicted: win rate of ``a`` that the league's ratings predict; None: one of them has no rating.
        seed: seed of the agents and the seats.
        interrupted: whether Ctrl-C ended it.
    """

    a: str
    b: str
    wanted: int
    score: MatchScore
    predicted: float | None
    seed: int
    interrupted: bool

    @property
    def missing(self) -> int:
        """Games that were not played."""
        return self.wanted - self.score.all.games

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values.

        Returns:
            ``a``, ``b``, ``seed``, ``wanted``, ``interrupted``; as ``a`` sees all games, their number ``games``,
            ``wins``, ``draws``, ``losses``, ``win_rate`` (null with no games) and its 95 % ``interval``; ``seats``: the
            same by the seat of ``a``; ``broken_off`` and ``contradictory`` games; ``predicted`` win rate, or null.
        """
        score = self.score
        return {
            "a": self.a,
            "b": self.b,
            "seed": self.seed,
            "wanted": self.wanted,
            "interrupted": self.interrupted,
            **_plain(score.all),
            "seats": {name: _plain(tally) for name, tally in score.by_seat.items()},
            "broken_off": score.broken_off,
            "contradictory": score.contradictory,
            "predicted": self.predicted,
        }

    def __str__(self) -> str:
        score = self.score
        rows: list[tuple[str, ...]] = [("", "games", "wins", "draws", "losses", "win rate", "95 % interval")]
        for name, tally in (*score.by_seat.items(), ("in all", score.all)):
            low, high = tally.interval
            rate = "-" if tally.win_rate is None else f"{tally.win_rate:.3f}"
            label = name if name == "in all" else f"as {name}"
            rows.append((label, *map(str, (tally.games, *tally)), rate, f"{low:.3f} to {high:.3f}"))
        lines = [f"{self.a} against {self.b}: {score.all.games} of {self.wanted} games"]
        lines += aligned(rows)
        not_counted = {"broken off": score.broken_off, "with results that contradict each other": score.contradictory}
        lines += [f"{count} more {fault}: {score.reason}" for fault, count in not_counted.items() if count]
        lines.append(
            "predicted win rate: " + ("-, without two ratings" if self.predicted is None else f"{self.predicted:.3f}")
        )
        return "\n".join(lines)


def match(
    job: JobConfig,
    a: str,
    b: str,
    *,
    uri: str,
    games: int = 200,
    seed: int | None = None,
    actor: str = "",
    explore: bool = False,
    trial: str = "",
    timeout_s: float = 180.0,
) -> MatchResult:
    """Plays games between two players; see `brayx.league.named.Opponents.find` for their names.

    Args:
        job: the job; its gamecores play the games.
        a, b: names of the players.
        uri: tracking URI.
        games: games that are to count.
        seed: seed of the agents and the seats; None: the job's.
        actor: name of the actor component; may be empty if there is only one.
        explore: whether the players explore, as where ratings come from; else they play as they are served.
        trial: as for `Opponents`.
        timeout_s: deadline for the next game to end; if some have ended by then, these are the result.

    Raises:
        ConfigError: the job has no gamecores, or its code cannot be loaded; or a player or the league is unknown.
        ModelNotFound: the registry has no such version.
        BadWeights: a player's weights are not of the job's model.
        StartupError: no gamecore connects, or no game ends.
    """
    if seed is not None:
        job = job.model_copy(update={"seed": seed})
    actor = only("actor", job.actors, actor)
    check_playable(job, actor)
    opponents = Opponents(job, uri, trial)
    sides = [replace(opponents.find(name), explores=explore) for name in (a, b)]
    teams = next(iter(job.leagues.values())).teams if job.leagues else {}
    try:
        played = MatchGames(teams, games, job.seed)
    except ValueError as error:
        raise ConfigError(f"{job.file}: {error}") from None
    a, b = sides[0].label, sides[1].label
    title = f"{a} against {b}"
    score, interrupted = play(
        job, actor, uri, opponents.model, sides, played, title=title, total=games, timeout_s=timeout_s
    )
    return MatchResult(a, b, games, score, opponents.predicted(*sides), job.seed, interrupted)


def _plain(tally: Tally) -> dict[str, Any]:
    return {"games": tally.games, **tally._asdict(), "win_rate": tally.win_rate, "interval": list(tally.interval)}
