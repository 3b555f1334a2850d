"""A search: refused before anything starts, how copies are changed, and its table."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from brayx.errors import ConfigError, ModelError
from brayx.search.space import Domain, parse
from brayx.search.tune import TrialOutcome, perturbed, table, tune


def test_clones_that_play_nothing_cannot_be_compared(tmp_path: Path) -> None:
    steps = {"action": np.zeros(10, np.int64), "reward": np.ones(10), "terminated": np.arange(10) == 9}
    np.savez(tmp_path / "games.npz", obs=np.zeros((10, 4), np.float32), **steps)
    space = parse(["learning_rate=loguniform(1e-4, 1e-2)", "evaluation_episodes=choice(0, 5)"])
    with pytest.raises(ConfigError, match=r"evaluation_episodes is 0, .*'bc'"):
        tune("CartPole-v1", space, algorithm="bc", demonstrations=tmp_path / "games.npz", tracking=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["games.npz"]


@pytest.mark.parametrize(
    ("env", "algorithm", "more", "message"),
    [
        (
            "gymnasium.envs.classic_control:CartPole-v1",
            "sac",
            "network.distribution='squashed'",
            "distribution is squashed, but actions are discrete",
        ),
        ("CartPoel-v1", "ppo", "", "no environment 'CartPoel-v1': the nearest known id is 'CartPole-v1'"),
        ("Pendulum-v1", "bc", "", "'bc' imitates recorded steps, but there are none"),
        (
            "CartPole-v1",
            "mixed",
            "",
            "'mixed' imitates demonstrations, but no data is marked as such.*learn without: ppo",
        ),
        ("Pendulum-v1", "ppo", "sde_steps=choice(1, 4)", "sde_steps is 4, but the model's noise does not depend on"),
        ("Pendulum-v1", "sac", "n_step=500;unroll_length=1", "n_step 500, and columns have unroll_length 1"),
        ("Pendulum-v1", "sac", "env_options={'gravity': 9, 'wind': 1}", "wind"),
        ("Pendulum-v1", "sac", "network.lstm=choice(0, 64)", "lstm"),
        ("CartPole-v1", "ppo", "network.value_heads=choice(None, 2)", r"gave value \[N, 2\], expected value \[N\]"),
        (
            "CartPole-v1",
            "impala",
            "sampler='uniform';unroll_length=128",
            "min_columns is 1000, and 60000 num_steps are 468 columns",
        ),
        ("Pendulum-v1", "sac", "capacity=choice(500, 100000)", "min_size is 1000, and there is room for 500"),
        (
            "CartPole-v1",
            "ppo",
            "min_columns=8;sampler=choice('uniform', 'prioritised')",
            "'ppo' neither gives priorities",
        ),
    ],
)
def test_a_search_whose_trials_cannot_start_starts_nothing(
    tmp_path: Path, env: str, algorithm: str, more: str, message: str
) -> None:
    space = parse(["learning_rate=loguniform(1e-4, 1e-2)", *filter(None, more.split(";"))])
    with pytest.raises((ConfigError, ModelError), match=message):
        tune(env, space, algorithm=algorithm, tracking=str(tmp_path))
    assert not list(tmp_path.iterdir())


def recorded(path: Path, **fields: np.ndarray) -> str:
    """Two steps of CartPole, or what ``fields`` makes of them, in a file."""
    steps = {"obs": np.zeros((2, 4), np.float32), "action": np.zeros(2, np.int64), "reward": np.ones(2, np.float32)}
    steps |= {"episode": np.zeros(2, np.int64), "terminated": np.array([False, True])}
    np.savez(path, **(steps | fields))
    return str(path)


@pytest.mark.parametrize(
    ("algorithm", "more", "fields", "message"),
    [
        ("ppo", [], {}, "'ppo' does not imitate, but there are demonstrations; these do: bc, mixed"),
        ("mixed", [], {"obs": np.zeros((2, 3), np.float32)}, "obs"),
        ("mixed", ["normalise_obs=choice(False, True)"], {}, "the observations of demonstrations stay as they are"),
    ],
)
def test_demonstrations_that_no_trial_can_imitate_start_nothing(
    tmp_path: Path, algorithm: str, more: list[str], fields: dict[str, np.ndarray], message: str
) -> None:
    data = recorded(tmp_path / "games.npz", **fields)
    space = parse(["learning_rate=loguniform(1e-4, 1e-2)", *more])
    with pytest.raises(ConfigError, match=message):
        tune("CartPole-v1", space, algorithm=algorithm, demonstrations=data, tracking=str(tmp_path / "tracking"))
    with pytest.raises(ConfigError, match=r"none\.npz: there is no such file"):
        tune("CartPole-v1", space, algorithm=algorithm, demonstrations=tmp_path / "none.npz", tracking=str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["games.npz"]


@pytest.mark.parametrize(
    "option",
    [
        "network.hidden=choice([8], [16])",
        *(f"{name}=choice(False, True)" for name in ("normalise_obs", "normalise_reward", "normalise_value")),
    ],
)
def test_options_that_a_copy_cannot_change_are_refused(tmp_path: Path, option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"pbt .*: {name} has a domain"):
        tune("CartPole-v1", parse([option, "gamma=uniform(0.9, 0.99)"]), method="pbt", tracking=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0, expected at least 1"),
        ({"num_steps": -5}, "num_steps is -5"),
        ({"interval_steps": 0}, "interval_steps is 0"),
        ({"interval_steps": -1}, "interval_steps is -1"),
        ({"num_trials": 0}, "num_trials is 0"),
    ],
)
def test_an_invalid_count_starts_nothing(tmp_path: Path, counts: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune("CartPole-v1", {"gamma": Domain("uniform", (0.9, 0.99))}, **counts, tracking=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_copy_is_changed_inside_the_domains() -> None:
    domains = {
        "gamma": Domain("uniform", (0.9, 1.0)),
        "epochs": Domain("randint", (1, 4)),
        "kind": Domain("choice", "ab"),
    }
    rng, options = random.Random(0), {"gamma": 0.99, "epochs": 4, "kind": "a", "num_envs": 8}
    seen = [perturbed(options, domains, rng) for _ in range(200)]
    assert all(
        0.9 <= draw["gamma"] <= 1.0 and draw["epochs"] in (1, 2, 3, 4) and draw["num_envs"] == 8 for draw in seen
    )
    assert sum(draw["gamma"] != 0.99 for draw in seen) > 150
    assert {draw["kind"] for draw in seen} == {"a", "b"}
    assert options == {"gamma": 0.99, "epochs": 4, "kind": "a", "num_envs": 8}


def test_the_table_has_a_line_for_each_trial() -> None:
    good = TrialOutcome(1, {"gamma": 0.95}, [(1000, 20.0), (2000, 33.25)], clones=[(1, 0)])
    bad = TrialOutcome(0, {"gamma": 0.5}, error="BadWeights: NaN")
    head, first, second = table([good, bad]).splitlines()
    assert head.split() == ["trial", "return", "env", "steps", "gamma"]
    assert first.split() == ["1", "33.25", "2,000", "0.95", "copy", "of", "0"]
    assert second.split() == ["0", "nan", "-", "0.5", "BadWeights:", "NaN"]


def test_the_table_has_the_digits_of_a_return() -> None:
    best, worst = (
        TrialOutcome(1, {"gamma": 0.99}, [(4000, 1234.5)]),
        TrialOutcome(0, {"gamma": 0.9}, [(4000, 0.041239)]),
    )
    assert [line.split()[1] for line in table([best, worst]).splitlines()] == ["return", "1234", "0.04124"]
