"""Plays whole episodes with a policy and says what they came to. Knows nothing of learning."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import VectorEnv

from brayx.rollout.collector import Collector, Episode
from brayx.rollout.moments import ObsNormaliser
from brayx.rollout.policy import Policy

_STEPS = 16
"""Of a run."""


@dataclass(frozen=True)
class Evaluation:
    """What episodes came to.

    Attributes:
        episodes: as many as were asked for, in no order; of one that was stopped fewer, and short ones first.
    """

    episodes: tuple[Episode, ...]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean([episode.ret for episode in self.episodes]))

    @property
    def std(self) -> float:
        """Deviation of the returns."""
        return float(np.std([episode.ret for episode in self.episodes]))


def evaluate(
    envs: VectorEnv,
    policy: Policy,
    episodes: int,
    *,
    seed: int = 0,
    greedy: bool = True,
    scale_actions: bool = True,
    normaliser: ObsNormaliser | None = None,
    max_steps: int = 1_000_000,
    stop: threading.Event | None = None,
) -> Evaluation:
    """Plays ``episodes`` whole episodes, equally many in each environment: short ones do not count more often.

    Args:
        envs: left open.
        policy: acts, with the weights it has.
        episodes: how many; the first of each environment are taken until there are so many.
        seed: of environments and actions.
        greedy: the most likely action instead of a drawn one.
        scale_actions: as the policy was trained.
        normaliser: of observations, as trained; stays as it is.
        max_steps: of each environment, then it is given up: fewer episodes come back, one at least is needed.
        stop: once set, those that ended until then come back, and there may be none.

    Raises:
        ConfigError: the policy is of other environments.
        ValueError: not one episode ended within ``max_steps``.
    """
    each = -(-episodes // envs.num_envs)
    collector = Collector(
        envs,
        policy,
        _STEPS,
        seed=seed,
        scale_actions=scale_actions,
        normalise_obs=normaliser if normaliser is not None else False,
        greedy=greedy,
    )
    finished: list[list[Episode]] = [[] for _ in range(collector.num_envs)]
    for _ in range(-(-max_steps // _STEPS)):
        if stop is not None and stop.is_set():
            break
        collector.collect()
        for episode in collector.episodes():
            if len(finished[episode.env]) < each:
                finished[episode.env].append(episode)
        if all(len(found) == each for found in finished):
            break
    turns = range(max(map(len, finished)))
    found = [found[turn] for turn in turns for found in finished if len(found) > turn][:episodes]
    if not found and (stop is None or not stop.is_set()):
        raise ValueError(f"no episode ended within {max_steps} steps")
    return Evaluation(tuple(found))
