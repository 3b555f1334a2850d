"""`brayx league calibrate`: measures levels of difficulty by matches, and writes the levels file.

Plays the league's snapshots against each other, at several temperatures and delays, and fits their points. Knows
nothing of doors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from brayx.errors import ConfigError, LeagueError
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.league.config import LeagueConfig
from brayx.league.files import levels_file
from brayx.league.finding import newest_league
from brayx.league.fit import Fitted, expected, fit
from brayx.league.ladder import Rung, choose, first_pairs, ladder, level_pairs
from brayx.league.levels import Levels, Strength, check_names, write_levels
from brayx.league.match import Pair, Tally, Tournament
from brayx.league.member import Member, Rated
from brayx.league.named import Opponent, Opponents
from brayx.league.playing import check_playable, play
from brayx.league.requested import ServedPool, read_pool
from brayx.tables import aligned

Play = Callable[[Sequence[Rung], Mapping[Pair, int], str], Mapping[Pair, Tally]]
"""Plays a number of games of each pair of rungs; the text is the title of the progress."""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        levels: the levels, and the other measured strengths.
        targets: each level's target in points.
        games: number of games played.
        moved: mean difference of the snapshots' points from the league's table; None: no rung is an unchanged snapshot.
    """

    levels: Levels
    targets: Mapping[str, float]
    games: int
    moved: float | None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("level", "points", "95 % interval", "target", "games", "beats the one below")]
        below: Strength | None = None
        for name, level in self.levels.levels.items():
            beats = "-" if below is None else f"{expected(level.points, below.points):.3f}"
            interval = f"{level.low:.0f} to {level.high:.0f}"
            rows.append((name, f"{level.points:.0f}", interval, f"{self.targets[name]:.0f}", f"{level.games:,}", beats))
            below = level
        plays = ["plays as", *(rung_of(level).label for level in self.levels.levels.values())]
        lines = [f"{line}  {label}" for line, label in zip(aligned(rows), plays, strict=True)]
        lines.append(f"{self.games:,} games, {len(self.levels.others)} more strengths measured")
        if self.moved is not None:
            lines.append(f"the snapshots' points differ from the league's table by {self.moved:.0f} on average")
        return "\n".join(lines)


def rung_of(strength: Strength) -> Rung:
    """The rung of a measured strength."""
    return Rung(Member(strength.player, strength.version), strength.temperature, strength.delay)


def calibrate(
    job: JobConfig,
    names: Sequence[str],
    *,
    uri: str,
    games: int = 400,
    delay: int = 0,
    seed: int | None = None,
    actor: str = "",
    trial: str = "",
    file: Path | None = None,
    timeout_s: float = 180.0,
) -> Calibration:
    """Plays the matches and writes the levels file.

    Args:
        job: the job; its gamecores play the games.
        names: names of the levels, the easiest first.
        uri: tracking URI.
        games: minimum games of each level.
        delay: the weakest rung's delay, in ticks; 0, as turn-based games need it: no delay.
        seed: seed of the agents and the seats; None: the job's.
        actor: name of the actor component; may be empty if there is only one.
        trial: calibrate the league of this trial; empty: the newest, see `brayx.league.finding`.
        file: file to write; None: the league's option ``levels``.
        timeout_s: deadline for the next game to end.

    Raises:
        ConfigError: the job has no league or no gamecores, its code cannot be loaded, the names are not valid, there
            is no such league in the store, or the file cannot be written.
        LeagueError: no snapshot has a rating, or too few games were played.
        StartupError: no game ends.
        KeyboardInterrupt: Ctrl-C; no file is written.
    """
    if seed is not None:
        job = job.model_copy(update={"seed": seed})
    if not job.leagues:
        instead = '; a start asks for an opponent of self-play by points: {"opponent": {"rating": 1100}}'
        raise ConfigError(
            f"{job.file}: the job has no league, so there is nothing to calibrate{instead if job.self_plays else ''}"
        )
    league = job.leagues[only("league", job.leagues)]
    actor = only("actor", job.actors, actor)
    try:
        check_names(names)
    except ValueError as error:
        raise ConfigError(f"--levels: {error}") from None
    check_playable(job, actor)
    name = pool_name(job, league.model)
    source = newest_league(uri, job.project, trial, model=name)
    pool = read_pool(name, uri, project=job.project, trial=source.run_id)
    rated = candidates(pool, league)
    if not rated:
        raise LeagueError(
            f"no snapshot of league {source.name!r} of project {source.project!r} has a rating (versions of model "
            f"{name!r} in {uri}): train it further, or name another league with --trial"
        )
    champion = next((candidate.member for candidate in rated if candidate.member.version == pool.champion), None)
    rungs = ladder(rated, champion, delay)
    if len(names) > len(rungs):
        raise ConfigError(f"--levels: {len(names)} levels, but only {len(rungs)} strengths to choose from")

    def played(sides: Sequence[Rung], pairs: Mapping[Pair, int], title: str) -> Mapping[Pair, Tally]:
        return _played(job, actor, uri, name, league, sides, pairs, title, timeout_s)

    points = {candidate.member: candidate.points for candidate in rated}
    measured = measure(rungs, points, names, games, played)
    levels = Levels(model=name, levels=measured.levels.levels, others=measured.levels.others)
    file = file or levels_file(job.folder, league)
    day = time.strftime("%Y-%m-%d")
    write_levels(file, levels, f"Levels of difficulty by `brayx league calibrate`, {measured.games} games, {day}.")
    return replace(measured, levels=levels)


