"""Masks in `info`: each is observed and recorded with its observation, and no masked action is ever taken."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from brayx.actions import ActionSpec
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.local.train import train_local
from brayx.local.training import Training
from brayx.rollout.collector import Collector
from brayx.rollout.envs import make_envs
from brayx.rollout.masks import with_masks
from brayx.rollout.multi import AgentsAsRows
from brayx.rollout.networks import observation_of, ready_made
from brayx.rollout.policy import RolloutPolicy
from tests.unit.rollout.test_multi import Count
from tests.unit.rollout.worlds import Counting, Linear, MaskedCounting

ACTIONS = 4


class MasksInInfo(Counting):
    """`Counting` where only the action equal to the step's number is allowed; a step without a mask allows the last."""

    action_space: spaces.Space = spaces.Discrete(ACTIONS)

    def _mask_info(self):
        return {} if self._at == 2 else {"action_mask": np.arange(ACTIONS) == self._at}

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset()
        return obs, self._mask_info()

    def step(self, action):
        assert self._at == 2 or action == self._at or self._lenient, "a masked action was taken"
        obs, *rest, _ = super().step(action)
        return obs, *rest, self._mask_info()

    _lenient = False


class Several(MasksInInfo):
    """The same with two heads and a dict observation; masks are a tuple, as Gymnasium's spaces have them."""

    observation_space = spaces.Dict({"where": Counting.observation_space})  # type: ignore[assignment]
    action_space = spaces.MultiDiscrete([2, 2])

    def _mask_info(self):
        return {"action_mask": (np.array([1, 0], np.int8), np.array([0, 1], np.int8))}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset()
        return {"where": obs}, info

    def step(self, action):
        assert tuple(action) == (0, 1)
        self._lenient = True
        obs, *rest = super().step(0)
        return {"where": obs}, *rest


def collector(env, mode, **options):
    envs = with_masks(SyncVectorEnv([env] * 3, autoreset_mode=mode))
    module, args = ready_made(None, envs)(observation_of(envs), ActionSpec.of(envs.single_action_space))
    return Collector(envs, RolloutPolicy(module, args, engine="torch"), 5, **options)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_each_observation_is_recorded_with_its_own_mask(mode, greedy):
    """Also after the reset of one environment among several, in each autoreset mode."""
    masking = collector(MasksInInfo, mode, greedy=greedy)
    for _ in range(8):
        arrays = masking.collect().arrays
        for row, t in np.argwhere(arrays["mask"] > 0):
            step = int(arrays["obs/obs"][row, t, 1])
            expected = np.ones(ACTIONS) if step == 2 else np.arange(ACTIONS) == step
            np.testing.assert_array_equal(arrays["obs/action_mask"][row, t], expected)
            assert step == 2 or arrays["action"][row, t] == step
            assert step == 2 or arrays["log_prob"][row, t] == 0


class AllowsNothing(Counting):
    """The second head has no allowed action after an episode's end, nor at step ``nothing_at``."""

    action_space = spaces.MultiDiscrete([2, 2])
    nothing_at = 3

    def _info(self):
        return {"action_mask": (np.array([1, 0]), np.array([0, self._at not in (self.nothing_at, 3)]))}

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], self._info()

    def step(self, action):
        return *super().step(action)[:4], self._info()


class AllowsNothingAtOne(AllowsNothing):
    nothing_at = 1


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_mask_that_allows_no_action_is_refused_except_after_an_episode(mode):
    assert collector(AllowsNothing, mode).collect().arrays["mask"].any()
    with pytest.raises(EnvironmentFailed, match=r"action_mask: environment 0 .* head 1"):
        collector(AllowsNothingAtOne, mode).collect()


def test_the_masks_of_several_heads_lie_one_after_the_other():
    arrays = collector(Several, AutoresetMode.NEXT_STEP).collect().arrays
    np.testing.assert_array_equal(arrays["obs/action_mask"], np.broadcast_to([1, 0, 0, 1], (3, 6, 4)))
    assert "obs/where" in arrays


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_taxi_takes_no_masked_action(vectorization):
    """Taxi is a Gymnasium game with masks; it forbids actions that would change nothing."""
    envs = make_envs("Taxi-v4", 4, vectorization=vectorization)
    module, args = ready_made(None, envs)(observation_of(envs), ActionSpec.of(envs.single_action_space))
    taxi = Collector(envs, RolloutPolicy(module, args, engine="torch"), 50, seed=3)
    try:
        arrays = taxi.collect().arrays
    finally:
        taxi.close()
    rules = gymnasium.make("Taxi-v4").unwrapped
    took = arrays["mask"] > 0
    for state, mask, action in zip(
        *(arrays[key][took] for key in ("obs/obs", "obs/action_mask", "action")), strict=True
    ):
        np.testing.assert_array_equal(mask, rules.action_mask(state))
        assert mask[action]


