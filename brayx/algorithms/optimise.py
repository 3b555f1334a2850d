"""The gradient step that every algorithm takes: precision, micro-batches, clipping, learning-rate schedule.

Knows nothing of losses. Nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms.config import AlgorithmConfig

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "linear", "cosine"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OptimiseConfig(AlgorithmConfig):
    """Options of the gradient step; options of algorithms derive from it."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 0.5
    """Gradients are scaled down to this norm; null: never."""
    learning_rate_schedule: Schedule = "linear"
    """How the learning rate falls over the training."""
    learning_rate_final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate left at the end of training, unless it is constant."""
    learning_rate_warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training over which the learning rate first rises from 0."""
    precision: Precision = "fp32"
    """Of the forward: ``bf16`` and ``fp16`` (whose loss is scaled) through autocast. Losses are always float32."""
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    """Parts that a minibatch is computed in one after the other, for the same gradient in less memory."""


def share(progress: float, *, schedule: Schedule = "linear", final: float = 0.0, warmup: float = 0.0) -> float:
    """The factor of a scheduled value at this point of the training.

    Args:
        progress: progress of the training, clipped to 0 to 1.
        schedule: course of the factor from 1 to ``final`` after the warm-up; constant: it stays 1.
        final: factor at the end.
        warmup: share of the training over which the factor first rises linearly from 0.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    done = (progress - warmup) / (1 - warmup)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1 - done * (1 - final)


def unhooked(module: nn.Module) -> nn.Module:
    """The inner module of a wrapper that adds a loss term; its forwards do not enter that term."""
    return getattr(module, "module", module) if hasattr(module, "extra_loss") else module


class Optimise:
    """Takes gradient steps.

        optimise.begin(progress)
        for part in parts:
            with optimise.autocast():
                outputs = module(...)
            optimise.backward(loss, share_of_the_minibatch)
        norm = optimise.step()

    Args:
        optimizer: schedules start from its learning rates at construction, or from ``initial_lr`` of a group.
        config: options.
        module: if wrapped in `DistributedDataParallel`, gradients are exchanged only at the last of several backwards.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: OptimiseConfig, module: nn.Module | None = None
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.scale = 1.0
        """Multiplies the scheduled learning rate; for algorithms that steer it."""
        self.terms: list[Callable[[], Tensor | None]] = []
        """Terms added to the loss of every gradient; each is called once, at the gradient's first backward."""
        self._config = config
        self._module = module
        self._device = self.parameters[0].device.type
        self._scaler = torch.amp.GradScaler(self._device) if config.precision == "fp16" else None
        self._fresh = False
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @property
    def adds(self) -> bool:
        """Whether `backward` adds terms to the loss."""
        return bool(self.terms) or getattr(self._module, "extra_loss", None) is not None

    def begin(self, progress: float) -> float:
        """Sets the learning rates for this progress, 0 to 1, and returns the first."""
        config = self._config
        left = self.scale * share(
            progress,
            schedule=config.learning_rate_schedule,
            final=config.learning_rate_final,
            warmup=config.learning_rate_warmup,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * left
        return float(self.optimizer.param_groups[0]["lr"])

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which forwards use the configured precision."""
        if self._config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device, _HALVES[self._config.precision])

    def shared(self, last: bool) -> AbstractContextManager[Any]:
        """A context for forward and backward of a micro-batch: only the ``last`` one exchanges gradients."""
        no_sync = None if last else getattr(self._module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def backward(self, loss: Tensor, part: float = 1.0) -> None:
        """Adds the gradients of ``loss`` to those since the last `step`.

        Args:
            loss: loss of a micro-batch.
            part: share of the minibatch; weights the user's loss, which is a mean.
        """
        first = not self._fresh
        if first:
            self.optimizer.zero_grad(set_to_none=True)
            self._fresh = True
        extra = getattr(self._module, "extra_loss", None)  # the user's loss for the module's last forwards
        if extra is not None and (term := extra()) is not None:
            loss = loss + part * term
        for term in self.terms if first else ():
            with self.autocast():
                also = term()
            if also is not None:
                loss = loss + also
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> Tensor:
        """Clips, steps, and returns the norm of the gradients before clipping, ``[]`` on their device.

        If gradients overflowed in half precision, only the loss scale changes.
        """
        self._fresh = False
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = self._clip()
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        return norm

    @torch.no_grad()
    def _clip(self) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        limit = self._config.max_grad_norm
        if limit is not None:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The scales of the loss and of the learning rate; the caller saves the optimiser's own state."""
        return {"scale": self.scale, "scaler": {} if self._scaler is None else self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.scale = float(state["scale"])
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
