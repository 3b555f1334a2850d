"""The verdict on a job, from its numbers and its curve."""

from __future__ import annotations

import re
from typing import Any

import pytest

from brayx.console import verdict
from brayx.console.verdict import VerdictDocument, verdict_of_end, verdict_of_service, verdict_of_training
from brayx.metrics.totals import RETURN_ERROR

PLAYED = {"env_steps": 50_000.0, "env_steps_per_s": 1_000.0, "games": 500.0, "games_in_window": 100.0}
RISING = [(1000.0 * n, 10.0 * n) for n in range(1, 51)]
FAILED = {"games_in_window": 0.0, "games_failed_in_window": 40.0, "agent_errors.on_tick": 40.0}

NAN = "10 requests refused (bad_body); the newest: obs.ball[2] is nan, expected a finite number"


def judged(numbers: dict[str, float], curve: list[tuple[float, float]], **changed: Any) -> VerdictDocument:
    options: dict[str, Any] = {"up_s": 300.0, "sessions": 8, "num_steps": 100_000, "target": None}
    errors = changed.pop("errors", [])
    return verdict_of_training(numbers, errors, curve, **options | changed)


def test_a_rising_return_is_learning_with_its_share_and_the_time_left() -> None:
    learning = judged(PLAYED, RISING)
    assert (learning.state, learning.share, learning.left_s) == ("learning", 0.5, 50.0)
    assert (learning.reason, learning.values["rise"], learning.values["steps"]) == (verdict.ROSE, 50.0, 5000.0)
    assert learning.advice == ""
    assert VerdictDocument.model_validate_json(learning.model_dump_json()) == learning
    assert learning.model_dump()["text"] == "The return rose by 50 in the last 5,000 env steps."


def test_a_return_below_that_of_a_while_ago_has_fallen() -> None:
    falling = judged(PLAYED, [*RISING[:-5], *((step, value - 60.0) for step, value in RISING[-5:])])
    assert (falling.state, falling.reason) == ("unsure", verdict.FELL)
    assert falling.values["fall"] == pytest.approx(10.0)
    same = judged(PLAYED, [*RISING, *((50_000.0 + step, 500.0) for step in range(1000, 11_000, 1000))])
    assert (same.state, same.reason) == ("unsure", verdict.STAYED)


def test_a_return_that_stays_level_is_stalled_but_not_at_once() -> None:
    level = [*RISING, *((50_000.0 + 1000 * n, 500.0 + (n % 3)) for n in range(1, 101))]
    stalled = judged(PLAYED, level, target=600.0)
    assert (stalled.state, stalled.reason, stalled.advice) == ("stalled", verdict.LEVEL, verdict.STALLED)
    assert stalled.values["steps"] == pytest.approx(100_000, rel=0.05)
    assert (stalled.values["high"], stalled.values["peak"]) == (500.0, 50_000.0)
    assert judged(PLAYED, level, up_s=10.0).state == "unsure", "too early to say"
    assert judged(PLAYED, [(1.0, 0.0), (2.0, 0.0)]).state == "unsure"


def test_a_return_that_stays_at_its_highest_may_be_finished() -> None:
    level = [*RISING, *((50_000.0 + 1000 * n, 500.0) for n in range(1, 101))]
    plateau = judged(PLAYED, level)
    assert (plateau.state, plateau.reason, plateau.advice) == ("plateau", verdict.PLATEAU, verdict.FINISHED)
    assert plateau.values == {"steps": 100_000.0, "value": 500.0, "high": 500.0, "peak": 50_000.0}
    lower = [*level, (151_000.0, 485.0)]
    assert judged(PLAYED, lower).state == "stalled"
    assert judged(PLAYED | {RETURN_ERROR: 10.0}, lower).state == "plateau", "it is lower by chance"
    same = PLAYED | {RETURN_ERROR: 0.0}
    assert judged(same, level, target=501.0).state == "plateau", "all the newest games have the same return"
    assert judged(same | {"games_in_window": 20.0}, level, target=501.0).state == "stalled", "too few games"
    soon = [*RISING, *((50_000.0 + 1000 * n, 500.0) for n in range(1, 11))]
    early = judged(same, soon, up_s=60.0)
    assert (early.state, early.values["steps"]) == ("plateau", 10_000.0), "no two minutes for what is clear"
    assert judged(same, RISING, up_s=60.0).state == "learning", "it still rises"
    assert judged(same, [(step, -200.0) for step, _ in level]).state == "stalled", "it has never risen"
    assert judged(same, [(step, 500.0 - value) for step, value in level]).state == "stalled", "it has fallen"


