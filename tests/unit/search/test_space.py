"""The space of a search: parsed, drawn from, and checked before anything starts."""

from __future__ import annotations

import random

import pytest

from brayx.algorithms.build import check_fits
from brayx.errors import ConfigError
from brayx.local.training import Training
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import NETWORK
from brayx.search.space import Domain, arguments, check, parse


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
