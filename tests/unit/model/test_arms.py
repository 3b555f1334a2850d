"""Arms: the alias of a session, and results counted by arm."""

from __future__ import annotations

import statistics

import pytest

from brayx.metrics import Recorder
from brayx.model.arms import Arm, Followed, Results, results_of

SESSIONS = [f"game-{i}" for i in range(10_000)]


def test_a_session_s_id_decides_its_arm_and_shares_are_as_configured():
    followed = Followed("policy", canary="candidate", share=0.1)
    versions = {"champion": 1, "candidate": 2}
    chosen = [followed.choose(session, versions) for session in SESSIONS]
    assert chosen == [followed.choose(session, versions) for session in SESSIONS]
    assert 0.08 < chosen.count("candidate") / len(chosen) < 0.12
    more = [Followed("policy", canary="candidate", share=0.3).choose(session, versions) for session in SESSIONS]
    assert all(wider == "candidate" for narrower, wider in zip(chosen, more, strict=True) if narrower == "candidate"), (
        "a larger share only adds sessions"
    )
    other = [Followed("rival", canary="candidate", share=0.1).choose(session, versions) for session in SESSIONS]
    assert other != chosen, "two models do not choose the same sessions"


@pytest.mark.parametrize(
    ("followed", "versions", "alias"),
    [
        (Followed("p", canary="candidate", share=1.0), {"champion": 1}, "champion"),
        (Followed("p", canary="candidate", share=1.0), {"champion": 1, "candidate": 2}, "candidate"),
        (Followed("p", canary="candidate", share=0.0), {"champion": 1, "candidate": 2}, "champion"),
        (Followed("p"), {"champion": 1, "candidate": 2}, "champion"),
        (Followed("p", alias="staging"), {}, "staging"),
    ],
)
def test_shares_of_zero_and_one(followed, versions, alias):
    assert {followed.choose(session, versions) for session in SESSIONS[:100]} == {alias}


def test_results_are_counted_by_arm_and_survive_the_recorder():
    arm, recorder = Arm("policy", "candidate", 4), Recorder()
    for game_return in (10.0, 20.0, 60.0):
        recorder.add("arm_sessions", 1, label=arm.label)
        recorder.add("arm_return", game_return, label=arm.label)
        recorder.add("arm_return_squared", game_return**2, label=arm.label)
    recorder.add("arm_ticks", 30, label=arm.label)
    recorder.add("ticks", 30)
    [(counted_arm, results)] = results_of(recorder.drain()).items()
    assert counted_arm == arm
    numbers = results.numbers()
    assert numbers == {
        "sessions": 3, "ticks": 30, "refusals": 0, "errors": 0, "games": 3, "episode_return": 30.0,
        "return_error": pytest.approx(statistics.stdev([10.0, 20.0, 60.0]) / 3**0.5),
    }  # fmt: skip
    again = Results.of(numbers)
    again.add("arm_return", 1, 70.0)
    again.add("arm_return_squared", 1, 70.0**2)
    assert again.numbers()["episode_return"] == pytest.approx(40.0)
    assert again.numbers()["return_error"] == pytest.approx(statistics.stdev([10.0, 20.0, 60.0, 70.0]) / 2)
    older = Results.of({"games": 3.0, "episode_return": 30.0})
    older.add("arm_return_squared", 1, 4.0)
    assert "return_error" not in older.numbers(), "it was written by a version without squares"
