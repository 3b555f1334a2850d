"""The user's hooks in training: a module with any of ``handle``, ``loss`` and ``evaluate``, checked beforehand.

    def handle(batch):              # arrays [B, T + 1, ...], perhaps read only: gives the batch to learn from
        return {**batch, "reward": batch["reward"].clip(-1, 1)}

    def loss(outputs, obs):         # of the steps of a gradient, [N, ...]: a term, [], that is added to the loss
        return 0.001 * outputs["logits"].square().mean()

    def evaluate(model, step):      # every `eval_interval` updates: numbers by name
        return {"norm": sum(float(p.norm()) for p in model.parameters())}

`brayx.record` works in all three. Knows nothing of when they are called.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brayx.components import load_module
from brayx.errors import BrayxError, ConfigError, ModelError, first_line
from brayx.replay.packing import Batch

TAKES = {"handle": ("batch",), "loss": ("outputs", "obs"), "evaluate": ("model", "step")}
"""Arguments of each hook."""


@dataclass(frozen=True)
class Hooks:
    """The user's hooks; None: no such hook.

    Attributes:
        handle: ``(batch)``: takes a learner batch of NumPy arrays; returns the one to learn from. Called by one thread.
        loss: ``(outputs, obs)``: takes the module's outputs and arguments, ``[N, ...]``, for the steps of one gradient,
            masked ones included; for a recurrent module sequences ``[T, N, ...]``, with its state among the arguments.
            Demonstrations are included only if they are learned from alone. Returns ``[]``, which is added to the loss.
        evaluate: ``(model, step)``: takes the module, not to be changed, in eval mode and without gradients, and the
            transitions learned from; returns numbers by name.
        name: name for messages.
    """

    handle: Callable[[Batch], Batch] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None
    name: str = "hooks"

    def __post_init__(self) -> None:
        for hook, takes in TAKES.items():
            self._check(hook, takes)

    def _check(self, hook: str, takes: tuple[str, ...]) -> None:
        function = getattr(self, hook)
        if function is None:
            return
        shown = f"{hook}({', '.join(takes)})"
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{self.name}.{hook} is no plain function, expected {shown}", attribute=hook)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C: its call reports errors
            return
        try:
            signature.bind(*takes)
        except TypeError:
            raise ConfigError(f"{self.name}.{hook} takes {signature}, expected {shown}", attribute=hook) from None

    def handled(self, batch: Batch) -> Batch:
        """Calls `handle` on a batch.

        Raises:
            ModelError: it raised, or did not return a batch.
        """
        if self.handle is None:
            return batch
        handled = self._call("handle", batch)
        if not isinstance(handled, Mapping) or "mask" not in handled:
            raise ModelError(f"{self.name}.handle gave {type(handled).__name__}, expected the batch to learn from")
        return dict(handled)

    def evaluated(self, module: nn.Module, step: int) -> dict[str, float]:
        """Calls `evaluate`; restores the module and the random generators afterwards.

        Raises:
            ModelError: it raised, or did not return numbers by name.
        """
        if self.evaluate is None:
            return {}
        training, numpy_state, python_state = module.training, np.random.get_state(), random.getstate()
        device = next((p.device for p in module.parameters() if p.device.type == "cuda"), None)
        try:
            with torch.random.fork_rng(devices=[] if device is None else [device]), torch.no_grad():
                numbers = self._call("evaluate", module.eval(), step)
        finally:
            module.train(training)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
        try:
            return {str(name): float(value) for name, value in numbers.items()}
        except (AttributeError, TypeError, ValueError):
            raise ModelError(f"{self.name}.evaluate gave {numbers!r:.80}, expected numbers by name") from None

    def _call(self, hook: str, *args: Any) -> Any:
        try:
            return getattr(self, hook)(*args)
        except BrayxError:
            raise
        except Exception as error:
            raise ModelError(f"{self.name}.{hook} raised {type(error).__name__}: {first_line(error)}") from error


def load_hooks(module: str, folder: str = "") -> Hooks:
    """The hooks of a module.

    Args:
        module: import path.
        folder: folder that is searched first.

    Raises:
        ConfigError: no such module, it has no hook, or a hook has other arguments.
    """
    loaded = load_module(module, folder)
    hooks = {hook: getattr(loaded, hook) for hook in TAKES if hasattr(loaded, hook)}
    if not hooks:
        raise ConfigError(f"module {module!r} ({loaded.__file__}) has none of {', '.join(TAKES)}", module=module)
    return Hooks(**hooks, name=module)


class WithLoss(nn.Module):
    """A module that remembers its forwards until a gradient is taken, for the hook's term of the loss.

    Args:
        module: possibly under DDP; other attributes are delegated to it.
        hooks: hooks with a ``loss``.
    """

    def __init__(self, module: nn.Module, hooks: Hooks) -> None:
        super().__init__()
        self.module = module
        self._hooks = hooks
        self._seen: list[tuple[Any, Any]] = []
        # Keeps the module's declaration and signature, by which algorithms detect a memory.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.is_recurrent = getattr(inner, "is_recurrent", False)

        @functools.wraps(inner.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = module(*args, **kwargs)
            if torch.is_grad_enabled():
                self._seen.append((outputs, args[0] if len(args) == 1 else args))
            return outputs

        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def extra_loss(self) -> Tensor | None:
        """The term for the forwards since the last call: their mean; None when there were none.

        Raises:
            ModelError: the hook raised, or did not return a scalar.
        """
        seen, self._seen = self._seen, []
        terms = [self._hooks._call("loss", outputs, obs) for outputs, obs in seen]
        for term in terms:
            if not isinstance(term, Tensor) or term.numel() != 1:
                shape = list(term.shape) if isinstance(term, Tensor) else type(term).__name__
                raise ModelError(f"{self._hooks.name}.loss gave {shape}, expected a tensor []")
        return torch.stack([term.reshape(()).float() for term in terms]).mean() if terms else None
