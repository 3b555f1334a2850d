"""`brayx.trainer.cores` with real layers and a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from brayx import systems
from brayx.trainer.cores import Cores

CONVOLUTIONS = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("module", "variable", "given", "expected"),
    [
        (nn.Linear(1, 1), "3", None, 1),
        (nn.Linear(1, 1), "3", 2, 2),
        (CONVOLUTIONS, "3", None, 3),
        (CONVOLUTIONS, "3", 2, 2),
        (CONVOLUTIONS, "", None, 5),
        (CONVOLUTIONS, "4,2", None, 5),
    ],
)
def test_convolutions_get_more_threads(
    module: nn.Module, variable: str, given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(systems, "cores", lambda: 5)
    Cores(module, given)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize("given", [None, 3])
def test_games_have_a_core_while_they_play(given: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    used: list[int] = []

    class Sees(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            used.append(torch.get_num_threads())
            return super().forward(x)

    module, image = nn.Sequential(Sees(1, 1, 1)), torch.zeros(1, 1, 4, 4)
    cores = Cores(module, given)
    cores.begin(None)
    module(image)
    now = 1020.0
    cores.begin(1005.0)  # played for 5 s of the last update, and so of this one
    module(image)
    now = 1024.9
    module(image)
    now = 1025.1
    module(image)
    now = 1030.0
    cores.begin(None)
    module(image)
    assert used == ([3, 2, 2, 3, 3] if given is None else [3] * 5)
