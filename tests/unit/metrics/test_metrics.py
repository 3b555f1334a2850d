"""Metrics are declared once, and parts of them merge exactly."""

from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest

from brayx.errors import ConfigError
from brayx.metrics import BOUNDS, METRICS, SIGNED_BOUNDS, Kind, Recorder, kind_of, label_of


def test_every_metric_is_fully_declared() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.islower()
        assert metric.unit
        assert metric.help


@pytest.mark.parametrize(("kind", "expected"), [(Kind.MEAN, 2.0), (Kind.SUM, 6.0), (Kind.MAX, 3.0), (Kind.LAST, 2.0)])
def test_kinds(kind: Kind, expected: float) -> None:
    recorder = Recorder()
    for value in (1.0, 3.0, 2.0):
        recorder.add("own", value, kind=kind)
    assert recorder.summary() == {"own": expected}


def test_the_maximum_of_negative_numbers_is_negative() -> None:
    recorder = Recorder()
    recorder.add("own", -5.0, kind=Kind.MAX)
    assert recorder.summary() == {"own": -5.0}


def test_add_all_equals_single_adds() -> None:
    values = [
        *(random.Random(1).lognormvariate(-8, 3) for _ in range(500)),
        *BOUNDS,
        0.0,
        -1.0,
        1e9,
        math.inf,
        2e-4,
        2e-4,
    ]
    one_by_one, at_once = Recorder(), Recorder()
    for value in values:
        one_by_one.add("tick_seconds", value)
    at_once.add_all("tick_seconds", values)
    assert at_once.drain() == one_by_one.drain()


def test_a_weight_counts_as_that_many_samples() -> None:
    recorder = Recorder()
    recorder.add("loss", 1.0, weight=3)
    recorder.add("loss", 5.0)
    assert recorder.summary() == {"loss": 2.0}


def test_labels_split_a_metric() -> None:
    recorder = Recorder()
    recorder.add("sessions_ended", 1, label="stop")
    recorder.add("sessions_ended", 1, label="idle")
    recorder.add("sessions_ended", 1, label="idle")
    assert recorder.summary() == {"sessions_ended.stop": 1, "sessions_ended.idle": 2}


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1.0, 1e3])
def test_percentiles_lie_in_the_bucket_of_the_exact_ones_and_mostly_close(scale: float) -> None:
    values = np.random.default_rng(0).lognormal(size=5000) * scale
    recorder = Recorder()
    for value in values:
        recorder.add("tick_seconds", value)
    numbers = recorder.summary()
    for name, q in (("tick_seconds.p50", 0.5), ("tick_seconds.p99", 0.99)):
        assert numbers[name] == pytest.approx(np.quantile(values, q), rel=0.03)


def test_percentiles_of_few_samples_lie_between_the_smallest_and_the_largest() -> None:
    recorder = Recorder()
    recorder.add_all("tick_seconds", [0.0204, 0.0204, 0.0206])
    numbers = recorder.summary()
    assert 0.0204 <= numbers["tick_seconds.p50"] <= numbers["tick_seconds.p99"] <= 0.0206, "their bucket ends at 0.0251"


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("kind", [Kind.PERCENTILE, Kind.HISTOGRAM])
def test_percentiles_of_infinite_samples_are_finite(value: float, kind: Kind) -> None:
    recorder = Recorder()
    recorder.add("mine", value, kind=kind)
    assert math.isfinite(recorder.summary()["mine.p50"])


def test_percentile_is_never_above_the_maximum() -> None:
    recorder = Recorder()
    recorder.add("tick_seconds", 0.0011)
    assert recorder.summary() == {"tick_seconds.p50": 0.0011, "tick_seconds.p99": 0.0011}


def test_percentile_beyond_the_last_bound() -> None:
    recorder = Recorder()
    recorder.add("tick_seconds", 5e9)
    assert recorder.summary()["tick_seconds.p99"] == pytest.approx(5e9)


def test_merged_parts_equal_one_recorder_in_any_order() -> None:
    rng = random.Random(0)
    names = ["ticks", "tick_seconds", "episode_return", "own"]
    samples = [(rng.choice(names), float(rng.randint(1, 64)), rng.choice(["", "a"])) for _ in range(500)]
    whole = Recorder()
    parts = [Recorder() for _ in range(5)]
    for index, (name, value, label) in enumerate(samples):
        for recorder in (whole, parts[index % 5]):
            recorder.add(name, value, label=label, kind=Kind.MAX if name == "own" else None)
    drained = [part.drain() for part in parts]
    for order in (drained, drained[::-1]):
        merged = Recorder()
        for part in order:
            merged.merge(part)
        assert merged.summary() == whole.summary()


def test_merging_does_not_share_cells() -> None:
    source, first = Recorder(), Recorder()
    source.add("ticks", 1)
    part = source.drain()
    first.merge(part)
    first.add("ticks", 1)
    second = Recorder()
    second.merge(part)
    assert second.summary() == {"ticks": 1}


def test_drain_empties_the_recorder() -> None:
    recorder = Recorder()
    recorder.add("ticks", 1)
    assert recorder.drain()[0]
    assert recorder.summary() == {}


