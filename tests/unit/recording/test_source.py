"""Recordings as demonstrations: what becomes a transition, where sessions are cut, and which are selected."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
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
from brayx.recording.chunks import write_chunk
from brayx.recording.columns import packed
from brayx.recording.config import Selection
from brayx.recording.fragments import fields_of, fragments
from brayx.recording.index import SessionPart
from brayx.recording.reader import open as open_recordings
from brayx.recording.source import selects
from brayx.replay.packing import Layout
from brayx.types import Fragment, Step
from tests.recorded import Tick, columns_of

STOP = {"obs": [9.0, 9.0], "reward": 7.0, "terminated": True}


def tick(number: int, *, event: str = "", stop: Mapping[str, Any] | None = None, **more: Any) -> Tick:
    """A tick whose observation is its number, and whose body has the reward of the action before."""
    obs = np.array([number, -number], np.float32)
    step = Step(obs, np.asarray(number % 3), -0.5, 4, {"state/h": np.full(2, number, np.float32)})
    body = {"obs": obs.tolist(), "reward": float(number), "move": number % 2, **more.pop("body", {})}
    attributes = {"step": step, "value": 0.5, **more}
    return Tick(number, 0.1, 0.01, json.dumps(body).encode(), b'{"action": 5}', attributes, event, encoded(stop))


def encoded(body: Mapping[str, Any] | None) -> bytes:
    return b"" if body is None else json.dumps(body).encode()


def save(folder: Path, name: str, ticks: Sequence[Tick], **part: Any) -> None:
    """Writes a session as one chunk."""
    with (folder / f"{name}.parquet").open("wb") as file:
        row = SessionPart(name, part.pop("session", name), 0.0, 0, len(ticks), **part)
        write_chunk(file, [row], packed(columns_of(ticks)))


def rewards(fragments_read: Sequence[Fragment]) -> list[list[float]]:
    return [fragment.reward.tolist() for fragment in fragments_read]


def test_a_stopped_session_is_one_fragment_with_its_last_action(tmp_path: Path) -> None:
    save(tmp_path, "a", [tick(0), tick(1), tick(2, stop=STOP)])
    (only,) = dataset(tmp_path)
    assert only.reward.tolist() == [1, 2, 7], "a body has the reward of the action before it"
    assert only.action.tolist() == [0, 1, 2]
    assert only.obs[:, 0].tolist() == [0, 1, 2, 2], "never bootstrapped from"
    assert (only.terminated, only.truncated) == (True, False)
    assert only.log_prob.tolist() == [-0.5] * 3
    assert only.policy_version.tolist() == [4] * 3
    assert {name: extra[:, 0].tolist() for name, extra in only.extras.items()} == {"state/h": [0, 1, 2]}
    has = dataset(tmp_path, demonstration=True).check(Layout.of_model((np.zeros((1, 2), np.float32),)))
    assert has == {
        "obs", "action", "reward", "terminated", "log_prob", "policy_version", "state/h", "demonstration",
    }  # fmt: skip


@pytest.mark.parametrize("stop", [None, {}, {"terminated": False, "reward": 1.0}, {"terminated": True}])
def test_an_action_without_a_known_outcome_is_left_out(tmp_path: Path, stop: Mapping[str, Any] | None) -> None:
    save(tmp_path, "a", [tick(0), tick(1), tick(2, stop=stop)])
    (only,) = dataset(tmp_path)
    assert (only.reward.tolist(), only.obs[:, 0].tolist()) == ([1, 2], [0, 1, 2])
    assert (only.terminated, only.truncated) == (False, True)


def test_fields_of_the_bodies_give_the_observation_after_the_last_action(tmp_path: Path) -> None:
    save(tmp_path, "a", [tick(0), tick(1, stop={**STOP, "terminated": False, "over": True})])
    fields = {"obs": "input/obs", "action": "input/move", "legal": "value", "terminated": "stop/over"}
    (only,) = dataset(tmp_path, fields=fields)
    assert only.obs.tolist() == [[0, 0], [1, -1], [9, 9]]
    assert only.obs.dtype == np.float32
    assert (only.action.tolist(), only.terminated) == ([0, 1], True)
    assert only.log_prob.tolist() == [0, 0], "it is that of another action"
    assert only.extras["legal"].tolist() == [0.5, 0.5]
    assert "log_prob" not in dataset(tmp_path, fields=fields).check()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ({3: "skipped 2"}, [[1, 2], [4, 5]]),
        ({3: "fallback"}, [[1, 2], [5]]),
        ({3: "fallback, forwarded"}, [[1, 2], [5]]),
        ({3: "forwarded, skipped 2"}, [[1, 2], [4, 5]]),
        ({3: "forwarded"}, [[1, 2, 3, 4, 5]]),
        ({0: "fallback"}, [[2, 3, 4, 5]]),
        ({5: "error"}, [[1, 2, 3, 4]]),
        ({3: "resumed"}, [[1, 2, 3, 4, 5]]),
    ],
)
def test_a_session_is_cut_where_the_game_did_not_get_the_agents_action(
    tmp_path: Path, events: Mapping[int, str], expected: list[list[float]]
) -> None:
    save(tmp_path, "a", [tick(number, event=events.get(number, "")) for number in range(6)])
    cut = list(dataset(tmp_path))
    assert rewards(cut) == expected
    assert all(fragment.truncated for fragment in cut)


def test_a_session_is_cut_where_ticks_are_missing(tmp_path: Path) -> None:
    save(tmp_path, "a", [tick(number) for number in (0, 1, 4, 5, 6)])
    assert rewards(list(dataset(tmp_path))) == [[1], [5, 6]]


def test_ticks_without_the_arrays_are_left_out_alone(tmp_path: Path) -> None:
    """An error's tick has no action, and so has no tick of its pack."""
    save(tmp_path, "1", [tick(0), tick(1), tick(2)])
    failed = Tick(3, 0.1, 0.01, b"{}", b"", {}, "error")
    with (tmp_path / "2.parquet").open("wb") as file:
        write_chunk(file, [SessionPart("1", "1", 0.0, 3, 1, end="error")], columns_of([failed]))
    assert rewards(list(dataset(tmp_path))) == [[1, 2]]


def test_a_long_session_comes_in_fragments_that_continue(tmp_path: Path) -> None:
    save(tmp_path, "a", [*(tick(number) for number in range(6)), tick(6, stop=STOP)])
    (episode,) = open_recordings(str(tmp_path))
    pieces = list(fragments(episode, fields_of(episode, {}), most=2))
    assert rewards(pieces) == [[1, 2], [3, 4], [5, 6, 7]]
    assert [(fragment.terminated, fragment.truncated) for fragment in pieces] == [
        (False, False),
        (False, False),
        (True, False),
    ]
    assert [fragment.obs[-1, 0] for fragment in pieces] == [2, 4, 6]
    (whole,) = fragments(episode, fields_of(episode, {}), most=None)
    assert whole.reward.tolist() == [1, 2, 3, 4, 5, 6, 7]


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
