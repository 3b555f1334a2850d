"""Files of every format for the tests of replay: numbered rows, and functions that save them."""

from __future__ import annotations

import json

import gymnasium
import numpy as np

from brayx.actions import ActionSpec


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


def grouped(path, arrays, rows):
    """A Parquet file with ``rows`` in each row group."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({name: array if isinstance(array, list) else array.tolist() for name, array in arrays.items()})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def values(episode):
    return (*episode.obs[:, 0].tolist(), len(episode), episode.terminated)


SPACES = gymnasium.spaces

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
