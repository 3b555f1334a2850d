"""When a job stops waiting and fails, with a clock for tests; and the registration of its best checkpoint."""

from __future__ import annotations

import io
import json
import shlex
import sys
import textwrap

import numpy as np
import pytest
from mlflow import MlflowClient
from rich.console import Console

from brayx.cluster import job as train_module
from brayx.cluster.job import _undeploy, _wait_for_weights, check_store_reachable
from brayx.cluster.learner import TrialKeeper
from brayx.commands import cli
from brayx.engines.base import save_weights
from brayx.errors import ConfigError, DeadlineExceeded, StartupError
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.progress import Progress
from brayx.jobs.result import TrainResult, end_reason, promote
from brayx.jobs.watching import (
    FIRST_STEP_TIMEOUT_S,
    NEXT_STEP_TIMEOUT_S,
    STALLED_TIMEOUT_S,
    Losses,
    Pace,
    Patience,
    Silence,
    Watch,
    last_of,
)
from brayx.metrics import Recorder
from brayx.metrics.numbers import LocalNumbers
from brayx.model.build import build_model
from brayx.ports import free_port
from brayx.tracking import Trial, files_of, find
from brayx.tracking.clerk import Clerk
from brayx.tracking.hub import Hub, totals_of
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop, Summary
from tests.unit.trainer.parts import Numbers, Weights, batches


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
    numbers["requests_refused.agent_error"] = 3.0
    clock.now = FIRST_STEP_TIMEOUT_S - 1
    assert not patience.is_over(numbers, failures=0)
    clock.now = FIRST_STEP_TIMEOUT_S + 1
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
@pytest.mark.parametrize(("games", "at"), [(0, 20), (60, 20), (90, 30)], ids=["only such", "a quarter", "few at first"])
def test_the_hint_about_stops_without_a_return_is_shown_once(cluster, games, at, tracking_db):
    hub, recorder, out = Hub(Trial.open("p", "t", tracking_db)), Recorder(), io.StringIO()
    numbers = recorder if cluster else LocalNumbers({}, "env_steps")
    progress = Progress("t", num_steps=1, log_interval=1, console=Console(file=out, width=1000))
    watch = Watch(progress, Starting(), Gamecores([], {}, "."), [], 8, None)

    def said():
        hub.push(recorder.drain())
        found = hub if cluster else numbers
        watch.look(found.snapshot(), found.notes())
        return out.getvalue()

    assert not said()
    for _ in range(games):
        numbers.add("episode_return", 1.0)
    for _ in range(at - 1):
        numbers.add("games_without_return", 1.0, note="its stop had no body")
    assert not said()
    numbers.add("games_without_return", 1.0, note='its stop had {"obs": [1]}')
    text = f'{at} games stopped without a return; the newest: its stop had {{"obs": [1]}}. The body of a stop must say'
    assert text in said()
    numbers.add("games_without_return", 100.0, note="its stop had no body")
    assert said().count("without a return") == 1
    hub.close()


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
    assert losses.verdict(["7 errors in on_tick", "lost: 7 of 10"]) == said
    assert losses.verdict([]).endswith("allows: see the log")


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


def ended(reason, mean, games):
    return Summary(reason, 1000, 10, 11, 5.0, mean, games, False)


@pytest.mark.parametrize(
    ("learned", "line"),
    [
        (ended("target_return", 0.81239, 100), "target_return 0.8 reached over the last 100 games: mean return 0.8124"),
        (ended("num_steps", 21.5, 1), "num_steps 1,000,000 reached: mean return 21.5 over the last 1 game"),
        (
            ended("num_steps", float("nan"), 0),
            "num_steps 1,000,000 reached: fewer than 7 games (`target_games`) were finished",
        ),
        (ended("stream_ended", -3.0, 40), "no more transitions to learn from: mean return -3 over the last 40 games"),
        (None, "interrupted; the same command resumes this trial"),
    ],
    ids=["target", "steps", "few games", "stream", "interrupted"],
)  # fmt: skip
def test_why_a_training_ended_is_the_last_line(tracking_db, learned, line):
    assert end_reason(TRAINER.model_copy(update={"target_return": 0.8}), learned) == line
    result = TrainResult(
        Trial.open("p", "t", tracking_db), {}, True, "p", 1, 1.0, [], "champion: p version 1", ended=line
    )
    assert result.summary().splitlines()[-1].strip() == line


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


def test_a_service_that_is_not_ready_names_the_learners_state(monkeypatch):
    monkeypatch.setattr(train_module, "READY_TIMEOUT_S", 0.2)
    progress = Progress("t", num_steps=1, console=Console(file=io.StringIO()))
    with pytest.raises(StartupError, match=r"refused.*; the learner has published no weights yet"):
        _wait_for_weights(f"http://127.0.0.1:{free_port()}", Starting(), "model", progress)


UNEXPORTABLE = """
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

        def forward(self, obs):
            if float(obs.sum()) > 3:
                obs = -obs
            x = self.net(obs)
            return {"logits": x, "value": x[:, 0]}

    def build_model(name, config):
        return Model(), (torch.zeros(1, 2),)
"""


