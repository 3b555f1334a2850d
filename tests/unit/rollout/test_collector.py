"""Columns hold every transition in replay's layout, for every autoreset mode."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from brayx import actions
from brayx.engines.torch import module_weights
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.replay.packing import check_columns
from brayx.rollout.collector import Collector, Episode, seed_after
from brayx.rollout.envs import make_envs
from brayx.rollout.policy import RolloutPolicy
from tests.unit.rollout.worlds import BoxCounting, Counter, Counting, Gaussian, Kinds, Linear, Masked, MaskedCounting
from tests.waiting import WAIT_S

OBS = (np.zeros((2, 2), np.float32),)
MODES = list(AutoresetMode)


def collector(
    env=Counting, module=None, args=OBS, *, num=3, length=5, mode=AutoresetMode.NEXT_STEP, engine="torch", **options
):
    torch.manual_seed(0)
    envs = SyncVectorEnv([env] * num, autoreset_mode=mode)
    return Collector(envs, RolloutPolicy(module or Linear(), args, engine=engine), length, **options)


class OfKinds(torch.nn.Module):
    """Logits that depend on the kind alone."""

    def forward(self, obs):
        return {"logits": obs["me"]["kind"].float().unsqueeze(-1).expand(-1, 2)}


KIND = {
    "pair": (np.zeros(2, int), np.zeros((2, 1), np.float32)),
    "me": {"kind": np.zeros(2, int), "seen": np.ones((2, 2), int)},
}


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("kind", 9, r"obs/me/kind: an environment returned 9 at \[1\], expected 5 to 8"),
        ("kind", 4, r"obs/me/kind: .* 4 at \[1\]"),
        ("seen", [1, 1004], r"obs/me/seen: .* 1004 at \[1, 1\], expected 1000 to 1003"),
        ("pair", (2, np.zeros(1, np.float32)), r"obs/pair/0: .* 2 at \[1\], expected -2 to 1"),
        ("pair", (1, np.zeros(3)), r"obs/pair/1: an environment returned shape \[3\], expected \[1\]"),
        ("seen", [1, 1000, 1000], r"obs/me/seen: .* shape \[3\], expected \[2\]"),
        ("seen", [[1], [1, 2]], r"obs/me/seen: .* lists of unequal lengths, expected shape \[2\]"),
        ("pair", (1,), r"obs/pair/1: .* none, expected one"),
    ],
)
def test_a_value_outside_the_observation_space_is_refused_by_name(name, value, refused):
    kinds = collector(Kinds, OfKinds(), (KIND,), length=4)
    assert set(kinds.collect().arrays["obs/me/kind"].ravel()) == {5, 6, 7, 8}

    class Outside(Kinds):
        def _kinds(self):
            kinds = super()._kinds()
            (kinds if name in kinds else kinds["me"])[name] = value
            return kinds

    kinds.close()
    envs = SyncVectorEnv([Kinds, Outside, Kinds])
    with pytest.raises(EnvironmentFailed, match=refused):
        Collector(envs, RolloutPolicy(OfKinds(), (KIND,), engine="torch"), 4)


@pytest.mark.parametrize("mode", MODES)
def test_every_transition_is_followed_by_its_outcome(mode):
    counting = collector(mode=mode, length=5)
    seen = []
    for _ in range(8):
        columns = counting.collect()
        arrays = check_columns(columns, 5, None)
        for row in range(3):
            for t in np.flatnonzero(arrays["mask"][row]):
                (episode, step), after = arrays["obs"][row, t], arrays["obs"][row, t + 1]
                ended = arrays["terminated"][row, t]
                assert arrays["reward"][row, t] == step + 1
                assert ended == (step == 2 and episode % 2 == 0)
                if not ended:  # it bootstraps from the state it led to
                    assert after.tolist() == [episode, step + 1]
                if row == 0:
                    seen.append((int(episode), int(step)))
    # No duplicates, in order, and complete except for steps that an autoreset leaves no room for.
    left_out = mode is not AutoresetMode.NEXT_STEP
    expected = [(e, s) for e in range(100) for s in range(3) if not (left_out and e % 2 == 1 and s == 2)]
    assert seen == expected[: len(seen)]
    assert len(seen) > 20
    assert counting.env_steps == 3 * len(seen)


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_is_cut_only_at_the_end_of_an_episode(mode):
    counting = collector(mode=mode, length=7)
    for _ in range(6):
        arrays = counting.collect().arrays
        assert not (arrays["terminated"] & arrays["truncated"]).any()
        for row in range(3):
            for t in range(6):
                if arrays["mask"][row, t] == 0:
                    continue
                cut = arrays["terminated"][row, t] or arrays["truncated"][row, t]
                # The next step is masked out only where the trace before it is cut.
                follows = arrays["mask"][row, t + 1] == 1
                same = arrays["obs"][row, t + 1, 0] == arrays["obs"][row, t, 0]
                assert cut == (not same or not follows)


@pytest.mark.parametrize("mode", MODES)
def test_after_an_error_every_environment_restarts(mode):
    """When the second environment raised, the first had already taken the step, so it is ahead of the record."""
    steps = iter(range(10**6))

    class Tripping(Counting):
        def step(self, action):
            if next(steps) == 10:  # the second environment, in its second episode
                raise ValueError("tripped")
            return super().step(action)

    tripping = collector(Tripping, num=3, length=5, mode=mode, normalise_reward=True, gamma=0.5)
    with pytest.raises(EnvironmentFailed, match=r"ValueError in step: tripped \(.*:\d+\)$"):
        tripping.collect()
    assert tripping.env_steps == 0
    runs = [tripping.collect().arrays for _ in range(4)]
    np.testing.assert_array_equal(runs[0]["obs"][:, 0, 1], 0)
    assert runs[0]["mask"][:, 0].all(), "the first step of an episode is no reset step"
    for arrays in runs:
        for row, t in np.argwhere(arrays["mask"] > 0):
            (episode, step), after = arrays["obs"][row, t], arrays["obs"][row, t + 1]
            assert arrays["terminated"][row, t] == (step == 2 and episode % 2 == 0)
            assert arrays["terminated"][row, t] or after.tolist() == [episode, step + 1]
    assert {episode.ret for episode in tripping.episodes()} == {6.0}, "episodes are neither split nor joined"
    assert tripping.env_steps == sum(int(run["mask"].sum()) for run in runs)


@pytest.mark.parametrize("mode", MODES)
def test_episodes_have_all_their_rewards(mode):
    counting = collector(mode=mode, length=5, reward_clip=0.5)
    columns = [counting.collect() for _ in range(4)]
    episodes = counting.episodes()
    assert set(episodes) == {Episode(6.0, 3, env) for env in range(3)}
    assert len(episodes) == 3 * (20 // (4 if mode is AutoresetMode.NEXT_STEP else 3))
    assert counting.episodes() == []
    assert max(block.arrays["reward"].max() for block in columns) == 0.5


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_log_probs_belong_to_the_weights_that_acted(engine):
    module = Linear()
    counting = collector(module=module, engine=engine)
    for version in (0, 7):
        if version:
            with torch.no_grad():
                module.layer.weight.mul_(50.0)
            counting.load(module_weights(module), version)
        arrays = counting.collect().arrays
        outputs = module(torch.from_numpy(arrays["obs"]))
        expected = actions.log_prob({"logits": outputs["logits"].detach().numpy()}, arrays["action"])
        np.testing.assert_allclose(arrays["log_prob"][:, :-1], expected[:, :-1], atol=1e-4)
        assert (arrays["policy_version"] == version).all()


def test_box_actions_are_scaled_to_bounds_and_recorded_in_the_policys_unit():
    box_counting = collector(BoxCounting, Gaussian(), num=2, length=64)
    arrays = box_counting.collect().arrays
    real = [index for index in range(64) if arrays["mask"][0, index]]
    done = np.stack(box_counting.envs.envs[0].actions)
    assert arrays["action"].dtype == np.float32
    expected = np.clip(arrays["action"][0, real] * [2, 5] + [0, 5], [-2, 0], [2, 10])
    np.testing.assert_allclose(done, expected, rtol=1e-5)
    assert np.abs(arrays["action"]).max() > 1.5  # not clipped: the density is that of the drawn value


def test_noise_is_drawn_at_each_step_unless_sde_steps_holds_it():
    class Still(Gaussian):
        def forward(self, obs):
            mean = obs[..., :2] * 0
            return {"mean": mean, "log_std": mean, "latent": mean[..., :1] + 1, "sde_std": mean[..., None, :] + 1}

    still = collector(BoxCounting, Still(), num=2, length=8, sde_steps=4).collect().arrays["action"]
    assert (still[:, :4] == still[:, :1]).all()
    assert (still[:, 4:8] == still[:, 4:5]).all()
    assert (still[:, 0] != still[:, 4]).all()
    fresh = collector(BoxCounting, Still(), num=2, length=8).collect().arrays["action"]
    assert (fresh[:, 0] != fresh[:, 1]).all()


def test_a_masked_action_is_never_taken():
    args = ({"where": OBS[0], "action_mask": np.ones((2, 2), np.float32)},)
    masked = collector(MaskedCounting, Masked(), args, engine="onnx")
    for _ in range(5):
        arrays = masked.collect().arrays
        assert (arrays["action"][:, :-1] == 1).all()
        assert arrays["obs/action_mask"].dtype == np.float32
        assert arrays["obs/where"].shape == (3, 6, 2)


@pytest.mark.parametrize("mode", MODES)
def test_the_state_before_each_step_is_recorded_and_resets_with_the_episode(mode):
    args = (OBS[0], np.zeros((2, 1), np.float32))
    counting = collector(Counting, Counter(), args, mode=mode, engine="onnx")
    for _ in range(6):
        arrays = counting.collect().arrays
        for row in range(3):
            for t in range(6):
                real, cut = arrays["mask"][row, t], t > 0 and arrays["truncated"][row, t - 1]
                if real or cut:  # the step to bootstrap from still has the episode's state
                    assert arrays["state"][row, t, 0] == arrays["obs"][row, t, 1]


def test_observations_are_normalised_by_all_samples_so_far():
    counting = collector(normalise_obs=True, num=4, length=50)
    for _ in range(12):
        arrays = counting.collect().arrays
    shown = arrays["obs"][:, :-1, 1]
    assert shown.mean() == pytest.approx(0, abs=0.1)
    assert shown.std() == pytest.approx(1, abs=0.1)
    state = counting.state_dict()
    assert int(state["obs:count"]) == 12 * 50 * 4
    other = collector(normalise_obs=True, num=4, length=50)
    other.load_state_dict(state)
    mean = other.obs_normaliser.leaves["obs"].total.mean
    np.testing.assert_allclose(mean, counting.obs_normaliser.leaves["obs"].total.mean)
    with pytest.raises(ConfigError, match=r"expected \[\], got \['obs:count'"):
        collector().load_state_dict(state)


def test_moments_are_read_as_a_consistent_whole():
    """A checkpoint taken while another thread collects has a count and a mean of the same observations."""
    counting = collector(normalise_obs=True)
    add, adding, go_on = counting.obs_normaliser.add, threading.Event(), threading.Event()

    def slowly(key, samples):
        adding.set()
        assert go_on.wait(WAIT_S)
        add(key, samples)

    counting.obs_normaliser.add = slowly
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(counting.collect)
        assert adding.wait(WAIT_S)
        state = pool.submit(counting.state_dict)
        with pytest.raises(TimeoutError):
            state.result(0.2)
        counting.obs_normaliser.add = add
        go_on.set()
        assert int(state.result(WAIT_S)["obs:count"]) > 0
        run.result(WAIT_S)


def test_a_resumed_run_plays_other_episodes():
    def first_run(seed):
        torch.manual_seed(0)
        policy = RolloutPolicy(CartPole(), (np.zeros((2, 4), np.float32),))
        cartpole = Collector(make_envs("CartPole-v1", 4), policy, 16, seed=1)
        cartpole.begin_again(seed)
        return cartpole.collect().arrays

    same, other = first_run(seed_after(1, 0)), first_run(seed_after(1, 512))
    anew, _ = make_envs("CartPole-v1", 4).reset(seed=1)
    np.testing.assert_array_equal(same["obs"][:, 0], anew)
    assert not np.isin(other["obs"][:, 0], same["obs"][:, 0]).any()


def test_rewards_are_normalised_by_the_deviation_of_discounted_sums():
    counting = collector(normalise_reward=True, gamma=0.5, num=2, length=80)
    arrays = counting.collect().arrays
    sums = [1.0, 0.5 * 1 + 2, 0.25 + 1 + 3]  # of an episode's rewards 1, 2, 3
    real = arrays["mask"] > 0
    rewards = arrays["obs"][real][:, 1] + 1
    np.testing.assert_allclose(arrays["reward"][real], rewards / np.std(sums), rtol=0.02)
    assert counting.episodes()[0] == Episode(6.0, 3, 0)


def test_the_same_seed_gives_the_same_columns():
    def run(seed):
        torch.manual_seed(0)
        policy = RolloutPolicy(CartPole(), (np.zeros((2, 4), np.float32),))
        cartpole = Collector(make_envs("CartPole-v1", 4), policy, 16, seed=seed)
        return [cartpole.collect().arrays for _ in range(3)]

    first, second, other = run(1), run(1), run(2)
    for columns, repeated in zip(first, second, strict=True):
        assert all(np.array_equal(columns[key], repeated[key]) for key in columns)
    assert not np.array_equal(first[0]["obs"], other[0]["obs"])
    assert not np.array_equal(first[0]["action"], other[0]["action"])


class CartPole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, obs):
        return {"logits": self.layer(obs)}


def test_a_model_with_other_observations_is_refused_with_the_difference():
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(ConfigError, match=r"obs: .*\[4\] float32, .*\[2\] float32"):
        Collector(envs, RolloutPolicy(Linear(), OBS, engine="torch"), 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_reward_affects_only_its_own_episode(bad):
    class Once(Counting):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, bad if (self._episode, self._at) == (1, 2) else reward, *rest

    once = collector(Once, num=1, length=7)
    for _ in range(4):
        once.collect()
    np.testing.assert_array_equal([episode.ret for episode in once.episodes()], [6, np.nan, 6, 6, 6, 6, 6])