def test_samples_beyond_the_bound_are_dropped_and_counted() -> None:
    recorder = Recorder(max_names=3)
    for index in range(3):
        recorder.add("sessions_ended", 1, label=str(index))
    recorder.add("sessions_ended", 1, label="0")
    for _ in range(2):
        recorder.add("sessions_ended", 1, label="3")
    recorder.add("ticks", 1)
    ended = {"sessions_ended.0": 2, "sessions_ended.1": 1, "sessions_ended.2": 1}
    assert recorder.summary() == {**ended, "metrics_dropped": 2, "ticks": 1}


def test_merging_keeps_the_bound() -> None:
    other, recorder = Recorder(), Recorder(max_names=2)
    for index in range(5):
        other.add("sessions_ended", 1, label=str(index))
    recorder.merge(other.drain())
    assert recorder.summary() == {"sessions_ended.0": 1, "sessions_ended.1": 1, "metrics_dropped": 3}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_histogram_has_values_on_both_sides_of_zero(scale: float) -> None:
    values = np.random.default_rng(0).normal(size=5000) * scale
    recorder = Recorder()
    for value in values:
        recorder.add("advantage", value, kind=Kind.HISTOGRAM)
    numbers = recorder.summary()
    for name, q in (("p05", 0.05), ("p25", 0.25), ("p75", 0.75), ("p95", 0.95)):
        assert numbers[f"advantage.{name}"] == pytest.approx(np.quantile(values, q), rel=0.05)
    assert abs(numbers["advantage.p50"]) < 0.1 * scale
    ends = (numbers["advantage.min"], numbers["advantage.max"], numbers["advantage.mean"])
    assert ends == pytest.approx((values.min(), values.max(), values.mean()))


def test_the_bars_of_a_histogram_equal_numpys() -> None:
    values = [*np.random.default_rng(1).normal(size=300).tolist(), 0.0, 5.0]
    parts = [Recorder(), Recorder()]
    for index, value in enumerate(values):
        parts[index % 2].add("own", value, kind=Kind.HISTOGRAM, label="a")
    merged = Recorder()
    for part in parts:
        merged.merge(part.drain())
    bars = merged.histograms()["own.a"]
    assert (bars["edges"][0], bars["edges"][-1], sum(bars["counts"])) == (min(values), max(values), len(values))
    # NumPy's bins are closed on the left, these on the right, so mirrored data must give the same counts.
    counts, _ = np.histogram(-np.array(values), bins=-np.array([*bars["edges"][:0:-1], min(values) - 1]))
    assert counts[::-1].tolist() == bars["counts"]
    assert set(bars["edges"][1:-1]) <= set(SIGNED_BOUNDS)


def test_a_histogram_of_one_value_is_that_value() -> None:
    recorder = Recorder()
    recorder.add("own", -3.0, kind=Kind.HISTOGRAM)
    assert set(recorder.summary().values()) == {-3.0}


def test_the_order_of_labels_does_not_matter() -> None:
    assert label_of({"side": "left", "hero": 3}) == label_of({"hero": 3, "side": "left"}) == "hero:3.side:left"
    assert label_of({"a": "x 0.5=z" + "w" * 100}).startswith("a:x 0.5_u003d_zwww")
    assert label_of({"map": "level_1", "dist_x_y": "a_x_b", "no": ""}) == "dist_x_y:a_x_b.map:level_1.no:"
    different = [{"a": "w" * 100}, {"a": "w" * 101}, {"a": "5%"}, {"a": "5#"}, {"a": "1.b:2"}, {"a": "1", "b": "2"}]
    assert len({label_of(labels) for labels in different}) == len(different)


def test_labels_beyond_the_bound_become_other_and_are_counted() -> None:
    recorder, merged = Recorder(max_labels=2), Recorder(max_labels=1)
    for label in ("a", "b", "c", "d", "a"):
        recorder.add("sessions_ended", 1, label=label)
    expected = {"sessions_ended.a": 2, "sessions_ended.b": 1, "sessions_ended.other": 2, "labels_folded": 2}
    assert recorder.summary() == expected
    merged.merge(recorder.drain())
    assert merged.summary() == {"sessions_ended.a": 2, "sessions_ended.other": 3, "labels_folded": 3}
    assert recorder.summary() == {}
    recorder.add("sessions_ended", 1, label="c")
    assert recorder.summary() == {"sessions_ended.c": 1}, "drained samples take no room"


def test_a_kind_may_be_given_by_name() -> None:
    assert kind_of("sum") is Kind.SUM
    with pytest.raises(ConfigError, match=r"kind is 'summ'.*mean, sum"):
        kind_of("summ")
    recorder = Recorder()
    recorder.add("own", 1, kind="sum")  # type: ignore[arg-type]
    assert recorder.drain()[1]["own"].kind is Kind.SUM


def test_every_listener_gets_all_samples_of_all_threads_once() -> None:
    recorder, listeners = Recorder(), [Recorder(), Recorder()]
    for listener in listeners:
        recorder.listen(listener.merge)

    def work() -> None:
        for _ in range(500):
            recorder.add("ticks", 1.0)
            recorder.add_all("tick_seconds", [0.001, 0.002])
            if recorder.drain()[0]:
                recorder.merge(other)

    extra = Recorder()
    extra.add("env_steps", 1.0)
    other = extra.drain()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.drain()
    assert recorder.empty
    first, second = (listener.drain() for listener in listeners)
    assert first == second
    assert first[0]["ticks", ""].total == 2000
    assert first[0]["tick_seconds", ""].count == 4000
    assert first[0]["env_steps", ""].total > 0
