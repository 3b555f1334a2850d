"""Recorded sessions as fragments: what becomes a transition, and where a session is cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.recording import dataset
from brayx.recording.chunks import write_chunk
from brayx.recording.fragments import fields_of, fragments
from brayx.recording.index import SessionPart
from brayx.recording.reader import open as open_recordings
from brayx.replay.packing import Layout
from tests.recorded import Tick, columns_of
from tests.unit.recording.demonstrations import STOP, rewards, save, tick


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
