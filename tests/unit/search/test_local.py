"""`brayx.search.local`: the verdicts, and trials in real worker processes that count, fail, die, stop and copy."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from brayx.errors import ConfigError
from brayx.search.competition import Asha, Options, Population, Reporter, TrialReport
from brayx.search.local import Copy, Exploiting, Halving, run_trials
from tests.waiting import until

ASHA = Asha(max_steps=9000, grace_steps=1000)
DEADLINE_S = 240.0


def look(
    env_steps: int, score: float, *, over: bool = False, origin: int = 0, options: Options | None = None
) -> TrialReport:
    return TrialReport(env_steps, score, score, origin, over, options or {})


def test_halving_compares_trials_at_the_same_env_steps_however_often_they_were_looked_at() -> None:
    """Games that last are first looked at at 3000 steps, with a return that is high for 1000 and low for 3000."""
    halving = Halving(ASHA)
    quick, slow, late, other = range(4)
    for looks in (1, 2, 3):
        assert halving.judge(quick, look(1000 * looks, 10.0 * looks)) is True
    assert halving.judge(slow, look(3040, 25.0)) is False
    assert halving.judge(late, look(3010, 35.0)) is True
    assert halving.judge(late, look(4010, 90.0)) is True
    assert halving.judge(other, look(1000, 12.0)) is True, "a score at 4010 steps is not among those at 1000"


def test_of_nine_trials_at_a_rung_about_a_third_goes_on() -> None:
    halving = Halving(ASHA)
    verdicts = [halving.judge(number, look(1000, float(-number))) for number in range(9)]
    assert verdicts == [True, *[False] * 8], "each is worse than all before it"
    better = Halving(ASHA)
    assert all(better.judge(number, look(1000, float(number))) is True for number in range(9))


def test_the_worst_quarter_copies_one_of_the_best_but_no_finished_trial() -> None:
    exploiting = Exploiting(Population(dict))
    for number in range(1, 8):
        assert exploiting.judge(number, look(100, float(number))) is True or number < 2
    verdict = exploiting.judge(0, look(100, 0.0))
    assert isinstance(verdict, Copy)
    assert verdict.origin in (6, 7)
    for number in (6, 7):
        exploiting.leave(number)
    assert exploiting.judge(0, look(200, 0.0)) == Copy(5)


class Heard:
    """A listener that keeps every report."""

    def __init__(self) -> None:
        self.looks: dict[int, list[TrialReport]] = {}
        self.ended: list[int] = []
        self.errors: dict[int, str] = {}

    def on_report(self, number: int, look: TrialReport, checkpoint: Path | None) -> None:
        assert checkpoint is not None
        assert json.loads((checkpoint / "state.json").read_text())["steps"] == look.env_steps
        self.looks.setdefault(number, []).append(look)

    def on_end(self, number: int) -> None:
        self.ended.append(number)

    def on_error(self, number: int, error: str) -> None:
        self.errors[number] = error


def steps_of(folder: str, number: int) -> int:
    """Env steps of a trial's newest checkpoint; -1: it has none, or is writing it."""
    try:
        return int(json.loads((Path(folder) / f"checkpoint-{number}" / "state.json").read_text())["steps"])
    except (FileNotFoundError, ValueError):
        return -1


def wait_for(folder: str, number: int, steps: int) -> None:
    until(lambda: steps_of(folder, number) >= steps, "the other trial is as far", 60.0)


def count(folder: str, total: int, number: int, options: Options, report: Reporter, begun: Path | None) -> None:
    """A trial whose score grows by ``options["rate"]`` a step; it may raise or die on the way."""
    state = json.loads((begun / "state.json").read_text()) if begun else {"steps": 0, "score": 0.0, "of": number}
    (Path(folder) / f"pid-{number}").write_text(str(os.getpid()))
    origin = state["of"]
    if (first := options.get("after")) is not None:
        wait_for(folder, first, 4000)
    while state["steps"] < total:
        state = {"steps": state["steps"] + 1000, "score": state["score"] + options["rate"], "of": number}
        tried = Path(folder) / f"tried-{number}"
        if options.get("fails") and state["steps"] == 2000:
            raise ConfigError("rate is wrong")
        if options.get("dies") and state["steps"] == 2000 and not tried.exists():
            tried.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint = Path(folder) / f"checkpoint-{number}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps(state))
        over = state["steps"] >= total
        report(look(state["steps"], state["score"], over=over, origin=origin, options=options), checkpoint)
        origin = number
        if options.get("hangs"):
            time.sleep(3600)
        if (other := options.get("beside")) is not None:
            wait_for(folder, other, state["steps"])


def heard(tmp_path: Path, drawn: list[Options], competition: Any, total: int = 9000) -> Heard:
    results = Heard()
    run_trials(partial(count, str(tmp_path), total), drawn, competition, results, deadline_s=DEADLINE_S)
    return results


def test_trials_behind_the_others_are_stopped(tmp_path: Path) -> None:
    drawn = [{"rate": 1.0}, {"rate": 0.9}, {"rate": 0.1, "after": 0}, {"rate": 0.2}, {"rate": 0.3}]
    results = heard(tmp_path, drawn, ASHA)
    assert sorted(results.ended) == [0, 1, 2, 3, 4]
    assert not results.errors
    steps = {number: looks[-1].env_steps for number, looks in results.looks.items()}
    assert steps[0] == 9000
    assert steps[2] < 9000
    assert [report.env_steps for report in results.looks[0]] == list(range(1000, 10_000, 1000))


def test_a_copy_goes_on_from_the_checkpoint_and_the_changed_options_of_the_other(tmp_path: Path) -> None:
    def change(options: Any) -> Options:
        return {**options, "rate": options["rate"] + 100.0}

    drawn: list[Options] = [{"rate": 1.0, "beside": 1}, {"rate": 2.0, "beside": 0}]
    results = heard(tmp_path, drawn, Population(change))
    copied = [
        (number, report) for number, looks in results.looks.items() for report in looks if report.origin != number
    ]
    assert copied
    assert all(report.options["rate"] > 100.0 for _, report in copied)
    assert sorted(results.ended) == [0, 1]


def test_a_trial_that_fails_says_why_and_one_that_dies_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    results = heard(tmp_path, [{"rate": 1.0, "dies": True}, {"rate": 1.0, "fails": True}], ASHA, total=3000)
    assert results.errors == {1: "rate is wrong"}
    assert [report.env_steps for report in results.looks[0]] == [1000, 2000, 3000]
    assert results.ended == [0]


def test_an_interrupted_search_leaves_no_process(tmp_path: Path) -> None:
    class Interrupted(Heard):
        def on_report(self, number: int, look: TrialReport, checkpoint: Path | None) -> None:
            super().on_report(number, look, checkpoint)
            if len(self.looks) == 2:
                raise KeyboardInterrupt

    listener = Interrupted()
    drawn = [{"rate": 1.0, "hangs": True}] * 2
    with pytest.raises(KeyboardInterrupt):
        run_trials(partial(count, str(tmp_path), 9000), drawn, Population(dict), listener, deadline_s=DEADLINE_S)
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the worker processes end", 10.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "brayx-trial"]


def test_a_search_past_its_deadline_ends(tmp_path: Path) -> None:
    listener = Heard()
    run_trials(partial(count, str(tmp_path), 9000), [{"rate": 1.0, "hangs": True}], ASHA, listener, deadline_s=5.0)
    assert listener.ended == []
    assert not [thread for thread in threading.enumerate() if thread.name == "brayx-trial"]
