"""A trial that this process writes itself: calls run here, at once, and `close` gives it its status."""

from __future__ import annotations

import threading

from brayx.tracking import Trial
from brayx.tracking.in_process import InProcessClerk


def test_calls_run_here_and_a_second_background_call_is_skipped_while_one_runs(tracking_db: str) -> None:
    trial = Trial.open("project", "trial", tracking_db)
    clerk = InProcessClerk(trial)
    assert clerk.opened()
    assert not clerk.may_resume
    assert clerk.call(lambda own, number: (own.name, number, threading.current_thread()), 3) == (
        "trial",
        3,
        threading.current_thread(),
    )
    began, go_on, calls = threading.Event(), threading.Event(), []

    def work(own: Trial, name: str) -> None:
        calls.append(name)
        began.set()
        go_on.wait(60)

    clerk.in_background(work, "first")
    assert began.wait(60)
    clerk.in_background(work, "second")
    go_on.set()
    assert clerk._background is not None
    clerk._background.join(60)
    assert calls == ["first"]
    clerk.close("FAILED")
    assert Trial.attach(tracking_db, trial.run_id).status == "FAILED"
