"""A trainer's state as a folder: ``weights.npz``, ``trainer.pt``, ``meta.json``, ``samples.npz``.

``weights.npz`` alone is what acting needs. ``samples.npz`` holds observations that were learned from, for whoever
calibrates or checks a copy of the model. ``trainer.pt`` holds the optimiser and the state of the random generators,
as tensors and plain numbers only, so it is read with ``weights_only=True`` and no code in it can run. ``meta.json``
holds the counters and whatever the job wants to say of itself. Knows nothing of where folders are kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from brayx.engines.base import check_weights, layout_of, load_weights, save_weights
from brayx.engines.torch import module_weights
from brayx.errors import TrackingError


@dataclass
class Counters:
    """How far training has come.

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


def save(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    about: Mapping[str, Any],
    samples: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes a checkpoint into ``folder``, which exists.

    Args:
        folder: empty folder.
        module: whose weights are saved.
        optimizer: whose state is saved.
        counters: how far training has come.
        about: JSON values for ``meta.json``, beside the counters.
        samples: observations by leaf, ``[N, ...]``; none: no such file.
    """
    if samples:
        save_weights(folder / "samples.npz", dict(samples))
    save_weights(folder / "weights.npz", module_weights(module))
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python_rng": random.getstate(),
    }
    device = _device(module)
    if device.type == "cuda":  # dropout draws there
        state["cuda_rng"] = torch.cuda.get_rng_state(device)
    torch.save(state, folder / "trainer.pt")
    (folder / "meta.json").write_text(json.dumps({**about, "counters": asdict(counters)}, indent=1, default=str))


def restore(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Counters:
    """Brings ``module``, ``optimizer`` and the random generators to the state that `save` wrote.

    The module may be on another device than the one that was saved: the generator of a GPU is then left as it is.

    Raises:
        TrackingError: the folder is not a whole checkpoint.
        BadWeights: its weights do not fit the module.
    """
    try:
        weights = load_weights(folder / "weights.npz")
        state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
        counters = Counters(**json.loads((folder / "meta.json").read_text())["counters"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError) as error:
        raise TrackingError(f"checkpoint {folder} cannot be read: {error}", folder=str(folder)) from error
    check_weights(layout_of(module_weights(module)), weights)
    module.load_state_dict({key: torch.from_numpy(np.array(array)) for key, array in weights.items()})
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    name, keys, *rest = state["numpy_rng"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python_rng"]
    random.setstate((version, tuple(numbers), gauss))
    device = _device(module)
    if device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"], device)
    return counters


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
