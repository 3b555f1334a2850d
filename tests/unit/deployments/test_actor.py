"""Where the weights of an application come from. The application itself is tested on Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from brayx.actor.config import ActorConfig
from brayx.actor.deployment import ActorReplica
from brayx.engines.base import save_weights
from brayx.errors import BadWeights, ConfigError, ModelError
from deployments.actor import WeightSource, _normalising, _Refused, actor_spec, application
from deployments.job import JobConfig

ROOT = Path(__file__).parents[3]


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


class Built(Exception):
    """Ends a replica's start where the rest needs Ray."""


class Starting(ActorReplica):
    def __del__(self) -> None:  # type: ignore[override]  # it has nothing to end
        pass


@pytest.mark.parametrize("mode", ["train", "serve"])
@pytest.mark.parametrize("where", ["file", "environment"])
async def test_keys_are_asked_for_when_a_job_is_served_not_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["train", "serve"], where: str
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("arena: sixteen or more of them\n")
    file.chmod(0o600)
    overrides = [f"actor.keys_file={file}"] if where == "file" else []
    if where == "environment":
        monkeypatch.setenv("BRAYX_KEYS_FILE", str(file))
    # Whatever the YAML says of the mode, a training trains, and what is served is served.
    other = {"train": "serve", "serve": "train"}[mode]
    job = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml", [*overrides, f"mode={other}"])
    spec = actor_spec(job, "actor", mode=mode, weights={"model": WeightSource()})
    bound: Any = application(spec, name="actor", directory="sessions")._bound_deployment

    async def build(handles: Mapping[str, Any]) -> Any:
        raise Built

    _, config, *rest = bound.init_args
    assert isinstance(config, ActorConfig)
    replica = Starting.__new__(Starting)
    with pytest.raises(Built):
        await ActorReplica.__init__(replica, build, config, *rest, **bound.init_kwargs)
    assert (replica._keys is not None) == (mode == "serve")


def test_games_do_not_fill_a_buffer_of_normalised_observations() -> None:
    """Nor one of their own, which the same model would learn from."""
    config: dict[str, Any] = {"a": {"kind": "rollout", "buffer": "b", "normalise_obs": True}, "c": {"buffer": "d"}}
    assert _normalising({**config, "e": 1}) == "a"
    config["a"]["normalise_obs"] = False
    assert _normalising(config) is None
    with pytest.raises(ConfigError, match="agents of this job cannot push"):
        _Refused("why").push(1)
