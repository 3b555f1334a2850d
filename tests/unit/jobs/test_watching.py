"""When a training stops waiting and fails, with a clock for tests."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from brayx.actor.config import GamecoreConfig
from brayx.errors import DeadlineExceeded, StartupError
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.progress import Progress
from brayx.jobs.watching import (
    FIRST_STEP_TIMEOUT_S,
    IDLE_S,
    NEXT_STEP_TIMEOUT_S,
    READY_TIMEOUT_S,
    STALLED_TIMEOUT_S,
    Idle,
    Losses,
    Pace,
    Patience,
    Silence,
    Watch,
    last_of,
)
from brayx.metrics import Recorder
from brayx.metrics.numbers import LocalNumbers
from brayx.tracking import Trial
from brayx.tracking.hub import Hub, totals_of
from tests.clocks import Clock


def test_a_slow_game_without_errors_is_waited_for():
    clock = Clock()
    patience = Patience(clock)
    for clock.now in (0.0, 100.0, 1e6):
        assert not patience.is_over({"ticks": clock.now}, failures=0)


def test_errors_and_no_env_step_end_patience():
    clock = Clock()
    patience = Patience(clock)
    numbers = {"requests_refused.agent_error": 0.0}
    assert not patience.is_over(numbers, failures=0)
    clock.now = FIRST_STEP_TIMEOUT_S + 1
    assert not patience.is_over({**numbers, "requests_refused.unauthorized": 9.0}, failures=0), "anyone may be refused"
    numbers["requests_refused.agent_error"] = 3.0
    clock.now = FIRST_STEP_TIMEOUT_S - 1
    assert not patience.is_over(numbers, failures=0)
    clock.now = FIRST_STEP_TIMEOUT_S + 1
    assert not patience.is_over(numbers, failures=0, losing=True), "what is lost ends it, and says why"
    assert patience.is_over(numbers, failures=0)
    verdict = patience.verdict(numbers, "agent 'a' raised")
    assert verdict == (
        "no env step has arrived for 21 s, only errors (requests_refused.agent_error 3); the last: agent 'a' raised"
    )


def test_gamecores_that_never_come_to_the_door_are_named_once_and_then_given_up():
    clock = Clock()
    silence = Silence(4, clock)
    assert not silence.hint({"policy_version": 1.0})
    clock.now = FIRST_STEP_TIMEOUT_S + 1
    assert silence.hint({}).startswith("no request has come to the door for 21 s")
    assert not silence.hint({}), "said once"
    assert not silence.is_over({})
    clock.now = NEXT_STEP_TIMEOUT_S + 1
    assert silence.is_over({})


@pytest.mark.parametrize("cluster", [False, True], ids=["local", "cluster"])
@pytest.mark.parametrize(
    ("games", "due"), [(0, 20), (60, 20), (90, 30)], ids=["only such", "a quarter", "few at first"]
)
def test_the_hint_about_stops_without_a_return_is_shown_once(cluster, games, due, tracking_db):
    hub, recorder, out = Hub(Trial.open("p", "t", tracking_db)), Recorder(), io.StringIO()
    numbers = recorder if cluster else LocalNumbers({}, "env_steps")
    progress = Progress("t", num_steps=1, log_interval=1, console=Console(file=out, width=1000))
    watch = Watch(progress, Starting(), Gamecores([], {}, "."), [], 8, None)

    def said():
        hub.push(recorder.drain())
        source = hub if cluster else numbers
        watch.look(source.snapshot(), source.notes())
        return out.getvalue()

    assert not said()
    for _ in range(games):
        numbers.add("episode_return", 1.0)
    for _ in range(due - 1):
        numbers.add("games_without_return", 1.0, note="its stop had no body")
    assert not said()
    numbers.add("games_without_return", 1.0, note='its stop had {"obs": [1]}')
    text = f'{due} games stopped without a return; the newest: its stop had {{"obs": [1]}}. The body of a stop must say'
    assert text in said()
    numbers.add("games_without_return", 100.0, note="its stop had no body")
    assert said().count("without a return") == 1
    hub.close()


def test_the_first_update_is_said_once_also_of_a_resumed_run() -> None:
    out = io.StringIO()
    for before in (0.0, 7.0):
        progress = Progress("t", num_steps=1, log_interval=10**9, console=Console(file=out, width=1000))
        watch = Watch(progress, Starting(), Gamecores([], {}, "."), [], 8, None, resumed=before > 0)
        for updates, steps in ((before, 0.0), (before, 100.0), (before + 1, 1280.0), (before + 2, 2560.0)):
            watch.look({"updates": updates, "env_steps": steps}, {})
    assert out.getvalue().count("it is learning: its first update came with 1,280 env steps") == 2
    assert out.getvalue().count("it is learning") == 2


def test_a_first_update_before_the_first_look_is_said_at_once() -> None:
    out = io.StringIO()
    progress = Progress("t", num_steps=1, log_interval=10**9, console=Console(file=out, width=1000))
    Watch(progress, Starting(), Gamecores([], {}, "."), [], 8, None).look({"updates": 1.0, "env_steps": 1576.0}, {})
    assert "it is learning: its first update came with 1,576 env steps" in out.getvalue()


def test_a_learner_without_weights_ends_a_training_but_a_hub_that_was_restarted_does_not(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr("brayx.clock.now", clock)
    progress = Progress("t", num_steps=1, log_interval=1, console=Console(file=io.StringIO()))
    never, restarted = (Watch(progress, Starting(), Gamecores([], {}, "."), [], 8, None) for _ in range(2))
    never.look({}, {})
    restarted.look({"policy_version": 124.0}, {})
    clock.now = READY_TIMEOUT_S + 1
    restarted.look({}, {})
    with pytest.raises(StartupError, match="no weights came within 180 s; the learner has published no weights"):
        never.look({}, {})


URLS = ["http://127.0.0.1:8000", "tcp://127.0.0.1:8001"]


@pytest.mark.parametrize(("gamecores", "urls"), [(0, []), (0, URLS), (4, URLS)], ids=["no door", "none", "some"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"requests_refused.bad_body": 1.0}),
        ({"ticks": 900.0, "ticks_this_run": 1.0}, {}),
        ({"sessions_started": 900.0, "sessions_active": 1.0}, {}),
    ],
    ids=["later", "a tick before the first look", "a session before the first look"],
)
def test_games_that_came_once_may_be_silent(gamecores, urls, first, second):
    clock = Clock()
    silence = Silence(gamecores, clock, urls)
    assert not silence.hint(first)
    numbers = {**first, **second}
    assert not silence.hint(numbers)
    clock.now = 1e6
    assert not silence.hint(numbers)
    assert not silence.is_over(numbers)


def test_a_job_that_starts_no_games_says_once_where_they_must_connect_and_goes_on():
    clock, out, nothing = Clock(), io.StringIO(), {"policy_version": 1.0, "ticks": 900.0, "ticks_this_run": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brayx.clock.now", clock)
        games = Gamecores([], {"http": URLS[0], "tcp": URLS[1]}, ".")
        progress = Progress("t", num_steps=1, log_interval=1, console=Console(file=out))
        watch, without_door = (Watch(progress, Starting(), games, [], 8, None, urls) for urls in (URLS, []))
        for clock.now in (0.0, FIRST_STEP_TIMEOUT_S - 1, FIRST_STEP_TIMEOUT_S + 1, NEXT_STEP_TIMEOUT_S + 1, 1e6):
            watch.look(nothing, {})
            without_door.look(nothing, {})
    (line,) = out.getvalue().splitlines()
    assert line.endswith(
        f"no request has come to the door for 21 s: this job starts no games, so yours must connect to one of "
        f"{URLS[0]}, {URLS[1]}; `brayx doctor URL` tries the door"
    )


def test_a_person_who_starts_the_games_is_waited_for_and_told_so_each_minute() -> None:
    clock, out = Clock(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brayx.clock.now", clock)
        bridge = GamecoreConfig(command="brayx gamecore godot --url {tcp_url}")
        games = Gamecores([bridge], {"tcp": URLS[1]}, ".")
        progress = Progress("t", num_steps=1, log_interval=1, console=Console(file=out, width=1000))
        watch = Watch(progress, Starting(), games, [], 8, None, URLS, by_hand=True)
        watch.look({"policy_version": 1.0}, {})
        clock.now = NEXT_STEP_TIMEOUT_S + 1
        watch.look({"requests_refused.bad_body": 1.0}, {})
        for _ in range(3):
            clock.now += NEXT_STEP_TIMEOUT_S
            watch.look({"requests_refused.bad_body": 1.0}, {})
            watch.look({"requests_refused.bad_body": 1.0}, {})
        lines = [line for line in out.getvalue().splitlines() if "no request has come" in line]
        for line, waited_s in zip(lines, (180, 360, 540), strict=True):
            assert f"no request has come to the door for {waited_s} s: start or mend your game; 1 gamecore" in line
        games.failures = 1
        clock.now += NEXT_STEP_TIMEOUT_S
        with pytest.raises(StartupError, match="only errors"):
            watch.look({"requests_refused.bad_body": 1.0}, {})


@pytest.mark.parametrize(
    ("gamecore", "how"),
    [
        ("", f"start it again, at {URLS[0]} or {URLS[1]}"),
        ("brayx gamecore unity --url {tcp_url}", "press Play"),
        ("brayx gamecore unity --url {tcp_url} --command ./game", ""),
    ],
    ids=["any game", "an engine", "builds"],
)
def test_each_silence_after_play_is_said_once_unless_the_job_starts_the_games(gamecore: str, how: str) -> None:
    clock, out = Clock(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brayx.clock.now", clock)
        configs = [GamecoreConfig(command=gamecore)] * bool(gamecore)
        games = Gamecores(configs, {"http": URLS[0], "tcp": URLS[1]}, ".")
        progress = Progress("t", num_steps=1, log_interval=10**9, console=Console(file=out, width=1000))
        watch = Watch(progress, Starting(), games, [], 8, None, URLS, by_hand=how == "press Play")
        for silence in range(1, 3):
            numbers = {"policy_version": 1.0, "ticks_this_run": 100.0 * silence}
            for later_s, sessions, times in ((0, 1, 0), (90, 1, 0), (19, 0, 0), (2, 0, 1), (30, 0, 1)):
                clock.now += later_s
                watch.look({**numbers, "sessions_active": sessions}, {})
                assert out.getvalue().count("no game has played for") == bool(how) * (silence - 1 + times)
    lines = [line for line in out.getvalue().splitlines() if "no game has played for" in line]
    assert all(line.endswith(f"no game has played for 21 s: {how}; Ctrl-C ends the training") for line in lines)


@pytest.mark.parametrize(
    ("command", "by_hand"),
    [
        ("brayx gamecore godot --url {tcp_url} --quiet", True),
        ("brayx bridge unity --url {tcp_url}", True),
        ("brayx gamecore unity --url {tcp_url} --command ./game", False),
        ("brayx gamecore unity --url {tcp_url} --command=./game", False),
        ("brayx gamecore gym CartPole-v1 --url {tcp_url}", False),
        ("./game {tcp_url}", False),
    ],
)
def test_a_bridge_without_builds_plays_games_that_a_person_starts(command: str, by_hand: bool) -> None:
    assert GamecoreConfig(command=command).by_hand == by_hand


@pytest.mark.parametrize("cluster", [False, True], ids=["local", "cluster"])
def test_counts_from_before_a_resume_or_without_a_door_are_not_requests(cluster, tracking_db):
    trial = Trial.open("p", "t", tracking_db)
    trial.log_metrics(dict.fromkeys(("tick/count", "session/started", "tick/refused", "replay/env_steps"), 900.0), 900)
    hub, recorder, clock = Hub(trial), Recorder(), Clock()
    numbers = recorder if cluster else LocalNumbers(totals_of(trial), "env_steps")

    def snapshot():
        hub.push(recorder.drain())
        return (hub if cluster else numbers).snapshot()

    silence = Silence(4, clock)
    assert {"ticks", "sessions_started", "requests_refused", "env_steps"} <= set(snapshot())
    assert not silence.hint(snapshot())
    numbers.add("env_steps", 128.0)  # of a rollout
    clock.now = FIRST_STEP_TIMEOUT_S + 1
    assert silence.hint(snapshot()).startswith("no request has come to the door for 21 s")
    clock.now = NEXT_STEP_TIMEOUT_S + 1
    assert silence.is_over(snapshot())
    numbers.add("sessions_started", 1.0)
    assert not silence.is_over(snapshot()), "a game came at last"
    hub.close()


def lost(games=0.0, failed=0.0, fragments=0.0, lost=0.0, overloaded=0.0):
    return {
        "games_in_window": games, "games_failed_in_window": failed, "games_overloaded_in_window": overloaded,
        "fragments_in_window": fragments, "fragments_lost_in_window": lost,
    }  # fmt: skip


@pytest.mark.parametrize("numbers", [lost(games=3, failed=7), lost(games=100, fragments=100, lost=60)])
def test_too_large_a_share_that_stays_lost_ends_a_training(numbers):
    clock = Clock()
    losses = Losses(0.5, clock)
    assert not losses.is_over(numbers)
    clock.now += 9.0
    assert not losses.is_over(lost(games=100, fragments=100)), "it was over for a moment"
    assert not losses.is_over(numbers)
    clock.now += 9.0
    assert not losses.is_over(numbers)
    clock.now += 2.0
    assert losses.is_over(numbers)
    said = "errors take more than trainer.max_lost_share 0.5 allows: 7 errors in on_tick; lost: 7 of 10"
    advice = "; mend that, and run the same command again: the training continues"
    assert losses.verdict(["7 errors in on_tick", "lost: 7 of 10"]) == said + advice
    assert losses.hint(lost(failed=1)) == losses.hint(lost(games=9, failed=8)) == "", "not too many yet"
    assert losses.hint(lost(failed=2)).startswith("the training ends if this goes on until 8 are lost")
    assert losses.hint(lost(failed=3)) == "", "once"
    assert losses.verdict([]).endswith("allows: see the log" + advice)


@pytest.mark.parametrize(("gamecores", "waits"), [(0, 0), (1, 1)])
def test_the_hint_about_losses_says_that_games_started_here_wait_before_they_start_again(gamecores, waits):
    out = io.StringIO()
    progress = Progress("t", num_steps=1, log_interval=10**9, console=Console(file=out, width=1000))
    games = Gamecores([GamecoreConfig(command="true")] * gamecores, {}, ".")
    Watch(progress, Starting(), games, [], 8, 0.5).look(lost(failed=2), {})
    assert "the training ends if this goes on until 8 are lost, and for at least 10 s" in out.getvalue()
    assert out.getvalue().count("a game that keeps ending waits up to 15 s for its next start") == waits


@pytest.mark.parametrize(
    ("share", "numbers"),
    [
        (0.5, lost(games=50, failed=50)),
        (0.5, lost(failed=7)),
        (0.5, lost(games=10, failed=90, overloaded=60)),
        (None, lost(failed=100, fragments=100, lost=100)),
    ],
    ids=["no more than the share", "too few to tell", "load is no error", "any share will do"],
)
def test_a_training_goes_on_with_what_may_be_lost(share, numbers):
    clock = Clock()
    losses = Losses(share, clock)
    for clock.now in (0.0, 100.0, 1e6):
        assert not losses.is_over(numbers)


def test_gamecores_that_keep_failing_count_as_errors():
    clock = Clock()
    patience = Patience(clock)
    assert not patience.is_over({}, failures=0)
    clock.now = FIRST_STEP_TIMEOUT_S + 1
    assert not patience.is_over({}, failures=0)
    assert patience.is_over({}, failures=1)


def test_once_steps_have_come_a_replica_may_take_its_time_to_restart():
    clock = Clock()
    patience = Patience(clock)
    assert not patience.is_over({"env_steps": 500.0}, failures=0)  # those of the trial that is resumed
    assert not patience.is_over({"env_steps": 600.0}, failures=0)
    clock.now = NEXT_STEP_TIMEOUT_S - 1
    assert not patience.is_over({"env_steps": 600.0}, failures=9)
    assert not patience.is_over({"env_steps": 601.0}, failures=9)
    clock.now = 2 * NEXT_STEP_TIMEOUT_S - 2
    assert not patience.is_over({"env_steps": 601.0}, failures=9), "the errors were before the newest step"
    clock.now = 2 * NEXT_STEP_TIMEOUT_S
    assert patience.is_over({"env_steps": 601.0}, failures=10)


def test_a_learner_that_hangs_while_games_play_is_given_up():
    clock = Clock()
    pace = Pace(100, clock)
    assert not pace.is_over({"env_steps": 1000.0, "updates": 7.0, "policy_version": 8.0})
    for clock.now in (1e3, 1e4, 1e5):
        assert not pace.is_over({"env_steps": 1199.0, "updates": 7.0, "policy_version": 8.0}), "too few steps"
    assert not pace.is_over({"env_steps": 1200.0, "updates": 7.0, "policy_version": 8.0})
    clock.now += STALLED_TIMEOUT_S
    assert not pace.is_over({"env_steps": 9000.0, "updates": 7.0, "policy_version": 8.0})
    clock.now += 1
    numbers = {"env_steps": 9000.0, "updates": 7.0, "policy_version": 8.0}
    assert pace.is_over(numbers)
    assert pace.verdict(numbers) == (
        "the learner hangs: 8000 env steps have come since its update 7, enough for the next one 601 s ago"
    )


@pytest.mark.parametrize("moved", [{"updates": 8.0}, {"policy_version": 9.0}])
def test_a_learner_that_is_slow_is_not(moved):
    clock = Clock()
    pace = Pace(100, clock)
    numbers = {"env_steps": 0.0, "updates": 7.0, "policy_version": 8.0}
    for turn in range(10):
        numbers["env_steps"] += 1e6
        clock.now += STALLED_TIMEOUT_S - 1
        if turn % 2 == 0:
            numbers.update({name: value + turn for name, value in moved.items()})
        assert not pace.is_over(numbers)


def test_a_hanging_learner_is_reported_long_before_it_is_given_up():
    clock = Clock()
    pace = Pace(100, clock)

    def hint(now, steps, updates):
        clock.now = now
        numbers = {"env_steps": steps, "updates": updates, "policy_version": 1.0}
        assert not pace.is_over(numbers)
        return pace.hint(numbers)

    assert [hint(0.0, 0.0, 0.0), hint(1.0, 500.0, 0.0), hint(61.0, 900.0, 0.0)] == ["", "", ""]
    assert hint(61.1, 900.0, 0.0) == (
        "no update for 60 s, though 900 env steps have come since update 0; after 600 s of this the job gives up"
    )
    assert hint(300.0, 5000.0, 0.0) == "", "it is reported once"
    assert [hint(301.0, 5000.0, 3.0), hint(302.0, 6000.0, 3.0)] == ["", ""]
    assert hint(363.0, 6000.0, 3.0).startswith("no update for 61 s, though 1000 env steps have come since update 3;")


def test_a_long_wait_for_the_first_update_is_reported_with_the_steps_it_needs():
    clock = Clock()
    pace = Pace(4096, clock)
    for clock.now, steps, said in (
        (0.0, 0.0, ""),
        (500.0, 0.0, ""),  # no step at all: `Patience` handles that
        (510.0, 3.0, ""),
        (571.0, 40.0, "no update yet: 40 env steps have come, and the first takes 4096 or more"),
        (700.0, 80.0, ""),
    ):
        assert not pace.is_over({"env_steps": steps})
        assert pace.hint({"env_steps": steps}) == said


class Starting:
    """A learner that takes longer to start than any wait."""

    running = True

    def state(self):
        return "has published no weights yet"


class Hanging:
    """A learner that does not end."""

    running = True

    def result(self, timeout_s):
        assert timeout_s == STALLED_TIMEOUT_S

    def state(self):
        return "has published weights, version 9"


def test_a_learner_that_does_not_end_after_its_stream_is_given_up():
    with pytest.raises(DeadlineExceeded, match=r"600 s .*; it has published weights"):
        last_of(Hanging())


def test_a_behaviour_is_idle_once_nothing_more_was_played() -> None:
    clock = Clock()
    idle = Idle(clock)
    assert idle.names({"runner": 10.0, "boss": 0.0}) == []
    clock.now = IDLE_S
    assert idle.names({"runner": 11.0, "boss": 0.0, "late": 0.0}) == []
    clock.now += 1
    assert idle.names({"runner": 11.0, "boss": 0.0, "late": 0.0}) == ["boss"]
    assert idle.names({"runner": 11.0, "boss": 1.0, "late": 0.0}) == []
    clock.now += IDLE_S
    assert idle.names({"runner": 12.0, "late": 0.0}) == ["late"]
