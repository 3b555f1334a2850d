"""Encoders of a user: right ones, and some for each error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brayx.gamecore.contract import ObservationSpec


class Eyes(nn.Module):
    """Bytes of an image, channels last."""

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(spec.shape[2], 4, 8, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7))

    def forward(self, image: Tensor) -> Tensor:
        assert image.dtype == torch.uint8
        return self.layers(image.permute(0, 3, 1, 2) / 255)


class Rows(nn.Module):
    """The sum of the rows, with first weights of its own."""

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(spec.shape[-1], 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        nn.init.constant_(self.layers[2].weight, 0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows.sum(1))


class Same(nn.Module):
    """What it gets."""

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).float()


class Huge(Same):
    """More weights than a computer has memory for."""

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__(spec)
        self.table = nn.Linear(2**20, 2**20)


class Real(Same):
    """Its constructor reads a number, which a tensor without memory does not have."""

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__(spec)
        self.scale = torch.ones(1).item()


class Branching(Same):
    """It has no graph: its output depends on a number in Python."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def raising(spec: ObservationSpec) -> nn.Module:
    raise KeyError(spec.name)


def nothing(spec: ObservationSpec) -> None:
    pass


class Unfit(Same):
    """It expects an image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


class Squeezed(Same):
    """It loses the batch axis of one observation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class Whole(Same):
    """It takes the batch for one observation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()[None]


class Deep(Same):
    """It keeps a further axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1)


class Double(Same):
    """Its output has another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class Pair(Same):
    """It gives two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x
