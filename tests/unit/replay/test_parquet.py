"""`brayx.replay.parquet`: nested lists are axes, and row groups divide a file into parts."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.errors import ConfigError
from brayx.replay.files import Dataset
from tests.unit.replay.data_files import grouped, steps, values


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([[1], [2, 3, 4]], "row 1 .*another length.* 1"),
        ([[1, 2], [3, 4], [5]], "row 2"),
        ([[[1, 2], [3, 4]], [[5, 6], [7]]], "row 1"),
        ([[[1], [2]], [[3], [4, 5]]], "row 1"),
        ([[], [1, 2]], "row 1"),
        ([[1, 2], None], "row 1 .*holds null"),
        ([[1, 2], [3, None]], "row 1 .*holds null"),
        ([1, None], "row 1 .*holds null"),
    ],
)
def test_lists_in_a_column_have_equal_lengths_and_no_nulls(tmp_path, column, message):
    """Otherwise their values would be assigned to other rows."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = {name: array.tolist()[: len(column)] for name, array in steps("---").items()}
    pyarrow.parquet.write_table(pa.table({**rows, "obs": column}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match=rf"data\.parquet: obs: {message}"):
        Dataset(tmp_path / "data.parquet").check()


def test_nested_lists_are_axes_for_any_row_groups(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = steps("----T")
    obs = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(10)), 2)
    table = pa.table({**{name: a.tolist() for name, a in rows.items()}, "obs": obs.tolist(), "bonus": fixed})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet", row_group_size=2)
    (only,) = Dataset(tmp_path / "data.parquet")
    assert (only.obs[:5] == obs).all()
    assert (only.extras["bonus"] == np.arange(10).reshape(5, 2)).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(None, "row 9000 .* holds null"), ([1.0], "row 9000 .* another length than the first one, 2")],
)
def test_a_long_file_is_read_in_blocks(tmp_path, wrong, message):
    import pyarrow as pa
    import pyarrow.parquet

    rows = {name: array.tolist() for name, array in steps("---T" * 2500).items()}
    rows["obs"][9000] = wrong
    pyarrow.parquet.write_table(pa.table(rows), tmp_path / "data.parquet")
    dataset = Dataset(tmp_path / "data.parquet")
    dataset.check()
    episodes = iter(dataset)
    assert next(episodes).reward.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=rf"data\.parquet: obs: {message}"):
        list(episodes)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 14])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("ends", ["--T-C-----TTC---", "-" * 15, "T" * 15, "--------------T", "T--------------"])
def test_parts_of_one_parquet_file_cover_every_episode_once(tmp_path, monkeypatch, group, rows, ends):
    monkeypatch.setattr("brayx.replay.steps.BLOCK_ROWS", rows)
    grouped(tmp_path / "data.parquet", steps(ends), group)
    dataset = Dataset(tmp_path / "data.parquet")
    whole = [values(episode) for episode in dataset]
    for count in (1, 2, 3, 16):
        parts = dataset.parts(count)
        assert len(parts) == min(count, -(-len(ends) // group))
        for _epoch in range(2):
            assert [values(episode) for part in parts for episode in part()] == whole, count


def test_parts_are_files_if_there_are_enough_and_otherwise_row_groups(tmp_path):
    for number in range(3):
        grouped(tmp_path / f"{number}.parquet", {**steps("T" * 8), "reward": np.arange(8) + 8 * number}, 2)
    dataset = Dataset(tmp_path / "*.parquet")
    for count, lengths in [(2, [16, 8]), (4, [8, 8, 4, 4]), (100, [2] * 12)]:
        parts = [[episode.reward[0] for episode in part()] for part in dataset.parts(count)]
        assert [len(part) for part in parts] == lengths
        assert sorted(reward for part in parts for reward in part) == list(range(24))


def test_a_part_reads_its_own_groups_and_names_a_row_by_its_number_in_the_file(tmp_path):
    rows = {name: array.tolist() for name, array in steps("-T" * 10).items()}
    rows["obs"][15] = [1.0]
    grouped(tmp_path / "data.parquet", rows, 5)
    first, second = Dataset(tmp_path / "data.parquet").parts(2)
    assert len(list(first())) == 5
    with pytest.raises(ConfigError, match=r"obs: row 15 .*another length.* 2"):
        list(second())


def test_an_unreadable_file_cannot_be_divided(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset(tmp_path / "broken.parquet").parts(2)
