"""The hub's arithmetic and its writer thread, without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from brayx.cluster.hub import HubClient
from brayx.errors import ConfigError
from brayx.metrics import Kind, Recorder, XAxis
from brayx.metrics.totals import Books, Drained
from brayx.tracking import Trial
from brayx.tracking.hub import Hub
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def part(*samples: tuple[str, float], label: str = "") -> Drained:
    recorder = Recorder()
    for name, value in samples:
        recorder.add(name, value, label=label)
    return recorder.drain()


class TestBooks:
    def test_sums_are_totals_and_means_cover_the_interval(self) -> None:
        books = Books()
        books.merge(part(("env_steps", 100), ("loss", 1.0)))
        assert books.take_interval()["env_steps"] == 100
        books.merge(part(("env_steps", 50), ("loss", 3.0)))
        books.merge(part(("loss", 5.0)))
        numbers = books.take_interval()
        assert (numbers["env_steps"], numbers["loss"], books.step) == (150, 4.0, 150)

    def test_games_are_counted_by_returns_and_a_leagues_game_only_once(self) -> None:
        seats = part(("episode_return", 1.0), ("episode_return", -1.0))
        for ended, games in (([], 2.0), ([("league_games", 1.0)], 1.0)):
            books = Books()
            books.merge(seats)
            books.merge(part(*ended))
            assert books.take_interval()["games"] == books.snapshot()["games"] == games

    def test_without_news_nothing_is_written(self) -> None:
        books = Books()
        books.merge(part(("loss", 1.0)))
        assert books.take_interval()
        assert books.take_interval() == {}
        assert books.snapshot()["loss"] == 1.0

    def test_totals_continue_from_an_interrupted_trial(self) -> None:
        books = Books({"env_steps": 1000, "sessions_ended.stop": 3, "games": 7})
        books.merge(part(("env_steps", 1), ("episode_return", 5.0)))
        books.merge(part(("sessions_ended", 1), label="stop"))
        assert (books.step, books.snapshot()["sessions_ended.stop"], books.snapshot()["games"]) == (1001, 4, 8)

    @pytest.mark.parametrize("each", [1, 7, 100, 1000], ids="{} a part".format)
    def test_the_window_holds_the_last_hundred_games_for_any_parts(self, each: int) -> None:
        books = Books()
        for start in range(0, 1000, each):
            books.merge(part(*[("episode_return", value) for value in range(start, min(start + each, 1000))]))
        numbers = books.snapshot()
        assert numbers["episode_return.last100"] == pytest.approx(sum(range(900, 1000)) / 100)
        assert (numbers["games_in_window"], numbers["games"]) == (100, 1000)

    def test_a_part_merged_on_the_way_keeps_the_newest_games_of_all(self) -> None:
        books, way = Books(), Recorder()
        for start in (0, 80):
            way.add_all("episode_return", [float(value) for value in range(start, start + 80)])
            held = Recorder()
            held.merge(way.drain())
            held.add("episode_return", 1000.0, weight=2)
            way.merge(held.drain())
        books.merge(way.drain())
        assert (
            books.snapshot()["episode_return.last100"] == (sum(range(64, 80)) + 2000 + sum(range(80, 160)) + 2000) / 100
        )
        assert books.snapshot()["games"] == 164

    def test_a_window_that_is_not_full_covers_the_games_so_far(self) -> None:
        books = Books()
        assert "episode_return.last100" not in books.snapshot()
        books.merge(part(("episode_return", 2.0), ("episode_return", 4.0)))
        assert books.snapshot()["episode_return.last100"] == 3.0

    def test_the_window_of_a_resumed_trial_starts_empty(self) -> None:
        books = Books({"games": 500})
        assert (books.snapshot()["games"], books.snapshot()["games_in_window"]) == (500, 0)
        books.merge(part(("episode_return", 9.0)))
        assert (books.snapshot()["games"], books.snapshot()["games_in_window"]) == (501, 1)
        books.merge(part(*[("episode_return", 1.0)] * 100))
        books.merge(part(("episode_return", 1.0)))
        assert (books.snapshot()["games_in_window"], books.snapshot()["episode_return.last100"]) == (100, 1.0)

    def test_failed_games_count_among_the_last_hundred(self) -> None:
        books = Books()
        books.merge(part(*[("episode_return", 4.0)] * 90))
        books.merge(part(*[("games_failed", 1.0)] * 30, label="on_episode"))
        books.merge(part(*[("episode_return", 8.0)] * 35))
        numbers = books.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"], numbers["games"]) == (70, 30, 125)
        assert numbers["episode_return.last100"] == (35 * 4.0 + 35 * 8.0) / 70
        books.merge(part(("games_failed", 1000.0), label="on_episode"))
        numbers = books.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"]) == (0, 100)
        assert "episode_return.last100" not in numbers

    def test_games_ended_by_overload_are_failures_but_not_errors(self) -> None:
        books = Books()
        books.merge(part(*[("episode_return", 4.0)] * 90))
        books.merge(part(("games_failed", 25.0), label="overloaded"))
        books.merge(part(("games_failed", 5.0), label="on_tick"))
        books.merge(part(("gamecores_failed", 30.0)))
        numbers = books.snapshot()
        assert (numbers["games_in_window"], numbers["games_failed_in_window"]) == (70, 30)
        assert numbers["games_overloaded_in_window"] == 25

    def test_a_game_process_that_ends_by_its_sessions_failure_is_not_counted_twice(self) -> None:
        books = Books()
        books.merge(part(("games_failed", 3.0), label="on_tick"))
        books.merge(part(("gamecores_failed", 2.0)))
        assert books.snapshot()["games_failed_in_window"] == 3
        books.merge(part(("gamecores_failed", 4.0)))
        assert books.snapshot()["games_failed_in_window"] == 6

    def test_fragments_lost_to_errors_are_counted_over_the_newest(self) -> None:
        books = Books()
        for _ in range(50):
            books.merge(part(("fragments_pushed", 10.0)))
        assert (books.snapshot()["fragments_in_window"], books.snapshot()["fragments_lost_in_window"]) == (100, 0)
        for _ in range(5):
            books.merge(part(("fragments_dropped", 10.0), label="refused"))
            books.merge(part(("fragments_dropped", 10.0), label="overloaded"))
            books.merge(part(("fragments_pushed", 10.0)))
        assert (books.snapshot()["fragments_in_window"], books.snapshot()["fragments_lost_in_window"]) == (100, 50)

    def test_a_rate_covers_its_window(self) -> None:
        clock = Clock()
        books = Books(clock=clock, rate_window_s=5.0)
        for _ in range(20):
            clock.now += 1.0
            books.merge(part(("ticks", 30)))
        assert books.snapshot()["ticks_per_s"] == pytest.approx(36.0)
        clock.now += 10.0
        assert books.snapshot()["ticks_per_s"] == 0.0

    def test_own_metrics_keep_their_kind(self) -> None:
        books = Books()
        for _ in range(2):
            recorder = Recorder()
            recorder.add("enemies", 2, kind=Kind.SUM)
            books.merge(recorder.drain())
        assert books.take_interval()["enemies"] == 4

    def test_percentiles_cover_the_run_and_the_last_interval(self) -> None:
        books = Books({"ticks": 1000})
        for seconds in (0.001, 0.1):
            books.merge(part(*[("tick_seconds", seconds)] * 60, ("ticks", 60)))
            books.merge(part(("forward_seconds", seconds), label="model"))
            written = books.take_interval()
            assert not [name for name in written if ".run." in name]
        numbers = books.snapshot()
        assert numbers["tick_seconds.p50"] == pytest.approx(0.1)
        assert numbers["tick_seconds.run.p50"] == pytest.approx(0.001)
        assert numbers["tick_seconds.run.p99"] == pytest.approx(0.1, rel=0.01)
        assert numbers["forward_seconds.model.run.p99"] == pytest.approx(0.1, rel=0.01)
        assert (numbers["ticks"], numbers["ticks_this_run"]) == (1120, 120)

    def test_names_are_bounded_and_drops_are_counted(self) -> None:
        books = Books({"env_steps": 5}, max_names=3)
        for session in range(10):
            recorder = Recorder()
            recorder.add(f"own-{session}", 1, kind=Kind.SUM)
            books.merge(recorder.drain())
            books.take_interval()
        books.merge(part(("ticks", 2), ("env_steps", 5)))
        numbers = books.snapshot()
        assert sorted(name for name in numbers if name.startswith("own")) == ["own-0", "own-1"]
        assert (numbers["metrics_dropped"], numbers["ticks"], numbers["env_steps"]) == (8, 2, 10)

    def test_labels_are_bounded_over_time_and_after_a_resume(self) -> None:
        books = Books({"sessions_ended.old": 1}, max_labels=2)
        for label in ("a", "b", "old", "c"):
            books.merge(part(("sessions_ended", 1), label=label))
            books.take_interval()
        numbers = books.snapshot()
        ended = {name: value for name, value in numbers.items() if name.startswith("sessions_ended")}
        assert ended == {"sessions_ended.old": 2, "sessions_ended.a": 1, "sessions_ended.other": 2}
        assert numbers["labels_folded"] == 2

    @pytest.mark.parametrize(("x_axis", "step"), [("env_steps", 40), ("updates", 3), ("seconds", 107)])
    def test_the_x_axis_continues_from_an_interrupted_trial(self, x_axis: XAxis, step: int) -> None:
        clock = Clock()
        books = Books({"env_steps": 10, "updates": 1, "seconds": 100.0}, x_axis=x_axis, clock=clock)
        clock.now += 7.5
        books.merge(part(("env_steps", 30), ("updates", 2)))
        assert (books.step, books.take_interval()["seconds"]) == (step, 107.5)

    def test_an_invalid_x_axis_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="x_axis is 'steps', expected one of env_steps, updates, seconds"):
            Books(x_axis="steps")  # type: ignore[arg-type]

    def test_histograms_cover_all_samples(self) -> None:
        books = Books()
        for value in (-1.0, 1.0):
            recorder = Recorder()
            recorder.add("own", value, kind=Kind.HISTOGRAM)
            books.merge(recorder.drain())
            assert books.take_interval()["own.p50"] == value
        assert sum(books.histograms()["own"]["counts"]) == 2


class TestHub:
    def test_writer_writes_to_mlflow_at_env_steps(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        hub = Hub(trial, interval_s=0.02)
        hub.push(part(("env_steps", 128), ("episode_return", 9.0)))
        until(lambda: trial.history("return/mean") == [(128, 9.0)])
        hub.push(part(("env_steps", 128), ("episode_return", 11.0)))
        last = hub.close()
        assert trial.history("return/mean") == [(128, 9.0), (256, 11.0)]
        assert trial.metrics()["return/last_100_games"] == last["episode_return.last100"] == 10.0

    def test_the_next_hub_of_the_trial_continues(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        for expected in (10, 20):
            hub = Hub(trial)
            hub.push(part(("env_steps", 10), ("loss", 1.0)))
            assert hub.close()["env_steps"] == expected
        assert trial.history("replay/env_steps") == [(10, 10.0), (20, 20.0)]

    def test_own_sums_and_seconds_continue_and_histograms_are_an_artifact(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        for round_ in (1, 2):
            hub = Hub(trial, interval_s=60, x_axis="updates")
            recorder = Recorder()
            recorder.add("gold", 5, kind=Kind.SUM, label="hero:3.side:left")
            recorder.add("hp", 7.0, kind=Kind.HISTOGRAM)
            recorder.add("updates", 1)
            hub.push(recorder.drain())
            last = hub.close()
            assert (last["gold.hero:3.side:left"], last["updates"]) == (5 * round_, round_)
            assert last["seconds"] >= trial.metrics()["learner/seconds"] > 0
        assert trial.history("game/gold.hero:3.side:left") == [(1, 5.0), (2, 10.0)]
        client = MlflowClient(tracking_db)
        bars = json.loads(Path(client.download_artifacts(trial.run_id, "histograms.json")).read_text())
        assert bars["hp"]["counts"] == [1.0], "only this hub's samples"

    def test_a_failed_write_is_counted_and_survived(self, tracking_db: str, caplog: pytest.LogCaptureFixture) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        hub = Hub(trial, interval_s=60)

        client = MlflowClient(tracking_db)
        client.delete_run(trial.run_id)  # writing to a deleted run is refused
        for _ in range(2):
            hub.push(part(("env_steps", 10)))
            hub.flush()
        assert hub.snapshot()["hub_write_failures"] == 2
        assert len([r for r in caplog.records if "not written" in r.message]) == 1
        client.restore_run(trial.run_id)
        hub.push(part(("env_steps", 10)))
        assert hub.close()["env_steps"] == 30
        assert trial.history("replay/env_steps") == [(30, 30.0)]

    def test_without_a_trial_it_keeps_metrics_in_memory(self) -> None:
        hub = Hub(None, interval_s=0.01)
        hub.push(part(("ticks", 5)))
        assert hub.close()["ticks"] == 5
        assert hub.close()["ticks"] == 5


class TestClientWithoutHub:
    def test_it_collects_metrics(self) -> None:
        client = HubClient(None)
        client.add("ticks", 2)
        recorder = Recorder()
        recorder.add("ticks", 3)
        client.merge(recorder.drain())
        assert client.summary()["ticks"] == 5
        client.close()
