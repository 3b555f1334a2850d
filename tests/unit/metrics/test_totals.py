"""A trial's sums, windows and rates."""

from __future__ import annotations

import statistics

import pytest

from brayx.errors import ConfigError
from brayx.metrics import Drained, Kind, Recorder, XAxis
from brayx.metrics.totals import Totals, joined
from tests.clocks import Clock


def part(*samples: tuple[str, float], label: str = "") -> Drained:
    recorder = Recorder()
    for name, value in samples:
        recorder.add(name, value, label=label)
    return recorder.drain()


def test_the_games_of_an_arm_are_summed_beside_the_mean_of_the_newest() -> None:
    totals = Totals()
    for returned in (2.0, -4.0):
        totals.merge(part(("arm_return", returned), label="model/champion/1"))
        totals.take_interval()
    numbers = totals.snapshot()
    named = [f"{name}.model/champion/1" for name in ("arm_games", "arm_returns", "arm_return")]
    assert [numbers[name] for name in named] == [2, -2, -4]


def test_numbers_of_several_behaviours_as_of_one_training() -> None:
    recorders = {}
    for name, steps, mean in (("chaser", 100.0, 2.0), ("runner", 50.0, 4.0)):
        recorders[name] = totals = Totals()
        totals.merge(part(("env_steps", steps), ("episode_return", mean), ("loss", mean)))
        totals.merge(part(("replay_dropped", 3.0), label="full"))
    numbers = joined({name: totals.snapshot() for name, totals in recorders.items()})
    assert (numbers["env_steps"], numbers["games"], numbers["games_in_window"]) == (150, 2, 2)
    assert numbers["replay_dropped.full"] == 6
    assert (numbers["loss"], numbers["episode_return.last100"]) == (2, 2), "a mean is the first one's"
    assert (numbers["behaviour_return.chaser"], numbers["behaviour_return.runner"]) == (2, 4)
    alone = recorders["chaser"].snapshot()
    assert joined({"chaser": alone}) == alone


