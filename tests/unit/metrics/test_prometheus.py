"""Exported metrics are declared, exact where promised, and include all that the Grafana dashboard queries."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from brayx.metrics import METRICS, Kind, Recorder
from brayx.metrics.prometheus import EXPORTED, OBSERVATIONS, Declared, Fold, MetricUpdate, Type

DASHBOARD = Path(__file__).parents[3] / "docker" / "grafana" / "brayx.json"
TAGS = {"application", "deployment", "replica", "label", "metric", "le"}


def folded(fold: Fold, recorder: Recorder) -> list[MetricUpdate]:
    return list(fold.points(recorder.drain()))


def by_name(points: list[MetricUpdate]) -> dict[tuple[str, str], float]:
    return {(point.of.name, point.tags["label"]): point.value for point in points}


def test_every_metric_is_exported_with_its_help_and_unit() -> None:
    types = {Kind.SUM: Type.COUNTER, Kind.PERCENTILE: Type.HISTOGRAM}
    for name, metric in METRICS.items():
        if metric.kind is Kind.SHAPE:
            assert f"brayx_{name}" not in EXPORTED
            continue
        declared = EXPORTED[f"brayx_{name}"]
        assert declared.help == f"{metric.help} [{metric.unit}]"
        assert declared.type is types.get(metric.kind, Type.GAUGE)


def test_names_are_prometheus_s_and_no_two_metrics_share_a_series() -> None:
    series = [name for declared in EXPORTED.values() for name in declared.series]
    assert len(series) == len(set(series))
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in series)


@pytest.mark.parametrize(
    ("kind", "value"), [(Kind.SUM, 6.0), (Kind.MEAN, 2.0), (Kind.MAX, 3.0), (Kind.LAST, 1.0)], ids=str
)
def test_kinds(kind: Kind, value: float) -> None:
    recorder = Recorder()
    for sample in (2.0, 3.0, 1.0):
        recorder.add("an application's own, with any name", sample, label="a", kind=kind)
    (point,) = folded(Fold(), recorder)
    assert (point.of.name, point.value) == (f"brayx_own_{kind}", value)
    assert point.tags == {"metric": "an application's own, with any name", "label": "a"}
    assert set(point.tags) == set(point.of.tags)


def test_sums_of_several_parts_add_up_by_label() -> None:
    fold, recorder, sums = Fold(), Recorder(), Counter[tuple[str, str]]()
    for _ in range(5):
        for reason, count in (("stop", 3), ("idle", 1)):
            for _ in range(count):
                recorder.add("sessions_ended", 1.0, label=reason)
        sums.update(by_name(folded(fold, recorder)))
    assert sums == {("brayx_sessions_ended", "stop"): 15.0, ("brayx_sessions_ended", "idle"): 5.0}


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf])
def test_a_counter_never_gets_an_invalid_value(total: float) -> None:
    recorder = Recorder()
    recorder.add("own", total, kind=Kind.SUM)
    recorder.add("ticks", 1.0)
    assert by_name(folded(Fold(), recorder)) == {("brayx_ticks", ""): 1.0}


def test_a_non_finite_level_is_not_shown() -> None:
    recorder = Recorder()
    recorder.add("loss", math.nan)
    recorder.add("entropy", 1.0, weight=0.0)
    assert folded(Fold(), recorder) == []


def observed(points: list[MetricUpdate]) -> Counter[float]:
    seen: Counter[float] = Counter()
    for point in points:
        if point.of.type is Type.HISTOGRAM:
            seen[point.value] += point.count
    return seen


def bucket(declared: Declared, value: float) -> int:
    return sum(bound < value for bound in declared.bounds)


def test_few_samples_are_all_observed_in_their_buckets() -> None:
    declared = EXPORTED["brayx_tick_seconds"]
    rng = random.Random(0)
    values = [*(10 ** rng.uniform(-6, 2) for _ in range(OBSERVATIONS - len(declared.bounds))), *declared.bounds]
    recorder = Recorder()
    for value in values:
        recorder.add("tick_seconds", value)
    points = folded(Fold(), recorder)
    seen: Counter[int] = Counter()
    for value, count in observed(points).items():
        seen[bucket(declared, value)] += count
    assert seen == Counter(bucket(declared, value) for value in values)
    assert by_name(points)["brayx_tick_seconds_samples", ""] == len(values)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9, math.inf])
def test_samples_past_all_buckets_are_finite_observations(value: float) -> None:
    recorder = Recorder()
    recorder.add("tick_seconds", value)
    ((seen, count),) = observed(folded(Fold(), recorder)).items()
    assert math.isfinite(seen)
    assert count == 1
    declared = EXPORTED["brayx_tick_seconds"]
    assert bucket(declared, seen) == bucket(declared, value)


def test_many_samples_are_observed_in_part_with_rare_ones_in_proportion() -> None:
    fold, recorder, seen, counted = Fold(), Recorder(), Counter[str](), 0.0
    for _ in range(50):
        for _ in range(1980):
            recorder.add("tick_seconds", 1e-3)
        for _ in range(20):
            recorder.add("tick_seconds", 0.5)
        points = folded(fold, recorder)
        here = observed(points)
        assert sum(here.values()) <= OBSERVATIONS + len(here)
        for value, count in here.items():
            seen["slow" if value > 0.1 else "quick"] += count
        counted += by_name(points)["brayx_tick_seconds_samples", ""]
    assert counted == 50 * 2000
    # 1 % of the samples: one of a hundred observations in each part.
    assert seen == {"quick": 50 * 99, "slow": 50}


def test_names_beyond_the_bound_are_dropped_and_counted() -> None:
    fold, recorder = Fold(max_names=10), Recorder()
    for part in range(3):
        for number in range(8):
            recorder.add(f"own of part {part}, number {number}", 1.0)
        recorder.add("ticks", 1.0)
        points = folded(fold, recorder)
        dropped = by_name(points).get(("brayx_metrics_dropped", ""), 0.0)
        assert dropped == (0.0, 6.0, 8.0)[part]
        assert by_name(points)["brayx_ticks", ""] == 1.0
    recorder.add("own of part 0, number 3", 1.0)
    assert len(folded(fold, recorder)) == 1


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("x" * 5000, "x" * 91 + "-00dbf026"),
        ("\ud800", r"\ud800"),
        ("☃" * 16, r"\u2603" * 16),
        (r"\u2603", r"\\u2603"),
        ('a"b\\c\nd', r'a"b\\c\nd'),
    ],
)
def test_labels_and_own_names_are_shown_in_short_ascii(label: str, shown: str) -> None:
    recorder = Recorder()
    recorder.add(label, 1.0, label=label)
    (point,) = folded(Fold(), recorder)
    assert point.tags == {"metric": shown, "label": shown}


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def queries() -> list[str]:
    document = dashboard()
    exprs = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    return exprs + [v["query"]["query"] for v in document["templating"]["list"] if v["type"] == "query"]


def test_the_dashboard_queries_exported_metrics() -> None:
    series = {name for declared in EXPORTED.values() for name in declared.series}
    queried = {name for query in queries() for name in re.findall(r"\bray_\w+", query)}
    assert queried <= series, f"not exported: {queried - series}"
    needed = {
        *(f"ray_brayx_{name}_total" for name in ("ticks", "sessions_started", "sessions_ended", "requests_refused")),
        *(f"ray_brayx_{name}_total" for name in ("ticks_forwarded", "ticks_fallen_back")),
        *(f"ray_brayx_{name}_bucket" for name in ("tick_seconds", "tick_wait_seconds", "forward_wait_seconds")),
        *(f"ray_brayx_{name}_bucket" for name in ("forward_seconds", "forwarded_seconds")),
        *(f"ray_brayx_{name}" for name in ("sessions_active", "forward_batch_size", "acting_version")),
    }
    assert needed <= queried, f"nowhere on the dashboard: {needed - queried}"


def test_the_dashboard_groups_by_existing_tags() -> None:
    for query in queries():
        named = {tag.strip() for tags in re.findall(r"by \(([^)]*)\)", query) for tag in tags.split(",")}
        named |= set(re.findall(r'[{,]\s*(\w+)\s*=~?"', query))
        assert named <= TAGS, query
        assert query.count("(") == query.count(")")


def test_counters_are_queried_as_rates_and_levels_are_not() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            name = re.search(r"ray_\w+", target["expr"])
            assert name is not None
            assert ("rate(" in target["expr"]) == name[0].endswith(("_total", "_bucket")), target["expr"]


def test_the_dashboard_s_panels_have_unique_names_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= cells