def test_a_target_that_is_reached_and_games_that_have_just_begun() -> None:
    reached = judged(PLAYED | {"episode_return.last100": 480.0}, RISING, target=475.0)
    assert (reached.state, reached.reason) == ("reached", verdict.REACHED)
    assert (reached.share, reached.left_s) == (None, None), "it does not wait for its last env step"
    resumed = {"episode_return.last100": 480.0, "games_in_window": 60.0}
    for games, wanted in ((60.0, 80), (95.0, 80), (500.0, 100), (500.0, 600)):
        waits = judged(PLAYED | resumed | {"games": games}, RISING, target=475.0, target_games=wanted)
        shown = f"{games if wanted == 600 else 60:.0f} so far"
        assert (waits.state, waits.share) == ("reached", None)
        assert f"the training stops after {wanted} games ({shown})" in waits.text
    assert judged({"env_steps": 10.0, "env_steps_per_s": 5.0}, [], up_s=3.0).state == "starting"
    few = {"episode_return.last100": 480.0, "games_in_window": 3.0}
    assert judged(PLAYED | few, RISING, target=475.0).state == "learning", "three games may be lucky"
    bare = judged(PLAYED | {"episode_return.last100": 377.0}, [])
    assert (bare.state, bare.reason) == ("unsure", verdict.NO_CURVE)
    assert bare.values == {"games": 500.0, "window": 100.0, "value": 377.0}


def test_games_whose_bodies_are_refused_count_as_failing() -> None:
    numbers = PLAYED | {
        "games_in_window": 3.0,
        "requests_refused.bad_body": 571.0,
        "requests_refused.service_full": 9.0,
    }
    refused = judged(numbers, RISING, errors=[NAN], target=1.0)
    assert (refused.state, refused.reason, refused.cause) == ("failing", verdict.REFUSALS, NAN)
    assert (refused.values, refused.advice) == ({"refused": 571.0, "games": 3.0}, verdict.REFUSED)
    assert judged(PLAYED | {"requests_refused.bad_body": 500.0}, RISING).state == "learning", "it was mended"
    once = {"games_in_window": 0.0, "requests_refused.bad_body": 1.0}
    assert judged(PLAYED | once, RISING).state == "learning", "somebody tried the door"


def test_points_at_one_number_of_env_steps_say_nothing_yet() -> None:
    assert judged(PLAYED, [(0.0, 1.0)] * 20).state == "starting"


def test_failing_games_come_before_everything_else() -> None:
    failing = judged(PLAYED | FAILED, RISING, errors=["40 errors in on_tick; the newest: KeyError"], target=1.0)
    assert (failing.state, failing.reason, failing.advice) == ("failing", verdict.LOST, verdict.CONTINUES)
    assert (failing.cause, failing.values) == ("40 errors in on_tick; the newest: KeyError", {"lost": 40, "total": 40})
    few = judged(PLAYED | {"games_failed_in_window": 10.0}, RISING)
    assert (few.state, few.advice) == ("losing", verdict.WATCH)
    assert judged(PLAYED | {"games_failed_in_window": 1.0}, RISING).state == "learning"
    ended = PLAYED | {"games_failed_in_window": 10.0, "gamecores_failed": 10.0}
    nan = judged(ended, RISING, errors=["10 gamecores failed; the newest: g ended with status 1", NAN])
    assert (nan.state, nan.advice, nan.cause) == ("losing", verdict.REFUSED, NAN)
    crashed = judged({"gamecores_failed": 3.0}, [])
    assert (crashed.state, crashed.advice) == ("failing", verdict.PROCESS)


def test_games_that_failed_because_of_load_are_not_lost() -> None:
    full = {"games_failed_in_window": 40.0, "games_overloaded_in_window": 40.0}
    assert judged(PLAYED | full, RISING).state == "learning"


def test_a_training_without_experience_says_why() -> None:
    silent = judged({}, [], sessions=0)
    assert (silent.state, silent.reason, silent.advice) == ("stalled", verdict.NO_GAME, verdict.CONNECT)
    assert judged({}, [], sessions=0, up_s=5.0).state == "starting", "games may still be starting"
    assert judged({"rollout_workers": 2.0}, [], sessions=0).state == "starting", "they need no door"
    refused = judged({"requests_refused.bad_body": 7.0, "requests_refused.unauthorized": 2.0}, [], sessions=1)
    assert (refused.state, refused.reason) == ("failing", verdict.UNHEARD)
    assert refused.values == {"refused": 9.0, "code": "bad_body"}
    between = PLAYED | {"env_steps_per_s": 0.0, "quiet_s": 20.0, "requests_refused.bad_body": 22.0}
    assert judged(between, RISING, sessions=0).state == "learning", "the crashed games are started again"
    silent = judged(between | {"quiet_s": 200.0}, RISING, sessions=0, errors=["lost: 1", NAN])
    assert (silent.state, silent.reason, silent.cause) == ("failing", verdict.UNHEARD, NAN)
    assert judged(PLAYED | {"env_steps_per_s": 0.0}, RISING).state == "learning", "games play, and are long"


