"""The display shows the numbers it is given, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from brayx import clock
from brayx.errors import AgentError
from brayx.faults import AGENTS_LOGGER, report
from brayx.jobs.progress import Progress, abandoned_line, dropped_line, error_lines, losses_of_recordings, tracebacks
from brayx.logs import limited
from brayx.metrics import Recorder
from brayx.metrics.totals import Totals, joined, mean_return
from brayx.replay.unfit import without_unfit

NUMBERS = {
    "env_steps": 12_345.0,
    "episode_return.last100": 123.4,
    "ticks_per_s": 2222.0,
    "tick_seconds.p50": 0.00042,
    "tick_seconds.p99": 0.0051,
    "policy_version": 17.0,
    "lag_versions": 1.5,
    "games": 99.0,
}


def test_a_line_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress("p / t (resumed)", num_steps=100, console=Console(file=out, width=200)) as progress:
        progress.update(NUMBERS)
        progress.update(NUMBERS)
    lines = out.getvalue().splitlines()
    assert lines[0] == "p / t (resumed)"
    assert len(lines) == 2, "one line every few seconds, not one per update"
    for part in ("12,345 env steps", "return 123.4 (0 games)", "2,222 ticks/s", "version 17", "lag 1.5"):
        assert part in lines[1]


def test_several_behaviours_have_a_return_each() -> None:
    out = io.StringIO()
    numbers = joined({"chaser": NUMBERS, "runner": {"env_steps": 655.0, "episode_return.last100": 0.25}, "late": {}})
    with Progress("p / t", num_steps=100, console=Console(file=out, width=200)) as progress:
        progress.update(numbers)
    assert "13,000 env steps  return chaser 123.4, runner 0.25, late -  2,222 ticks/s" in out.getvalue()
    numbers = joined({"chaser": NUMBERS, "duel": {"league_points.main": 1312.4, "episode_return.last100": 0.0}})
    assert "points of duel: 1,312" in drawn(numbers)
    assert "return of duel" not in drawn(numbers)


def test_a_line_every_so_many_updates() -> None:
    out = io.StringIO()
    with Progress("t", num_steps=100, log_interval=10, console=Console(file=out, width=200)) as progress:
        for updates in (0, 9, 10, 11, 19, 34, 35):
            progress.update({**NUMBERS, "updates": updates, "env_steps": updates})
    assert [line.split()[2] for line in out.getvalue().splitlines()[1:]] == ["10", "34"]


def test_a_panel_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress("cartpole / main", num_steps=100_000, target=475.0, console=console) as progress:
        progress.update(NUMBERS, gamecores=8, note="a gamecore ended")
    shown = out.getvalue()
    for part in (
        "cartpole / main",
        "123.4 (0 games) / 475",
        "12,345",
        "0.42 / 5.1",
        "from 8 gamecores",
        "a gamecore ended",
    ):
        assert part in shown


def test_what_is_said_during_a_prompt_is_printed_after_it() -> None:
    out = io.StringIO()
    with Progress("p / t", num_steps=100, console=Console(file=out, width=200)) as progress:
        with clock.hold():
            before = out.getvalue()
            progress.say("first")
            progress.say("second")
            progress.update(NUMBERS)
            assert out.getvalue() == before
        progress.update(NUMBERS)
        assert [line.split()[-1] for line in out.getvalue().splitlines()[1:3]] == ["first", "second"]
        with clock.hold():
            progress.say("third")
    assert out.getvalue().endswith("third\n")


def test_one_gamecore_may_play_several_sessions() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress("t", num_steps=1, console=console) as progress:
        progress.update({**NUMBERS, "sessions_active": 8}, gamecores=1)
    assert "8 from 1 gamecore " in out.getvalue()


def test_no_numbers_yet() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress("t", num_steps=1, console=console) as progress:
        progress.update({})
    assert "nan" not in out.getvalue().lower()


def drawn(numbers: dict[str, float], note: str = "", errors: Sequence[str] = ()) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress("t", num_steps=1, console=console) as progress:
        progress.update(numbers, note=note, errors=errors)
    return out.getvalue()


def test_everything_the_buffer_dropped_counts_whatever_the_reason() -> None:
    recorder, totals = Recorder(), Totals()
    recorder.add("replay_dropped", 30.0, label="full")
    recorder.add("replay_dropped", 4.0, label="stale")
    totals.merge(recorder.drain())
    assert re.search(r"dropped\s+34 \(full 30, stale 4\)", drawn(totals.snapshot()))
    out = io.StringIO()
    with Progress("t", num_steps=1, log_interval=1, console=Console(file=out, width=200)) as progress:
        progress.update({**NUMBERS, "updates": 1.0})
        progress.update({**NUMBERS, "updates": 2.0, "replay_dropped": 9.0, "replay_dropped.full": 2000.0})
    _, none, some = out.getvalue().splitlines()
    assert "dropped" not in none
    assert some.endswith("dropped 2,009 (full 2,000)"), "9 of them before the trial was resumed"


def test_dropped_transitions_are_a_line_of_losses() -> None:
    assert dropped_line({"replay_dropped.full": 0.0, "ticks": 5.0}) == ""
    dropped = {"replay_dropped.full": 2000.0, "replay_dropped.policy_lag": 9.0}
    assert dropped_line(dropped) == "transitions dropped before the learner took them: 2,009 (full 2,000, policy_lag 9)"


def test_sessions_that_were_left_are_a_line_of_losses() -> None:
    assert abandoned_line({"sessions_ended.stop": 9.0}) == ""
    assert abandoned_line({"sessions_ended.idle": 1.0}) == "1 session ended without a stop, after a silence"
    assert abandoned_line({"sessions_ended.idle": 11.0}).startswith("11 sessions ended without a stop")


def test_errors_of_agents_are_shown_with_their_count_and_the_newest() -> None:
    totals = Totals()
    for message in ("first", "second"):
        recorder = Recorder()
        recorder.add("agent_errors", 2000.0, label="on_episode", note=message)
        totals.merge(recorder.drain())
    errors = error_lines(totals.snapshot(), totals.notes)
    assert errors == ["4,000 errors in on_episode; the newest: second"]
    assert errors[0] in drawn({}, errors=errors)
    assert error_lines(NUMBERS, {}) == []
    assert error_lines(totals.snapshot(), {}) == [], "those of an interrupted trial"


def test_a_line_is_not_broken_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress("t", num_steps=100, console=Console(file=out, width=40)) as progress:
        progress.say("word " * 20)
        progress.update({**NUMBERS, "checkpoints_failed": 3}, errors=["error " * 20], note="note " * 20)
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["t", "word", "versions", "error", "continues"]


def test_a_cause_of_errors_is_shown_at_once_and_once() -> None:
    out = io.StringIO()
    with Progress("t", num_steps=100, log_interval=1, console=Console(file=out, width=200)) as progress:
        progress.update({**NUMBERS, "updates": 1})
        progress.update({**NUMBERS, "updates": 1}, errors=["1 error in on_episode; the newest: KeyError"])
        for updates in (2, 3):
            errors = [f"{updates} errors in on_episode; the newest: KeyError", f"lost: {updates} of the last 100 games"]
            progress.update({**NUMBERS, "updates": updates}, errors=errors)
        progress.update({**NUMBERS, "updates": 4}, errors=["5 errors in on_episode; the newest: ValueError"])
    lines = [line.strip() for line in out.getvalue().splitlines() if "env steps" not in line]
    assert lines[1:] == [
        "1 error in on_episode; the newest: KeyError",
        "lost: 2 of the last 100 games",
        "5 errors in on_episode; the newest: ValueError",
    ]


def test_failed_writes_are_shown_before_the_games_note() -> None:
    recorder, totals = Recorder(), Totals()
    recorder.add("checkpoints_failed", 1.0)
    totals.merge(recorder.drain())
    shown = drawn({**totals.snapshot(), "hub_write_failures": 3.0}, "a gamecore ended")
    assert "failed writes to MLflow: 3 of metrics, 1 of checkpoints; training continues; a gamecore ended" in shown
    assert "MLflow" not in drawn({**NUMBERS, "hub_write_failures": 0.0})


def test_losses_by_errors_are_shown_with_their_cause_and_share() -> None:
    totals = Totals()
    recorder = Recorder()
    for value in (1.0, 3.0):
        recorder.add("episode_return", value)
    recorder.add("games_failed", 6.0, label="on_episode")
    recorder.add("agent_errors", 6.0, label="on_episode", note="agent 'a': KeyError: 'speed' (agent.py:3)")
    recorder.add("gamecores_failed", 8.0, note="a gamecore ended with status 1 after 2 s")
    recorder.add("fragments_pushed", 3.0)
    recorder.add("fragments_dropped", 1.0, label="refused", note="BadFragment: obs (agent.py:9)")
    recorder.add("recording_lost", 7.0, label="disk", note="the folder cannot be written")
    totals.merge(recorder.drain())
    numbers = totals.snapshot()
    assert error_lines(numbers, totals.notes) == [
        "6 errors in on_episode; the newest: agent 'a': KeyError: 'speed' (agent.py:3)",
        "1 fragment dropped (refused); the newest: BadFragment: obs (agent.py:9)",
        "8 gamecores failed; the newest: a gamecore ended with status 1 after 2 s",
        "7 ticks not recorded (disk); the newest: the folder cannot be written",
        "lost: 8 of the last 10 games (80%), 1 of the last 4 fragments (25%)",
    ]
    assert losses_of_recordings(numbers) == ["7 ticks not recorded (disk)"]
    crashed = {"gamecores_failed": "it said: obs[2] is nan", "requests_refused.bad_body": "obs[2] is nan (session 7)"}
    assert error_lines(dict.fromkeys(crashed, 2.0), crashed) == [
        "2 gamecores failed",
        "2 requests refused (bad_body); the newest: obs[2] is nan (session 7)",
    ], "each error once"
    assert mean_return(numbers) == "2 (2 games, 8 failed)"
    assert mean_return({}) == "- (0 games)"
    assert mean_return({"episode_return.last100": 0.81234, "games_in_window": 1.0}) == "0.8123 (1 game)"


@pytest.mark.parametrize("label", ["deadline", "cancelled"])
def test_fragments_lost_to_a_deadline_have_a_line_and_a_share(label: str) -> None:
    recorder, totals = Recorder(), Totals()
    why = "on_episode was cut off by actor.tick_timeout_s, or by the end of the service"
    recorder.add("fragments_pushed", 2.0)
    recorder.add("fragments_dropped", 18.0, label=label, note=why)
    totals.merge(recorder.drain())
    lines = error_lines(totals.snapshot(), totals.notes)
    assert lines == [
        f"18 fragments dropped ({label}); the newest: {why}",
        "lost: 18 of the last 20 fragments (90%)",
    ]
    assert error_lines(totals.snapshot(), {}) == lines[1:], "whatever is lost, its share is shown"


def test_games_that_load_ended_have_a_line_but_no_share() -> None:
    recorder, totals = Recorder(), Totals()
    recorder.add("episode_return", 3.0)
    recorder.add("games_failed", 2.0, label="overloaded", note="agent 'a': QueueFull: full (agent.py:3)")
    recorder.add("fragments_dropped", 1.0, label="overloaded")
    totals.merge(recorder.drain())
    lines = ["2 games failed (overloaded); the newest: agent 'a': QueueFull: full (agent.py:3)"]
    assert error_lines(totals.snapshot(), totals.notes) == lines
    assert mean_return(totals.snapshot()) == "3 (1 game, 2 failed)"


def raised(message: str) -> AgentError:
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            raise AgentError("agent 'a' raised in on_tick at tick 3") from error
    except AgentError as error:
        return error


def test_the_traceback_of_each_fault_of_an_agent_is_shown_once_above_the_panel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress("p / t", num_steps=1, console=console) as progress, tracebacks(progress.say):
        limited(AGENTS_LOGGER)  # as a module does that is imported meanwhile
        progress.update(NUMBERS)
        for message in ("speed\x1b[2J", "lives"):  # one place
            report(raised(message), "", "session s1", show_text=True)
        try:
            raise ValueError("no reward")
        except ValueError:
            logging.getLogger(AGENTS_LOGGER).exception("session s1: a.on_episode raised")
        progress.update(NUMBERS)
    shown = out.getvalue()
    assert shown.count("Traceback (most recent call last)") == 2
    assert re.search(r"fault \w{8}: session s1: agent 'a' raised in on_tick at tick 3", shown)
    assert f'  File "{__file__}", line ' in shown
    assert "\n    raise RuntimeError(message)" in shown
    assert r"RuntimeError: speed\x1b[2J" in shown, "no client controls this terminal"
    assert "session s1: a.on_episode raised\n" in shown
    assert "ValueError: no reward\n" in shown
    assert shown.rindex("version") > shown.rindex("ValueError"), "the panel is below"
    assert not caplog.records

    report(raised("speed"), "", "session s1", show_text=True)
    assert len(caplog.records) == 1, "the log has them again, one line each"
    assert "\n" not in caplog.records[0].getMessage()


def test_a_long_message_does_not_fill_the_terminal() -> None:
    said: list[str] = []
    with tracebacks(said.append):
        report(raised("speed"), "", "s", show_text=True)
        try:
            raise ValueError("line\n" * 10**4 + "x" * 10**6)
        except ValueError:
            logging.getLogger(AGENTS_LOGGER).exception("session s: raised")
    assert len(said[1].splitlines()) == 101
    assert len(said[1]) < 10**4


def test_a_league_shows_its_leader_instead_of_a_return() -> None:
    league = {"league_points.main": 1312.4, "league_points.random": 890.0, "league_pool": 12.0,
              "games": 3400.0}  # fmt: skip
    text = "leader main 1312 points, no champion, pool 12, 3,400 games"
    out = io.StringIO()
    with Progress("t", num_steps=100, console=Console(file=out, width=200)) as progress:
        progress.update({**NUMBERS, **league})
    assert text in out.getvalue()
    assert "return" not in out.getvalue()
    assert "return" not in drawn({**NUMBERS, **league})
    crowned = text.replace("no champion", "champion version 7")
    assert crowned in drawn({**NUMBERS, **league, "league_champion": 7.0})


def test_a_part_of_a_fragment_that_is_dropped_counts_as_one() -> None:
    arrays = {"mask": np.ones((8, 4), np.float32), "reward": np.ones((8, 4), np.float32)}
    arrays["reward"][3, 1] = np.nan
    recorder, totals = Recorder(), Totals()
    without_unfit(arrays, recorder, keep_shape=True)
    recorder.add("fragments_pushed", 7.0)
    totals.merge(recorder.drain())
    dropped, share = error_lines(totals.snapshot(), totals.notes)
    assert dropped.startswith("1 fragment dropped (refused); the newest: BadFragment: reward: ")
    assert share == "lost: 1 of the last 7 fragments (2%)"
