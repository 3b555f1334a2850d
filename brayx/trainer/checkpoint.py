"""A trainer's state as a folder: ``weights.npz``, ``normaliser.npz``, ``trainer.pt``, ``meta.json``, ``samples.npz``.

Acting needs only ``weights.npz``: the module's weights, and the normalisation of observations
(`brayx.engines.scaling`). ``samples.npz`` holds observations that were learned from, to calibrate or check a copy of
the model. ``normaliser.npz`` holds the moments of observations and rewards, if these are normalised. ``trainer.pt``
holds the optimiser, the algorithm's own state and the state of the random generators, as tensors and plain numbers
only, so it is read with ``weights_only=True`` and no code in it can run. ``meta.json`` holds the counters and the job's
own values. Knows nothing of where folders are kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from brayx.algorithms.base import Algorithm
from brayx.engines.base import check_finite, check_weights, layout_of, load_weights, save_weights
from brayx.engines.scaling import Scaling, learned, to_weights
from brayx.engines.torch import module_weights
from brayx.errors import TrackingError, first_line
from brayx.types import Weights

_FORMAT = 1
"""Format of the folder; ``meta.json`` has it. Folders without one are of format 1, too."""


@dataclass
class Counters:
    """Progress of a training.

    Attributes:
        env_steps: transitions learned from.
        updates: learner batches learned from.
        policy_version: version of the newest published weights; 0 before the first.
        seconds: spent in the loop.
        best_return: highest mean return that a checkpoint was saved with.
    """

    env_steps: int = 0
    updates: int = 0
    policy_version: int = 0
    seconds: float = 0.0
    best_return: float | None = None


class Normaliser(Protocol):
    """Running moments of observations and rewards, which acting and learning share."""

    def scalings(self) -> Mapping[str, Scaling]:
        """The current scaling of each observation, by its name in a learner batch; never blocks."""
        ...

    def state_dict(self) -> dict[str, np.ndarray]:
        """The moments, as arrays by name."""
        ...

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores what `state_dict` returned."""
        ...


def save(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    about: Mapping[str, Any],
    samples: Mapping[str, np.ndarray] | None = None,
    *,
    algorithm: Algorithm | None = None,
    normaliser: Normaliser | None = None,
    observed: Collection[str] = (),
) -> None:
    """Writes a checkpoint into ``folder``, which exists.

    Args:
        folder: empty folder.
        module: whose weights are saved.
        optimizer: whose state is saved.
        counters: progress of the training.
        about: JSON values for ``meta.json``, in addition to the counters.
        samples: observations by leaf, ``[N, ...]``; none: no such file.
        algorithm: whose own state is saved.
        normaliser: whose moments are saved; None: no such file.
        observed: leaves of the observation that the module takes; their normalisation is saved for acting.

    Raises:
        TrackingError: it cannot be written, as on a full disk.
        BadWeights: a weight is NaN or infinite, so training could not resume from it.
    """
    check_finite(module_weights(module))
    meta = {**about, "format": _FORMAT, "counters": asdict(counters)}
    try:
        _save(folder, module, optimizer, algorithm, normaliser, observed, samples)
        (folder / "meta.json").write_text(json.dumps(meta, indent=1, default=str))
    except (OSError, RuntimeError) as error:  # torch says RuntimeError of a file that it cannot write
        raise TrackingError(
            f"checkpoint {folder} cannot be written: {first_line(error)}", folder=str(folder)
        ) from error


def _save(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm | None,
    normaliser: Normaliser | None,
    observed: Collection[str],
    samples: Mapping[str, np.ndarray] | None,
) -> None:
    if samples:
        save_weights(folder / "samples.npz", dict(samples))
    if normaliser is not None:
        save_weights(folder / "normaliser.npz", normaliser.state_dict())
    save_weights(folder / "weights.npz", acting_weights(module, normaliser, observed))
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "optimizer": optimizer.state_dict(),
        "algorithm": {} if algorithm is None else algorithm.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python_rng": random.getstate(),
    }
    device = _device(module)
    if device.type == "cuda":  # dropout draws there
        state["cuda_rng"] = torch.cuda.get_rng_state(device)
    torch.save(state, folder / "trainer.pt")


def acting_weights(module: nn.Module, normaliser: Normaliser | None, observed: Collection[str]) -> Weights:
    """Copies of the weights for acting: the module's, and the current scalings of the leaves ``observed``."""
    weights = module_weights(module)
    return weights if normaliser is None else weights | to_weights(normaliser.scalings(), observed)


class Restored:
    """A restored checkpoint: module and optimiser are done, and `go_on` restores the rest once there is an algorithm.

    Attributes:
        counters: progress of the training.
    """

    def __init__(self, counters: Counters, state: Mapping[str, Any], device: torch.device) -> None:
        self.counters = counters
        self._state = state
        self._device = device

    def go_on(self, algorithm: Algorithm, rank: int = 0) -> None:
        """Gives the algorithm its state, then the random generators theirs, since making things draws from them.

        They are those of rank 0, which saved: another rank's are seeded from them and its number, as two that drew the
        same would learn from the same dice. The module may be on another device than the one that was saved: the
        generator of a GPU is then left as it is.
        """
        state = self._state
        if state.get("algorithm"):
            algorithm.load_state_dict(state["algorithm"])
        torch.set_rng_state(state["torch_rng"])
        name, keys, *rest = state["numpy_rng"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        version, numbers, gauss = state["python_rng"]
        random.setstate((version, tuple(numbers), gauss))
        if self._device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self._device)
        if rank:
            seeds = np.random.SeedSequence([int(torch.randint(2**62, ())), rank]).generate_state(3)
            torch.manual_seed(int(seeds[0]))
            np.random.seed(int(seeds[1]))
            random.seed(int(seeds[2]))


def start_from(module: nn.Module, weights: Weights) -> None:
    """Gives ``module`` these weights, which hold no scalings. Raises BadWeights if they do not fit."""
    check_weights(layout_of(module_weights(module)), weights)
    module.load_state_dict({key: torch.from_numpy(np.array(array)) for key, array in weights.items()})


def restore(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, normaliser: Normaliser | None = None
) -> Restored:
    """Brings ``module``, ``optimizer`` and ``normaliser`` to the state that `save` wrote.

    Raises:
        TrackingError: the folder is not a whole checkpoint, or has another format.
        BadWeights: its weights do not fit the module; or they, or required moments, are missing.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if (format_ := meta.get("format", 1)) != _FORMAT:
            raise TrackingError(
                f"checkpoint {folder} has format {format_!r}, expected {_FORMAT}: another version of brayx wrote it",
                folder=str(folder),
            )
        weights = learned(load_weights(folder / "weights.npz"))
        moments = None if normaliser is None else load_weights(folder / "normaliser.npz")
        state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
        counters = Counters(**meta["counters"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError) as error:
        raise TrackingError(f"checkpoint {folder} cannot be read: {error}", folder=str(folder)) from error
    start_from(module, weights)
    optimizer.load_state_dict(state["optimizer"])
    if normaliser is not None and moments is not None:
        normaliser.load_state_dict(moments)
    return Restored(counters, state, _device(module))


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
