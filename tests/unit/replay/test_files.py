"""`brayx.replay.files`: whole episodes of every format, and data that do not fit are refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from brayx.errors import ConfigError
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout, check
from tests.unit.replay.data_files import (
    SAVE,
    grouped,
    save_npz,
    save_parquet,
    steps,
    values,
)


@pytest.mark.parametrize("kind", SAVE)
def test_rows_become_episodes(tmp_path, kind):
    SAVE[kind](tmp_path / f"data.{kind}", steps("--T-C--"))
    first, two, three = Dataset(tmp_path / f"data.{kind}")
    assert first.reward.tolist() == [0, 1, 2]
    assert first.terminated
    assert first.obs[:, 0].tolist() == [0, 1, 2, 2], "never bootstrapped from"
    assert (two.reward.tolist(), two.obs[:, 0].tolist(), two.truncated) == ([3], [3, 4], True)
    assert (three.reward.tolist(), three.obs[:, 0].tolist(), three.truncated) == ([5], [5, 6], True)
    for episode in (first, two, three):
        check(episode, None)


def test_next_obs_is_used_if_the_data_has_it(tmp_path):
    rows = steps("-C")
    save_npz(tmp_path / "data.npz", {**rows, "next_obs": rows["obs"] + 1, "bonus": np.ones(2, np.float32)})
    (only,) = Dataset(tmp_path / "data.npz")
    assert only.obs[:, 0].tolist() == [0, 1, 2]
    assert only.extras["bonus"].tolist() == [1, 1]


def test_leaves_are_found_by_path_and_by_mapped_names(tmp_path):
    rows = steps("-T")
    rows = {"image": rows.pop("obs"), "a": rows.pop("action"), **rows, "obs/speed": np.zeros(2, np.float32)}
    save_npz(tmp_path / "data.npz", rows)
    (only,) = Dataset(tmp_path / "data.npz", fields={"obs/camera/image": "image", "action": "a"})
    assert only.obs["camera"]["image"].shape == (3, 2)
    assert only.obs["speed"].shape == (3,)


def test_a_mismatched_dataset_is_refused_with_both_layouts(tmp_path):
    save_npz(tmp_path / "data.npz", steps("-T"))
    model = Layout.of_model((np.zeros((2, 3), np.float32),))
    with pytest.raises(ConfigError, match=r"obs: .*\(3,\).* \(2,\).*fits: .*\(3,\)"):
        Dataset(tmp_path / "data.npz").check(model)
    Dataset(tmp_path / "data.npz").check(Layout.of_model((np.zeros((2, 2), np.float32),)))


@pytest.mark.parametrize("missing", ["obs", "action", "reward", "terminated"])
def test_a_missing_field_is_named_with_the_existing_ones(tmp_path, missing):
    rows = steps("-T")
    save_npz(tmp_path / "data.npz", {name: array for name, array in rows.items() if name != missing})
    with pytest.raises(ConfigError, match=f"no {missing}; .*Needed: obs"):
        Dataset(tmp_path / "data.npz").check()


@pytest.mark.parametrize("kind", SAVE)
def test_every_file_is_checked_before_any_is_read(tmp_path, kind):
    """Without it a defect in a later file showed in the middle of a job, or the file was left out."""
    whole, file = steps("-T"), tmp_path / f"2.{kind}"
    SAVE[kind](tmp_path / f"1.{kind}", {**whole, "log_prob": np.zeros(2)})
    assert "log_prob" in Dataset(tmp_path / f"*.{kind}").check()
    SAVE[kind](file, {"act" if name == "action" else name: array for name, array in whole.items()})
    data = Dataset(tmp_path / f"*.{kind}")
    with pytest.raises(ConfigError, match=rf"2\.{kind}: .*action; .*'act'"):
        data.check()
    with pytest.raises(ConfigError, match=rf"2\.{kind}: .*action; .*'act'"):
        next(data.checked())
    SAVE[kind](file, {**whole, "obs": np.zeros((2, 3), np.float32)})
    with pytest.raises(ConfigError, match=rf"2\.{kind}: obs: .*\(2,\).*\(3,\)"):
        Dataset(tmp_path / f"*.{kind}").check()
    SAVE[kind](file, whole)
    assert "log_prob" not in Dataset(tmp_path / f"*.{kind}").check(), "one file lacks it"


def test_checking_a_file_reads_only_the_first_episode(tmp_path):
    save_npz(tmp_path / "1.npz", steps("-T"))
    save_npz(tmp_path / "2.npz", {**steps("-T"), "reward": np.full(2, np.nan)})
    Dataset(tmp_path / "*.npz").check()


def test_other_defects_of_a_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        Dataset(tmp_path / "none.npz")
    (tmp_path / "broken.npz").write_bytes(b"not an archive")
    (tmp_path / "broken.parquet").write_bytes(b"neither")
    (tmp_path / "data.csv").write_bytes(b"1,2")
    for name in ("broken.npz", "broken.parquet"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Dataset(tmp_path / name).check()
    with pytest.raises(ConfigError, match=r"data.csv: .*`format`"):
        Dataset(tmp_path / "data.csv")
    save_npz(tmp_path / "short.npz", {**steps("-T"), "action": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"action .*3 .*reward .*2"):
        Dataset(tmp_path / "short.npz").check()
    rows = {**steps("-T"), "obs": np.zeros((2, 4)), "next_obs": np.zeros((2, 3))}
    save_npz(tmp_path / "narrow.npz", rows)
    with pytest.raises(ConfigError, match=r"narrow.npz: next_obs .*\(3,\) .*\(4,\)"):
        Dataset(tmp_path / "narrow.npz").check()
    save_npz(tmp_path / "pickled.npz", {**steps("-T"), "extra": np.array([{}, {}], object)})
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset(tmp_path / "pickled.npz").check()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("following", [False, True])
def test_episodes_read_in_blocks_are_whole(tmp_path, monkeypatch, rows, following):
    columns_made = steps("--T-C-----TTC---")
    if following:
        columns_made["next_obs"] = columns_made["obs"] + 1
    save_npz(tmp_path / "data.npz", columns_made)
    save_parquet(tmp_path / "data.parquet", columns_made)
    np.savez_compressed(tmp_path / "fortran.npz", **{**columns_made, "obs": np.asfortranarray(columns_made["obs"])})
    expected = list(Dataset(tmp_path / "data.npz"))
    assert len(expected) == (6 if following else 5)
    monkeypatch.setattr("brayx.replay.steps.BLOCK_ROWS", rows)
    for name in ("data.npz", "data.parquet", "fortran.npz"):
        for episode_read, other in zip(Dataset(tmp_path / name), expected, strict=True):
            assert (episode_read.obs == other.obs).all()
            assert (episode_read.reward == other.reward).all()
            assert (episode_read.terminated, episode_read.truncated) == (other.terminated, other.truncated)


def test_a_checked_dataset_holds_nothing_in_memory(tmp_path):
    episode = {**steps("-" * 24_999 + "T"), "obs": np.ones((25_000, 64), np.float32)}
    np.savez(tmp_path / "long.npz", **episode)
    dataset = Dataset(tmp_path / "long.npz")
    tracemalloc.start()
    try:
        dataset.check()
        dataset.check(Layout.of_model((np.zeros((2, 64), np.float32),)))
        assert tracemalloc.get_traced_memory()[0] < 2**20, "the first episode has 6 MiB"
    finally:
        tracemalloc.stop()


def test_parts_cover_every_file_once(tmp_path):
    for number in range(5):
        save_npz(tmp_path / f"{number}.npz", {**steps("-T"), "reward": np.full(2, number)})
    dataset = Dataset(tmp_path / "*.npz")
    parts = dataset.parts(3)
    assert len(parts) == 3
    assert sorted(episode.reward[0] for part in parts for episode in part()) == list(range(5))
    assert len(dataset.parts(9)) == 5


def test_parts_use_the_names_in_the_data(tmp_path):
    rows = steps("--T-----T--T")
    grouped(tmp_path / "data.parquet", {**rows, "done": rows.pop("terminated"), "cut": rows.pop("truncated")}, 3)
    dataset = Dataset(tmp_path / "data.parquet", fields={"terminated": "done", "truncated": "cut"})
    assert [values(episode) for part in dataset.parts(4) for episode in part()] == [
        values(episode) for episode in dataset
    ]
