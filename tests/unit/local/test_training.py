"""The options of a training have the same bounds as the corresponding options of a job."""

from __future__ import annotations

import math

import pytest
from pydantic import BaseModel, ValidationError

from brayx.local.training import Training
from brayx.replay.config import BufferConfig
from brayx.rollout.component import RolloutComponent
from brayx.trainer.config import TrainerConfig

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def bounds(config: type[BaseModel]) -> dict[str, dict[str, float]]:
    """Of each field, whether it may be null or not."""
    bounds_of = {}
    for name, schema in config.model_json_schema()["properties"].items():
        number = next((kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"), {})
        bounds_of[name] = {bound: number[bound] for bound in BOUNDS if bound in number}
    return bounds_of


@pytest.mark.parametrize("part", [TrainerConfig, BufferConfig, RolloutComponent])
def test_no_training_is_begun_that_its_parts_refuse(part):
    mine, theirs = bounds(Training), bounds(part)
    common = mine.keys() & theirs.keys()
    assert len(common) > 4
    assert {name: mine[name] for name in common} == {name: theirs[name] for name in common}


@pytest.mark.parametrize("option", ["learning_rate", "samples_per_insert", "target_return", "reward_clip"])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_numbers_are_finite(option, number):
    with pytest.raises(ValidationError, match="finite number"):
        Training(**{option: number})
