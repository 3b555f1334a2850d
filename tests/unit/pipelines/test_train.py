"""When a job that only gets errors is given up, with a clock of the test's own."""

from __future__ import annotations

from pipelines.train import _FIRST_STEP_TIMEOUT_S, _NEXT_STEP_TIMEOUT_S, _Patience


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_slow_game_without_errors_is_waited_for():
    clock = Clock()
    patience = _Patience(clock)
    for clock.now in (0.0, 100.0, 1e6):
        assert not patience.is_over({"ticks": clock.now}, failures=0)


def test_errors_and_no_env_step_end_patience():
    clock = Clock()
    patience = _Patience(clock)
    numbers = {"requests_refused.agent_error": 0.0}
    assert not patience.is_over(numbers, failures=0)
    numbers["requests_refused.agent_error"] = 3.0
    clock.now = _FIRST_STEP_TIMEOUT_S - 1
    assert not patience.is_over(numbers, failures=0)
    clock.now = _FIRST_STEP_TIMEOUT_S + 1
    assert patience.is_over(numbers, failures=0)
    verdict = patience.verdict(numbers, "agent 'a' raised")
    assert verdict == (
        "no env step has arrived for 21 s, only errors (requests_refused.agent_error 3); the last: agent 'a' raised"
    )


def test_gamecores_that_keep_failing_count_as_errors():
    clock = Clock()
    patience = _Patience(clock)
    assert not patience.is_over({}, failures=0)
    clock.now = _FIRST_STEP_TIMEOUT_S + 1
    assert not patience.is_over({}, failures=0)
    assert patience.is_over({}, failures=1)


def test_once_steps_have_come_a_replica_may_take_its_time_to_restart():
    clock = Clock()
    patience = _Patience(clock)
    assert not patience.is_over({"env_steps": 500.0}, failures=0)  # those of the trial that is resumed
    assert not patience.is_over({"env_steps": 600.0}, failures=0)
    clock.now = _NEXT_STEP_TIMEOUT_S - 1
    assert not patience.is_over({"env_steps": 600.0}, failures=9)
    assert not patience.is_over({"env_steps": 601.0}, failures=9)
    clock.now = 2 * _NEXT_STEP_TIMEOUT_S - 2
    assert not patience.is_over({"env_steps": 601.0}, failures=9), "the errors were before the newest step"
    clock.now = 2 * _NEXT_STEP_TIMEOUT_S
    assert patience.is_over({"env_steps": 601.0}, failures=10)
