"""Vector environments: each id by its fastest stepping, and one-line errors for those that are not available."""

from __future__ import annotations

import sys

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from brayx.errors import ConfigError
from brayx.rollout.envs import autoreset_mode, check_env, is_atari, make_envs
from tests.unit.rollout.worlds import Counting


@pytest.mark.parametrize(
    ("env", "vectorization", "kind"),
    [
        ("CartPole-v1", "auto", "CartPoleVectorEnv"),
        ("CartPole-v1", "native", "CartPoleVectorEnv"),
        ("CartPole-v1", "sync", "SyncVectorEnv"),
        ("Pendulum-v1", "auto", "SyncVectorEnv"),
        ("Acrobot-v1", "async", "AsyncVectorEnv"),
        (Counting, "auto", "SyncVectorEnv"),
        (Counting, "async", "AsyncVectorEnv"),
        (lambda: SyncVectorEnv([Counting] * 3), "auto", "SyncVectorEnv"),
    ],
)
def test_vectorization_selects_the_class(env, vectorization, kind):
    envs = make_envs(env, 3, vectorization=vectorization)
    try:
        assert type(envs).__name__ == kind
        assert envs.num_envs == 3
        assert autoreset_mode(envs) is AutoresetMode.NEXT_STEP
        obs, _ = envs.reset(seed=0)
        assert len(obs) == 3
    finally:
        envs.close()


def test_options_reach_the_environment():
    assert make_envs("Pendulum-v1", 1, options={"g": 1.0}).envs[0].unwrapped.g == 1.0


@pytest.mark.parametrize(
    ("env", "options", "why"),
    [
        ("CartPoll-v1", {}, "'CartPoll-v1': .*'CartPole-v1'"),
        ("CartPole-v11", {}, "'CartPole-v11': .*'CartPole-v1'; write MODULE:CartPole-v11 if a module"),
        ("Nope-v1", {}, "'Nope-v1': [^']*'[^']*'; write MODULE:Nope-v1 if a module"),
        ("missing:Nope-v1", {}, "'missing:Nope-v1': .*missing"),
        ("Pendulum-v1", {"vectorization": "native"}, "no native vector environment"),
        ("Pendulum-v1", {"options": {"gravity": 1}}, "unexpected keyword argument 'gravity'"),
        (Counting, {"options": {"g": 1}}, "a factory sets its own"),
        (lambda: SyncVectorEnv([Counting] * 2), {}, "has 2 environments, expected 3"),
    ],
)
def test_unavailable_environments_are_refused(env, options, why):
    with pytest.raises(ConfigError, match=why):
        make_envs(env, 3, **options)


@pytest.mark.parametrize("count", [0, -1])
def test_the_number_of_environments_is_at_least_one(count):
    with pytest.raises(ConfigError, match="expected 1 or more"):
        make_envs("CartPole-v1", count)


def test_an_id_is_checked_without_making_the_environment():
    check_env("Pendulum-v1")
    with pytest.raises(ConfigError, match=r"'pendulum-v1': .*'Pendulum-v1'; write MODULE:pendulum-v1 if"):
        check_env("pendulum-v1")


def test_only_atari_ids_are_refused_with_the_atari_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    for env in ("ALE/Pung-v5", "PungNoFrameskip-v4"):
        with pytest.raises(ConfigError, match=r"`pip install 'brayx\[atari\]'`"):
            check_env(env)
    for env in ("Nope-v0", "Nope-v4", "Nope-v5"):
        with pytest.raises(ConfigError, match=f"'{env}': [^']*'[^']*'; write MODULE:{env} if a module[^']*$"):
            check_env(env)


def test_atari_uses_its_own_vector_environment():
    pytest.importorskip("ale_py", reason="Atari games come with the extra `atari`")
    for env in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
        assert is_atari(env)
        envs = make_envs(env, 2)
        try:
            assert type(envs).__name__ == "AtariVectorEnv"
            obs, _ = envs.reset(seed=0)
            assert obs.shape == (2, 4, 84, 84)
        finally:
            envs.close()
    assert not is_atari("CartPole-v1")
    assert not is_atari(Counting)
    assert not is_atari("Nothing-v0")
