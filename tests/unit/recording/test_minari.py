"""`brayx.recording.minari`: the spaces are those of the data; sessions of several games make no dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brayx.commands import cli
from brayx.errors import ConfigError
from brayx.recording.minari import write_minari
from brayx.recording.source import reader
from tests.unit.recording.demonstrations import STOP, save, tick


def test_minaris_spaces_are_those_of_the_data(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    save(tmp_path, "a", [tick(0), tick(1), tick(2, stop=STOP)])
    data = reader(tmp_path)
    assert write_minari(data.episodes(tmp_path, {"obs/x": "obs", "obs/y": "value"}), tmp_path / "out") == (1, 3)
    facts = json.loads((tmp_path / "out" / "data" / "metadata.json").read_text())
    assert json.loads(facts["action_space"]) == {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}
    assert json.loads(facts["observation_space"])["subspaces"]["x"] == {
        "type": "Box", "dtype": "float32", "shape": [2], "low": [-2.0, -2.0], "high": [2.0, 2.0],
    }  # fmt: skip
    assert (facts["total_episodes"], facts["total_steps"]) == (1, 3)


def test_sessions_of_several_games_make_no_dataset(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    save(tmp_path, "a", [tick(0), tick(1)])
    save(tmp_path, "b", [tick(0, body={"obs": [1.0]}), tick(1, body={"obs": [1.0]})])
    episodes = reader(tmp_path).episodes(tmp_path, {"obs": "input/obs"})
    with pytest.raises(ConfigError, match=r"float32 of shape \(1,\), .* of \("):
        write_minari(episodes, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir()), "nothing is left"


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a", [tick(0), tick(1)])
    words = ["recordings", "export", str(tmp_path), "--out", str(tmp_path / "out"), "--format"]
    assert cli.main([*words, "minari", "--only", "player"]) == 2
    assert "--only is 'player', expected KEY=VALUE" in capsys.readouterr().err
    assert cli.main([*words, "minari", "--only", "player=nobody"]) == 2
    assert "no recorded session is selected" in capsys.readouterr().err
    assert cli.main([*words, "rerun", "--field", "reward=input/score"]) == 2
    assert "--field is for --format minari" in capsys.readouterr().err
