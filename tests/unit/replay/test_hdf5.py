"""`brayx.replay.hdf5`: files of Minari, D4RL and robomimic become episodes; others are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout
from tests.unit.replay.data_files import BOX, SPACES, save_flat, save_minari, save_robomimic, steps


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