def candidates(pool: ServedPool, league: LeagueConfig) -> list[Rated]:
    """The snapshots that levels may use: those of main players, or all if there are none.

    An exploiter is strong only against its target, so points do not describe it.
    """
    rated = [Rated(member, pool.points[member]) for member in pool.snapshots if member in pool.points]
    mains = [name for name, player in league.players.items() if player.role == "main"]
    return [candidate for candidate in rated if candidate.member.player in mains] or rated


def measure(
    rungs: Sequence[Rung], points: Mapping[Member, float], names: Sequence[str], games: int, played: Play
) -> Calibration:
    """Measures the rungs, chooses levels among them, and measures the levels more precisely.

    Args:
        rungs: the rungs, the strongest first.
        known: known points of snapshots, which fix the scale.
        names: names of the levels, the easiest first.
        games: minimum games of each level.
        played: plays the games.
    """
    anchors = {i: points[rung.member] for i, rung in enumerate(rungs) if rung == Rung(rung.member)}
    results = dict(played(rungs, first_pairs(len(rungs), games), "strengths"))
    first = fit(len(rungs), results, anchors)
    chosen = choose(rungs, [strength.points for strength in first], len(names))
    sides = [*rungs, *(rung for rung, _ in chosen if rung not in rungs)]
    guesses = [strength.points for strength in first] + [points for rung, points in chosen if rung not in rungs]
    places = [sides.index(rung) for rung, _ in chosen]
    for pair, tally in played(sides, level_pairs(guesses, places, games), "levels").items():
        results[pair] = Tally(*map(sum, zip(results.get(pair, Tally()), tally, strict=True)))
    fitted = fit(len(sides), results, anchors)
    ranked = sorted(places, key=lambda i: fitted[i].points)
    targets = np.linspace(fitted[ranked[0]].points, fitted[ranked[-1]].points, len(names))
    moved = [abs(fitted[i].points - points) for i, points in anchors.items()]
    others = sorted((i for i in range(len(sides)) if i not in places), key=lambda i: fitted[i].points)
    return Calibration(
        Levels(
            model="",
            levels={name: _strength(sides[i], fitted[i]) for name, i in zip(names, ranked, strict=True)},
            others=[_strength(sides[i], fitted[i]) for i in others],
        ),
        dict(zip(names, map(float, targets), strict=True)),
        sum(tally.games for tally in results.values()),
        sum(moved) / len(moved) if moved else None,
    )


def _strength(rung: Rung, fitted: Fitted) -> Strength:
    (player, version), temperature, delay = rung
    return Strength(player=player, version=version, temperature=temperature, delay=delay, **fitted._asdict())


def _played(
    job: JobConfig,
    actor: str,
    uri: str,
    name: str,
    league: LeagueConfig,
    rungs: Sequence[Rung],
    pairs: Mapping[Pair, int],
    title: str,
    timeout_s: float,
) -> Mapping[Pair, Tally]:
    """Plays games between rungs through the job's doors; returns the results of each pair."""
    opponents = Opponents(job, uri)
    members = dict.fromkeys(rung.member for rung in rungs)
    opponent_of = {member: opponents.find(f"models:/{name}/{member.version}") for member in members}
    sides: list[Opponent] = [
        replace(opponent_of[member], label=member.label, explores=True, temperature=temperature, delay=delay)
        for member, temperature, delay in rungs
    ]
    try:
        tournament = Tournament(league.teams, pairs, job.seed)
    except ValueError as error:
        raise ConfigError(f"{job.file}: {error}") from None
    total = sum(pairs.values())
    score, interrupted = play(
        job, actor, uri, league.model, sides, tournament, title=title, total=total, timeout_s=timeout_s
    )
    if interrupted:
        raise KeyboardInterrupt
    if not score.done:
        raise LeagueError(f"{score.all.games} of {total} games were played, too few to tell levels: {score.reason}")
    return tournament.results()
