"""Makes vector environments from Gymnasium ids, ale_py's Atari games and factories.

An Atari id becomes ale_py's own vector environment, which steps and preprocesses in threads; an id with a
``vector_entry_point`` its own; any other one is stepped in a row (``sync``) or in processes (``async``). Knows nothing
of policies.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from brayx.errors import BrayxError, ConfigError, EnvironmentFailed, first_line, raised_at

Vectorization: TypeAlias = Literal["auto", "sync", "async", "native"]
EnvSource: TypeAlias = str | Callable[[], Any]
"""A Gymnasium id, or a factory of an environment or a vector environment."""

_ATARI_OPTIONS = {
    "frameskip": 4,
    "maxpool": True,
    "stack_num": 4,
    "noop_max": 30,
    "reward_clipping": False,  # a return is the game's score; rewards for learning may be clipped later
}


def make_envs(
    env: EnvSource,
    num_envs: int,
    *,
    vectorization: Vectorization = "auto",
    options: Mapping[str, Any] | None = None,
) -> VectorEnv:
    """A vector environment of ``num_envs``.

    Args:
        env: id, or factory; a factory of a vector environment makes them all at once.
        num_envs: number of environments.
        vectorization: ``native``: the id's ``vector_entry_point``, or ale_py's for an Atari id. ``auto``: native where
            there is one, else ``sync``.
        options: passed on to the environment; a native Atari environment has ale_py's: ``frameskip``, ``num_threads``
            and others.

    A mask in an environment's ``info["action_mask"]`` becomes part of the observation, see
    `brayx.rollout.masks.InfoMasks`.

    Raises:
        ConfigError: there is no such environment or vectorization of it, or it does not take these options.
        EnvironmentFailed: its constructor or its first reset raised.
    """
    from brayx.rollout.masks import with_masks  # loads torch

    envs = _make(env, num_envs, vectorization, options)
    try:
        return with_masks(envs)
    except BaseException:
        envs.close()
        raise


def failed(what: str, error: Exception, envs: VectorEnv | None = None) -> BrayxError:
    """The typed error for an environment's exception in its method ``what``; a typed one stays as it is.

    If the environments are stepped in a row, an observation that does not fit its space is named instead.
    """
    if isinstance(error, BrayxError):
        return error
    base: Any = envs.unwrapped if envs is not None else None
    for obs in getattr(base, "_env_obs", ()):  # of a SyncVectorEnv
        if obs is not None and (wrong := _misfit(base.single_observation_space, obs, "obs")):
            key, found = wrong
            return EnvironmentFailed(f"{key}: an environment returned {found} by its observation space", key=key)
    message = f"the environment raised {type(error).__name__} in {what}: {first_line(error)} ({raised_at(error)})"
    return EnvironmentFailed(message)


def _misfit(space: Any, obs: Any, path: str) -> tuple[str, str] | None:
    """Path of the first part of an observation that its space cannot hold, and what it is; None: there is none."""
    inner = getattr(space, "spaces", None)
    if inner is None:
        expected = [*(space.shape or ())]
        try:
            shape = [*np.shape(obs)]
        except ValueError:
            return path, f"lists of unequal lengths, expected shape {expected}"
        return None if shape == expected else (path, f"shape {shape}, expected {expected}")
    for key, part in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
        try:
            value = obs[key]
        except (KeyError, IndexError, TypeError):
            return f"{path}/{key}", "none, expected one"
        if wrong := _misfit(part, value, f"{path}/{key}"):
            return wrong
    return None


def _make(env: EnvSource, num_envs: int, vectorization: Vectorization, options: Mapping[str, Any] | None) -> VectorEnv:
    if num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}, expected 1 or more", key="num_envs")
    given = dict(options or {})
    try:
        if callable(env):
            return _from_factory(env, num_envs, vectorization, given)
        spec = _spec(env)
        game = _atari_game(spec)
        if vectorization == "native" and game is None and spec.vector_entry_point is None:
            raise ConfigError(f"{env} has no native vector environment: use sync or async", env=env)
        if game is not None and vectorization in ("auto", "native"):
            from ale_py.vector_env import AtariVectorEnv

            registered = {key: spec.kwargs[key] for key in ("repeat_action_probability", "full_action_space")}
            return AtariVectorEnv(game, num_envs, **{**registered, **_ATARI_OPTIONS, **given})
        mode = {"auto": None, "native": "vector_entry_point"}.get(vectorization, vectorization)
        return gymnasium.make_vec(env, num_envs, vectorization_mode=mode, **given)
    except BrayxError:
        raise
    except (gymnasium.error.Error, TypeError, ValueError, ImportError, AssertionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"no environment {env!r} with options {given}: {said[0]}", env=str(env)) from error
    except Exception as error:
        raise failed("its constructor", error) from error


def is_atari(env: EnvSource) -> bool:
    """Whether an id is an Atari game's, seen as pixels."""
    if callable(env):
        return False
    try:
        return _atari_game(_spec(env)) is not None
    except (ConfigError, gymnasium.error.Error):
        return False


