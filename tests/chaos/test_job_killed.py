"""A job on a cluster with games at its door: a gamecore is killed, then the command itself; nothing of it stays.

The same on the local host is in `tests/end_to_end/test_faults.py` and `tests/end_to_end/test_local.py`.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from brayx.ports import free_port
from tests.end_to_end.jobs import brayx, goes_on, metrics_of, said_on_failure, setting, trials, written
from tests.end_to_end.test_faults import LONG_GAME, gamecores, on_ray


@pytest.mark.chaos
def test_a_killed_gamecore_costs_its_session_and_a_killed_job_goes_on_at_its_own_port(tmp_path: Path) -> None:
    port = free_port()
    words = on_ray(tmp_path, f"actor.port={port}", "trainer.checkpoint_interval_s=2", long_game=LONG_GAME)
    words = [word.replace("CartPole-v1", "long_game:LongCartPole-v0") for word in words]
    with brayx(tmp_path, *words, *setting("trainer.num_steps=100000000")) as killed, said_on_failure(killed):
        killed.until(lambda: metrics_of(killed).get("updates", 0) > 3, "it learns")
        games = gamecores(killed)
        os.kill(min(games), signal.SIGKILL)

        def played_on() -> bool:
            now = metrics_of(killed)
            restarted = gamecores(killed) - games
            return bool(restarted) and now.get("sessions_ended.disconnect", 0) >= 1 and now["sessions_active"] >= 2

        killed.until(played_on, "another gamecore plays")
        updates = metrics_of(killed)["updates"]
        killed.until(lambda: metrics_of(killed)["updates"] > updates, "it learns on")
        games_after, now = gamecores(killed), metrics_of(killed)
        assert now["sessions_ended.disconnect"] == 1, "its own session only"
        assert not [name for name in now if name.startswith(("sessions_ended.error", "sessions_ended.lost"))]
        assert len(games) == len(games_after) == 2
        assert len(games & games_after) == 1, "the other gamecore plays on"
        killed.until(lambda: bool(trials(tmp_path)["main"][-1].checkpoints()), "it is saved")
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(timeout=30)
        env_steps = max(step for step, _ in written(trials(tmp_path)["main"][-1], "replay/env_steps"))
        more = setting(f"trainer.num_steps={env_steps + 6000}")
        with brayx(tmp_path, *words, *more) as resumed, said_on_failure(resumed):
            assert resumed.ended() == 0
            resumed.gone(30.0)
            assert "cartpole / main (resumed)" in resumed.err
            assert re.search(rf"ws://127\.0\.0\.1:{port}\b", resumed.err), "it plays at its own port again"
        killed.gone(0.0)
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "FINISHED"
    for metric in ("replay/env_steps", "learner/updates"):
        assert goes_on(written(trial, metric)), metric