def test_a_league_has_a_leader_and_no_return() -> None:
    flat = [(float(step), 0.0) for step in range(50)]
    early = judged(PLAYED, flat, league=True)
    assert (early.state, early.reason) == ("starting", verdict.BEGINS)
    points = {"league_points.main": 1310.4, "league_points.exploiter": 1250.0}
    leading = judged(PLAYED | points, flat, league=True)
    assert (leading.state, leading.reason) == ("leading", verdict.LEADS)
    assert leading.values == {"leader": "main", "points": 1310}


def test_a_training_that_has_ended_is_done_or_says_how_it_goes_on() -> None:
    finished = verdict_of_end("finished", "champion: {g} version 2", "brayx train g.yaml", 0.3)
    assert (finished.state, finished.text, finished.share) == ("finished", "champion: {g} version 2", 1.0)
    interrupted = verdict_of_end("interrupted", "interrupted", "brayx train g.yaml", 0.3)
    assert interrupted.advice.format(**interrupted.values) == "Resume with: brayx train g.yaml"
    assert (interrupted.text, interrupted.share) == ("interrupted", 0.3)
    assert verdict_of_end("interrupted", "interrupted", "", 0.3).advice == ""


def test_a_service_serves_is_idle_or_fails() -> None:
    numbers = {"ticks_per_s": 120.4, "tick_seconds.p50": 0.0005, "tick_seconds.p99": 0.002}
    serving = verdict_of_service(numbers, [], 3)
    assert (serving.state, serving.reason) == ("serving", verdict.SERVES)
    assert serving.values == {"sessions": 3, "ticks_per_s": 120, "p50": 0.5, "p99": 2.0}
    assert verdict_of_service({}, [], 1).state == "serving", "no tick yet"
    assert verdict_of_service({}, [], 0).state == "idle"
    some = verdict_of_service(numbers, [], 4, 2)
    assert (some.values["sessions"], some.advice) == (2, ""), "people who think"
    most = verdict_of_service(numbers, [], 4, 3)
    assert (most.state, most.values["sessions"], most.advice) == ("serving", 1, verdict.SILENT)
    alone = verdict_of_service(numbers, [], 1, 1)
    assert (alone.state, alone.reason, alone.advice) == ("idle", verdict.WAITS, ""), "a player thinks"
    left = verdict_of_service(numbers, [], 11, 11)
    assert (left.state, left.advice, left.values) == ("idle", verdict.SILENT, {"silent": 11})
    failing = verdict_of_service(FAILED | {"failed_s": 59.0}, ["why"], 3)
    assert (failing.state, failing.advice, failing.cause) == ("failing", verdict.RESTARTS, "why")
    assert verdict_of_service(numbers | FAILED | {"failed_s": 60.0}, ["why"], 3).state == "serving", "long ago"


def test_an_agent_that_finds_a_body_bad_needs_no_restart() -> None:
    bad = "40 errors in on_tick; the newest: agent 'a': BadBody: obs is missing (agent.py:3)"
    refused = verdict_of_service(FAILED, [bad, NAN], 3)
    assert (refused.state, refused.advice, refused.cause) == ("failing", verdict.REFUSED, bad)
    fault = "1 error in on_episode; the newest: agent 'a': KeyError: 'speed' (agent.py:9)"
    both = verdict_of_service(FAILED | {"agent_errors.on_episode": 1.0}, [fault, bad, NAN], 3)
    assert (both.advice, both.cause) == (verdict.RESTARTS, fault)


def test_each_reason_has_its_values() -> None:
    league = {"league_points.main": 1.0}
    refused = {"requests_refused.bad_body": 7.0}
    served = {"ticks_per_s": 1.0, "tick_seconds.p50": 0.1, "tick_seconds.p99": 0.2}
    verdicts = [judged(PLAYED, RISING), judged(PLAYED | FAILED, []), judged(refused, []), judged(PLAYED, [])]
    verdicts.append(judged(PLAYED, [*RISING, *((50_000.0 + step, 500.0) for step in range(1000, 50_000, 1000))]))
    verdicts.append(verdict_of_service(served, [], 3, 2))
    verdicts.append(judged(league | PLAYED, [], league=True))
    verdicts.append(verdict_of_service(served, [], 1))
    for made in verdicts:
        assert made.reason in verdict.REASONS
        assert set(re.findall(r"\{(\w+)\}", made.reason + made.advice)) <= made.values.keys()
        assert made.advice in ("", *verdict.ADVICE)
