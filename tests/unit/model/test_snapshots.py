"""Files of frozen weights: what is read is what was written, and a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from brayx.errors import VersionUnknown
from brayx.model import snapshots
from brayx.model.snapshots import SnapshotFiles, digest_of

WEIGHTS = {
    "body.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    "batches": np.array(7),
    "empty": np.zeros((0, 5), np.float16),
    "mask": np.array([True, False, True]),
    "größe": np.array([-1], np.int8),
}


@pytest.fixture
def files(tmp_path: Path) -> SnapshotFiles:
    stored = SnapshotFiles(tmp_path / "weights")
    stored.put(3, WEIGHTS)
    return stored


def test_weights_are_read_as_they_were_written(files: SnapshotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(snapshots, "load_weights")  # which is slow, and only for other files
    weights = files.read(3)
    assert list(weights) == list(WEIGHTS)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
        assert (array.dtype, array.shape) == (WEIGHTS[name].dtype, WEIGHTS[name].shape)
        assert array.flags.aligned
        assert array.flags.c_contiguous
        assert not array.flags.writeable, "else an engine would copy it"
    assert digest_of(weights) == digest_of(WEIGHTS)


def test_a_compressed_file_is_read_too(files: SnapshotFiles) -> None:
    np.savez_compressed(files.path(4), **WEIGHTS)
    assert digest_of(files.read(4)) == digest_of(WEIGHTS)


def test_a_damaged_file_is_refused(files: SnapshotFiles) -> None:
    whole = files.path(3).read_bytes()
    data_at = whole.index(WEIGHTS["body.0.weight"].tobytes())
    damaged = [
        whole[: len(whole) // 2],
        whole[:data_at] + b"x" + whole[data_at + 1 :],
        b"",
        b"x" * 500,
    ]
    for content in damaged:
        files.path(4).write_bytes(content)
        with pytest.raises(VersionUnknown, match="no weights of version 4"):
            files.read(4)
    with pytest.raises(VersionUnknown, match="no weights of version 5") as refused:
        files.read(5)
    assert refused.value.details["known"] == [3, 4]


def test_a_changed_bit_is_noticed_or_changes_no_value(files: SnapshotFiles) -> None:
    whole = bytearray(files.path(3).read_bytes())
    rng = np.random.default_rng(0)
    for index in rng.integers(0, len(whole), 300):
        changed = whole.copy()
        changed[index] ^= 1 << int(rng.integers(8))
        weights = snapshots._stored(bytes(changed))
        if weights is not None and weights.keys() == WEIGHTS.keys():  # other names do not fit the model
            assert digest_of(weights) == digest_of(WEIGHTS)
