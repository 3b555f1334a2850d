"""`brayx.metrics.cell`: what the samples of one metric come to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from brayx.metrics import SIGNED_BOUNDS, Kind, Recorder


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


def test_a_weight_counts_as_that_many_samples() -> None:
    recorder = Recorder()
    recorder.add("loss", 1.0, weight=3)
    recorder.add("loss", 5.0)
    assert recorder.summary() == {"loss": 2.0}


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
