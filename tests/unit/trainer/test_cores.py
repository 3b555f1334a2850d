"""`brayx.trainer.cores` with a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from brayx import systems
from brayx.trainer.cores import Cores

VECTOR, BOARD = np.zeros((1, 84), np.float32), np.zeros((1, 3, 8, 8), np.float32)
PICTURE = {"camera": np.zeros((1, 84, 84, 3), np.uint8), "obs": VECTOR}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("obs", "variable", "given", "expected"),
    [
        (VECTOR, "3", None, 1),
        (BOARD, "3", None, 1),
        (VECTOR, "3", 2, 2),
        (PICTURE, "3", None, 3),
        (PICTURE, "3", 2, 2),
        (PICTURE, "", None, 5),
        (PICTURE, "4,2", None, 5),
        (PICTURE, "0", None, 1),
    ],
)
def test_learners_of_pictures_get_all_cores(
    obs: object, variable: str, given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(systems, "cores", lambda: 5)
    cores = Cores((obs,), given)
    assert torch.get_num_threads() == expected
    cores.close()


def test_several_learners_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    first, second, other = Cores((PICTURE,), None), Cores((PICTURE,), None), Cores((VECTOR,), None)
    assert not other.changes
    first.choose()
    assert torch.get_num_threads() == 3
    second.close()
    first.choose()
    assert torch.get_num_threads() == 6
    first.close()
    first.choose()
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize("given", [None, 3])
def test_games_have_a_core_while_they_play(given: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    cores = Cores((PICTURE,), given)

    def used() -> int:
        cores.choose()
        return torch.get_num_threads()

    fewer = 2 if given is None else 3
    cores.begin(None)
    assert used() == 3
    now = 1020.0
    cores.begin(1005.0)  # played for 5 s of the last update, and so of this one
    assert used() == fewer
    now = 1024.9
    assert used() == fewer
    now = 1025.1
    assert used() == 3
    now = 1030.0
    cores.begin(None)
    assert used() == 3
    cores.close()
