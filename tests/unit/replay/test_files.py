"""`brayx.replay.files` and `feed`: whole episodes of every format, refused data that do not fit, readers that wait."""

from __future__ import annotations

import json
import threading
import tracemalloc

import gymnasium
import numpy as np
import pytest

from brayx.actions import ActionSpec
from brayx.errors import BadFragment, ConfigError, ReplayError
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.feed import Feed
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout, check
from tests.unit.replay.made import changed, columns, fragment


def steps(ends: str, **more) -> dict[str, np.ndarray]:
    """Rows numbered from 0; ``ends`` has a letter for each: T(erminated), C(ut, that is truncated) or -."""
    number = np.arange(len(ends))
    return {
        "obs": np.stack([number, -number], axis=1).astype(np.float32),
        "action": number % 3,
        "reward": number.astype(np.float64),
        "terminated": np.array([end == "T" for end in ends]),
        "truncated": np.array([end == "C" for end in ends]),
        **more,
    }


def save_npz(path, arrays):
    np.savez(path, **arrays)


def save_parquet(path, arrays):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({name: array.tolist() for name, array in arrays.items()}), path)


SAVE = {"npz": save_npz, "parquet": save_parquet}


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


@pytest.mark.parametrize("as_groups", [False, True])
def test_minari(tmp_path, as_groups):
    h5py = pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for number in range(11):  # so that the order by name is wrong
            group = file.create_group(f"episode_{number}")
            observed = np.full((4, 2), number, np.float32)
            if as_groups:
                group.create_group("observations")["position"] = observed
            else:
                group["observations"] = observed
            group["actions"] = np.zeros((3, 1), np.float32)
            group["rewards"] = np.full(3, number, np.float64)
            group["terminations"] = np.array([0, 0, number % 2], bool)
            group["truncations"] = np.array([0, 0, 1 - number % 2], bool)
    dataset = Dataset(tmp_path / "set")
    episodes = list(dataset)
    assert [episode.reward[0] for episode in episodes] == list(range(11))
    assert [episode.terminated for episode in episodes] == [bool(number % 2) for number in range(11)]
    has = dataset.check(
        Layout.of_example(
            {"position": np.zeros(2, np.float32)} if as_groups else np.zeros(2, np.float32), np.zeros(1, np.float32)
        )
    )
    assert has == {"obs", "action", "reward", "terminated", "truncated"}, "the data has no log-probabilities"
    (first, *_) = Dataset(tmp_path / "set", demonstration=True)
    assert first.extras["demonstration"].tolist() == [True] * 3
    with pytest.raises(ConfigError, match=r"expected shape|missing"):
        dataset.check(Layout.of_example(np.zeros(3, np.float32), np.zeros(1, np.float32)))


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


def test_every_minari_file_is_checked(tmp_path):
    h5py = pytest.importorskip("h5py")
    for number, width in (("1", 2), ("2", 3)):
        with h5py.File(tmp_path / f"{number}.hdf5", "w") as file:
            group = file.create_group("episode_0")
            group["observations"] = np.zeros((3, width), np.float32)
            group["actions"] = np.zeros((2, 1), np.float32)
            group["rewards"] = np.zeros(2)
            group["terminations"] = group["truncations"] = np.array([False, True])
    Dataset(tmp_path / "1.hdf5").check()
    with pytest.raises(ConfigError, match=r"2\.hdf5: obs: .*\(2,\)"):
        Dataset(tmp_path / "*.hdf5").check()


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


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("name", ["reward", "terminated", "truncated", "log_prob", "policy_version"])
@pytest.mark.parametrize("value", [np.zeros((3, 2)), np.array(["a"] * 3)])
def test_a_scalar_field_accepts_only_one_number_per_step(tmp_path, kind, name, value):
    SAVE[kind](tmp_path / f"data.{kind}", {**steps("--T"), name: value})
    with pytest.raises(ConfigError, match=f"{name} has .*, expected a number"):
        Dataset(tmp_path / f"data.{kind}").check()


@pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated"])
def test_a_single_value_for_all_steps_is_refused(tmp_path, name):
    np.savez(tmp_path / "data.npz", **{**steps("--T"), name: np.float32(1)})
    with pytest.raises(ConfigError, match=f"{name} is one value"):
        Dataset(tmp_path / "data.npz").check()


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


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_long_archive_needs_memory_only_for_the_current_rows(tmp_path, save):
    save(tmp_path / "long.npz", **{**steps(("-" * 99 + "T") * 1_000), "obs": np.ones((100_000, 64), np.float32)})
    tracemalloc.start()
    try:
        assert sum(len(episode) for episode in Dataset(tmp_path / "long.npz")) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20, "obs alone has 24 MiB"
    finally:
        tracemalloc.stop()


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


