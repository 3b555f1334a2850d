"""Demonstrations for a training in one process: read from files before it starts, then drawn as batches.

A job reads demonstrations from sources instead, while it learns. Knows nothing of environments.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.build import OURS
from brayx.algorithms.config import AlgorithmConfig
from brayx.engines.base import ModelSpec
from brayx.engines.torch import limits_declared
from brayx.errors import BadFragment, ConfigError
from brayx.local.training import Settled, Training
from brayx.nets.recurrent import state_argument
from brayx.recording.source import dataset
from brayx.replay.files import Dataset
from brayx.replay.packing import Batch, BatchPacker, Layout
from brayx.trainer.fits import actions_of
from brayx.types import DEMONSTRATION, NestedArray, flatten

logger = logging.getLogger(__name__)


def check_imitates(algorithm: AlgorithmConfig, training: Training) -> None:
    """Refuses demonstrations that the algorithm or the training's normalisation cannot use.

    Normalisation changes collected observations and rewards, but not those of demonstrations, so the two would not
    match.

    Raises:
        ConfigError: they do not fit; the message names the option, and what fits.
    """
    if algorithm.imitates == "nothing":
        fits = [ours.name for ours in OURS if ours.imitates != "nothing"]
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
    """Recorded episodes, packed once into columns of one memory block; batches are views of it.

    Recordings of a human or another agent lack the recurrent state of the imitating policy. Such an episode starts
    with the policy's initial state. It is kept in one column if it fits; otherwise it is cut, and each piece starts
    with the initial state again.

    Args:
        data: a file in a format that `brayx.replay.files` reads, a glob pattern, a folder of recordings, or a
            `Dataset`. All of it stays in memory; of its extras only the recurrent state before each step,
            ``state/...``.
        layout: layout of its episodes.
        batch_size: most columns of a batch.
        unroll_length: transitions of a column.
        seed: seed of the draws.
        initial: the recurrent state at the start of an episode, by path, ``state/...``.

    Attributes:
        batch_size: columns of a batch: the argument, or all columns if they are fewer.
        rounds: batches needed to cover all columns.

    Raises:
        ConfigError: the file does not exist, or its data does not fit.
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
        opened = (data if isinstance(data, Dataset) else dataset(data)).for_env(layout.env)
        packer = BatchPacker(1, unroll_length, layout)
        made: list[Batch | None] = []
        cut, number = 0, -1
        for number, episode in enumerate(opened.checked(layout)):
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
                    f"{opened.files[0]}: demonstrations: episode {number} (the first is 0): {error.message}",
                    episode=number,
                ) from error
        if cut:
            logger.warning(
                "%d of %d demonstrations have more than unroll_length (%d) steps and no recorded state: they are "
                "cut, and each piece starts with an empty memory",
                cut,
                number + 1,
                unroll_length,
            )
        columns = [column for column in (*made, packer.flush()) if column is not None]
        self._rng = np.random.default_rng(seed)
        order = self._rng.permutation(len(columns))
        self._block = {key: np.concatenate([columns[index][key] for index in order]) for key in columns[0]}
        self._block["policy_version"][:] = 0  # recorded versions are of another policy
        self._block[DEMONSTRATION] = np.ones(self._block["mask"].shape, np.bool_)
        self.batch_size = min(batch_size, len(columns))
        self.rounds = -(-len(columns) // self.batch_size)
        self._next: list[int] = []
        self._first = True

    @classmethod
    def of_model(
        cls,
        data: str | Path | Dataset,
        module: nn.Module,
        forward_args: tuple[NestedArray, ...],
        signature: ModelSpec,
        env: ActionSpec,
        training: Settled,
    ) -> Demonstrations:
        """Reads demonstrations in the layout of a model.

        Args:
            data: as for `Demonstrations`.
            module, forward_args: the model and its example arguments.
            signature: inputs and outputs of the model.
            env: actions of the environment in which the model acts.
            training: options of the training.
        """
        state = state_argument(module)
        observed = tuple(arg for index, arg in enumerate(forward_args) if index != state)
        layout = Layout.of_model(observed, actions_of(signature), limits_declared(module))
        # Episodes begin with the same state as in acting (`brayx.engines.base.StateSpec`).
        initial = None
        if state is not None:
            initial = {path: leaf[0] for path, leaf in flatten(forward_args[state], "state").items()}
        return cls(
            data,
            replace(layout, env=env),
            batch_size=training.batch_size,
            unroll_length=training.unroll_length,
            seed=training.seed,
            initial=initial,
        )

    def draw(self) -> Batch:
        """A learner batch ``[B, T + 1, ...]`` with the key `DEMONSTRATION`. Its arrays are views: do not change them.

        Every column is drawn once before any is drawn again, except columns at the edges of the block.
        """
        if not self._next:
            columns = len(self._block["mask"])
            # Each pass shifts the cuts, so that batches differ between passes.
            shift = 0 if self._first else int(self._rng.integers(self.batch_size))
            starts = np.clip(np.arange(-shift, columns, self.batch_size), 0, columns - self.batch_size)
            self._next, self._first = self._rng.permutation(np.unique(starts)).tolist(), False
        start = self._next.pop()
        return {key: array[start : start + self.batch_size] for key, array in self._block.items()}