def test_an_application_that_does_not_end_in_time_is_reported(monkeypatch):
    said = []
    for ended in (True, False):
        monkeypatch.setattr(train_module, "delete_application", lambda name, timeout_s, ended=ended: ended)
        _undeploy("actor", 2.0, said.append)
    assert said == ["the actor 'actor' did not end within 2 s: its last metrics may be missing"]


TRAINER = TrainerConfig(model="model", buffers=["buffer"], target_games=7)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "unexportable.py").write_text(textwrap.dedent(UNEXPORTABLE))
    text = "project: p\ntrial: t\nmodel: {kind: model, module: unexportable, engine: torch}\n"
    (tmp_path / "job.yaml").write_text(text)
    return JobConfig.load(tmp_path / "job.yaml")


@pytest.fixture
def trained(job, tmp_path, tracking_db, monkeypatch):
    """Trains with a given return, or none, and promotes the result: version and outcome."""
    monkeypatch.delitem(sys.modules, "unexportable", raising=False)  # each test has a folder of its own
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"net.weight": np.ones((2, 2), np.float32), "net.bias": np.ones(2, "f")})
    (folder / "meta.json").write_text(json.dumps({"counters": {"policy_version": 3}}))

    def train(episode_return, say=lambda line: None):
        trial = Trial.open("p", "t", tracking_db, resume=False)
        trial.save_checkpoint(
            folder, 100, {} if episode_return is None else {"episode_return": episode_return, "games": 30}
        )
        return promote(job, TRAINER, say, lambda function, *args: function(trial, *args))

    return train


def champion(uri):
    return find("models:/p@champion", uri).version


def test_a_model_that_cannot_be_exported_becomes_champion_without_onnx(trained, tracking_db):
    said = []
    assert trained(5.0, said.append) == (1, "champion: p version 1, mean return 5 over 30 games after 100 env steps")
    with files_of("models:/p@champion", tracking_db) as folder:
        assert {path.name for path in folder.iterdir()} == {"weights.npz", "meta.json", "MLmodel"}
    (line,) = said
    assert line.startswith(
        "the best checkpoint is registered without an ONNX file: the model cannot be exported to ONNX"
    )


def test_a_version_is_tagged_with_what_it_is_rated_by(trained, tracking_db):
    trained(5.04)
    tags = find("models:/p/1", tracking_db).tags
    assert {key: tags[key] for key in ("return", "return_games", "rating", "env_steps", "project")} == {
        "return": "5.04",
        "return_games": "30",
        "rating": "5.04",
        "env_steps": "100",
        "project": "p",
    }


def test_without_enough_games_the_summary_says_why_there_is_no_champion(trained, tracking_db):
    version, outcome = trained(None)
    assert version is None
    trial = Trial.open("p", "t", tracking_db)
    summary = TrainResult(trial, {}, True, "p", version, 1.0, [], outcome).summary()
    assert summary.splitlines()[-1] == (
        "  no champion: fewer than 7 games (`target_games`) with an `episode_return` were seen "
        "when its checkpoints were saved"
    )


@pytest.mark.parametrize(
    ("finished", "state"), [(True, "finished"), (False, "interrupted (the same command resumes it)")]
)
def test_the_summary_says_what_its_seconds_include(tracking_db, finished, state):
    first, *_ = (
        TrainResult(Trial.open("p", "t", tracking_db), {}, finished, "p", None, 64.2, [], "").summary().splitlines()
    )
    assert first == f"trial 't' of project 'p': {state} after 64 s of training, without its start"


LEARNED = """
    import torch
    from brayx.nets.mlp import ActorCritic

    def build_model(name, config):
        return ActorCritic(3, 2, hidden=()), (torch.zeros(1, 3),)
"""


@pytest.fixture(params=["Ray", pytest.param("local", marks=pytest.mark.slow)])  # local: starts MLflow in a process
def learned(request, tmp_path, tracking_db, monkeypatch):
    """Trains as a host does while the games have the given returns, one per batch; the last line and the champion's."""
    monkeypatch.setattr("brayx.engines.onnx.standalone", lambda module, example: None)  # takes seconds
    (tmp_path / "learned.py").write_text(textwrap.dedent(LEARNED))
    (tmp_path / "job.yaml").write_text("project: p\ntrial: t\nmodel: {kind: model, module: learned, engine: torch}\n")
    job = JobConfig.load(tmp_path / "job.yaml")
    monkeypatch.delitem(sys.modules, "learned", raising=False)

    def train(returns, **options):
        module, example = build_model(str(tmp_path), "learned", "model", {})
        config = TrainerConfig(
            model="model", buffers=["buffer"], target_games=7, checkpoint_interval_s=1e-6, checkpoints_kept=1, **options
        )
        left = iter(returns)

        def newest():
            return {"episode_return.last100": next(left), "games": 50, "games_in_window": 30}

        def run(keeper):
            return LearnerLoop(
                config,
                module,
                example,
                batches=batches(len(returns)),
                publisher=Weights,
                numbers=Numbers(newest),
                keeper=keeper,
            ).run()

        if request.param == "Ray":
            trial = Trial.open("p", "t", tracking_db)
            last = end_reason(config, run(TrialKeeper(trial, 1)))
            _, outcome = promote(job, config, pytest.fail, lambda function, *args: function(trial, *args))
        else:
            clerk = Clerk("p", "t", tracking_db, {}, kept=1)
            try:
                last = end_reason(config, run(clerk))
                clerk.settle()
                _, outcome = promote(job, config, pytest.fail, clerk.call)
            finally:
                clerk.end()
        return last, outcome, find("models:/p@champion", tracking_db).tags

    return train


