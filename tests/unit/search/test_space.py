"""The space of a search: parsed, drawn from, and checked before anything starts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from brayx.algorithms.build import check_fits
from brayx.errors import ConfigError, ModelError
from brayx.local.training import Training
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import NETWORK
from brayx.search.space import Domain, arguments, check, parse
from brayx.search.tune import TrialOutcome, perturbed, table, tune


def test_lines_are_domains_or_values() -> None:
    space = parse(["learning_rate=loguniform(1e-4, 1e-2)", "num_envs = 16", "network.hidden=choice([32], [64, 64])"])
    assert space == {
        "learning_rate": Domain("loguniform", (1e-4, 1e-2)),
        "num_envs": 16,
        "network.hidden": Domain("choice", ([32], [64, 64])),
    }


def test_options_go_where_they_belong() -> None:
    algorithm, training = arguments("impala", {"num_envs": 4, "gamma": 0.9, "network.lstm": 32})
    assert training.num_envs == 4
    assert (algorithm.name, algorithm.gamma) == ("impala", 0.9)
    assert training.network.lstm == 32


def test_options_that_are_not_given_suit_the_algorithm() -> None:
    _, training = arguments("ppo", {"gamma": 0.9})
    assert training == Training()
    algorithm, training = arguments("sac", {"gamma": 0.9})
    assert training.network is None, "SAC's own default"
    settled = training.of(algorithm)
    assert (settled.sampler, settled.unroll_length, settled.batch_size) == ("uniform", 1, 256)
    assert settled.samples_per_insert == 256, "one gradient per transition"
    algorithm, training = arguments("sac", {"n_step": 5, "batch_size": 64, "sampler": "prioritised"})
    settled = training.of(algorithm)
    assert (settled.sampler, settled.unroll_length, settled.batch_size) == ("prioritised", 5, 64)
    assert settled.samples_per_insert == 5 * 64


def test_options_of_the_network_change_the_one_that_the_algorithm_has() -> None:
    _, training = arguments("sac", {"network.hidden": [32]})
    assert training.network == NETWORK.model_copy(update={"hidden": [32]})
    _, training = arguments("ppo", {"network.hidden": [32]})
    assert training.network == NetworkConfig(hidden=[32])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["learning_rate"], "'learning_rate': expected OPTION="),
        (["learning_rate=normal(0, 1)"], "'normal' is not a domain; there are choice, uniform, loguniform, randint"),
        (["gamma=uniform(1, 0)"], "uniform.1, 0.: expected least < largest"),
        (["learning_rate=loguniform(0, 1)"], "expected 0 < least < largest"),
        (["epochs=randint(1, 2.5)"], "expected whole numbers"),
        (["epochs=choice()"], "is empty"),
        (["gamma=0.9", "gamma=0.8"], "gamma is given twice"),
        (["learning_rate=__import__('os')"], "'__import__' is not a domain"),
    ],
)
def test_an_invalid_line_is_quoted(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["gamma=0.9"], "no option is searched"),
        (["clip_parm=choice(0.1, 0.2)"], "there is no option 'clip_parm'; nearest is 'clip_param'"),
        (["clip_param=uniform(0.1, 2)"], "clip_param is 2"),
        (["learning_rate=uniform(0.5, 3)"], "learning_rate is 3"),
        (["network.lstm=choice(0, -1)"], "lstm is -1"),
        (["gamma=7", "epochs=randint(2, 4)"], "gamma is 7"),
        (["num_envs=randint(0, 4)"], "num_envs is 0"),
        (["sampler=choice('fifo', 'lifo')"], "sampler is 'lifo'"),
        (["epochs=uniform(2, 10)"], "epochs is 4.54.*: Input should be a valid integer"),
        (["normalise_obs=uniform(0, 1)"], "normalise_obs is 0.31.*: Input should be a valid boolean"),
        (["num_envs=loguniform(1, 64)"], "num_envs is 3.75.*: Input should be a valid integer"),
        (["num_steps=choice(10, 20)"], "there is no option 'num_steps'"),
    ],
)
def test_an_invalid_search_space_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("ppo", parse(lines))


def fits_unroll(algorithm, training) -> None:  # type: ignore[no-untyped-def]
    check_fits(algorithm, unroll_length=training.unroll_length)


def test_options_that_do_not_go_together_in_any_draw_are_refused() -> None:
    lines = ["n_step=choice(1, 8)", "unroll_length=choice(16, 4)", "gamma=uniform(0.9, 0.99)"]
    with pytest.raises(ConfigError, match=r"n_step 8, .*unroll_length 4"):
        check("sac", parse(lines), fits_unroll)
    check("sac", parse([lines[0], "unroll_length=choice(16, 8)", lines[2]]), fits_unroll)
    check("sac", parse(["n_step=choice(1, 500)", "unroll_length=500"]), fits_unroll)
    check("sac", parse(["n_step=500", "unroll_length=choice(500, 600)", lines[2]]), fits_unroll)


def test_options_of_the_reinforcement_that_is_mixed_are_searched_by_name() -> None:
    config, _ = arguments("mixed", {"reinforcement.clip_param": 0.3, "imitation_coef": 0.5})
    assert (config.reinforcement.clip_param, config.imitation_coef) == (0.3, 0.5)
    config, _ = arguments("mixed", {"reinforcement": {"name": "impala"}, "reinforcement.clip_rho": 2.0})
    assert (config.reinforcement.name, config.reinforcement.clip_rho) == ("impala", 2.0)
    for values, message in (
        (
            {"reinforcement.clip_parm": 0.3},
            "no option 'reinforcement.clip_parm'; nearest is 'reinforcement.clip_param'",
        ),
        ({"reinforcement.clip_param": 3.0}, r"clip_param is 3\.0"),
        ({"reinforcement.clip_rho": 2.0}, "clip_rho"),
    ):
        with pytest.raises(ConfigError, match=message):
            arguments("mixed", values)
    with pytest.raises(ConfigError, match=r"'reinforcement.clip_param'.*'clip_param'"):
        arguments("ppo", {"reinforcement.clip_param": 0.3})


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
        ("CartPole-v1", "sac", "", "actions that are discrete; these do: ppo"),
        ("gymnasium.envs.classic_control:CartPole-v1", "sac", "", "actions that are discrete; these do: ppo"),
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
        ({"num_steps": 0}, "num_steps is 0, expected 1 at least"),
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


def test_an_unknown_algorithm_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="'dqn', expected one of ppo, impala"):
        check("dqn", {"gamma": Domain("uniform", (0.9, 0.99))})


def test_draws_are_of_the_domain() -> None:
    rng = random.Random(0)
    drawn = [Domain("loguniform", (1e-4, 1e-2)).draw(rng) for _ in range(500)]
    assert 1e-4 <= min(drawn) < 2e-4
    assert 5e-3 < max(drawn) <= 1e-2
    assert 0.4 < sum(value < 1e-3 for value in drawn) / 500 < 0.6
    assert {Domain("randint", (1, 3)).draw(rng) for _ in range(100)} == {1, 2, 3}
    assert {Domain("choice", ("a", "b")).draw(rng) for _ in range(100)} == {"a", "b"}


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
