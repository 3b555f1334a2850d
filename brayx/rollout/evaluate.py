"""Plays whole episodes with a policy and returns their scores. Knows nothing of learning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import VectorEnv

from brayx.rollout.collector import Collector, Episode
from brayx.rollout.moments import ObsNormaliser
from brayx.rollout.policy import RolloutPolicy

logger = logging.getLogger(__name__)

MAX_STEPS = 30_000
"""Default limit of an episode: half an hour of an Atari game has 27,000 steps."""
_STEPS = 16
"""Steps of a run, at most."""


@dataclass(frozen=True)
class PolicyEvaluation:
    """The result of an evaluation.

    Attributes:
        episodes: the requested number of episodes, in no order; fewer after a stop or a cut, and then short ones first.
        cut: number of these that had not ended after ``max_steps``: they count with their return so far.
    """

    episodes: tuple[Episode, ...]
    cut: int = 0

    @property
    def mean(self) -> float:
        """Mean return; NaN if an episode's return is NaN."""
        return float(np.mean([episode.ret for episode in self.episodes]))

    @property
    def std(self) -> float:
        """Deviation of the returns."""
        return float(np.std([episode.ret for episode in self.episodes]))


def evaluate(
    envs: VectorEnv,
    policy: RolloutPolicy,
    episodes: int,
    *,
    seed: int = 0,
    greedy: bool = True,
    normaliser: ObsNormaliser | None = None,
    max_steps: int = MAX_STEPS,
    stop: threading.Event | None = None,
    say: Callable[[str], None] | None = None,
) -> PolicyEvaluation:
    """Plays ``episodes`` whole episodes, the same number in each environment, so that short ones do not count more.

    Args:
        envs: left open.
        policy: acts, with the weights it has.
        episodes: number of episodes; the first ones of each environment count.
        seed: seed of environments and actions.
        greedy: the most likely action instead of a drawn one.
        normaliser: the trained normaliser of observations; not updated.
        max_steps: limit of an episode. A longer one is cut, and its environment plays no other, since it may never end.
        stop: once set, the evaluation ends with the episodes that have ended so far, which may be none.
        say: called again and again with how many have ended.

    Raises:
        ConfigError: the policy does not fit the environments.
        EnvironmentFailed: an environment raised.
    """
    share = -(-episodes // envs.num_envs)
    collector = Collector(
        envs,
        policy,
        _STEPS,
        seed=seed,
        normalise_obs=normaliser if normaliser is not None else False,
        greedy=greedy,
    )
    played: list[list[Episode]] = [[] for _ in range(collector.num_envs)]
    cut: set[int] = set()

    def wanted(episode: Episode) -> bool:
        return len(played[episode.env]) < share and episode.env not in cut

    while running := [episode for episode in collector.unfinished() if wanted(episode)]:
        if stop is not None and stop.is_set():
            break
        if say is not None:
            say(f"evaluation: {sum(map(len, played))} of {episodes} games played")
        # No episode passes the limit within a run.
        collector.unroll_length = min(_STEPS, max_steps - max(episode.length for episode in running))
        collector.collect()
        for episode in collector.episodes():
            if wanted(episode):
                played[episode.env].append(episode)
        for episode in collector.unfinished():
            if episode.length >= max_steps and wanted(episode):
                played[episode.env].append(episode)
                cut.add(episode.env)
    turns = range(max(map(len, played)))
    order = [(env, turn) for turn in turns for env, ended in enumerate(played) if len(ended) > turn][:episodes]
    left = sum(env in cut and turn == len(played[env]) - 1 for env, turn in order)
    if left:
        logger.warning(
            "%d of %d episodes had not ended after %d steps: they count with their return so far",
            left,
            len(order),
            max_steps,
        )
    return PolicyEvaluation(tuple(played[env][turn] for env, turn in order), left)
