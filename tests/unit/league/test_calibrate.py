"""Calibration finds levels whose points are true, with simulated games; what cannot be calibrated is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.league.calibrate import calibrate, candidates, measure, rung_of
from brayx.league.config import LeagueConfig
from brayx.league.fit import expected
from brayx.league.ladder import Rung, ladder
from brayx.league.match import Pair, Tally
from brayx.league.member import Member, Rated
from brayx.league.requested import ServedPool

POINTS = {Member("main", version): 900.0 + 100.0 * version for version in range(1, 6)}
"""The league's points, which are true."""
NAMES = ["beginner", "easy", "normal", "hard", "expert"]


def truth(rung: Rung) -> float:
    """Above temperature 1 weaker, below stronger, and weaker the later it sees."""
    weaker = 200.0 * min(rung.temperature - 1.0, 2.0) if rung.temperature > 1 else 60.0 * (rung.temperature - 1.0)
    return POINTS[rung.member] - weaker - 10.0 * rung.delay


class Simulated:
    """Plays by the true points."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.games = 0

    def __call__(self, sides: Sequence[Rung], pairs: Mapping[Pair, int], title: str) -> Mapping[Pair, Tally]:
        tallies = {}
        for (a, b), games in pairs.items():
            rate = expected(truth(sides[a]), truth(sides[b]))
            wins = sum(self.rng.random() < rate for _ in range(games))
            tallies[a, b] = Tally(wins, 0, games - wins)
            self.games += games
        return tallies


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay", [0, 8])
def test_levels_have_their_true_points_and_are_spread(seed: int, delay: int) -> None:
    rungs = ladder([Rated(*fields) for fields in POINTS.items()], Member("main", 5), delay)
    played = Simulated(seed)
    calibration = measure(rungs, POINTS, NAMES, 400, played)
    levels = calibration.levels.levels
    assert list(levels) == NAMES
    points = [strength.points for strength in levels.values()]
    assert points == sorted(points)
    for strength, target in zip(levels.values(), calibration.targets.values(), strict=True):
        true = truth(rung_of(strength))
        assert strength.points == pytest.approx(true, abs=60)
        assert strength.low - 40 < true < strength.high + 40
        assert target == pytest.approx(true, abs=110)
        assert strength.games >= 400
        assert strength.high - strength.low < 140
    assert levels["expert"].version == 5
    assert levels["beginner"].version == 1
    assert levels["beginner"].delay > 0 or not delay
    assert calibration.games == played.games
    assert calibration.moved is not None
    assert calibration.moved < 40
    assert {rung_of(strength) for strength in (*levels.values(), *calibration.levels.others)} >= set(rungs)
    text = str(calibration)
    assert all(name in text for name in NAMES)
    assert f"{calibration.games:,} games" in text


def test_levels_are_of_main_players_and_only_of_those_that_are_rated() -> None:
    players = {"main": {"role": "main"}, "exploiter": {"role": "exploiter", "of": "main"}}
    league = LeagueConfig.model_validate({"model": "model", "players": players})
    main, other, unrated = Member("main", 1), Member("exploiter", 2), Member("main", 3)
    points = {main: 1000.0, other: 1300.0}
    assert candidates(ServedPool({}, [main, other, unrated], points, None), league) == [Rated(main, 1000.0)]
    assert candidates(ServedPool({}, [other], points, None), league) == [Rated(other, 1300.0)]
    assert candidates(ServedPool({}, [unrated], points, None), league) == []


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, tracking_db: str) -> None:
    job = JobConfig.load(TEMPLATES / "league" / "four.yaml")
    for names, message in ((["easy"], "two or more"), (["easy", "easy"], "each once")):
        with pytest.raises(ConfigError, match=message):
            calibrate(job, names, uri=tracking_db)
    with pytest.raises(ConfigError, match="no league"):
        calibrate(job.model_copy(update={"leagues": {}}), NAMES, uri=tracking_db)
