"""`brayx.replay.npz`: broken archives are refused, and a long one is read with little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from brayx.errors import ConfigError
from brayx.replay.files import Dataset
from tests.unit.replay.data_files import steps


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_truncated_archive_is_refused_as_unreadable(tmp_path, save):
    save(tmp_path / "whole.npz", **steps("--T" * 20))
    whole = (tmp_path / "whole.npz").read_bytes()
    for length in range(0, len(whole), 11):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.npz: cannot be read"):
            Dataset(tmp_path / "cut.npz").check()


def test_a_corrupt_byte_is_refused_as_unreadable(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", **steps("--T" * 20))
    whole = (tmp_path / "whole.npz").read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        (tmp_path / "bad.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            Dataset(tmp_path / "bad.npz").check()  # a date may be corrupt, for example
        except ConfigError:
            refused += 1
    assert refused > len(whole) / 10


@pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated"])
def test_a_single_value_for_all_steps_is_refused(tmp_path, name):
    np.savez(tmp_path / "data.npz", **{**steps("--T"), name: np.float32(1)})
    with pytest.raises(ConfigError, match=f"{name} is one value"):
        Dataset(tmp_path / "data.npz").check()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_long_archive_needs_memory_only_for_the_current_rows(tmp_path, save):
    save(tmp_path / "long.npz", **{**steps(("-" * 99 + "T") * 1_000), "obs": np.ones((100_000, 64), np.float32)})
    tracemalloc.start()
    try:
        assert sum(len(episode) for episode in Dataset(tmp_path / "long.npz")) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20, "obs alone has 24 MiB"
    finally:
        tracemalloc.stop()
