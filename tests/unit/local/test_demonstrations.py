"""`brayx.local.demonstrations`: batches are views of one block, passes are complete, and state starts with episodes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from brayx.actions import ActionSpec
from brayx.algorithms.bc import BCConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.errors import ConfigError
from brayx.local.demonstrations import Demonstrations
from brayx.local.train import train_local
from brayx.local.training import Training
from brayx.replay import npz
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout
from brayx.trainer.prefetch import Prepare

EXAMPLE = np.zeros((2, 1), np.float32)
LAYOUT = Layout.of_model((EXAMPLE,))


def written(path: Path, lengths: list[int]) -> Path:
    """Episodes whose observation is their number and whose action the step."""
    obs = np.concatenate([np.full((length, 1), number, np.float32) for number, length in enumerate(lengths)])
    action = np.concatenate([np.arange(length) for length in lengths])
    last = np.zeros(len(obs), bool)
    last[np.cumsum(lengths) - 1] = True
    np.savez(path, obs=obs, action=action, reward=np.ones(len(obs)), terminated=last)
    return path


def test_batches_are_views_of_one_block_however_many_are_kept(tmp_path: Path) -> None:
    """As those of `mixed` are, which keeps tensors of many."""
    recorded = Demonstrations(written(tmp_path / "a.npz", [5] * 20), LAYOUT, batch_size=6, unroll_length=5, seed=0)
    prepare = Prepare((torch.from_numpy(EXAMPLE),), torch.device("cpu"))
    batches = [prepare(recorded.draw()).tensors["obs"][0] for _ in range(40)]
    assert {tuple(obs.shape) for obs in batches} == {(6, 6, 1)}
    addresses = [obs.data_ptr() for obs in batches]
    assert max(addresses) - min(addresses) <= (20 - 6) * batches[0][0].nbytes
    assert len({obs[:, 0, 0].sum().item() for obs in batches}) > 4, "other columns are together in another pass"


def test_every_column_comes_in_each_pass(tmp_path: Path) -> None:
    recorded = Demonstrations(written(tmp_path / "a.npz", [5] * 20), LAYOUT, batch_size=6, unroll_length=5, seed=0)
    assert recorded.rounds == 4
    first = [recorded.draw()["obs"][:, 0, 0] for _ in range(recorded.rounds)]
    assert set(np.concatenate(first)) == set(range(20))
    later = [recorded.draw()["obs"][:, 0, 0] for _ in range(2 * (recorded.rounds + 1))]
    assert set(np.concatenate(later)) == set(range(20))


def test_an_episode_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, read = Dataset(written(tmp_path / "a.npz", [3, 4])), []
    inner = npz.episodes
    monkeypatch.setattr(npz, "episodes", lambda file, fields: (read.append(file), inner(file, fields))[1])
    Demonstrations(dataset, LAYOUT, batch_size=2, unroll_length=4, seed=0)
    assert len(read) == 1


def test_a_memory_that_was_not_recorded_begins_with_each_episode_and_none_is_cut(tmp_path: Path, caplog) -> None:
    """A column has as many whole episodes as fit; one that is longer than a column is cut, and said so."""
    initial = {"state/h": np.full(3, 0.5, np.float32)}
    lengths = [3, 4, 2, 6, 1, 9, 2]
    recorded = Demonstrations(
        written(tmp_path / "a.npz", lengths), LAYOUT, batch_size=100, unroll_length=7, seed=0, initial=initial
    )
    batch = recorded.draw()
    assert (batch["state/h"][batch["mask"] > 0] == 0.5).all()
    assert batch["mask"].sum() == sum(lengths)
    columns = sorted(
        [*zip(obs[mask > 0, 0].astype(int).tolist(), action[mask > 0].tolist(), strict=True)]
        for obs, action, mask in zip(batch["obs"], batch["action"], batch["mask"], strict=True)
    )
    whole = [[(number, step) for step in range(length)] for number, length in enumerate(lengths)]
    assert columns == [whole[0] + whole[1], whole[2], whole[3] + whole[4], whole[5][:7], whole[5][7:] + whole[6]]
    assert "1 of 7 demonstrations have more than unroll_length (7) steps" in caplog.text


def test_a_memory_that_was_recorded_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "a.npz"
    state = np.arange(6, dtype=np.float32)[:, None]
    np.savez(
        data, obs=np.zeros((6, 1), np.float32), action=np.zeros(6), reward=np.ones(6),
        terminated=np.arange(6) == 5, **{"state/h": state},
    )  # fmt: skip
    recorded = Demonstrations(
        data, LAYOUT, batch_size=9, unroll_length=3, seed=0, initial={"state/h": np.zeros(1, np.float32)}
    )
    assert sorted(recorded.draw()["state/h"][:, :3].flatten()) == [0, 1, 2, 3, 4, 5]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_batches_of_a_job_lack_of_a_memory_is_said(tmp_path: Path) -> None:
    recorded = Demonstrations(written(tmp_path / "a.npz", [3]), LAYOUT, batch_size=9, unroll_length=3, seed=0)
    prepare = Prepare((EXAMPLE, {"h": np.zeros((2, 3), np.float32)}), torch.device("cpu"), state_at=1)
    with pytest.raises(ConfigError, match=r"no 'state/h', .* train_local"):
        prepare(recorded.draw())


def test_recorded_actions_of_the_environment_are_converted_before_imitation(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    steps = {"obs": np.zeros((3, 1), np.float32), "reward": np.ones(3), "terminated": [0, 0, 1]}
    np.savez(path, **steps, action=[[0.0], [2.5], [10.0]])
    layout = replace(LAYOUT, env=ActionSpec.of(gymnasium.spaces.Box(0, 10, (1,)), scale=True))
    recorded = Demonstrations(Dataset(path, actions="environment"), layout, batch_size=1, unroll_length=3, seed=0)
    assert recorded.draw()["action"].tolist() == [[[-1], [-0.5], [1], [0]]]
    with pytest.raises(ConfigError, match="its actions are the environment's"):
        Demonstrations(path, layout, batch_size=1, unroll_length=3, seed=0)


@pytest.mark.parametrize("algorithm", [BCConfig(), MixedConfig()])
def test_a_training_refuses_demonstrations_that_do_not_say_whose_actions_they_have(
    tmp_path: Path, algorithm: Any
) -> None:
    """`Pendulum-v1` takes -2 to 2."""
    path = tmp_path / "a.npz"
    np.savez(path, obs=np.zeros((3, 3), np.float32), action=np.ones((3, 1)), reward=np.ones(3), terminated=[0, 0, 1])
    with pytest.raises(ConfigError, match=r"Box \[1\] from -2 to 2, .* -1 to 1"):
        train_local("Pendulum-v1", algorithm, Training(num_steps=100), demonstrations=path)
