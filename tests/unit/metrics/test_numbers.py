"""The numbers of a training in one process: exact over threads, saved, and continued after a resume."""

from __future__ import annotations

import threading

from brayx.metrics import Recorder
from brayx.metrics.numbers import LocalNumbers
from tests.waiting import until


def test_samples_of_all_threads_are_in_the_numbers_and_are_kept_once():
    listener = Recorder()
    numbers = LocalNumbers({"env_steps": 100.0}, "env_steps")
    numbers.listen(listener.merge)

    def work():
        for _ in range(500):
            numbers.add("env_steps", 1.0)
            numbers.newest()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers.snapshot()["env_steps"] == 2100.0, "an interrupted trial's go on"
    assert listener.summary()["env_steps"] == 2000.0


def test_the_newest_numbers_are_a_moment_old_at_most():
    numbers = LocalNumbers({}, "env_steps")
    assert "games" in numbers.newest()
    numbers.add("episode_return", 3.0)
    until(lambda: numbers.newest().get("episode_return.last100") == 3.0, "it is there")


def test_errors_of_agents_are_counted_with_their_note():
    numbers = LocalNumbers({}, "env_steps")
    numbers.add("agent_errors", 1.0, label="on_tick", note="KeyError: 'obs' (game.py:3)")
    assert numbers.snapshot()["agent_errors.on_tick"] == 1.0
    assert numbers.notes() == {"agent_errors.on_tick": "KeyError: 'obs' (game.py:3)"}
