"""Only a model that declares itself recurrent has a state."""

from __future__ import annotations

import pytest
from torch import nn

from brayx.nets.recurrent import state_argument


class Memory(nn.Module):
    is_recurrent = True

    def forward(self, obs, mask, state):
        return obs


class Undeclared(nn.Module):
    def forward(self, obs, state):
        return obs


def test_the_index_of_the_state_is_that_of_its_argument() -> None:
    assert state_argument(Memory()) == 2


@pytest.mark.parametrize("declared", [None, False, 1, "yes"])
def test_a_model_that_does_not_say_so_has_none(declared: object) -> None:
    module = Undeclared()
    if declared is not None:
        module.is_recurrent = declared
    assert state_argument(module) is None
