"""The pictures of a league, and the ratings in its versions' tags."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.engines.base import save_weights
from brayx.league.charts import (
    DRAWN_FILE,
    PAYOFF_FILE,
    RATINGS_FILE,
    changed,
    draw_drawn,
    draw_league,
    draw_payoff,
    draw_ratings,
    keep_curves,
    keep_ratings,
    point_of,
)
from brayx.league.ledger import Ledger, RatingPoint
from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff
from brayx.league.ratings import Rating, Ratings
from brayx.league.snapshots import Snapshot
from brayx.tracking import Trial, find
from brayx.tracking.registry import register_files

MAIN, FIRST, SCRIPT = Member("main"), Member("main", 1), Member("script")
SNAPSHOT = Snapshot(FIRST, "digest", None, 1000, 1.5e9)


def test_a_player_that_learns_has_a_line_with_a_band_its_snapshots_dots_a_script_a_dashed_line() -> None:
    curve = [RatingPoint(0, 1200.0, 1000.0, 1400.0), RatingPoint(2000, 1300.0, 1250.0, 1350.0)]
    ratings = Ratings({FIRST: Rating(mu=30.0)})
    (axes,) = draw_ratings({MAIN: curve}, [SNAPSHOT], ratings, [MAIN, FIRST, SCRIPT]).axes
    line, dots, level = axes.lines
    assert line.get_xydata().tolist() == [[0, 1200], [2000, 1300]]
    assert dots.get_xydata().tolist() == [[1000, ratings.points(FIRST)]]
    assert level.get_ydata() == [1200, 1200]
    assert (line.get_label(), level.get_label()) == ("main", "script")
    assert dots.get_color() == line.get_color()
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().extents.tolist() == [0, 1000, 2000, 1400]


def test_a_payoff_has_rates_of_rows_and_nothing_where_none_has_played() -> None:
    payoff = Payoff(pairs={(MAIN, SCRIPT): Pair(3, 0, 1)})
    axes = draw_payoff(payoff, [MAIN, SCRIPT]).axes[0]
    assert np.ma.filled(axes.images[0].get_array(), np.nan) == pytest.approx(
        np.array([[np.nan, 0.75], [0.25, np.nan]]), nan_ok=True
    )
    assert sorted(text.get_text() for text in axes.texts) == ["25%", "75%"]


def test_labels_do_not_overlap_with_60_members() -> None:
    members = [Member("exploiter", version) for version in range(1001, 1061)]
    for figure, axis in ((draw_payoff(Payoff(), members), "both"), (draw_drawn({}, members), "y")):
        figure.canvas.draw()
        axes = figure.axes[0]
        heights = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 - 0.5 for above, below in itertools.pairwise(heights))
        if axis == "both":
            widths = [label.get_window_extent() for label in axes.get_xticklabels()]
            assert all(left.x1 <= right.x0 + 0.5 for left, right in itertools.pairwise(widths))


def test_the_books_are_drawn_into_the_trial_and_versions_have_their_ratings(
    tracking_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial.open("project", "league", tracking_db)
    save_weights(tmp_path / "weights.npz", {"w": np.zeros(3, np.float32)})
    (tmp_path / "books").mkdir()
    version = register_files(trial, tmp_path, "pool", 1000, tags={}).version
    books = str(tmp_path / "books" / "books.sqlite")
    ledger = Ledger(books)
    ledger.freeze(SNAPSHOT._replace(member=Member("main", version)), {FIRST: Rating(30.0, 2.0)})
    ledger.count_game("one", {(MAIN, FIRST): Pair(0, 0, 1)}, {MAIN: Rating(), FIRST: Rating(30.0, 2.0)},
                      {MAIN: 1, FIRST: 1}, {"counted": 1})  # fmt: skip
    keep_curves(trial, books, {"main": 1000})
    keep_curves(trial, books, {"main": 2000})
    keep_ratings(trial, books, {}, "pool", "keeper")
    assert "player" not in find("models:/pool/1", tracking_db).tags, "it is another model's version"
    draw_league(trial, books, {"main": 3000}, "pool", "", ["main:1", "main"])
    assert [point.env_steps for point in ledger.curves()[MAIN]] == [1000], "its rating stands still"
    artifacts = {file.path for file in MlflowClient(tracking_db).list_artifacts(trial.run_id)}
    assert {RATINGS_FILE, PAYOFF_FILE, DRAWN_FILE} <= artifacts
    tags = find("models:/pool/1", tracking_db).tags
    points = Ratings({FIRST: Rating(30.0, 2.0)}).points(FIRST)
    expected = {
        "brayx.points": f"{points:.0f}",
        "brayx.points.sigma": "2.00",
        "player": "main",
        "brayx.digest": "digest",
    }
    assert expected.items() <= tags.items()

    written = []
    write = MlflowClient.set_model_version_tag

    def counted(self: MlflowClient, name: str, version: str, key: str, value: str) -> None:
        written.append((version, key, value))
        write(self, name, version, key, value)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", counted)
    draw_league(trial, books, {"main": 4000}, "pool", "", ["main:1", "main"])
    assert written == [], "nothing has changed"
    ledger.count_game("two", {}, {FIRST: Rating(30.0, 1.9)}, {FIRST: 1}, {"counted": 1})
    draw_league(trial, books, {"main": 5000}, "pool", "", ["main:1", "main"])
    assert [key for _, key, _ in written if key != "brayx.points"] == ["brayx.points.sigma"]
    assert find("models:/pool/1", tracking_db).tags["brayx.points.sigma"] == "1.90"


LAST = RatingPoint(1000, 1200.0, 1100.0, 1300.0)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        (LAST._replace(env_steps=2000), False),
        (LAST._replace(env_steps=2000, points=1201.9), False),
        (LAST._replace(env_steps=2000, points=1198.0), True),
        (LAST._replace(env_steps=2000, low=1110.0), True),
        (LAST._replace(env_steps=1000, points=1300.0), False),
    ],
)
def test_a_point_counts_if_steps_came_and_the_rating_or_its_interval_moved(point: RatingPoint, expected: bool) -> None:
    assert changed([LAST], point) is expected
    assert changed([], point)


def test_a_point_is_the_rating_with_its_interval() -> None:
    ratings = Ratings()
    ratings.rate([[MAIN], [Member("other")]], [0, 1])
    point = point_of(ratings, MAIN, 7)
    assert (point.env_steps, point.points) == (7, ratings.points(MAIN))
    assert (point.low, point.high) == ratings.interval(MAIN)
    assert point.low < 1200.0 < point.points < point.high
