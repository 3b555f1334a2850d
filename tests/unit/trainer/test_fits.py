"""Batches that do not fit the model or the algorithm."""

from __future__ import annotations

import pytest

from brayx.errors import ConfigError, ModelError
from tests.unit.trainer.parts import batches, run


def test_a_mismatched_observation_is_named(tmp_path):
    def renamed():
        for batch in batches(1):
            yield {**{key: array for key, array in batch.items() if key != "obs"}, "obs/image": batch["obs"]}

    with pytest.raises(ConfigError, match="obs/image"):
        run(tmp_path, stream=renamed())


def test_an_unsuitable_batch_is_a_typed_error_and_not_retried(tmp_path):
    stream = [{**batch, "mask": batch["mask"][:, :1]} for batch in batches(1)]
    with pytest.raises(ModelError, match=r"'ppo' .*: mask: expected"):
        run(tmp_path, stream=iter(stream))
