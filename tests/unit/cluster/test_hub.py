"""The hub's writer thread, without Ray."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from brayx.cluster.hub import HubClient
from brayx.metrics import Kind, Recorder
from brayx.metrics.totals import Drained
from brayx.tracking import Trial
from brayx.tracking.hub import Hub
from tests.waiting import until


def part(*samples: tuple[str, float], label: str = "") -> Drained:
    recorder = Recorder()
    for name, value in samples:
        recorder.add(name, value, label=label)
    return recorder.drain()


@pytest.fixture
def trial(tracking_db: str) -> Trial:
    return Trial.open("project", "trial", tracking_db)


@contextlib.contextmanager
def refusing(trial: Trial) -> Iterator[None]:
    """A context in which MLflow refuses what is written to the trial, since it is deleted."""
    client = MlflowClient(trial.uri)
    client.delete_run(trial.run_id)
    yield
    client.restore_run(trial.run_id)


class TestHub:
    def test_writer_writes_to_mlflow_at_env_steps(self, trial: Trial) -> None:
        hub = Hub(trial, interval_s=0.02)
        hub.push(part(("env_steps", 128), ("episode_return", 9.0)))
        until(lambda: trial.history("return/mean") == [(128, 9.0)])
        hub.push(part(("env_steps", 128), ("episode_return", 11.0)))
        last = hub.close()
        assert trial.history("return/mean") == [(128, 9.0), (256, 11.0)]
        assert trial.metrics()["return/last_100_games"] == last["episode_return.last100"] == 10.0

    def test_the_next_hub_of_the_trial_continues(self, trial: Trial) -> None:
        for expected in (10, 20):
            hub = Hub(trial)
            hub.push(part(("env_steps", 10), ("loss", 1.0)))
            assert hub.close()["env_steps"] == expected
        assert trial.history("replay/env_steps") == [(10, 10.0), (20, 20.0)]

    def test_own_sums_and_seconds_continue_and_histograms_are_an_artifact(self, trial: Trial) -> None:
        for round_ in (1, 2):
            hub = Hub(trial, interval_s=60, x_axis="updates")
            recorder = Recorder()
            recorder.add("gold", 5, kind=Kind.SUM, label="hero:3.side:left")
            recorder.add("hp", 7.0, kind=Kind.HISTOGRAM)
            recorder.add("updates", 1)
            recorder.add("seconds", 7.5 * round_)
            hub.push(recorder.drain())
            last = hub.close()
            assert (last["gold.hero:3.side:left"], last["updates"]) == (5 * round_, round_)
            assert last["seconds"] == trial.metrics()["learner/seconds"] == 7.5 * round_
        assert trial.history("game/gold.hero:3.side:left") == [(1, 5.0), (2, 10.0)]
        client = MlflowClient(trial.uri)
        bars = json.loads(Path(client.download_artifacts(trial.run_id, "histograms.json")).read_text())
        assert bars["hp"]["counts"] == [1.0], "only this hub's samples"

    def test_a_failed_write_is_counted_and_survived(self, trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
        hub = Hub(trial, interval_s=60)
        with refusing(trial):
            for loss in (1.0, 2.0):
                hub.push(part(("env_steps", 10), ("loss", loss)))
                hub.flush()
            assert hub.snapshot()["hub_write_failures"] == 2
            assert len([r for r in caplog.records if "not written" in r.message]) == 1
        hub.push(part(("env_steps", 10), ("loss", 3.0)))
        assert hub.close()["env_steps"] == 30
        assert trial.history("replay/env_steps") == [(10, 10.0), (20, 20.0), (30, 30.0)]
        assert trial.history("learner/loss") == [(10, 1.0), (20, 2.0), (30, 3.0)]

    def test_a_failed_write_is_repeated_also_if_no_metrics_come(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brayx.tracking.hub._RETRY_S", 0.05)
        hub = Hub(trial, interval_s=0.02)
        with refusing(trial):
            hub.push(part(("env_steps", 10)))
            until(lambda: hub.snapshot()["hub_write_failures"] >= 1)
        until(lambda: trial.history("replay/env_steps") == [(10, 10.0)])
        hub.close()

    def test_of_many_failed_writes_the_oldest_are_dropped_and_counted(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brayx.tracking.hub._UNWRITTEN", 2)
        hub = Hub(trial, interval_s=60)
        with refusing(trial):
            for _ in range(3):
                hub.push(part(("env_steps", 10)))
                hub.flush()
        assert hub.snapshot()["hub_intervals_lost"] == 1
        hub.flush()
        assert hub.close()["env_steps"] == 30
        assert trial.history("replay/env_steps") == [(20, 20.0), (30, 30.0)]

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
