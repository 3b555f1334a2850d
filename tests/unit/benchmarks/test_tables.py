"""The benchmarks' arithmetic, tables and options. Nothing here is timed."""

from __future__ import annotations

import math
import os
import time

import pytest

from benchmarks import servers, ticks, train
from benchmarks.parts import CpuClock
from benchmarks.servers import Cost, Loaded
from benchmarks.tables import Table, figure, median, median_ratio, percentile, ratio
from benchmarks.ticks import Case
from benchmarks.train import Outcome, Point, Ran, outcome


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_median_over_rounds_needs_every_round() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([3.0, None, 2.0]) is None
    assert median([]) is None


def test_ratios_are_taken_round_by_round() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(1.0, 0.0) is None
    assert ratio(None, 2.0) is None
    # The second round was slow for both; the ratio of medians would be 10 / 6.
    assert median_ratio([10.0, 1.0, 12.0], [20.0, 2.0, 6.0]) == 0.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "-"), (16, "16"), (12345.6, "12,346"), (0.01234, "0.0123"), (1.5, "1.50"), (0.0, "0")],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_markdown_aligns_and_refuses_ragged_rows() -> None:
    table = Table(["name", ">n"])
    table.add("a", 1000)
    assert table.markdown() == "| name |     n |\n|------|------:|\n| a    | 1,000 |"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table.add("b")


def test_ticks_compares_with_the_bare_echo_of_the_same_door_and_sessions() -> None:
    bare, served = Case("echo", "ws", "bare", 16), Case("cartpole", "ws", "haproxy", 16)
    fast, slow = Loaded(2000, 1000.0, 0.001, 0.002), Loaded(500, 250.0, 0.004, 0.008)
    rows = ticks.table({bare: [fast, fast], served: [slow, slow]}).rows
    assert list(rows[1]) == ["cartpole", "ws", "HAProxy", 16, 250.0, 4.0, 8.0, 0.25]
    assert list(ticks.table({bare: [fast, None]}).rows[0])[4:] == [None, None, None, None]


def test_ticks_cases_cover_every_combination_once() -> None:
    found = ticks.cases(["http", "ws"], ["serve", "haproxy"], [1, 16], ["echo", "cartpole"])
    assert len(found) == len(set(found)) == 20
    assert all(case.yardstick in found for case in found)


def test_outcome_summarises_a_course() -> None:
    points = [Point(110.0, 1000, 40, 20.0), Point(120.0, 2000, 90, 480.0), Point(130.0, 3000, 120, 480.0)]
    ran = Ran("", started_s=100.0, ended_s=135.0, cpu_at=lambda time_s: (time_s - 90.0) / 10.0)
    read = outcome(points, ran)
    assert (read.steps_per_s, read.startup_s, read.total_s) == (100.0, 0.0, 35.0)
    assert read.target_s == 30.0  # the 480 at 120 s is a mean of fewer than 100 games
    assert read.target_steps == 3000
    assert read.target_from_start_s == 30.0
    with pytest.raises(ValueError, match="no course"):
        outcome(points[:1], ran)
    assert read.cpu_us == 1e6 * 3.0 / 3000  # of the 30 s from the first game on
    known = outcome([*points, Point(140.0, 3000, 130, 490.0)], ran, began_s=105.0)
    assert (known.startup_s, known.steps_per_s) == (5.0, 120.0)  # no update came after 130 s
    assert known.final_return == 490.0


def test_the_cpu_clock_interpolates_between_samples_and_is_constant_outside() -> None:
    clock = CpuClock(os.getpid())
    clock._samples = [(10.0, 1.0), (11.0, 2.0)]
    assert [clock.at(time_s) for time_s in (0.0, 10.0, 10.5, 11.0, 100.0)] == [1.0, 1.0, 1.5, 2.0, 2.0]


def test_the_cpu_clock_samples_what_a_process_uses() -> None:
    used = time.process_time()
    with CpuClock(os.getpid()) as clock:
        until = time.monotonic() + 30.0
        while len(clock._samples) < 2 and time.monotonic() < until:
            pass
    assert 0.0 < used <= clock.at(time.time())


def test_train_reports_how_many_seeds_reached_the_target() -> None:
    good, bad = Outcome(200.0, 5.0, 10.0, 2000, 20.0, 490.0), Outcome(100.0, 1.0, None, None, 20.0, 300.0)
    rows = train.table({"once": [good, good], "sb3": [good, bad]}).rows
    assert list(rows[0])[:3] == ["brayx, local host", 200.0, 1.5]
    assert (rows[0][-1], rows[1][-1]) == ("2 of 2", "1 of 2")
    assert rows[1][5] is None  # a seed that missed the target has no time, so the median has none either


def test_options() -> None:
    quick = ticks.parse(["--quick"])
    assert (quick.rounds, quick.ingress, quick.sessions) == (1, ["haproxy", "native"], [1, 16])
    assert train.parse(["--quick"]).seeds == [0]
    assert train.parse(["--seeds", "4", "5"]).seeds == [4, 5]
    with pytest.raises(SystemExit):
        ticks.parse(["--rounds", "0"])


def test_the_cost_of_serving_is_compared_round_by_round() -> None:
    none = [Cost(100.0, 1e-5, 0.0, 1.0), Cost(10.0, 2e-5, 0.0, 1.0)]
    slower = [Cost(50.0, 2e-5, 0.0, 1.0), Cost(5.0, 4e-5, 0.0, 1.0)]
    assert servers.cost_cells(slower, none) == pytest.approx([27.5, 0.5, 30.0, 2.0])


def test_a_service_says_where_it_serves_and_ends_with_its_context() -> None:
    with servers.server("bare") as served:
        assert set(served.urls) == {"echo", "echo tcp", "echo uvloop"}
        assert servers.listeners(served.urls["echo tcp"]) == [served.pid]
    assert servers.tree(served.pid) == []
