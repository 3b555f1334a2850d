"""Options of a rollout component: the environment has one source."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from brayx.rollout.component import RolloutComponent

PARTS = {"model": "model", "buffer": "buffer"}


@pytest.mark.parametrize("source", [{"env": "CartPole-v1"}, {"module": "worlds", "func": "make"}])
def test_an_id_or_a_function_names_the_environment(source: dict[str, Any]) -> None:
    assert RolloutComponent(**PARTS, **source).num_workers == 1


@pytest.mark.parametrize(
    "source", [{}, {"module": "worlds"}, {"func": "make"}, {"env": "CartPole-v1", "module": "worlds", "func": "make"}]
)
def test_no_source_or_two_are_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RolloutComponent(**PARTS, **source)