@pytest.mark.parametrize("blocking", [True, False])
def test_training_and_evaluation_obey_the_masks(blocking):
    class Strict(gymnasium.Wrapper):
        """Raises on a masked action."""

        def __init__(self):
            super().__init__(gymnasium.make("Taxi-v4", max_episode_steps=20))

        def reset(self, **options):
            obs, self.info = self.env.reset(**options)
            return obs, self.info

        def step(self, action):
            if not self.info["action_mask"][action]:
                raise RuntimeError(f"{action} is not allowed")
            *result, self.info = self.env.step(action)
            return *result, self.info

    training = Training(
        num_steps=600, num_envs=4, unroll_length=16, engine="torch", blocking=blocking, evaluation_episodes=8
    )
    result = train_local(Strict, PPOConfig(epochs=2, minibatch_size=32), training)
    assert len(result.evaluation.episodes) == 8
    assert result.updates > 5


def test_a_model_without_a_mask_input_acts_as_before(caplog):
    class TwoOf(MasksInInfo):
        action_space = spaces.Discrete(2)
        _lenient = True

        def _mask_info(self):
            return {"action_mask": np.ones(2, np.int8)}

    envs = with_masks(SyncVectorEnv([TwoOf] * 2))
    arrays = (
        Collector(envs, RolloutPolicy(Linear(), (np.zeros((2, 2), np.float32),), engine="torch"), 4).collect().arrays
    )
    assert arrays["obs"].shape == (2, 5, 2)
    (warning,) = caplog.messages
    assert "the model takes no action_mask" in warning


def test_masks_that_resets_lack_are_ignored_with_one_warning(caplog):
    class MasksInStepsOnly(MasksInInfo):
        _lenient = True

        def reset(self, *, seed=None, options=None):
            return super().reset()[0], {}

    masking = collector(MasksInStepsOnly, AutoresetMode.NEXT_STEP)
    for _ in range(2):
        assert "obs/action_mask" not in masking.collect().arrays
    (warning,) = caplog.messages
    assert "info's action_mask is ignored" in warning


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_mask_in_the_observation_may_be_in_info_too(method, caplog):
    class Both(MaskedCounting):
        def reset(self, *, seed=None, options=None):
            return super().reset()[0], {"action_mask": np.ones(2, np.int8)} if method == "reset" else {}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"action_mask": np.ones(2, np.int8)} if method == "step" else {}

    assert not collector(Both, AutoresetMode.NEXT_STEP).collect().arrays["obs/action_mask"][..., 0].any()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("mask", "got"),
    [([1, 0], "2"), (np.ones(2), "2"), (1, "1"), (None, "None"), ("0110", "'0110'"), ([], r"\[\]"), ({"a": 1}, r"\{")],
)
def test_a_mask_of_another_size_is_refused(mask, got):
    class BadMask(MasksInInfo):
        def _mask_info(self):
            return {"action_mask": mask}

    with pytest.raises(ConfigError, match=rf"action_mask: expected 4 .*, got {got}"):
        collector(BadMask, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize(
    ("space", "layout"),
    [
        (spaces.MultiBinary(3), r"6 .* MultiBinary\(3\) \(2 \+ 2 \+ 2\)"),
        (spaces.MultiDiscrete([2, 3]), r"5 .* \(2 \+ 3\)"),
    ],
)
def test_a_mask_of_another_size_is_refused_with_the_layout_of_the_parts(space, layout):
    class Bits(MasksInInfo):
        action_space = space

        def _mask_info(self):
            return {"action_mask": np.ones(3, np.int8)}

    with pytest.raises(ConfigError, match=rf"expected {layout}, got 3$"):
        collector(Bits, AutoresetMode.NEXT_STEP)


def test_an_error_in_a_constructor_or_reset_is_named():
    class Broken(Counting):
        def reset(self, *, seed=None, options=None):
            raise OSError("no licence")

    with pytest.raises(EnvironmentFailed, match=r"OSError in reset: no licence \(.*:\d+\)"):
        make_envs(Broken, 2)
    with pytest.raises(EnvironmentFailed, match=r"OSError in .*constructor: no display \("):
        make_envs(lambda: (_ for _ in ()).throw(OSError("no display")), 2)


class TimeMasks(Count):
    """An agent may only take the action equal to the time."""

    def mask_info(self):
        return {agent: {"action_mask": np.arange(3) == self.time} for agent in "ab"}

    def reset(self, seed=None, options=None):
        seen, _ = super().reset(seed, options)
        return seen, self.mask_info()

    def step(self, actions):
        assert list(actions.values()) == [self.time] * 2
        *rest, _ = super().step(actions)
        return *rest, self.mask_info()


@pytest.mark.parametrize("state", [True, False])
def test_each_agent_row_has_its_own_mask(state):
    """In a game with a state, the mask is part of the agent's own observation."""
    training = Training(num_steps=100, num_envs=4, unroll_length=5, engine="torch", evaluation_episodes=4)
    algorithm = (MAPPOConfig if state else PPOConfig)(epochs=1)
    result = train_local(lambda: AgentsAsRows(TimeMasks, 2, state=state), algorithm, training)
    assert result.evaluation.mean == 0 + 1 + 2
    assert result.updates > 3
