"""The numbers of a trial that MLflow gets, and those that an interrupted trial resumes from."""

from __future__ import annotations

import re

from brayx.metrics import METRICS, Kind, Recorder
from brayx.metrics.charts import CHARTS, GROUPS, RETURN_CHART, charted, grouped, sums_of
from brayx.metrics.totals import Totals


def test_each_chart_has_a_name_of_its_own_in_a_group_of_brayx() -> None:
    assert len(set(CHARTS.values())) == len(CHARTS)
    assert all(re.fullmatch(r"[a-z]+/[a-z0-9_]+", chart) for chart in CHARTS.values())
    assert {chart.partition("/")[0] for chart in CHARTS.values()} <= set(GROUPS)
    assert sorted(name for name in CHARTS.values() if name.startswith("return/"))[0] == RETURN_CHART


def test_charts_are_grouped_in_the_order_of_brayx_then_by_name() -> None:
    charts = ["boss/hp", "learner/alpha", "loss", "learner/loss", "game/gold/per_s", "league/points", RETURN_CHART]
    assert list(grouped(charts).items()) == [
        ("return", [RETURN_CHART]),
        ("learner", ["learner/loss", "learner/alpha"]),
        ("league", ["league/points"]),
        ("game", ["game/gold/per_s"]),
        ("", ["loss"]),
        ("boss", ["boss/hp"]),
    ]


def test_only_labels_of_means_add_to_brayxs_charts() -> None:
    recorder, totals = Recorder(), Totals()
    for name in METRICS:
        for label in ("", "a", "b"):
            recorder.add(name, 2.0, label=label)
    totals.merge(recorder.drain())
    shown = charted(totals.take_interval(), totals.sums, totals.own)
    labelled = [name for name in METRICS if name in CHARTS and METRICS[name].kind in (Kind.MEAN, Kind.LAST)]
    assert "rollout_workers" in labelled
    added = {f"{CHARTS[name]}.{label}" for name in labelled for label in ("a", "b")}
    assert set(shown) - set(CHARTS.values()) == added
    assert shown["replay/dropped"] == 6.0, "over all labels"


def test_a_sum_covers_all_labels_also_those_without_news() -> None:
    totals = Totals()
    for label in ("full", "stale"):
        recorder = Recorder()
        recorder.add("replay_dropped", 3.0, label=label)
        totals.merge(recorder.drain())
        shown = charted(totals.take_interval(), totals.sums, totals.own)
    assert shown["replay/dropped"] == 6.0


def test_own_metrics_form_a_group_and_their_sums_continue() -> None:
    recorder, totals = Recorder(), Totals()
    recorder.add("gold", 5.0, label="hero:3", kind=Kind.SUM)
    recorder.add("boss/hp", 7.0)
    recorder.add("rollout_workers", 2.0, label="rollout")
    recorder.add("env_steps", 30.0)
    recorder.add("seconds", 4.5)
    totals.merge(recorder.drain())
    shown = charted(totals.take_interval(), totals.sums, totals.own)
    assert (shown["game/gold.hero:3"], shown["boss/hp"], shown["rollout/workers.rollout"]) == (5.0, 7.0, 2.0)
    assert [name for name in shown if name.startswith("game/")] == ["game/gold.hero:3"]
    assert sums_of(shown, ["gold"]) == {
        "gold.hero:3": 5.0,
        "env_steps": 30.0,
        "games": 0.0,
        "seconds": 4.5,
    }


def test_an_own_metric_never_replaces_another_metrics_chart() -> None:
    recorder, totals = Recorder(), Totals()
    names = ("gold", "game/gold", "learner/loss", "learner/loss.x", "loss", "game/kills")
    for value, name in enumerate(names):
        recorder.add(name, value, kind=Kind.SUM)
    totals.merge(recorder.drain())
    shown = charted(totals.take_interval(), totals.sums, totals.own)
    charts = ("game/gold", "game/game/gold", "game/learner/loss", "game/learner/loss.x", "learner/loss", "game/kills")
    assert [shown[name] for name in charts] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    sums = dict(zip(names, range(6), strict=True))
    assert (
        sums_of(shown, [name for name in names if name not in METRICS]).items()
        >= {name: value for name, value in sums.items() if name not in METRICS}.items()
    )
    assert sums_of(shown, ["game/gold"])["game/gold"] == 1.0, "though `gold` is no sum"


def test_an_own_metric_keeps_its_chart_if_no_other_has_it() -> None:
    assert charted({"game/kills": 5.0, "game/loss": 1.0}, {}, {"game/kills"}) == {"game/kills": 5.0, "game/loss": 1.0}
    assert sums_of({"game/kills": 5.0}, ["game/kills"]) == {"game/kills": 5.0}


def test_a_chart_keeps_its_metric_in_intervals_without_the_other() -> None:
    totals = Totals()
    for names in (("gold", "game/gold"), ("game/gold",)):
        recorder = Recorder()
        for name in names:
            recorder.add(name, 1.0)
        totals.merge(recorder.drain())
        shown = charted(totals.take_interval(), totals.sums, totals.own)
    assert "game/game/gold" in shown
    assert "game/gold" not in shown
    resumed = Totals({"gold": 1.0, "game/gold": 2.0, "games": 3.0, "env_steps": 4.0})
    assert resumed.own == {"gold", "game/gold"}


def test_a_trial_with_names_of_an_earlier_brayx_continues() -> None:
    totals = Totals(sums_of({"env_steps": 100.0, "episode_return.last100": 3.0}, []))
    assert totals.step == 0
