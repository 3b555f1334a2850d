"""What a console makes of the answers of several replicas."""

from __future__ import annotations

import json

import numpy as np

from brayx.actor.live_ticks import LiveFrame, LiveTick, LiveTicks
from brayx.cluster.console import merged, packed, unpacked
from brayx.console.job import with_refusals
from brayx.model.encoding import pack, unpack


def test_ticks_come_as_they_were_sent() -> None:
    arrays = {"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "input": np.array([1, 2]), "a/b": np.array(True)}
    ticks = [LiveTick(4, 1.5, 0.25, b'{"x": 1}', b"", arrays, "skipped 2"), LiveTick(5, 2.0, 0.0, b"", b"ok", {}, "")]
    for frame in (None, LiveFrame(4, b"\x89PNG", ""), LiveFrame(5, b"", "it raised")):
        sent = LiveTicks(ticks, b'{"contract": 1}', 6, "stop", 7.0, frame)
        came = unpacked(packed(sent))
        assert came._replace(ticks=[]) == sent._replace(ticks=[])
        for before, after in zip(sent.ticks, came.ticks, strict=True):
            assert after._replace(arrays={}) == before._replace(arrays={})
            assert after.arrays.keys() == before.arrays.keys()
            for name, array in before.arrays.items():
                assert after.arrays[name].dtype == array.dtype
                np.testing.assert_array_equal(after.arrays[name], array)
    arrays, metadata = unpack(packed(LiveTicks(ticks, b"", 6, "", None, None)))
    del arrays["start"]
    *older, _ = json.loads(metadata["ticks"])
    assert unpacked(pack(arrays, {"ticks": json.dumps(older)})).after == 6, "of a replica of an older version"


def test_sums_add_up_percentiles_are_the_largest_and_other_numbers_the_mean() -> None:
    numbers = (
        {"ticks": 2.0, "arm_games.m/champion/1": 1.0, "tick_seconds.p99": 0.5, "forward_batch_size": 1.0},
        {"ticks": 3.0, "arm_games.m/champion/1": 2.0, "tick_seconds.p99": 0.1, "failed_s": 2.0},
    )
    replicas = [
        {
            "sessions": count,
            "silent": 1,
            "registered": {"model": [version]},
            "numbers": of_replica,
            "application": "a",  # of an older version, without notes
        }
        for count, version, of_replica in zip((1, 4), ("models:/m/2", "models:/m/1"), numbers, strict=True)
    ]
    together = merged(replicas)
    assert (together["sessions"], together["silent"], together["application"]) == (5, 2, "a")
    assert together["registered"] == {"model": ["models:/m/1", "models:/m/2"]}
    of_arm = {"arm_games.m/champion/1": 3.0}
    others = {"tick_seconds.p99": 0.5, "forward_batch_size": 1.0, "failed_s": 2.0}
    assert together["numbers"] == {"ticks": 5.0, **of_arm, **others}
    assert merged([])["sessions"] == 0


def test_refusals_and_errors_of_agents_have_their_newest_message() -> None:
    numbers = {"requests_refused.bad_body": 2.0, "agent_errors.on_tick": 1.0, "ticks": 9.0}
    facts = {"numbers": numbers, "notes": dict.fromkeys(numbers, "KeyError: 'obs' (game.py:3)")}
    raised, refused, other = with_refusals(facts, ["no replica answers"])["errors"]
    assert raised == "1 error in on_tick; the newest: KeyError: 'obs' (game.py:3)"
    assert refused.startswith("2 requests refused (bad_body);")
    assert other == "no replica answers"
