"""The summary of a training, and the registration of its best checkpoint."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.cluster.learner import CheckpointKeeper
from brayx.commands import cli
from brayx.engines.base import save_weights
from brayx.errors import ModelNotFound
from brayx.jobs.champion import behaviour_pool, best_of, champions, register_best, register_trial, without_champion
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import BEHAVIOUR_TAG, CONTRACT_TAG, plain_name
from brayx.jobs.evaluate import Evaluation
from brayx.jobs.rating import rating_tags
from brayx.jobs.result import TrainResult, end_reason, promote
from brayx.metrics import ERROR_OF_BEST
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.model.build import build_model
from brayx.tracking import Trial, files_of, find
from brayx.tracking.clerk import Clerk
from brayx.tracking.options import Options
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop, TrainingSummary
from tests.unit.trainer.parts import Numbers, Weights, batches


@pytest.mark.parametrize(
    ("failed", "finished", "more"),
    [(0.0, True, ""), (1.0, True, "; 1 more game failed"), (3.0, True, "; 3 more games failed"), (3.0, False, "")],
)
def test_failed_games_are_beside_the_return_of_the_others(failed: float, finished: bool, more: str) -> None:
    ended = "num_steps 1,000 reached: mean return 21.5 over the last 40 games"
    trial, numbers = Trial("sqlite:///none.db", "id", "p", "t"), {"games_failed_in_window": failed}
    result = TrainResult(trial, numbers, finished, "p", None, 1.0, [], "", ended=ended)
    assert result.summary().splitlines()[-1].strip() == ended + more


def test_a_result_names_its_version_or_says_why_there_is_none() -> None:
    trial = Trial("sqlite:///none.db", "id", "p", "t")
    assert TrainResult(trial, {}, True, "cartpole", 3, 1.0, [], "").reference == "models:/cartpole/3"
    with pytest.raises(ModelNotFound, match=r"trial 't' .*: fewer than 20 games"):
        _ = TrainResult(trial, {}, True, "cartpole", None, 1.0, [], "no champion: fewer than 20 games").reference


def ended(reason, mean, games):
    return TrainingSummary(reason, 1000, 10, 11, 5.0, mean, games, False)


@pytest.mark.parametrize(
    ("learned", "line"),
    [
        (ended("target_return", 0.81239, 100), "target_return 0.8 reached over the last 100 games: mean return 0.8124"),
        (ended("num_steps", 21.5, 1), "num_steps 1,000,000 reached: mean return 21.5 over the last 1 game"),
        (
            ended("num_steps", float("nan"), 0),
            "num_steps 1,000,000 reached: the last checkpoint has fewer than 7 games (`target_games`), so no return",
        ),
        (ended("stream_ended", -3.0, 40), "no more transitions to learn from: mean return -3 over the last 40 games"),
        (
            None,
            "interrupted, so no version is registered; the same command resumes this trial, with --set "
            "trainer.num_steps=1 it registers the best version so far",
        ),
    ],
    ids=["target", "steps", "few games", "stream", "interrupted"],
)  # fmt: skip
def test_why_a_training_ended_is_the_last_line(tracking_db, learned, line):
    assert end_reason(TRAINER.model_copy(update={"target_return": 0.8}), learned, {}) == line
    result = TrainResult(
        Trial.open("p", "t", tracking_db), {}, True, "p", 1, 1.0, [], "champion: p version 1", ended=line
    )
    assert result.summary().splitlines()[-1].strip() == line


def test_a_league_ends_with_its_standing_instead_of_a_return() -> None:
    numbers = {"league_points.main": 1312.0, "league_champion": 7.0, "league_pool": 12.0, "games": 3400.0}
    assert end_reason(TRAINER, ended("num_steps", 21.5, 40), numbers) == (
        "num_steps 1,000,000 reached: leader main 1312 points, champion version 7, pool 12, 3,400 games"
    )
    assert end_reason(TRAINER, None, numbers).startswith("interrupted: leader main 1312 points, champion version 7")


def test_a_training_that_a_viewer_has_finished_says_so() -> None:
    line = end_reason(TRAINER, ended("stream_ended", 21.5, 40), {}, on_request=True)
    assert line == "ended from the console: mean return 21.5 over the last 40 games"


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

    def train(episode_return, say=lambda line: None, contract=None, params=None, error=None):
        trial = Trial.open("p", "t", tracking_db, resume=False)
        trial.log_params(params or {})
        if contract is not None:
            trial.set_tag(CONTRACT_TAG, contract)
        metrics = {} if episode_return is None else {"episode_return": episode_return, "games": 30}
        trial.save_checkpoint(folder, 100, metrics | ({} if error is None else {ERROR_OF_BEST: error}))
        return promote(job, TRAINER, say, lambda function, *args: function(trial, *args))

    return train


def test_each_of_several_behaviours_has_a_champion_of_its_own(tmp_path, tracking_db):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"w": np.ones(2, np.float32)})

    def learned(project, behaviour, several):
        trial = Trial.open(project, plain_name(behaviour), tracking_db, resume=False)
        trial.set_tag(BEHAVIOUR_TAG, behaviour)
        trial.save_checkpoint(folder, 100, {"episode_return": 1.0, "games": 30})
        pool = behaviour_pool(trial, several)
        register_best(trial, best_of(trial)[0], pool, None, None)
        return pool

    assert learned("p", "chaser", several=False) == "p", "a project with one behaviour"
    assert champions("p", tracking_db) == {}
    assert learned("p-x", "runner", several=False) == "p-x", "another project, with a name like a behaviour's"
    assert learned("p", "x", several=False) == "p"
    assert learned("p", "runner", several=True) == "p-runner"
    named = {behaviour: entry.name for behaviour, entry in champions("p", tracking_db).items()}
    assert named == {"runner": "p-runner", "x": "p"}
    assert learned("p", "a/b", several=True) == "p-a_b"
    assert learned("p", "runner", several=False) == "p-runner", "it has learned several before"
    named = {behaviour: entry.name for behaviour, entry in champions("p", tracking_db).items()}
    assert named == {"runner": "p-runner", "x": "p", "a/b": "p-a_b"}
    assert champions("p_", tracking_db) == {}
    assert learned("p", "x", several=True) == "p--x", "p-x is another project's"
    assert learned("p-a_b", "runner", several=False) == "p-a_b-runner", "p-a_b is another project's"
    assert learned("p-x", "runner", several=False) == "p-x"
    named = {behaviour: entry.name for behaviour, entry in champions("p", tracking_db).items()}
    assert named == {"runner": "p-runner", "x": "p--x", "a/b": "p-a_b"}
    assert {name: entry.name for name, entry in champions("p-a_b", tracking_db).items()} == {"runner": "p-a_b-runner"}


def champion(uri):
    return find("models:/p@champion", uri).version


def test_a_model_that_cannot_be_exported_becomes_champion_without_onnx(trained, tracking_db):
    said = []
    assert trained(5.0, said.append) == (1, "champion: p version 1, mean return 5 over 30 games after 100 env steps")
    with files_of("models:/p@champion", tracking_db) as folder:
        assert {path.name for path in folder.iterdir()} == {"weights.npz", "meta.json", "MLmodel"}
    first, line = said
    assert first == "writing the best checkpoint, after 100 env steps, as ONNX"
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


@pytest.mark.parametrize(
    ("games", "why"),
    [
        ({}, "no game ended; set a time limit (`env_options.max_episode_steps`)"),
        ({"session/games": 7.0}, "too few games with a return had ended when a checkpoint was saved (7)"),
        ({"session/failed_games": 7.0}, "too few games with a return had ended when a checkpoint was saved (0)"),
    ],
)
def test_a_training_without_a_champion_says_what_to_do(tracking_db, games, why):
    trial = Trial.open("p", "t", tracking_db, resume=False)
    trial.log_metrics(games, step=1)
    version, outcome = register_trial(trial, "p", None)
    assert version is None
    assert outcome.startswith(f"no champion: {why}")


def test_without_enough_games_the_summary_says_why_there_is_no_champion(trained, tracking_db):
    version, outcome = trained(None)
    assert version is None
    trial = Trial.open("p", "t", tracking_db)
    summary = TrainResult(trial, {}, True, "p", version, 1.0, [], outcome).summary()
    assert summary.splitlines()[-1].startswith("  no champion: no game ended; set a time limit")
    trial.log_metrics({"session/games": 3.0}, step=1)
    assert "when a checkpoint was saved (3 of 7); fewer `target_games`" in without_champion(trial, 7)


@pytest.mark.parametrize(
    ("finished", "state"), [(True, "finished"), (False, "interrupted (the same command resumes it)")]
)
def test_the_summary_has_the_seconds_of_the_whole_trial_as_the_console_does(finished, state):
    trial, numbers = Trial("sqlite:///none.db", "id", "p", "t"), {"seconds": 64.2}
    first, *_ = TrainResult(trial, numbers, finished, "p", None, 4.0, [], "").summary().splitlines()
    assert first == f"trial 't' of project 'p': {state} after 64 s of training, start-up not counted"


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

    def no_failure(line):
        assert line.startswith("writing the best checkpoint")

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
            last = end_reason(config, run(CheckpointKeeper(trial, 1)), {})
            _, outcome = promote(job, config, no_failure, lambda function, *args: function(trial, *args))
        else:
            clerk = Clerk("p", "t", tracking_db, Options({}, {}), kept=1)
            try:
                last = end_reason(config, run(clerk), {})
                clerk.settle()
                _, outcome = promote(job, config, no_failure, clerk.call)
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
    for step, metrics in ((640, {"episode_return": 5.0, "games": 30, "env_steps": 100}), (2000, {})):
        trial.save_checkpoint(tmp_path / "checkpoint", step, metrics)
    _, outcome = promote(job, TRAINER, lambda line: None, lambda function, *args: function(trial, *args))
    assert outcome.endswith("after 100 env steps (the best checkpoint; the last, after 2,000, has too few games)")


def test_a_champion_is_replaced_by_what_is_not_worse(trained, tracking_db):
    replaces = ""
    for version, episode_return in enumerate([-3.0, 5.0401, 5.04, 90.0], start=1):
        played = f"mean return {episode_return:.3g} over 30 games after 100 env steps"
        assert trained(episode_return) == (version, f"champion: p version {version}, {played}{replaces}")
        replaces = f"; it replaces version {version} with {episode_return:.3g} over 30 games"
        assert champion(tracking_db) == version


def test_a_champion_stays_if_the_difference_is_within_chance(trained, tracking_db):
    trained(50.0, error=1.0)
    stays = "; version 1 with 50 over 30 games stays champion: the difference is within chance\n"
    assert all(stays in trained(mean, error=1.0)[1] for mean in (53.0, 49.0, 50.0))
    assert champion(tracking_db) == 1
    assert trained(58.0, error=1.0)[1].endswith("; it replaces version 1 with 50 over 30 games")
    assert trained(58.1)[1].startswith("champion: "), "its error is not known"


def test_evaluations_choose_the_champion_and_its_return_is_a_point_of_the_curve(tracking_db, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"w": np.ones(2, np.float32)})

    def learned(mean, rating, env="env"):
        trial = Trial.open("p", "t", tracking_db, resume=False)
        trial.log_metrics({CHARTS["env_steps"]: 0.0}, 1)
        trial.log_metrics({RETURN_CHART: 0.9, CHARTS["env_steps"]: 200.0}, 7)
        trial.save_checkpoint(folder, 100, {"episode_return": mean, "games": 1})
        tags = None if rating is None else rating_tags(env, Evaluation([rating - 0.1, rating + 0.1]))
        _, outcome = register_trial(trial, "p", None, tags)
        return outcome, trial

    outcome, trial = learned(1.5, 0.6)
    played = "mean return 1.5 over 1 game after 100 env steps, 0.6 over 2 games of its evaluation"
    assert outcome == f"champion: p version 1, {played}"
    assert trial.history(RETURN_CHART) == [(4, 1.5), (7, 0.9)], "its 100 env steps are halfway from the first point"
    tags = find("models:/p/1", tracking_db).tags
    assert (tags["rating"], tags["rating_games"], tags["return"]) == ("0.6", "2", "1.5")
    better = learned(1.2, 1.9)[0]
    assert better.startswith("champion: p version 2")
    assert better.endswith("; it replaces version 1 with 0.6 over 2 games of its evaluation")
    its = "version 2 with 1.9 over 2 games of its evaluation stays champion: "
    assert f"{its}it is better\n" in learned(9.0, 0.5)[0]
    assert f"{its}the difference is within chance\n" in learned(9.0, 2.0)[0]
    its = "version 2 with 1.2 over 1 game stays champion: "
    assert f"{its}it is better\n" in learned(1.1, None)[0], "only one was evaluated, so returns compare"
    assert f"{its}it is better\n" in learned(1.1, 9.0, "other")[0]
    assert "it replaces version 2 with 1.2 over 1 game" in learned(1.3, None)[0]
    its = "version 7 with 1.3 over 1 game stays champion: "
    assert f"{its}it is better\n" in learned(1.2, 9.0)[0], "an evaluation does not beat a return"
    assert "it replaces version 7 with 1.3 over 1 game" in learned(1.4, 0.1)[0]
    before = find("models:/p@champion", tracking_db).version
    with monkeypatch.context() as failing:  # what fails leaves the alias where it is
        failing.delattr(Trial, "history")
        with pytest.raises(AttributeError):
            learned(9.0, 9.0)
    assert find("models:/p@champion", tracking_db).version == before


def test_a_better_champion_stays_until_the_alias_is_moved(trained, tracking_db):
    trained(50.0)
    version, outcome = trained(49.9)
    assert version == 2
    assert champion(tracking_db) == 1
    summary, instruction = outcome.splitlines()
    assert summary == (
        "registered as p version 2, mean return 49.9 over 30 games after 100 env steps; "
        "version 1 with 50 over 30 games stays champion: it is better"
    )
    command, *words = shlex.split(instruction.removeprefix("to make version 2 champion: "))
    assert (command, cli.main(words)) == ("brayx", 0)
    assert champion(tracking_db) == 2


def test_a_champion_for_another_contract_is_no_rival(trained, tracking_db):
    trained(50.0, contract="sha256:1")
    assert trained(49.0, contract="sha256:1")[1].startswith("registered as p version 2")
    version, outcome = trained(1.0, contract="sha256:2")
    assert (version, champion(tracking_db)) == (3, 3)
    assert outcome == (
        "champion: p version 3, mean return 1 over 30 games after 100 env steps; version 1, the champion before, has "
        "another contract, so returns do not compare: to keep a champion of each, add --set project=NAME"
    )


def test_a_champion_of_another_environment_is_no_rival(trained, tracking_db):
    trained(50.0, params={"env_options": {"wind": 0.5}})
    assert trained(49.0, params={"rollout": {"env_options": {"wind": 0.5}}})[1].startswith("registered as p version 2")
    version, outcome = trained(1.0, params={"env_options": {}})
    assert (version, champion(tracking_db)) == (3, 3)
    assert "version 1, the champion before, has other env_options (wind=0.5 instead of none), so returns" in outcome


@pytest.mark.parametrize("tag", [None, "good", "nan"])
def test_a_champion_with_an_unreadable_return_is_replaced(trained, tracking_db, tag):
    trained(50.0)
    client = MlflowClient(tracking_db)
    client.delete_model_version_tag("p", "1", "return")
    if tag is not None:
        client.set_model_version_tag("p", "1", "return", tag)
    version, outcome = trained(1.0)
    assert (version, outcome.partition("; ")[2]) == (2, "it replaces version 1 with an unknown return")
    assert champion(tracking_db) == 2
