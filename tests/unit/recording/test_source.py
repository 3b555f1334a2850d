"""Recordings as demonstrations: what becomes a transition, where sessions are cut, and which are selected."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.algorithms.config import AlgorithmConfig
from brayx.commands import cli
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.sources import check_sources
from brayx.recording import dataset
from brayx.recording.config import Selection
from brayx.recording.reader import open as open_recordings
from brayx.recording.source import selects
from brayx.types import Step
from tests.recorded import Tick
from tests.unit.recording.demonstrations import rewards, save, tick


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ({}, "abc"),
        ({"agent": "red"}, "a"),
        ({"agent": "*"}, "abc"),
        ({"player": "main*"}, "bc"),
        ({"player": "main:7"}, "c"),
        ({"min_result": 2}, "c"),
        ({"max_result": 2}, "b"),
        ({"min_version": 5}, "b"),
        ({"max_version": 4, "human": False}, "c"),
        ({"reported": "win"}, "b"),
        ({"human": True}, "a"),
    ],
)
def test_sessions_are_selected(tmp_path: Path, only: Mapping[str, Any], expected: str) -> None:
    newer = Step(np.zeros(2, np.float32), np.asarray(0), 0.0, 6, {"state/h": np.zeros(2, np.float32)})
    mixed = [tick(0), tick(1)]
    save(tmp_path, "a", mixed, session="g-agent-red", start='{"human": true}')
    two = [tick._replace(attributes={**tick.attributes, "step": newer}) for tick in mixed]
    save(tmp_path, "b", two, session="g-agent-blue", player="main", result=1.0, reported="win", start="no JSON")
    save(tmp_path, "c", mixed, player="main:7", result=3.0, start='{"human": 1}')
    names = {"a": "g-agent-red", "b": "g-agent-blue", "c": "c"}
    selected = [episode.session for episode in open_recordings(str(tmp_path)) if selects(Selection(**only), episode)]
    assert selected == [names[index] for index in expected]


def test_a_selection_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only\.min_result: .*got 'high'"):
        dataset(tmp_path, only={"min_result": "high"})
    np.savez(tmp_path / "a.npz", obs=np.zeros(2))
    with pytest.raises(ConfigError, match=r"a\.npz: `only`"):
        dataset(tmp_path / "a.npz", only={"player": "main"})


def test_recordings_that_lack_a_field_are_named_and_left_out(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(ConfigError, match="holds no episode"):
        dataset(tmp_path).check()
    without = Tick(0, 0.1, 0.01, b"{}", b"", {"value": 0.5})
    save(tmp_path, "a", [without])
    with pytest.raises(ConfigError, match=r"'a' .*obs; .* value.*`fields`"):
        dataset(tmp_path).check()
    save(tmp_path, "0", [tick(0), tick(1)])
    save(tmp_path, "b", [tick(0, body={"reward": "much"}), tick(1, body={"reward": "much"})])
    with caplog.at_level(logging.WARNING):
        assert rewards(list(dataset(tmp_path))) == [[1]]
    assert "2 of 3 sessions were left out, at least in part; the last: session 'b': input/reward" in caplog.text
    with pytest.raises(ConfigError, match="there is no recording at"):
        dataset(tmp_path / "none", "recording").check()


def test_a_broken_file_leaves_the_others(tmp_path: Path, caplog: Any) -> None:
    save(tmp_path, "a", [tick(0), tick(1)])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        assert rewards(list(dataset(tmp_path))) == [[1]]
    assert "1 files cannot be read" in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_a_folder_without_a_readable_file_is_refused_with_the_reason(
    tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(count):
        (tmp_path / f"{number}.parquet").write_bytes(b"no Parquet")
    with pytest.raises(ConfigError, match=r"0\.parquet"):
        list(dataset(tmp_path))
    for words in (["list"], ["export", "--format", "parquet", "--out", str(tmp_path / "out")]):
        assert cli.main(["recordings", words[0], str(tmp_path), *words[1:]]) == 2
        assert "0.parquet" in capsys.readouterr().err


JOB = """
project: p
trial: t
network: {kind: config, hidden: [4]}
model: {kind: model, module: given_model}
buffer: {kind: buffer}
trainer: {kind: trainer, model: model, buffers: [buffer], algorithm: {name: ALGORITHM}}
data: {kind: source, buffer: buffer, path: recordings, demonstration: true, fields: FIELDS}
"""


@pytest.mark.parametrize(("algorithm", "fits"), [("bc", True), ("sac", False)])
def test_rewards_are_needed_only_to_learn_from_them(tmp_path: Path, algorithm: str, fits: bool) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    save(folder, "a", [tick(0, body={"reward": None}), tick(1, body={"reward": None})])
    (tmp_path / "given_model.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB.replace("ALGORITHM", algorithm).replace("FIELDS", "{}"))
    job = JobConfig.load(tmp_path / "job.yaml")
    assert isinstance(job.trainers["trainer"].algorithm, AlgorithmConfig)
    if fits:
        assert "reward" not in check_sources(job)["data"]
        return
    with pytest.raises(ConfigError, match=r"'data': .*reward.*'sac'"):
        check_sources(job)
    (tmp_path / "job.yaml").write_text(JOB.replace("ALGORITHM", algorithm).replace("FIELDS", "{reward: input/move}"))
    assert "reward" in check_sources(JobConfig.load(tmp_path / "job.yaml"))["data"]
