"""Steps a vector environment with a policy and returns the transitions as replay's `Columns`.

Each environment gives one column per run of ``T`` steps. A step runs only the environment, the policy and the draw of
an action; log-probabilities, episodes and normalisation are computed for the whole run afterwards. A run is stored
time-major, so that a step is one block for the engine, and transposed once. How
Gymnasium's autoreset modes become columns:

    NEXT_STEP            the step that only resets is the column's bootstrap step: mask 0, obs is the episode's last one
    SAME_STEP, DISABLED  columns have no place for the last observation. An episode that terminated needs none. One that
                         was truncated would be bootstrapped from it, so its last transition is left out: the step
                         becomes the bootstrap step, and the previous one is truncated

Knows nothing of learning, of Ray, nor of where weights come from.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from brayx import actions
from brayx.actions import ActionSpec
from brayx.arrays import as_dtype
from brayx.engines.scaling import Scaling
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.metrics import Recorder
from brayx.rollout.envs import autoreset_mode, failed
from brayx.rollout.masks import InfoMasks, is_observed
from brayx.rollout.moments import AllMoments, ObsNormaliser, RewardNormaliser, SharedMoments, from_arrays, to_arrays
from brayx.rollout.policy import RolloutPolicy
from brayx.spaces import MASK, by_path, limits_of, row_without_action
from brayx.types import Columns, NestedArray, Weights, flatten

logger = logging.getLogger(__name__)

_MAX_EPISODES = 65_536
"""Finished episodes kept for `Collector.episodes`."""
_WARM_UP = 1_000
"""Number of observations up to which the normaliser is updated at every step, not only at every run."""


class Episode(NamedTuple):
    """A finished episode: its undiscounted return in the environment's own rewards, its length, and its environment.
    The return is NaN if a reward was NaN or infinite, as float32."""

    ret: float
    length: int
    env: int


def record_episodes(sink: Recorder, episodes: Collection[Episode]) -> None:
    """Records returns and lengths of episodes; those with a return of NaN are left out of the means."""
    whole = [episode for episode in episodes if not math.isnan(episode.ret)]
    if whole:
        sink.add_all("episode_return", [episode.ret for episode in whole])
        sink.add_all("episode_length", [float(episode.length) for episode in whole])


def seed_after(seed: int, env_steps: int) -> int:
    """The seed after ``env_steps`` were learned from, so that a resumed trial plays other episodes."""
    return int(np.random.SeedSequence([seed, env_steps]).generate_state(1)[0] >> 1) if env_steps else seed


class Collector:
    """Collects runs of ``unroll_length`` steps of every environment.

    Args:
        envs: the environments; `close` closes them.
        policy: the policy that acts.
        unroll_length: steps of a run, ``T``; the attribute may be changed between two runs.
        seed: seed of environments and actions.
        normalise_obs: normalise observations to running mean 0 and deviation 1, for acting and in the record; a
            normaliser: use it without updating it.
        normalise_reward: divide recorded rewards by the running deviation of their discounted sums.
        gamma: discount of those sums.
        reward_clip: clip recorded rewards to +- this before they are normalised; None: do not clip.
        sde_steps: steps for which noise that depends on the state stays the same.
        greedy: take the most likely action instead of a drawn one.

    Attributes:
        env_steps: transitions collected since the start, without those left out.
        obs_normaliser, reward_normaliser: None if unused.

    Raises:
        ConfigError: the environments' observations or actions do not fit the policy, or ``sde_steps`` does not.
        EnvironmentFailed: the first reset raised.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policy: RolloutPolicy,
        unroll_length: int,
        *,
        seed: int = 0,
        normalise_obs: bool | ObsNormaliser = False,
        normalise_reward: bool = False,
        gamma: float = 0.99,
        reward_clip: float | None = None,
        sde_steps: int = 1,
        greedy: bool = False,
    ) -> None:
        check_noise(sde_steps, policy.output_names)
        self._ignores_masks = not is_observed(envs.single_observation_space)
        if isinstance(envs, InfoMasks) and not any(MASK in key.split("/") for key in policy.obs_keys):
            logger.warning("the environments give action masks, but the model takes no action_mask: they are ignored")
            envs = envs.env
        self.envs = envs
        self.policy = policy
        self.num_envs = int(envs.num_envs)
        self.unroll_length = unroll_length
        self.action_spec = ActionSpec.of(envs.single_action_space, scale=True)
        self.env_steps = 0
        self._reward_clip = reward_clip
        self._sde_steps = sde_steps
        self._greedy = greedy
        self._mode = autoreset_mode(envs)
        self._takes = dict(zip(policy.obs_keys, policy.obs_leaves, strict=True))
        self._limits = by_path(limits_of(envs.single_observation_space), "obs")
        self._episodes: deque[tuple[float, int, int]] = deque(maxlen=_MAX_EPISODES)  # plain: they cost a fifth to make
        self._obs: dict[str, np.ndarray] = {}
        self._raw: list[dict[str, np.ndarray]] = []
        self._moving = threading.Lock()
        self.reward_normaliser = RewardNormaliser(self.num_envs, gamma) if normalise_reward else None
        self.begin_again(seed)
        self._sees = normalise_obs is True
        if isinstance(normalise_obs, bool):
            shapes = {key: leaf.shape[1:] for key, leaf in self._obs.items()}
            dtypes = {key: leaf.dtype for key, leaf in self._obs.items()}
            self.obs_normaliser = ObsNormaliser(shapes, dtypes) if normalise_obs else None
        else:
            self.obs_normaliser = normalise_obs

    def begin_again(self, seed: int) -> None:
        """Resets every environment, as a new collector of that ``seed`` does; normalisers keep their moments."""
        self._rng = np.random.default_rng([seed, 0xAC7])
        try:
            first, _ = self.envs.reset(seed=seed)
        except Exception as error:
            raise failed("reset", error, self.envs) from error
        self._obs = self._leaves(first)
        self._state = self.policy.initial_state(self.num_envs)
        self._resetting = np.zeros(self.num_envs, np.bool_)
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, np.int64)
        if self.reward_normaliser is not None:
            self.reward_normaliser.begin_again()
        self._broken = False

    def load(self, weights: Weights, version: int) -> None:
        """Acts with these weights from the next run on.

        Raises:
            BadWeights: they do not fit the model.
        """
        self.policy.load(weights, version)

    def collect(self) -> Columns:
        """The next run: ``num_envs`` columns of ``unroll_length`` transitions.

        A run that raises is lost. The next one resets every environment with another seed, since some may have taken
        the step in which others raised.

        Raises:
            EnvironmentFailed: an environment raised, or an action mask allows no action.
            ModelError: the policy failed.
        """
        if self._broken:
            self._raw.clear()
            self.begin_again(int(self._rng.integers(2**31)))
        self._broken = True
        steps, num = self.unroll_length, self.num_envs
        observed = {key: np.empty((steps + 1, *leaf.shape), leaf.dtype) for key, leaf in self._obs.items()}
        states = [np.empty((steps + 1, *leaf.shape), leaf.dtype) for leaf in self._state]
        rewards = np.zeros((steps + 1, num), np.float32)
        terminations, truncations = (np.zeros((steps + 1, num), np.bool_) for _ in range(2))
        took: list[np.ndarray] = []
        policy, keys, greedy, sde_steps = self.policy, self.policy.obs_keys, self._greedy, self._sde_steps
        for t in range(steps):
            shown = self._record(observed, states, t)
            outputs, after = policy.step([shown[key] for key in keys], self._state)
            if t == 0:
                outputs_of_steps, pairs = _room(outputs, steps)
                noise = [] if greedy else self._noise(outputs)
            for run, output in pairs:
                run[t] = output
            action = actions.greedy(outputs) if greedy else actions.choose(outputs, noise[t // sde_steps])
            took.append(action)
            rewards[t], terminations[t], truncations[t] = self._step(action)
            if after:
                resetting = self._resetting if t == 0 else terminations[t - 1] | truncations[t - 1]
                self._state = self._carried(after, terminations[t], truncations[t], resetting)
        self._record(observed, states, steps)
        resets = self._resets(terminations | truncations)
        arrays = {key: _columns(run) for key, run in observed.items()}
        arrays |= {key: _columns(run) for key, run in zip(self.policy.state_keys, states, strict=True)}
        reward, terminated, truncated, resetting = map(_columns, (rewards, terminations, truncations, resets))
        if self.obs_normaliser is not None:
            self._look_at_raw(self.obs_normaliser)
        truncated &= ~terminated
        self._count_episodes(reward, terminated | truncated, resetting)
        arrays.update(self._ended(reward, terminated, truncated, resetting))
        arrays.update(self._acted(outputs_of_steps, np.stack(took)))
        self._check_masks(arrays)
        self.env_steps += int(np.count_nonzero(arrays["mask"]))
        self._broken = False
        return Columns(arrays)

    def unfinished(self) -> list[Episode]:
        """The running episode of each environment, with its return and length so far."""
        return [
            Episode(*so_far, env)
            for env, so_far in enumerate(zip(self._return.tolist(), self._length.tolist(), strict=True))
        ]

    def episodes(self) -> list[Episode]:
        """Episodes that have ended since the last call, in order."""
        ended = list(map(Episode._make, self._episodes))
        self._episodes.clear()
        return ended

    def state_dict(self) -> dict[str, np.ndarray]:
        """The normalisers' moments, as arrays by name; empty without one. Environments are not saved. May be called
        while another thread collects."""
        with self._moving:
            return to_arrays(self.moments())

    def scalings(self) -> Mapping[str, Scaling]:
        """The current scaling of each observation, by its name in a learner batch."""
        return {} if self.obs_normaliser is None else self.obs_normaliser.scalings()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores a `state_dict`.

        Raises:
            ConfigError: it belongs to other normalisers.
        """
        if set(state) != set(self.state_dict()):
            raise ConfigError(f"normalisers: expected {sorted(self.state_dict())}, got {sorted(state)}")
        shared = self._shared()
        for name, moments in from_arrays(state).items():
            shared[name].load(moments)
        if self.obs_normaliser is not None:
            self.obs_normaliser.refresh()

    def moments(self) -> AllMoments:
        """The moments that its normalisers use now."""
        return {name: shared.total for name, shared in self._shared().items()}

    def drain_moments(self) -> AllMoments:
        """The moments of its normalisers' samples since the last call."""
        with self._moving:
            return {name: shared.drain() for name, shared in self._shared().items()}

    def adopt_moments(self, merged: AllMoments) -> None:
        """Sets the moments of all workers, to which each normaliser adds its samples that are not in them yet."""
        with self._moving:
            for name, shared in self._shared().items():
                if name in merged:
                    shared.adopt(merged[name])
            if self.obs_normaliser is not None:
                self.obs_normaliser.refresh()

    def _shared(self) -> dict[str, SharedMoments]:
        shared: dict[str, SharedMoments] = {}
        if self.obs_normaliser is not None:
            shared.update(self.obs_normaliser.leaves)
        if self.reward_normaliser is not None:
            shared["reward"] = self.reward_normaliser.moments
        return shared

    def close(self) -> None:
        """Closes the environments."""
        self.envs.close()

    def _record(self, observed: dict[str, np.ndarray], states: list[np.ndarray], t: int) -> dict[str, np.ndarray]:
        """Records the observation and the state before step ``t``; returns the observation's leaves for the policy."""
        shown = self._obs
        normaliser = self.obs_normaliser
        if normaliser is not None:
            if self._sees and t < self.unroll_length:  # the last observation is the next run's first
                self._raw.append(shown)
                if normaliser.count < _WARM_UP:
                    self._look_at_raw(normaliser)
            shown = {key: normaliser(key, leaf) for key, leaf in shown.items()}
        for key, leaf in shown.items():
            observed[key][t] = leaf
        for run, leaf in zip(states, self._state, strict=True):
            run[t] = leaf
        return shown

    def _noise(self, outputs: Mapping[str, Any]) -> list[actions.Noise]:
        """Noise for the steps of a whole run, drawn at once."""
        noise = actions.noise(outputs, self._rng, -(-self.unroll_length // self._sde_steps))
        return list(zip(*noise, strict=True)) if isinstance(noise, tuple) else list(noise)

    def _look_at_raw(self, normaliser: ObsNormaliser) -> None:
        """Updates the normaliser with the observations of this run."""
        if self._raw:
            with self._moving:
                for key in self._raw[0]:
                    normaliser.add(key, np.concatenate([leaves[key] for leaves in self._raw]))
                normaliser.refresh()
            self._raw.clear()

    def _step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        action = self.action_spec.to_env(action)
        try:
            obs, reward, terminated, truncated, info = self.envs.step(action)
            if self._mode is AutoresetMode.DISABLED and (done := terminated | truncated).any():
                obs, _ = self.envs.reset(options={"reset_mask": done})
        except Exception as error:
            raise failed("step", error, self.envs) from error
        if self._ignores_masks and MASK in info:
            self._ignores_masks = False  # warns once
            logger.warning(
                "info's %s is ignored: expected discrete actions, and masks from the first reset on, of the first "
                "environment too",
                MASK,
            )
        self._obs = self._leaves(obs)
        return reward, terminated, truncated

    def _resets(self, done: np.ndarray) -> np.ndarray:
        """The steps of a run that only reset an environment, ``[T + 1, N]``."""
        resets = np.zeros_like(done)
        if self._mode is AutoresetMode.NEXT_STEP:
            resets[0] = self._resetting
            resets[1:-1] = done[:-2]
            self._resetting = done[-2]
        return resets

    def _carried(
        self, after: list[np.ndarray], terminated: np.ndarray, truncated: np.ndarray, resetting: np.ndarray
    ) -> list[np.ndarray]:
        """The state before the next step; the initial state where an episode begins."""
        ends = resetting if self._mode is AutoresetMode.NEXT_STEP else truncated
        ends = ends | terminated
        if not ends.any():
            return after
        for leaf, start in zip(after, self.policy.initial_state(int(ends.sum())), strict=True):
            leaf[ends] = start
        return after

    def _leaves(self, obs: NestedArray) -> dict[str, np.ndarray]:
        """The leaves of an observation by a learner batch's names, as the policy takes them.

        Raises:
            ConfigError: the policy takes something else.
            EnvironmentFailed: a whole number is outside the observation space.
        """
        leaves = {"obs": obs} if isinstance(obs, np.ndarray) else flatten(obs, "obs")
        for key, limits in self._limits.items():
            if wrong := limits.refusal(leaves[key]):
                raise EnvironmentFailed(f"{key}: an environment returned {wrong} by its observation space", key=key)
        if isinstance(obs, np.ndarray):
            last = self._obs.get("obs")
            if last is not None and obs.dtype == last.dtype and obs.shape == last.shape:  # already checked
                return leaves
        for key, spec in self._takes.items():
            leaf = leaves.get(key)
            if leaf is None:
                raise ConfigError(f"the environments give {sorted(leaves)}, the model takes {sorted(self._takes)}")
            if leaf.dtype == spec.dtype and leaf.shape[1:] == spec.shape:
                continue
            converted = as_dtype(leaf, spec.dtype)
            if converted is None or leaf.shape[1:] != spec.shape:
                raise ConfigError(
                    f"{key}: the environments give {list(leaf.shape[1:])} {leaf.dtype}, "
                    f"the model takes {list(spec.shape)} {spec.dtype}",
                    key=key,
                )
            leaves[key] = converted
        if len(leaves) > len(self._takes):  # used for learning only, such as the state of a game
            for key in leaves.keys() - self._takes.keys():
                leaf = leaves[key]
                leaves[key] = leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf
        return leaves

    def _count_episodes(self, reward: np.ndarray, done: np.ndarray, resetting: np.ndarray) -> None:
        """Sums rewards between episode ends; a column's last step, without an action, also starts a new sum."""
        begins = np.zeros(done.shape, np.bool_)
        begins[:, 1:] = done[:, :-1]
        begins[:, 0] = True
        pieces = np.flatnonzero(begins)
        counted = ~resetting
        counted[:, -1] = False
        returns = np.add.reduceat(reward.ravel(), pieces, dtype=np.float64)
        returns[~np.isfinite(returns)] = np.nan
        lengths = np.add.reduceat(counted.ravel(), pieces, dtype=np.int64)
        env, t = np.divmod(pieces, done.shape[1])
        first = np.flatnonzero(t == 0)
        returns[first] += self._return
        lengths[first] += self._length
        last = np.append(first[1:], len(pieces)) - 1  # of each environment: continues in the next run
        self._return, self._length = returns[last], lengths[last]
        ended = np.delete(np.arange(len(pieces)), last)
        ended = ended[np.argsort(t[ended + 1], kind="stable")]  # by time, then by environment
        self._episodes.extend(zip(returns[ended].tolist(), lengths[ended].tolist(), env[ended].tolist(), strict=True))

    def _ended(
        self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, resetting: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Rewards, ends and mask of a run; ``truncated`` excludes ``terminated``."""
        mask = (~resetting).astype(np.float32)
        mask[:, -1] = 0.0
        done = terminated | truncated
        if self._mode is not AutoresetMode.NEXT_STEP:
            mask[truncated] = 0.0
            truncated[:, :-1] |= truncated[:, 1:] & ~terminated[:, :-1]
        if self._reward_clip is not None:
            reward = np.clip(reward, -self._reward_clip, self._reward_clip)
        if self.reward_normaliser is not None:
            with self._moving:
                reward[:, :-1] = self.reward_normaliser(reward[:, :-1], done[:, :-1], mask[:, :-1])
        return {"reward": reward * mask, "terminated": terminated, "truncated": truncated, "mask": mask}

    def _check_masks(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Refuses a step whose mask allows no action. The last observation of an episode may forbid all."""
        for key in arrays:
            if key.rpartition("/")[2] != MASK or arrays[key].shape[-1] != sum(self.action_spec.sizes):
                continue
            masks = np.where(arrays["mask"][..., None] > 0, arrays[key], 1)
            if (row := row_without_action(masks, self.action_spec.sizes)) is not None:
                (env, step), head = row
                of_head = f" of head {head}" if len(self.action_spec.sizes) > 1 else ""
                raise EnvironmentFailed(
                    f"{key}: environment {env} allows none of the {self.action_spec.sizes[head]} actions{of_head} at "
                    f"step {step} of a run, expected one or more",
                    key=key,
                    head=head,
                )

    def _acted(self, outputs: Mapping[str, Any], actions_taken: np.ndarray) -> dict[str, np.ndarray]:
        """Actions, their log-probabilities and the version that acted."""
        log_prob = actions.log_prob(outputs, actions_taken)
        action = np.zeros((self.num_envs, self.unroll_length + 1, *actions_taken.shape[2:]), actions_taken.dtype)
        action[:, :-1] = actions_taken.swapaxes(0, 1)
        density = np.zeros(action.shape[:2], np.float32)
        density[:, :-1] = log_prob.T
        version = np.full(density.shape, self.policy.version, np.int64)
        return {"action": action, "log_prob": density, "policy_version": version}


def check_noise(sde_steps: int, outputs: Collection[str]) -> None:
    """Refuses ``sde_steps`` above 1 for a policy whose noise does not depend on the state.

    Args:
        sde_steps: as for `Collector`.
        outputs: names of the model's outputs.

    Raises:
        ConfigError: says what fits.
    """
    if sde_steps > 1 and "sde_std" not in outputs:
        raise ConfigError(
            f"sde_steps is {sde_steps}, but the model's noise does not depend on the state: expected 1, or a network "
            "whose distribution is sde",
            key="sde_steps",
        )


def _columns(run: np.ndarray) -> np.ndarray:
    """``[T + 1, N, ...]`` as ``[N, T + 1, ...]``, C-contiguous."""
    return np.ascontiguousarray(run.swapaxes(0, 1))


def _room(outputs: Mapping[str, Any], steps: int) -> tuple[dict[str, Any], list[tuple[np.ndarray, np.ndarray]]]:
    """Arrays for the outputs of many steps, ``[T, N, ...]``, by name, and each output with its array; none for outputs
    that only noise uses.
    """
    room: dict[str, Any] = {}
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for name, output in outputs.items():
        if name in ("latent", "sde_std"):
            continue
        heads = output if isinstance(output, tuple | list) else (output,)
        runs = tuple(np.empty((steps, *head.shape), head.dtype) for head in heads)
        room[name] = runs if isinstance(output, tuple | list) else runs[0]
        pairs.extend(zip(runs, heads, strict=True))
    return room, pairs