def test_parts_cover_every_file_once(tmp_path):
    for number in range(5):
        save_npz(tmp_path / f"{number}.npz", {**steps("-T"), "reward": np.full(2, number)})
    dataset = Dataset(tmp_path / "*.npz")
    parts = dataset.parts(3)
    assert len(parts) == 3
    assert sorted(episode.reward[0] for part in parts for episode in part()) == list(range(5))
    assert len(dataset.parts(9)) == 5


def grouped(path, arrays, rows):
    """A Parquet file with ``rows`` in each row group."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({name: array if isinstance(array, list) else array.tolist() for name, array in arrays.items()})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def values(episode):
    return (*episode.obs[:, 0].tolist(), len(episode), episode.terminated)


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


def test_parts_use_the_names_in_the_data(tmp_path):
    rows = steps("--T-----T--T")
    grouped(tmp_path / "data.parquet", {**rows, "done": rows.pop("terminated"), "cut": rows.pop("truncated")}, 3)
    dataset = Dataset(tmp_path / "data.parquet", fields={"terminated": "done", "truncated": "cut"})
    assert [values(episode) for part in dataset.parts(4) for episode in part()] == [
        values(episode) for episode in dataset
    ]


def test_an_unreadable_file_cannot_be_divided(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset(tmp_path / "broken.parquet").parts(2)


class GatedBuffer:
    """A buffer that has room only when the test allows it."""

    def __init__(self):
        self.room = threading.Event()
        self.waits = threading.Event()
        self.taken = []

    def offer(self, *replays, timeout_s):
        if not self.room.is_set():
            self.waits.set()
            self.room.wait(min(timeout_s, 0.05))
            return list(replays)
        for replay in replays:
            if np.isnan(replay.reward).any():
                raise BadFragment("reward: holds NaN")
            self.taken.append(float(replay.reward[0]))
        return []


def test_a_feed_waits_for_room_and_reads_each_part_once_per_epoch():
    gated = GatedBuffer()
    parts = [lambda first=first: (fragment(2, first + number) for number in range(3)) for first in (0, 10)]
    with Feed(gated, parts, epochs=2) as feed:
        assert gated.waits.wait(5)
        assert not feed.join(0.05)
        gated.room.set()
        assert feed.join(5)
    assert sorted(gated.taken) == sorted(2 * [0, 1, 2, 10, 11, 12])
    assert (feed.fed, feed.refused, feed.error) == (12, 0, None)


def test_a_feed_skips_refused_fragments_and_ends_at_an_error():
    gated = GatedBuffer()
    gated.room.set()

    def breaks():
        yield fragment(2, float("nan"))
        yield fragment(2, 1)
        raise OSError("disk gone")

    with Feed(gated, [breaks], name="data") as feed:
        assert feed.join(5)
    assert (feed.fed, feed.refused) == (1, 1)
    assert feed.error.message == "source 'data' raised OSError: disk gone"


@pytest.mark.parametrize("published", [None, 1])
def test_fed_fragments_are_accepted_with_any_version_of_another_trial(tmp_path, published):
    save_npz(tmp_path / "data.npz", {**steps("-----T"), "policy_version": np.full(6, 800)})
    buffer = ReplayBuffer(changed(max_policy_lag=1))
    if published is not None:
        buffer.published(published)

    class AcceptingBuffer:
        def offer(self, *replays, timeout_s):
            for replay in replays:
                buffer.push(replay)
            return []

    row = columns(2, version=800)
    with Feed(AcceptingBuffer(), [*Dataset(tmp_path / "data.npz").parts(1), lambda: [row]]) as feed:
        assert feed.join(5)
    assert (feed.fed, feed.refused, feed.error) == (2, 0, None)
    buffer.push(columns(2, version=1))  # the agent's own fragment, which they must not make too old
    buffer.flush()
    batches = list(iter(buffer.pop, None))
    assert sum(int(batch["mask"].sum()) for batch in batches) == 6 + 8 + 8
    assert {int(version) for batch in batches for version in np.unique(batch["policy_version"])} == {0, 1}


@pytest.mark.parametrize(("part", "message"), [(lambda: 3, "expected an iterator"), (lambda: [1], "yielded int")])
def test_a_feed_of_an_invalid_part_is_an_error(part, message):
    gated = GatedBuffer()
    gated.room.set()
    with Feed(gated, [part]) as feed:
        assert feed.join(5)
    assert message in feed.error.message


def test_a_feed_ends_with_its_context_and_reports_a_lost_buffer():
    gated = GatedBuffer()
    with Feed(gated, [lambda: iter(lambda: fragment(2), None)]) as feed:
        assert gated.waits.wait(5)
    assert feed.done
    assert feed.error is None

    class LostBuffer:
        def offer(self, *replays, timeout_s):
            raise ReplayError("buffer 'b' was lost")

    with Feed(LostBuffer(), [lambda: [fragment(2)]], name="data") as feed:
        assert feed.join(5)
    assert feed.error.message == "source 'data': buffer 'b' was lost"


def test_a_feed_ends_without_error_once_its_buffer_has_ended():
    class EndedBuffer:
        def offer(self, *replays, timeout_s):
            raise ReplayError("buffer 'b' takes no more: its stream has ended", ended=True)

    with Feed(EndedBuffer(), [lambda: iter(lambda: fragment(2), None)], name="data") as feed:
        assert feed.join(5)
    assert (feed.fed, feed.error) == (0, None)


SPACES = gymnasium.spaces
OBS = np.zeros((1, 2), np.float32)
BOX = ActionSpec.of(SPACES.Box(0, 10, (1,)), scale=True)


def save_flat(path, arrays):
    import h5py

    names = {"obs": "observations", "action": "actions", "reward": "rewards", "terminated": "terminals"}
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[names.get(name, "timeouts")] = array
        file.create_group("metadata")["algorithm"] = "none"


def save_robomimic(path, arrays):
    import h5py

    with h5py.File(path, "w") as file:
        file.create_group("mask")["train"] = [b"demo_0"]
        for number in (0, 10, 2):
            group = file.create_group(f"data/demo_{number}")
            group.create_group("obs")["robot0_eef_pos"] = arrays["obs"] + number
            group.create_group("next_obs")["robot0_eef_pos"] = arrays["obs"] + number + 1
            group["actions"], group["rewards"] = arrays["action"], arrays["reward"]
            group["dones"] = arrays["terminated"].astype(int)


def save_minari(path, arrays, **facts):
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("episode_0")
        group["observations"] = np.concatenate([arrays["obs"], arrays["obs"][-1:]])
        group["actions"], group["rewards"] = arrays["action"], arrays["reward"]
        group["terminations"], group["truncations"] = arrays["terminated"], arrays["truncated"]
    (path.parent / "metadata.json").write_text(json.dumps({"dataset_id": "mujoco/any-v0", **facts}))


WRITE = {**SAVE, "flat.hdf5": save_flat, "robomimic.hdf5": save_robomimic, "main_data.hdf5": save_minari}


@pytest.mark.parametrize("kind", WRITE)
@pytest.mark.parametrize("actions", [None, "environment", "policy"])
def test_actions_of_the_environment_are_converted_to_a_policys_or_refused(tmp_path, kind, actions):
    recorded = np.array([[0.0], [2.5], [10.0]])
    WRITE[kind](tmp_path / f"a.{kind}", steps("--T", action=recorded))
    dataset = Dataset(tmp_path / f"a.{kind}", actions=actions)
    if kind in SAVE and actions is None:
        with pytest.raises(ConfigError, match=r"Box \[1\] from 0 to 10, .*`actions`"):
            dataset.for_env(BOX)
        dataset.for_env(ActionSpec.of(SPACES.Box(0, 10, (1,))))
        dataset.for_env(ActionSpec.of(SPACES.Box(-1, 1, (1,)), scale=True))
        return
    converted = dataset.for_env(BOX)
    expected = recorded.tolist() if actions == "policy" else [[-1], [-0.5], [1]]
    layout = Layout.of_model(({"robot0_eef_pos": np.zeros((1, 2), np.float32)} if "robo" in kind else OBS,))
    assert {"obs", "obs/robot0_eef_pos"} & converted.check(layout)
    for read in (converted, converted.checked(layout), converted.parts(1)[0](), [converted.finished(dataset.first())]):
        assert all(episode.action.tolist() == expected for episode in read)
    assert dataset.first().action.tolist() == recorded.tolist(), "the first one stays as it is"


def test_categories_are_counted_from_0(tmp_path):
    save_npz(tmp_path / "a.npz", steps("--T", action=np.array([5, 6, 7])))
    env = ActionSpec.of(SPACES.Discrete(3, start=5))
    with pytest.raises(ConfigError, match=r"discrete of 3 from 5, .*`actions`"):
        Dataset(tmp_path / "a.npz").for_env(env)
    dataset = Dataset(tmp_path / "a.npz", actions="environment").for_env(env)
    dataset.check(Layout.of_model((OBS,), ActionSpec("discrete", (3,), ())))
    assert dataset.first().action.tolist() == [0, 1, 2]
    save_npz(tmp_path / "a.npz", steps("--TT", action=np.array([5, 6, 7, 8])))
    with pytest.raises(ConfigError, match=r"episode 1 .*action: 8 at \[0\], .*5 to 7"):
        list(dataset)


@pytest.mark.parametrize(
    ("space", "env", "actions"),
    [
        ({"type": "Box", "low": [0], "high": [10], "shape": [1], "dtype": "float32"}, SPACES.Box(0, 10, (1,)), [[0.0]]),
        ({"type": "Discrete", "n": 3, "start": 5, "dtype": "int64"}, SPACES.Discrete(3, start=5), [5]),
        ({"type": "MultiDiscrete", "nvec": [3, 2], "dtype": "int64"}, SPACES.MultiDiscrete([3, 2]), [[0, 0]]),
        ({"type": "MultiBinary", "n": 2}, SPACES.MultiBinary(2), [[0, 0]]),
    ],
)
def test_minaris_space_must_equal_the_environments(tmp_path, space, env, actions):
    path = tmp_path / "main_data.hdf5"
    save_minari(path, steps("T", action=np.array(actions)), action_space=json.dumps(space))
    spec = ActionSpec.of(env, scale=True)
    expected = [[-1]] if spec.kind == "box" else np.zeros_like(actions).tolist()
    assert Dataset(path).for_env(spec).first().action.tolist() == expected
    other = {"n": 4} if "n" in space else {"nvec": [3, 3]} if "nvec" in space else {"high": [9]}
    save_minari(path, steps("T", action=np.array(actions)), action_space=json.dumps({**space, **other}))
    with pytest.raises(ConfigError, match=r"main_data.hdf5: its action space"):
        Dataset(path).for_env(spec)


def test_without_an_environment_only_categories_are_converted(tmp_path):
    path = tmp_path / "main_data.hdf5"
    save_minari(path, steps("T", action=np.array([[10.0]])))
    assert Dataset(path).for_env(None).first().action.tolist() == [[10]]
    space = {"type": "Discrete", "n": 3, "start": 5, "dtype": "int64"}
    save_minari(path, steps("T", action=np.array([6])), action_space=json.dumps(space))
    assert Dataset(path).for_env(None).first().action.tolist() == [1]
    with pytest.raises(ConfigError, match="actions is 'environment'"):
        Dataset(path, actions="environment").for_env(None)
    # The range of brayx's own is that of the data.
    save_minari(path, steps("T", action=np.array([6])), action_space=json.dumps(space), dataset_id="brayx/a-v0")
    with pytest.raises(ConfigError, match="`actions`"):
        Dataset(path).for_env(BOX)


def test_the_flat_layout_of_d4rl(tmp_path):
    save_flat(tmp_path / "a.hdf5", steps("--T-C--"))
    assert [episode.reward.tolist() for episode in Dataset(tmp_path / "a.hdf5")] == [[0, 1, 2], [3], [5]]
    save_flat(tmp_path / "long.hdf5", steps("-" * 5000))
    (only,) = Dataset(tmp_path / "long.hdf5")
    assert only.reward.tolist() == list(range(4999)), "the last step shows what follows the one before"


def test_the_demonstrations_of_robomimic(tmp_path):
    save_robomimic(tmp_path / "a.hdf5", steps("--T"))
    episodes = list(Dataset(tmp_path / "a.hdf5"))
    assert [episode.obs["robot0_eef_pos"][:, 0].tolist() for episode in episodes] == [
        [0, 1, 2, 3], [2, 3, 4, 5], [10, 11, 12, 13],
    ]  # fmt: skip
    assert [episode.terminated for episode in episodes] == [True] * 3


def test_an_hdf5_file_of_another_layout_says_what_was_expected(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["states"] = np.zeros((50, 2))
    with pytest.raises(ConfigError, match=r"Minari.* robomimic.* D4RL.*\['states'\]"):
        Dataset(tmp_path / "a.hdf5").check()
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["actions"] = np.zeros((50, 2))
    with pytest.raises(ConfigError, match=r"no obs; .*\['actions', 'states'\]"):
        Dataset(tmp_path / "a.hdf5").check()
