"""Recorded steps for a training in one process to imitate: read from files before it begins, and drawn as batches.

A job has sources for that, which are read while it learns. Knows nothing of environments.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from brayx.algorithms.build import OURS
from brayx.algorithms.config import AlgorithmConfig
from brayx.errors import BadFragment, ConfigError
from brayx.local.training import Training
from brayx.replay.files import Dataset
from brayx.replay.packing import Batch, Layout, Packer
from brayx.types import DEMONSTRATION

logger = logging.getLogger(__name__)


def check_imitates(algorithm: AlgorithmConfig, training: Training) -> None:
    """Refuses demonstrations for an algorithm that imitates nothing, and where they would be learned from as they are,
    beside play that is changed.

    Raises:
        ConfigError: names the option, and what fits.
    """
    if algorithm.imitates == "nothing":
        fits = [each.name for each in OURS if each.imitates != "nothing"]
        raise ConfigError(
            f"algorithm {algorithm.name!r} does not imitate, but there are demonstrations; these do: {', '.join(fits)}",
            key="algorithm",
            fits=fits,
        )
    changed = {"normalise_obs": "observations"}
    if algorithm.learns_demonstrated_rewards:
        changed |= {"normalise_reward": "rewards", "reward_clip": "rewards"}
    for option, what in changed.items():
        if getattr(training, option):
            raise ConfigError(
                f"{option} is {getattr(training, option)}, and the {what} of demonstrations stay as they are: expected "
                f"{option} off",
                key=option,
            )


class Demonstrations:
    """Recorded episodes, packed into columns once, in one block of memory that batches are views of: keeping many
    keeps no more than that.

    Recordings of a human or another agent have no memory of the imitating policy. Where episodes
    have no state beside their steps, that of each begins as acting begins it, and goes on as the policy makes it: such
    an episode is not cut where a column has room for it. A longer one is, and its pieces begin as episodes do.

    Args:
        data: a file of a kind that `brayx.replay.files` reads, a pattern of several, or a `Dataset`. All of it is kept
            in memory; of its extras only what a recurrent model's memory held before each step, ``state/...``.
        layout: layout of its episodes.
        batch_size: columns of a batch, or as many as there are.
        unroll_length: transitions of a column.
        seed: seed of the draws.
        initial: what a recurrent model's memory holds where an episode begins, by path, ``state/...``.

    Attributes:
        batch_size: columns of a batch.
        rounds: batches needed to cover all columns.

    Raises:
        ConfigError: there is no such file, or its data does not fit.
    """

    def __init__(
        self,
        data: str | Path | Dataset,
        layout: Layout,
        *,
        batch_size: int,
        unroll_length: int,
        seed: int,
        initial: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        packer = Packer(1, unroll_length, layout)
        made: list[Batch | None] = []
        cut, number = 0, -1
        for number, episode in enumerate(dataset.checked(layout)):
            state = {name: extra for name, extra in episode.extras.items() if name.split("/")[0] == "state"}
            if initial and not state:
                state = {name: np.broadcast_to(leaf, (len(episode), *leaf.shape)) for name, leaf in initial.items()}
                cut += len(episode) > unroll_length
                if len(episode) > packer.left:
                    made.append(packer.flush())
            try:
                made += packer.add(replace(episode, extras=state))
            except BadFragment as error:
                raise ConfigError(
                    f"{dataset.files[0]}: demonstrations: episode {number} (the first is 0): {error.message}",
                    episode=number,
                ) from error
        if cut:
            logger.warning(
                "%d of %d demonstrations have more than unroll_length (%d) steps and no state beside them: in each "
                "piece of one the memory begins anew",
                cut,
                number + 1,
                unroll_length,
            )
        columns = [column for column in (*made, packer.flush()) if column is not None]
        self._rng = np.random.default_rng(seed)
        order = self._rng.permutation(len(columns))
        self._block = {key: np.concatenate([columns[at][key] for at in order]) for key in columns[0]}
        self._block["policy_version"][:] = 0  # another's say nothing here
        self._block[DEMONSTRATION] = np.ones(self._block["mask"].shape, np.bool_)
        self.batch_size = min(batch_size, len(columns))
        self.rounds = -(-len(columns) // self.batch_size)
        self._next: list[int] = []
        self._first = True

    def draw(self) -> Batch:
        """A learner batch ``[B, T + 1, ...]`` with the key `DEMONSTRATION`, of views: not to be written to.

        All columns come before one comes again, but for those at the edges.
        """
        if not self._next:
            columns = len(self._block["mask"])
            # Each pass cuts the columns elsewhere, so that batches differ.
            shift = 0 if self._first else int(self._rng.integers(self.batch_size))
            starts = np.clip(np.arange(-shift, columns, self.batch_size), 0, columns - self.batch_size)
            self._next, self._first = self._rng.permutation(np.unique(starts)).tolist(), False
        start = self._next.pop()
        return {key: array[start : start + self.batch_size] for key, array in self._block.items()}
