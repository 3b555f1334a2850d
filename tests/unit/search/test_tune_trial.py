"""One trial of a search, without Ray: compared while it runs, and started as a copy of another."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx.replay.files import Dataset
from brayx.search.competition import TrialReport
from brayx.search.tune import _by_whole_path
from brayx.search.tune_trial import Spec, train_trial
from tests.leaning import leaning

PPO = {"num_envs": 4, "unroll_length": 20, "epochs": 1, "network.hidden": [8]}


@dataclass
class Look:
    """What one report said, with a copy of its checkpoint."""

    numbers: TrialReport
    folder: Path

    @property
    def counters(self) -> dict[str, Any]:
        """Of the learner."""
        return json.loads((self.folder / "meta.json").read_text())["counters"]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """Of the network."""
        return dict(np.load(self.folder / "weights.npz"))

    @property
    def adam(self) -> list[dict[str, torch.Tensor]]:
        """The optimiser's state of each parameter."""
        state = torch.load(self.folder / "trainer.pt", weights_only=True)["optimizer"]["state"]
        return [state[index] for index in sorted(state)]


def looks_at(
    folder: Path, env: str, options: dict[str, Any], *, total: int, interval: int, algorithm: str = "ppo",
    number: int = 0, target: float | None = None, begun: Path | None = None, data: Dataset | None = None,
) -> list[Look]:  # fmt: skip
    """Every report of a trial."""
    looks: list[Look] = []

    def report(numbers: TrialReport, checkpoint: Path) -> None:
        copy = folder / f"{number}-{len(looks)}"
        shutil.copytree(checkpoint, copy)
        looks.append(Look(numbers, copy))

    spec = Spec(env, algorithm, total, interval, target, 0, data)
    train_trial(spec, number, options, report, begun)
    return looks


def test_games_go_on_from_one_look_to_the_next(tmp_path: Path) -> None:
    """A game of Pendulum takes 200 steps, and between two looks each environment takes 100."""
    looks = looks_at(tmp_path, "Pendulum-v1", PPO, total=2200, interval=400)
    steps = [look.numbers.env_steps for look in looks]
    means = [look.numbers.return_mean for look in looks]
    assert steps[0] >= 800, "the first look comes once each environment has ended a game"
    assert len(looks) == 4
    assert all(math.isfinite(mean) for mean in means)
    assert means[1] == means[0], "of the same games"
    assert len(set(means)) > 1
    assert [look.numbers.over for look in looks] == [False, False, False, True]
    assert [step - step % 400 for step in steps[:-1]] == [800, 1200, 1600]
    assert all(step % 400 < 4 * 20 for step in steps[:-1]), "the first run that is past it"
    assert steps[-1] - steps[-2] >= 400, "the return of a short rest would decide about the whole trial"
    saved = [look.counters["env_steps"] for look in looks]
    assert saved == steps, "a checkpoint is of when it was looked at"


def test_what_was_collected_stays_in_the_table_from_one_look_to_the_next(tmp_path: Path) -> None:
    """Learning begins after 600 columns, and 400 come between two looks."""
    table = {"sampler": "uniform", "min_columns": 600, "batch_size": 8, "samples_per_insert": 1.0}
    options = {"num_envs": 2, "unroll_length": 1, "network.hidden": [8], **table}
    looks = looks_at(tmp_path, "Pendulum-v1", options, total=1600, interval=400, algorithm="sac")
    updates = [look.counters["updates"] for look in looks]
    assert len(looks) > 1
    assert updates[0] > 0
    assert updates[-1] - updates[0] > 0.8 * (looks[-1].numbers.env_steps - looks[0].numbers.env_steps) / 8


def test_sac_learns_once_for_each_transition_where_nothing_else_is_said(tmp_path: Path) -> None:
    options = {"min_columns": 100, "num_envs": 2, "network.hidden": [8]}
    (look,) = looks_at(tmp_path, "Pendulum-v1", options, total=500, interval=500, algorithm="sac")
    assert 390 <= look.counters["updates"] <= 410


CLONE = {"num_envs": 4, "network.hidden": [16], "batch_size": 8, "evaluation_episodes": 6}


