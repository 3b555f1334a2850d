"""Rows of recorded data as steps: scalars, actions of the environment or of a policy, and categories."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout
from tests.unit.replay.data_files import (
    BOX,
    SAVE,
    SPACES,
    save_flat,
    save_minari,
    save_npz,
    save_robomimic,
    steps,
)


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("name", ["reward", "terminated", "truncated", "log_prob", "policy_version"])
@pytest.mark.parametrize("value", [np.zeros((3, 2)), np.array(["a"] * 3)])
def test_a_scalar_field_accepts_only_one_number_per_step(tmp_path, kind, name, value):
    SAVE[kind](tmp_path / f"data.{kind}", {**steps("--T"), name: value})
    with pytest.raises(ConfigError, match=f"{name} has .*, expected a number"):
        Dataset(tmp_path / f"data.{kind}").check()


OBS = np.zeros((1, 2), np.float32)


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