def test_the_champions_tag_is_the_last_lines_return_when_the_target_is_reached(learned):
    last, outcome, tags = learned([3.0, 9.0, 17.04, 81.239], target_return=20.0)
    assert last == "target_return 20 reached over the last 30 games: mean return 81.24"
    assert (tags["return"], tags["return_games"], tags["env_steps"]) == ("81.24", "30", "128")
    assert outcome == "champion: p version 1, mean return 81.24 over 30 games after 128 env steps"


@pytest.mark.parametrize(
    ("options", "why"),
    [({"num_steps": 96}, "num_steps 96 reached"), ({}, "no more transitions to learn from")],
    ids=["steps", "stream"],
)
def test_the_outcome_compares_a_better_champion_with_the_last_checkpoint(learned, options, why):
    last, outcome, tags = learned([3.0, 81.239, 17.04], **options)
    assert last == f"{why}: mean return 17.04 over the last 30 games"
    assert (tags["return"], tags["return_games"], tags["env_steps"]) == ("81.24", "30", "64")
    assert outcome == (
        "champion: p version 1, mean return 81.24 over 30 games after 64 env steps "
        "(the best checkpoint; the last, after 96, has 17.04)"
    )


def test_the_outcome_mentions_a_last_checkpoint_with_too_few_games(trained, tmp_path, tracking_db, job):
    trial = Trial.open("p", "t", tracking_db, resume=False)
    for step, metrics in ((100, {"episode_return": 5.0, "games": 30}), (2000, {})):
        trial.save_checkpoint(tmp_path / "checkpoint", step, metrics)
    _, outcome = promote(job, TRAINER, lambda line: None, lambda function, *args: function(trial, *args))
    assert outcome.endswith("after 100 env steps (the best checkpoint; the last, after 2,000, has too few games)")


def test_a_champion_is_replaced_by_what_is_not_worse(trained, tracking_db):
    for version, episode_return in enumerate([-3.0, 5.0401, 5.04, 90.0], start=1):
        played = f"mean return {episode_return:.3g} over 30 games after 100 env steps"
        assert trained(episode_return) == (version, f"champion: p version {version}, {played}")
        assert champion(tracking_db) == version


def test_a_better_champion_stays_until_the_alias_is_moved(trained, tracking_db):
    trained(50.0)
    version, outcome = trained(49.9)
    assert version == 2
    assert champion(tracking_db) == 1
    summary, instruction = outcome.splitlines()
    assert summary == (
        "registered as p version 2, mean return 49.9 over 30 games after 100 env steps; "
        "version 1 with 50 stays champion"
    )
    command, *words = shlex.split(instruction.removeprefix("to make version 2 champion: "))
    assert (command, cli.main(words)) == ("brayx", 0)
    assert champion(tracking_db) == 2


@pytest.mark.parametrize("tag", [None, "good", "nan"])
def test_a_champion_with_an_unreadable_return_is_replaced(trained, tracking_db, tag):
    trained(50.0)
    client = MlflowClient(tracking_db)
    client.delete_model_version_tag("p", "1", "return")
    if tag is not None:
        client.set_model_version_tag("p", "1", "return", tag)
    assert trained(1.0) == (2, "champion: p version 2, mean return 1 over 30 games after 100 env steps")
    assert champion(tracking_db) == 2


class Hanging:
    """A learner that does not end."""

    running = True

    def result(self, timeout_s):
        assert timeout_s == STALLED_TIMEOUT_S

    def state(self):
        return "has published weights, version 9"


def test_a_learner_that_does_not_end_after_its_stream_is_given_up():
    with pytest.raises(DeadlineExceeded, match="not ended within 600 s after the last batch; it has published weights"):
        last_of(Hanging())


@pytest.mark.parametrize("uri", ["sqlite:////home/me/mlflow.db", "file:///home/me/mlruns"])
def test_a_store_in_a_file_is_refused_where_a_learner_on_another_machine_could_not_reach_it(uri):
    def node(name, address, *, alive=True):
        return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive}

    here, beside, gone = node("a", "10.0.0.1"), node("b", "10.0.0.1"), node("c", "10.0.0.2", alive=False)
    far = node("d", "10.0.0.3")
    with pytest.raises(ConfigError, match=r"a learner on 10\.0\.0\.3 could not reach it: start `mlflow server"):
        check_store_reachable(uri, False, [here, beside, gone, far], "a")
    check_store_reachable(uri, True, [here, far], "a")
    check_store_reachable(uri, False, [here, beside, gone], "a")
    check_store_reachable("http://store:5000", False, [here, far], "a")