def autoreset_mode(envs: VectorEnv) -> AutoresetMode:
    """The autoreset mode of ``envs``; Gymnasium's default if they do not declare one."""
    return AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))


def _from_factory(
    env: Callable[[], Any], num_envs: int, vectorization: Vectorization, options: dict[str, Any]
) -> VectorEnv:
    if options:
        raise ConfigError("options need an environment's id: a factory sets its own", options=sorted(options))
    first = env()
    if isinstance(first, VectorEnv):
        if first.num_envs != num_envs:
            raise ConfigError(
                f"the factory's vector environment has {first.num_envs} environments, expected {num_envs}"
            )
        return first
    if vectorization == "async":
        first.close()
        return gymnasium.vector.AsyncVectorEnv([env] * num_envs)
    return SyncVectorEnv([lambda: first, *[env] * (num_envs - 1)])


def check_env(env: str) -> None:
    """Checks that an environment's id is registered, without making it.

    Raises:
        ConfigError: it is not; names the nearest id.
    """
    _spec(env)


def _spec(env: str) -> Any:
    """Registers ale_py's ids where Gymnasium knows no such id: importing it is no part of importing Gymnasium."""
    module, _, name = env.rpartition(":")  # Gymnasium's "module:id", whose module registers the id
    try:
        if module:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # `python -m` looks there, the command `brayx` does not
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise ConfigError(f"no environment {env!r}: {first_line(error)}", env=env) from error
    except gymnasium.error.Error:
        atari = _register_atari()
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        more = ""
        if not atari and (name.startswith("ALE/") or "NoFrameskip-" in name):
            more = "; Atari games come with `pip install 'brayx[atari]'`"
        if not module:
            more += f"; write MODULE:{name} if a module of yours registers it"
        raise ConfigError(
            f"no environment {env!r}: the nearest known id is {_nearest(name)!r}{more}", env=env
        ) from error


def _register_atari() -> bool:
    """Registers ale_py's ids; returns whether ale_py is installed."""
    try:
        import ale_py
    except ImportError:
        return False
    gymnasium.register_envs(ale_py)
    return True


def _nearest(env: str) -> str:
    """The registered id most similar to ``env``: by name, then with the same version, then the newest."""
    game, _, version = env.partition("-v")

    def alike(known: str) -> tuple[float, bool, int]:
        name, _, number = known.partition("-v")
        ratio = difflib.SequenceMatcher(None, game.lower(), name.lower()).ratio()
        return ratio, number == version, int(number) if number.isdecimal() else 0

    return max(gymnasium.registry, key=alike)


def _atari_game(spec: Any) -> str | None:
    """The game of an Atari id with pixels as observations; None for any other id."""
    if not str(spec.entry_point).startswith("ale_py") or spec.kwargs.get("obs_type", "rgb") == "ram":
        return None
    game: str | None = spec.kwargs.get("game")
    return game
