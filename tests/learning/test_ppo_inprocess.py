"""PPO on CartPole without Ray: packing, buffer and update alone reach the reference, with an old policy acting.

In the whole loop actors act with weights a few versions behind the learner; here they do so on purpose. A mean of 475
over the last 20 games is the rule near 25,000 steps; the bound leaves room for unlucky seeds.
"""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
import pytest
import torch

from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.engines.torch import module_weights
from brayx.nets.mlp import ActorCritic
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.types import Fragment, Step

NUM_ENVS = 8
NUM_STEPS = 120_000
GAMES = 20
RECIPE = PPOConfig(
    gamma=0.98, gae_lambda=0.8, entropy_coef=0.0, epochs=20, minibatch_size=256, learning_rate_schedule="linear",
    clip_schedule="linear",
)  # fmt: skip


def logits(weights, obs):
    hidden = obs
    for layer in (0, 2):
        hidden = np.tanh(hidden @ weights[f"policy.layers.{layer}.weight"].T + weights[f"policy.layers.{layer}.bias"])
    return hidden @ weights["policy.layers.4.weight"].T + weights["policy.layers.4.bias"]


def train(seed: int, lag: int, episode_length: int) -> tuple[int, dict[str, np.ndarray]]:
    """Env steps until the mean of the last 20 games reached 475, and the weights at that time."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    module = ActorCritic(4, 2)
    ppo = PPO(module, torch.optim.Adam(module.parameters(), lr=1e-3, eps=1e-5, fused=True), RECIPE)
    buffer = ReplayBuffer(BufferConfig(size=100))
    acting = deque([module_weights(module)], maxlen=lag + 1)
    envs = [gymnasium.make("CartPole-v1") for _ in range(NUM_ENVS)]
    obs = np.stack([env.reset(seed=seed * 1000 + index)[0] for index, env in enumerate(envs)])
    steps = [[] for _ in envs]
    rewards = [[] for _ in envs]
    score, scores = np.zeros(NUM_ENVS), deque(maxlen=GAMES)
    for count in range(NUM_ENVS, NUM_STEPS + 1, NUM_ENVS):
        policy = torch.distributions.Categorical(logits=torch.from_numpy(logits(acting[0], obs)))
        actions = policy.sample().numpy()
        log_probs = policy.log_prob(torch.from_numpy(actions)).numpy()
        for index, env in enumerate(envs):
            steps[index].append(Step(obs[index].copy(), actions[index], float(log_probs[index]), 0))
            after, reward, terminated, truncated, _ = env.step(int(actions[index]))
            rewards[index].append(float(reward))
            score[index] += float(reward)
            if terminated or truncated or len(rewards[index]) == episode_length:
                buffer.push(
                    Fragment.from_steps(steps[index], rewards[index], after, terminated=terminated, truncated=truncated)
                )
                steps[index], rewards[index] = [], []
            if terminated or truncated:
                scores.append(score[index])
                score[index] = 0
                after, _ = env.reset()
            obs[index] = after
        while (batch := buffer.pop()) is not None:
            ppo.update({key: torch.from_numpy(array) for key, array in batch.items()}, count / NUM_STEPS)
            acting.append(module_weights(module))
        if len(scores) == GAMES and np.mean(scores) >= 475:
            return count, module_weights(module)
    return NUM_STEPS, module_weights(module)


def greedy_returns(weights: dict[str, np.ndarray], games: int) -> np.ndarray:
    envs = [gymnasium.make("CartPole-v1") for _ in range(games)]
    obs = np.stack([env.reset(seed=10_000 + index)[0] for index, env in enumerate(envs)])
    returns, playing = np.zeros(games), np.ones(games, bool)
    while playing.any():
        actions = logits(weights, obs).argmax(-1)
        for index in np.flatnonzero(playing):
            obs[index], reward, terminated, truncated, _ = envs[index].step(int(actions[index]))
            returns[index] += float(reward)
            playing[index] = not (terminated or truncated)
    return returns


@pytest.mark.learning
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lag", "episode_length"), [(0, 32), (2, 32), (4, 128)])
def test_cartpole_reaches_475(seed, lag, episode_length):
    steps, weights = train(seed, lag, episode_length)
    returns = greedy_returns(weights, 20)
    print(f"lag {lag} length {episode_length} seed {seed}: 475 after {steps} steps, greedy {returns.mean():.0f}")
    assert steps <= 80_000
    assert returns.mean() >= 475
