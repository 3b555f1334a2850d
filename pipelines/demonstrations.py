"""Recorded steps for a training in one process to imitate: read from files before it begins, and drawn as batches.

A job has sources for that, which are read while it learns. Knows nothing of environments.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from brayx.algorithms.bc import BCConfig
from brayx.algorithms.build import AlgorithmConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.errors import BadFragment, ConfigError
from brayx.replay.files import Dataset
from brayx.replay.packing import Batch, Layout, Packer
from brayx.replay.table import Table
from brayx.types import DEMONSTRATION
from pipelines.training import Training


def check_imitates(algorithm: AlgorithmConfig, training: Training) -> None:
    """Refuses demonstrations for an algorithm that imitates nothing, and where they would be learned from as they are,
    beside play that is changed.

    Raises:
        ConfigError: names the option, and what fits.
    """
    if not isinstance(algorithm, BCConfig | MixedConfig):
        raise ConfigError(
            f"algorithm {algorithm.name!r} imitates nothing, and there are demonstrations; these do: bc, mixed",
            key="algorithm",
            fits=["bc", "mixed"],
        )
    changed = {"normalise_obs": "observations"}
    if isinstance(algorithm, MixedConfig) and algorithm.fit_value:
        changed |= {"normalise_reward": "rewards", "reward_clip": "rewards"}
    for option, what in changed.items():
        if getattr(training, option):
            raise ConfigError(
                f"{option} is {getattr(training, option)}, and the {what} of demonstrations stay as they are: expected "
                f"{option} off",
                key=option,
            )


class Demonstrations:
    """Recorded episodes, packed into columns once and drawn from uniformly.

    Args:
        data: a file of a kind that `brayx.replay.files` reads, a pattern of several, or a `Dataset`. All of it is kept
            in memory; of its extras only what a recurrent model's memory held before each step, ``state/...``.
        layout: what its episodes must be like.
        batch_size: columns of a batch, or as many as there are.
        unroll_length: transitions of a column.
        seed: of what is drawn.

    Attributes:
        rounds: batches that are as many columns as there are, or just more.

    Raises:
        ConfigError: there is no such file, or what it holds does not fit.
    """

    def __init__(
        self, data: str | Path | Dataset, layout: Layout, *, batch_size: int, unroll_length: int, seed: int
    ) -> None:
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        dataset.check(layout)
        packer = Packer(1, unroll_length, layout)
        made: list[Batch | None] = []
        for number, episode in enumerate(dataset):
            try:
                state = {name: extra for name, extra in episode.extras.items() if name.split("/")[0] == "state"}
                made += packer.add(replace(episode, extras=state))
            except BadFragment as error:
                raise ConfigError(
                    f"{dataset.files[0]}: demonstrations: episode {number} (the first is 0): {error.message}",
                    episode=number,
                ) from error
        columns = [column for column in (*made, packer.flush()) if column is not None]
        whole = {key: np.concatenate([column[key] for column in columns]) for key in columns[0]}
        whole["policy_version"][:] = 0  # another's say nothing here
        whole[DEMONSTRATION] = np.ones(whole["mask"].shape, np.bool_)
        size = min(batch_size, len(columns))
        self.rounds = -(-len(columns) // size)
        self._table = Table.uniform(len(columns), size, seed=seed)
        self._table.insert(whole)

    def draw(self) -> Batch:
        """A learner batch ``[B, T + 1, ...]`` with the key `DEMONSTRATION`."""
        batch = self._table.sample()
        assert batch is not None
        return batch
