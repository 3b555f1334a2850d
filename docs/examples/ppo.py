"""PPO in one file: play, advantages, minibatches, loss, gradient step. Its loss and its returns are brayx's own.

    python docs/examples/ppo.py        # CartPole: a return of 400 and more in half a minute

`brayx.algorithms.ppo` takes the same steps (`tests/unit/algorithms/test_example.py` compares them), for any
distribution and recurrent networks, with schedules, several ranks, half precision and metrics. Start here to read or
change the algorithm; [guide-algorithms.md](../guide-algorithms.md) shows how to train with your own.
"""

from __future__ import annotations

from collections import deque

import gymnasium
import torch
from torch import Tensor, nn

from brayx.algorithms.ppo import ppo_loss
from brayx.algorithms.returns import discounts, gae
from brayx.nets.distributions import log_prob_entropy, sample

GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP_PARAM, VALUE_COEF, ENTROPY_COEF, MAX_GRAD_NORM = 0.2, 0.5, 0.01, 0.5
EPOCHS, MINIBATCH_SIZE = 10, 256
ENVS, STEPS = 8, 128
"""Environments that play side by side, and steps of each between two updates."""


class ActorCritic(nn.Module):
    """A policy over ``actions`` and a value, each an MLP of the observation ``[N, D]``."""

    def __init__(self, observation_size: int, actions: int) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size))
            for size in (actions, 1)
        )

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.policy(obs), "value": self.value(obs).squeeze(-1)}


class Play:
    """Environments in the middle of their episodes.

    Attributes:
        returns: those of the newest hundred episodes.
    """

    def __init__(self, env_name: str, seed: int) -> None:
        self.envs = gymnasium.make_vec(env_name, ENVS, vectorization_mode="sync")
        self.returns = deque[float](maxlen=100)
        self._obs = torch.as_tensor(self.envs.reset(seed=seed)[0])
        self._return = torch.zeros(ENVS)
        self._ended = torch.zeros(ENVS, dtype=torch.bool)

    @torch.no_grad()
    def collect(self, module: nn.Module) -> dict[str, Tensor]:
        """Plays `STEPS` steps: ``obs`` ``[T + 1, B, D]``, everything else ``[T, B]``.

        After an episode's end, Gymnasium's next step ignores the action and resets. That is no transition, so its
        ``mask`` is 0; the observation before it is the episode's last, whose value a truncated episode bootstraps from.
        """
        rows: dict[str, list[Tensor]] = {}
        for _ in range(STEPS):
            action, log_prob = sample(module(self._obs))
            obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            reward, terminated, truncated = (torch.as_tensor(x) for x in (reward, terminated, truncated))
            row = {
                "obs": self._obs,
                "action": action,
                "log_prob": log_prob,
                "reward": reward.float(),
                "terminated": terminated,
                "truncated": truncated,
                "mask": (~self._ended).float(),
            }
            for key, x in row.items():
                rows.setdefault(key, []).append(x)
            self._obs, self._ended = torch.as_tensor(obs), terminated | truncated
            self._return += row["reward"]
            self.returns += self._return[self._ended].tolist()
            self._return[self._ended] = 0.0
        rows["obs"].append(self._obs)
        return {key: torch.stack(column) for key, column in rows.items()}


def update(module: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """Learns from a batch of `Play.collect`; returns the mean loss."""
    obs, mask = batch["obs"], batch["mask"]
    with torch.no_grad():
        values = module(obs.flatten(0, 1))["value"].unflatten(0, obs.shape[:2])
        ends = discounts(batch["terminated"], batch["truncated"], gamma=GAMMA, lam=GAE_LAMBDA, dtype=values.dtype)
        advantages = gae(batch["reward"], *ends, values)
    # The old log-probability of a masked step is so large that its ratio is 0, whatever its action.
    old_log_probs = torch.where(mask > 0, batch["log_prob"], 1e4)
    columns = (obs[:-1], batch["action"], old_log_probs, advantages, advantages + values[:-1], mask)
    steps = [x.flatten(0, 1) for x in columns]
    losses = []
    for _ in range(EPOCHS):
        for index in torch.randperm(mask.numel()).tensor_split(max(1, round(mask.numel() / MINIBATCH_SIZE))):
            seen, action, old_log_prob, advantage, target, learn = (x[index] for x in steps)
            weight = learn / learn.sum().clamp(min=1)
            centred = advantage - (weight * advantage).sum()
            normalised = centred / ((weight * centred.square()).sum().sqrt() + 1e-8)
            outputs = module(seen)
            log_prob, entropy = log_prob_entropy(outputs, action)
            loss = ppo_loss(
                log_prob,
                old_log_prob,
                entropy,
                outputs["value"],
                weight * normalised,
                target,
                weight,
                clip_param=CLIP_PARAM,
                value_coef=VALUE_COEF,
                entropy_coef=ENTROPY_COEF,
            )
            optimizer.zero_grad()
            loss.total.backward()
            nn.utils.clip_grad_norm_(module.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            losses.append(loss.total.item())
    return sum(losses) / len(losses)


def train(
    env_name: str = "CartPole-v1", total_steps: int = 100_000, learning_rate: float = 1e-3, seed: int = 0
) -> float:
    """Trains, printing a line for every ten updates; returns the mean return of the last hundred episodes."""
    torch.manual_seed(seed)
    play = Play(env_name, seed)
    module = ActorCritic(play.envs.single_observation_space.shape[0], int(play.envs.single_action_space.n))
    optimizer = torch.optim.Adam(module.parameters(), eps=1e-5)
    updates = max(1, total_steps // (ENVS * STEPS))
    for number in range(updates):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - number / updates)
        loss = update(module, optimizer, play.collect(module))
        mean = sum(play.returns) / max(1, len(play.returns))
        if number % 10 == 9 or number == updates - 1:
            print(f"{(number + 1) * ENVS * STEPS:8} steps   return {mean:6.1f}   loss {loss:8.3f}")
    play.envs.close()
    return mean


if __name__ == "__main__":
    torch.set_num_threads(1)  # the fastest for a network of this size
    train()
