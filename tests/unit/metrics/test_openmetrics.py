"""A process's metrics as OpenMetrics text, read by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from brayx.metrics import METRICS, Drained, Kind, Recorder
from brayx.metrics.openmetrics import OpenMetrics
from brayx.metrics.prometheus import EXPORTED

TAGS = {"application": "arena", "deployment": "arena", "replica": "local"}


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Any, suffix: str = "", **labels: str) -> float:
    (found,) = [
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and sample.labels == {**TAGS, **labels}
    ]
    return float(found)


def shown(recorder: Recorder, levels: Iterable[tuple[str, str, float]] = ()) -> dict[str, Any]:
    metrics = OpenMetrics(**TAGS)
    metrics.follow(recorder)
    return families(metrics.text(levels))


def test_without_samples_there_are_the_levels() -> None:
    read = shown(Recorder(), [("sessions_active", "", 3), ("acting_version", "policy", 7)])
    assert value(read["ray_brayx_sessions_active"], label="") == 3
    assert value(read["ray_brayx_acting_version"], label="policy") == 7
    assert families(OpenMetrics().text(())) == {}


def test_sums_add_up_over_drains_and_scrapes_and_means_are_of_the_newest_part() -> None:
    metrics, recorder = OpenMetrics(**TAGS), Recorder()
    metrics.follow(recorder)
    for loss in (4.0, 2.0):
        recorder.add("ticks", 3)
        recorder.add("sessions_ended", 1, label="stop")
        recorder.add("loss", loss)
        recorder.drain()  # the host's own
        recorder.add("ticks", 1)
        read = families(metrics.text(()))
        assert value(read["ray_brayx_loss"], label="") == loss
    assert value(read["ray_brayx_ticks"], "_total", label="") == 8
    assert value(read["ray_brayx_sessions_ended"], "_total", label="stop") == 2
    assert read["ray_brayx_ticks"].type == "counter"
    assert read["ray_brayx_ticks"].documentation == f"{METRICS['ticks'].help} [ticks]"


def test_recorders_have_labels_of_their_own_and_what_they_include_has_none() -> None:
    metrics, doors, first, second = OpenMetrics(**TAGS), Recorder(), Recorder(), Recorder()
    first.include(doors)
    metrics.follow(first, behaviour="chaser")
    metrics.follow(second, behaviour="runner")
    parts: list[Drained] = []
    first.listen(parts.append)
    for _ in range(2):
        doors.add("ticks", 3)
        first.add("env_steps", 1)
        first.add("ticks", 1)
        second.add("env_steps", 2)
        read = families(metrics.text(()))
    assert value(read["ray_brayx_env_steps"], "_total", label="", behaviour="chaser") == 2
    assert value(read["ray_brayx_env_steps"], "_total", label="", behaviour="runner") == 4
    assert value(read["ray_brayx_ticks"], "_total", label="") == 6
    assert value(read["ray_brayx_ticks"], "_total", label="", behaviour="chaser") == 2
    assert [cells["ticks", ""].total for cells, _ in parts] == [4, 4], "other listeners get the sum"


def test_every_sample_of_a_percentile_is_in_its_bucket() -> None:
    recorder, samples = Recorder(), [1e-4] * 900 + [0.02] * 99 + [100.0]
    recorder.add_all("tick_seconds", samples)
    family = shown(recorder)["ray_brayx_tick_seconds"]
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    assert [float(bucket.labels["le"]) for bucket in buckets[:-1]] == [*EXPORTED["brayx_tick_seconds"].bounds]
    for bucket in buckets:
        assert bucket.value == sum(sample <= float(bucket.labels["le"]) for sample in samples)
    assert value(family, "_count", label="") == len(samples)
    assert value(family, "_sum", label="") > 0


def test_the_newest_traced_sample_of_a_bucket_is_its_exemplar() -> None:
    """One whose bucket has no sample has no place; a recorder's parts have theirs."""
    recorder, doors, samples = Recorder(), Recorder(), [1.1e-3, 1.2e-3, 0.5]
    recorder.include(doors)
    doors.add_all("tick_seconds", samples)
    for number, value in enumerate([*samples, 7.0]):
        doors.trace("tick_seconds", value, f"{number:032x}")
    buckets = [sample for sample in shown(recorder)["ray_brayx_tick_seconds"].samples if sample.exemplar]
    assert [(b.exemplar.labels, b.exemplar.value) for b in buckets] == [
        ({"trace_id": f"{1:032x}"}, 1.2e-3),
        ({"trace_id": f"{2:032x}"}, 0.5),
    ]
    for bucket in buckets:
        assert bucket.exemplar.value <= float(bucket.labels["le"])


def test_an_applications_own_metrics_of_every_kind_and_any_name_can_be_read() -> None:
    recorder, name = Recorder(), 'coins "found" \\ ☃\n'
    kinds = [kind for kind in Kind if kind is not Kind.SHAPE]
    for kind in kinds:
        for sample in (-2.0, 4.0):
            recorder.add(f"{name}{kind}", sample, label='a "b"\\\n', kind=kind)
    read = shown(recorder)
    assert {f"ray_brayx_own_{kind}" for kind in kinds} <= set(read)
    for kind in kinds:
        assert {sample.labels["label"] for sample in read[f"ray_brayx_own_{kind}"].samples} == {'a "b"' + r"\\\n"}
    assert not any(sample.name.endswith("_sum") for sample in read["ray_brayx_own_histogram"].samples)


def test_names_have_a_bound() -> None:
    recorder = Recorder(max_names=5000)
    metrics = OpenMetrics(**TAGS)
    metrics.follow(recorder)
    for number in range(2000):
        recorder.add(f"own {number}", 1.0, kind=Kind.SUM)
    read = families(metrics.text(()))
    assert len(read["ray_brayx_own_sum"].samples) == 1024
    assert value(read["ray_brayx_metrics_dropped"], "_total", label="") == 2000 - 1024
