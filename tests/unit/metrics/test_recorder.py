"""`brayx.metrics.recorder`: parts merge exactly, and everything is bounded."""

from __future__ import annotations

import math
import random
import threading

from brayx.metrics import BOUNDS, Kind, Recorder


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


def test_labels_split_a_metric() -> None:
    recorder = Recorder()
    recorder.add("sessions_ended", 1, label="stop")
    recorder.add("sessions_ended", 1, label="idle")
    recorder.add("sessions_ended", 1, label="idle")
    assert recorder.summary() == {"sessions_ended.stop": 1, "sessions_ended.idle": 2}


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
