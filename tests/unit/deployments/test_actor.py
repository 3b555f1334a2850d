"""Where the weights of an application come from. The application itself is tested on Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from brayx.engines.base import save_weights
from brayx.errors import BadWeights, ModelError
from deployments.actor import WeightSource


def checkpoint(folder: Path, meta: str | None) -> WeightSource:
    save_weights(folder / "weights.npz", {"w": np.array([1.0, 2.0], np.float32)})
    if meta is not None:
        (folder / "meta.json").write_text(meta)
    return WeightSource(checkpoint=str(folder))


@pytest.mark.parametrize(("meta", "version"), [('{"counters": {"policy_version": 41}}', 41), ("{}", 0), (None, 0)])
def test_a_checkpoint_gives_version_and_weights(tmp_path: Path, meta: str | None, version: int) -> None:
    read = checkpoint(tmp_path, meta).read()
    assert read is not None
    assert read[0] == version
    np.testing.assert_array_equal(read[1]["w"], [1.0, 2.0])


def test_what_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"meta\.json cannot be read"):
        checkpoint(tmp_path, "half").read()
    with pytest.raises(BadWeights, match="nowhere"):
        WeightSource(checkpoint=str(tmp_path / "nowhere")).read()


def test_without_a_checkpoint_there_is_nothing_to_read() -> None:
    assert WeightSource(store="weights").read() is None