class TestTotals:
    def test_sums_are_totals_and_means_cover_the_interval(self) -> None:
        totals = Totals()
        totals.merge(part(("env_steps", 100), ("loss", 1.0)))
        assert totals.take_interval()["env_steps"] == 100
        totals.merge(part(("env_steps", 50), ("loss", 3.0)))
        totals.merge(part(("loss", 5.0)))
        numbers = totals.take_interval()
        assert (numbers["env_steps"], numbers["loss"], totals.step) == (150, 4.0, 150)

    def test_games_are_counted_by_returns_and_a_leagues_game_only_once(self) -> None:
        seats = part(("episode_return", 1.0), ("episode_return", -1.0))
        for ended, games in (([], 2.0), ([("league_games", 1.0)], 1.0)):
            totals = Totals()
            totals.merge(seats)
            totals.merge(part(*ended))
            assert totals.take_interval()["games"] == totals.snapshot()["games"] == games

    def test_without_news_nothing_is_written(self) -> None:
        totals = Totals()
        totals.merge(part(("loss", 1.0)))
        assert totals.take_interval()
        assert totals.take_interval() == {}
        assert totals.snapshot()["loss"] == 1.0

    def test_totals_continue_from_an_interrupted_trial(self) -> None:
        totals = Totals({"env_steps": 1000, "sessions_ended.stop": 3, "games": 7})
        totals.merge(part(("env_steps", 1), ("episode_return", 5.0)))
        totals.merge(part(("sessions_ended", 1), label="stop"))
        assert (totals.step, totals.snapshot()["sessions_ended.stop"], totals.snapshot()["games"]) == (1001, 4, 8)

    @pytest.mark.parametrize("games", [1, 7, 100, 1000], ids="{} a part".format)
    def test_the_window_holds_the_last_hundred_games_for_any_parts(self, games: int) -> None:
        totals = Totals()
        for start in range(0, 1000, games):
            totals.merge(part(*[("episode_return", value) for value in range(start, min(start + games, 1000))]))
        numbers = totals.snapshot()
        assert numbers["episode_return.last100"] == pytest.approx(sum(range(900, 1000)) / 100)
        assert numbers["episode_return.error100"] == pytest.approx(statistics.stdev(range(900, 1000)) / 10)
        assert (numbers["games_in_window"], numbers["games"]) == (100, 1000)

    def test_a_part_merged_on_the_way_keeps_the_newest_games_of_all(self) -> None:
        totals, way = Totals(), Recorder()
        for start in (0, 80):
            way.add_all("episode_return", [float(value) for value in range(start, start + 80)])
            games = Recorder()
            games.merge(way.drain())
            games.add("episode_return", 1000.0, weight=2)
            way.merge(games.drain())
        totals.merge(way.drain())
        assert (
            totals.snapshot()["episode_return.last100"]
            == (sum(range(64, 80)) + 2000 + sum(range(80, 160)) + 2000) / 100
        )
        assert totals.snapshot()["games"] == 164

    def test_a_window_that_is_not_full_covers_the_games_so_far(self) -> None:
        totals = Totals()
        assert "episode_return.last100" not in totals.snapshot()
        totals.merge(part(("episode_return", 2.0), ("episode_return", 4.0)))
        assert totals.snapshot()["episode_return.last100"] == 3.0

    def test_the_window_of_a_resumed_trial_starts_empty(self) -> None:
        totals = Totals({"games": 500})
        assert (totals.snapshot()["games"], totals.snapshot()["games_in_window"]) == (500, 0)
        totals.merge(part(("episode_return", 9.0)))
        assert (totals.snapshot()["games"], totals.snapshot()["games_in_window"]) == (501, 1)
        totals.merge(part(*[("episode_return", 1.0)] * 100))
        totals.merge(part(("episode_return", 1.0)))
        assert (totals.snapshot()["games_in_window"], totals.snapshot()["episode_return.last100"]) == (100, 1.0)

    def test_failed_games_count_among_the_last_hundred(self) -> None:
        totals = Totals()
        totals.merge(part(*[("episode_return", 4.0)] * 90))
        totals.merge(part(*[("games_failed", 1.0)] * 30, label="on_episode"))
        totals.merge(part(*[("episode_return", 8.0)] * 35))
        numbers = totals.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"], numbers["games"]) == (70, 30, 125)
        assert numbers["episode_return.last100"] == (35 * 4.0 + 35 * 8.0) / 70
        totals.merge(part(("games_failed", 1000.0), label="on_episode"))
        numbers = totals.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"]) == (0, 100)
        assert "episode_return.last100" not in numbers

    def test_games_ended_by_overload_are_failures_but_not_errors(self) -> None:
        totals = Totals()
        totals.merge(part(*[("episode_return", 4.0)] * 90))
        totals.merge(part(("games_failed", 25.0), label="overloaded"))
        totals.merge(part(("games_failed", 5.0), label="on_tick"))
        totals.merge(part(("gamecores_failed", 30.0)))
        numbers = totals.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"]) == (70, 30)
        assert numbers["games_overloaded_in_window"] == 25

    def test_a_game_process_that_ends_by_its_sessions_failure_is_not_counted_twice(self) -> None:
        totals = Totals()
        totals.merge(part(("games_failed", 3.0), label="on_tick"))
        totals.merge(part(("gamecores_failed", 2.0)))
        assert totals.snapshot()["games_failed_in_window"] == 3
        totals.merge(part(("gamecores_failed", 4.0)))
        assert totals.snapshot()["games_failed_in_window"] == 6

    def test_fragments_lost_to_errors_are_counted_over_the_newest(self) -> None:
        totals = Totals()
        for _ in range(50):
            totals.merge(part(("fragments_pushed", 10.0)))
        assert (totals.snapshot()["fragments_in_window"], totals.snapshot()["fragments_lost_in_window"]) == (100, 0)
        for _ in range(5):
            totals.merge(part(("fragments_dropped", 10.0), label="refused"))
            totals.merge(part(("fragments_dropped", 10.0), label="overloaded"))
            totals.merge(part(("fragments_pushed", 10.0)))
        assert (totals.snapshot()["fragments_in_window"], totals.snapshot()["fragments_lost_in_window"]) == (100, 50)

    def test_it_is_quiet_since_the_newest_env_step(self) -> None:
        clock = Clock(100.0)
        totals = Totals(clock=clock)
        clock.now += 20.0
        assert totals.snapshot()["quiet_s"] == 20.0
        totals.merge(part(("env_steps", 5.0)))
        clock.now += 3.0
        totals.merge(part(("ticks", 5.0)))
        assert totals.snapshot()["quiet_s"] == 3.0

    def test_the_newest_failed_game_has_an_age(self) -> None:
        clock = Clock(100.0)
        totals = Totals(clock=clock)
        totals.merge(part(("games_failed", 1.0), label="overloaded"))
        assert "failed_s" not in totals.snapshot()
        totals.merge(part(("games_failed", 1.0), label="on_tick"))
        clock.now += 3.0
        totals.merge(part(("ticks", 5.0)))
        assert totals.snapshot()["failed_s"] == 3.0

    def test_a_rate_covers_its_window(self) -> None:
        clock = Clock(100.0)
        totals = Totals(clock=clock, rate_window_s=5.0)
        for _ in range(20):
            clock.now += 1.0
            totals.merge(part(("ticks", 30)))
        assert totals.snapshot()["ticks_per_s"] == pytest.approx(36.0)
        clock.now += 10.0
        assert totals.snapshot()["ticks_per_s"] == 0.0

    def test_own_metrics_keep_their_kind(self) -> None:
        totals = Totals()
        for _ in range(2):
            recorder = Recorder()
            recorder.add("enemies", 2, kind=Kind.SUM)
            totals.merge(recorder.drain())
        assert totals.take_interval()["enemies"] == 4

    def test_percentiles_cover_the_run_and_the_last_interval(self) -> None:
        totals = Totals({"ticks": 1000})
        for seconds in (0.001, 0.1):
            totals.merge(part(*[("tick_seconds", seconds)] * 60, ("ticks", 60)))
            totals.merge(part(("forward_seconds", seconds), label="model"))
            written = totals.take_interval()
            assert not [name for name in written if ".run." in name]
        numbers = totals.snapshot()
        assert numbers["tick_seconds.p50"] == pytest.approx(0.1)
        assert numbers["tick_seconds.run.p50"] == pytest.approx(0.001)
        assert numbers["tick_seconds.run.p99"] == pytest.approx(0.1, rel=0.01)
        assert numbers["forward_seconds.model.run.p99"] == pytest.approx(0.1, rel=0.01)
        assert (numbers["ticks"], numbers["ticks_this_run"]) == (1120, 120)

    def test_names_are_bounded_and_drops_are_counted(self) -> None:
        totals = Totals({"env_steps": 5}, max_names=3)
        for session in range(10):
            recorder = Recorder()
            recorder.add(f"own-{session}", 1, kind=Kind.SUM)
            totals.merge(recorder.drain())
            totals.take_interval()
        totals.merge(part(("ticks", 2), ("env_steps", 5)))
        numbers = totals.snapshot()
        assert sorted(name for name in numbers if name.startswith("own")) == ["own-0", "own-1"]
        assert (numbers["metrics_dropped"], numbers["ticks"], numbers["env_steps"]) == (8, 2, 10)

    def test_labels_are_bounded_over_time_and_after_a_resume(self) -> None:
        totals = Totals({"sessions_ended.old": 1}, max_labels=2)
        for label in ("a", "b", "old", "c"):
            totals.merge(part(("sessions_ended", 1), label=label))
            totals.take_interval()
        numbers = totals.snapshot()
        ended = {name: value for name, value in numbers.items() if name.startswith("sessions_ended")}
        assert ended == {"sessions_ended.old": 2, "sessions_ended.a": 1, "sessions_ended.other": 2}
        assert numbers["labels_folded"] == 2

    @pytest.mark.parametrize(("x_axis", "step"), [("env_steps", 40), ("updates", 3), ("seconds", 107)])
    def test_the_x_axis_continues_from_an_interrupted_trial(self, x_axis: XAxis, step: int) -> None:
        clock = Clock(100.0)
        totals = Totals({"env_steps": 10, "updates": 1, "seconds": 100.0}, x_axis=x_axis, clock=clock)
        clock.now += 7.5
        assert totals.snapshot()["seconds"] == 100.0, "until its learner continues"
        totals.merge(part(("env_steps", 30), ("updates", 2), ("seconds", 107.5)))
        assert totals.take_interval()["seconds"] == 107.5
        assert totals.step == step

    def test_an_invalid_x_axis_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"x_axis is 'steps'.*env_steps"):
            Totals(x_axis="steps")  # type: ignore[arg-type]

    def test_histograms_cover_all_samples(self) -> None:
        totals = Totals()
        for value in (-1.0, 1.0):
            recorder = Recorder()
            recorder.add("own", value, kind=Kind.HISTOGRAM)
            totals.merge(recorder.drain())
            assert totals.take_interval()["own.p50"] == value
        assert sum(totals.histograms()["own"]["counts"]) == 2
