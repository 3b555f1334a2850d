"""`brayx.metrics.declarations`: metrics are declared once, and labels have one spelling."""

from __future__ import annotations

import pytest

from brayx.errors import ConfigError
from brayx.metrics import METRICS, Kind, Recorder, kind_of, label_of


def test_every_metric_is_fully_declared() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.islower()
        assert metric.unit
        assert metric.help


def test_the_order_of_labels_does_not_matter() -> None:
    assert label_of({"side": "left", "hero": 3}) == label_of({"hero": 3, "side": "left"}) == "hero:3.side:left"
    assert label_of({"a": "x 0.5=z" + "w" * 100}).startswith("a:x 0.5_u003d_zwww")
    assert label_of({"map": "level_1", "dist_x_y": "a_x_b", "no": ""}) == "dist_x_y:a_x_b.map:level_1.no:"
    different = [{"a": "w" * 100}, {"a": "w" * 101}, {"a": "5%"}, {"a": "5#"}, {"a": "1.b:2"}, {"a": "1", "b": "2"}]
    assert len({label_of(labels) for labels in different}) == len(different)


def test_a_kind_may_be_given_by_name() -> None:
    assert kind_of("sum") is Kind.SUM
    with pytest.raises(ConfigError, match=r"kind is 'summ'.*mean, sum"):
        kind_of("summ")
    recorder = Recorder()
    recorder.add("own", 1, kind="sum")  # type: ignore[arg-type]
    assert recorder.drain()[1]["own"].kind is Kind.SUM