def test_a_clone_plays_at_each_look_what_it_has_learned_by_then(tmp_path: Path) -> None:
    data = leaning(tmp_path / "games.npz")
    options = {**CLONE, "learning_rate": 1e-2}
    looks = looks_at(tmp_path, "CartPole-v1", options, total=60_000, interval=2000, algorithm="bc", data=data)
    means = [look.numbers.return_mean for look in looks]
    assert means[0] < means[-1]
    assert means[-1] > 150
    assert [look.numbers.over for look in looks] == [*[False] * (len(looks) - 1), True]
    steps = [look.numbers.env_steps for look in looks]
    assert [step // 2000 for step in steps] == [*range(1, 29), 30]

    idle = {**CLONE, "learning_rate": 1e-9}
    bound = looks_at(tmp_path, "CartPole-v1", idle, total=6000, interval=2000, algorithm="bc", data=data, number=1)
    assert len({look.numbers.return_mean for look in bound}) == 1, "the same weights play the same games"


def test_a_clone_that_reaches_its_target_is_over(tmp_path: Path) -> None:
    data = leaning(tmp_path / "games.npz")
    options = {**CLONE, "learning_rate": 1e-2}
    looks = looks_at(
        tmp_path, "CartPole-v1", options, total=10**9, interval=2000, algorithm="bc", data=data, target=150.0
    )
    assert [look.numbers.return_mean >= 150.0 for look in looks] == [*[False] * (len(looks) - 2), True, True]
    assert looks[-1].numbers.over


@pytest.mark.parametrize("algorithm", ["bc", "mixed"])
def test_a_copy_that_imitates_goes_on_where_the_other_was(tmp_path: Path, algorithm: str) -> None:
    """Those of `mixed` that come before any play are not imitated a second time."""
    data = leaning(tmp_path / "games.npz")
    options = {**CLONE, "unroll_length": 20, "learning_rate": 1e-2}
    options |= {} if algorithm == "bc" else {"imitation_updates": 50}
    about = {"algorithm": algorithm, "data": data, "interval": 800}
    first, *_ = looks_at(tmp_path, "CartPole-v1", options, total=2400, **about)
    total = first.numbers.env_steps
    (ended,) = looks_at(tmp_path, "CartPole-v1", options, total=total, number=1, begun=first.folder, **about)
    assert ended.counters["updates"] == first.counters["updates"] > 0
    for name, array in first.weights.items():
        np.testing.assert_array_equal(ended.weights[name], array)
    for of_first, of_copy in zip(first.adam, ended.adam, strict=True):
        torch.testing.assert_close(of_copy["exp_avg_sq"], of_first["exp_avg_sq"], rtol=0, atol=0)
    copy, *_ = looks_at(tmp_path, "CartPole-v1", options, total=total + 1600, number=2, begun=first.folder, **about)
    assert copy.numbers.origin == 0
    assert copy.numbers.env_steps >= total + 800
    assert 0 < copy.counters["updates"] - first.counters["updates"] <= 45, "two of a run of 80 steps at most"


def test_a_trial_imitates_demonstrations_that_were_named_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that imitated plays longer than one that learned nothing from 20 steps."""
    leaning(tmp_path / "games.npz")
    (elsewhere := tmp_path / "trial").mkdir()
    monkeypatch.chdir(tmp_path)
    data: Dataset = pickle.loads(pickle.dumps(_by_whole_path("games.npz")))
    monkeypatch.chdir(elsewhere)
    options = {name: value for name, value in PPO.items() if name != "epochs"}
    options |= {"learning_rate": 1e-2, "imitation_updates": 200}
    looks = looks_at(tmp_path, "CartPole-v1", options, total=1600, interval=400, algorithm="mixed", data=data)
    assert looks[0].numbers.return_mean > 60, "a policy that learned nothing plays for 22 steps"


def test_a_trial_that_reaches_its_target_reports_once_more_and_ends(tmp_path: Path) -> None:
    looks = looks_at(tmp_path, "CartPole-v1", PPO, total=40_000, interval=4000, target=5.0)
    assert [look.numbers.over for look in looks] == [True]
    assert looks[-1].numbers.return_mean >= 5.0


def test_a_copy_begins_with_the_weights_the_optimiser_and_the_counters_of_the_other(tmp_path: Path) -> None:
    """A copy with no steps left ends as it began."""
    first, *_ = looks_at(tmp_path, "CartPole-v1", {**PPO, "learning_rate": 1e-2}, total=4000, interval=1600)
    total = first.numbers.env_steps
    other = {**PPO, "learning_rate": 1e-3}
    (copy,) = looks_at(tmp_path, "CartPole-v1", other, total=total, interval=1600, number=1, begun=first.folder)
    assert (copy.numbers.origin, copy.numbers.env_steps, copy.numbers.over) == (0, total, True)
    for name in ("env_steps", "updates"):
        assert copy.counters[name] == first.counters[name] > 0
    assert first.weights.keys() == copy.weights.keys()
    for name, array in first.weights.items():
        np.testing.assert_array_equal(copy.weights[name], array)
    for of_first, of_copy in zip(first.adam, copy.adam, strict=True):
        assert of_first["step"] > 0
        for name, tensor in of_first.items():
            torch.testing.assert_close(of_copy[name], tensor, rtol=0, atol=0)


def test_a_copy_is_looked_at_after_an_interval_of_its_own(tmp_path: Path) -> None:
    first, *_ = looks_at(tmp_path, "CartPole-v1", PPO, total=4000, interval=1600)
    looks = looks_at(tmp_path, "CartPole-v1", PPO, total=8000, interval=1600, number=1, begun=first.folder)
    assert [look.numbers.origin for look in looks] == [0, 1, 1]
    steps = [look.numbers.env_steps for look in (first, *looks)]
    assert all(0 <= step - 1600 * number < 80 for number, step in enumerate(steps[:-1], 1))


@pytest.mark.parametrize("num_envs", [1, 4, 16])
def test_trials_are_looked_at_at_the_same_env_steps_however_many_environments_they_step(
    tmp_path: Path, num_envs: int
) -> None:
    """Runs of 300, 1200 and 4800 steps do not drift from looks that are 6000 apart."""
    options = {**PPO, "num_envs": num_envs, "unroll_length": 300, "learning_rate": 1e-9}
    looks = looks_at(tmp_path, "CartPole-v1", options, total=36_000, interval=6000)
    steps = [look.numbers.env_steps for look in looks[:-1]]
    assert [step // 6000 for step in steps] == [1, 2, 3, 4]
    assert all(step % 6000 < num_envs * 300 for step in steps)
