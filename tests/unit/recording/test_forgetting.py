"""A forgotten session is in no file, index or trial; the others keep their ticks and frames."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from brayx.commands import cli
from brayx.errors import BadRecording
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.forgetting import forget
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.recording.trials import log
from brayx.tracking import Trial, initialise, tracking_uri
from tests.unit.recording.pictures import config, image, is_close, play

TICKS = 10


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of two files, the second with one session only."""
    path = tmp_path_factory.mktemp("recorded")
    for sessions in (("red", "game-agent-a", "blue"), ("game-agent-b",)):
        recorder = SessionRecorder(config(path), Recorder())
        for session in sessions:
            play(recorder, session, [image(number) for number in range(TICKS)])
        recorder.close(60.0)
    return path


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "recordings"
    shutil.copytree(recorded, copied)
    return copied


def sessions(folder: Path) -> dict[str, Recording]:
    recordings = open_recordings(str(folder))
    assert not recordings.unreadable
    return {episode.session: episode for episode in recordings}


def mentions(folder: Path, text: str) -> bool:
    """Whether a file has this text, in an index or elsewhere."""
    contents = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return any(text.encode() in (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data) for data in contents)


def test_the_other_sessions_of_a_file_keep_their_ticks_and_frames(folder: Path) -> None:
    before = [path for path in folder.iterdir() if path.suffix == ".parquet"]
    began = sessions(folder)["red"].began
    assert mentions(folder, "red")
    assert forget(str(folder), ["red"]) == (1, TICKS, 1, began, {"red"})
    assert not mentions(folder, "red")
    left = sessions(folder)
    assert sorted(left) == ["blue", "game-agent-a", "game-agent-b"]
    assert list(left).index("game-agent-a") < list(left).index("blue"), "in the order of their file"
    for episode in left.values():
        assert episode["score"].tolist() == list(range(TICKS))
        assert all(is_close(frame, image(number)) for number, frame in enumerate(episode.images()))
    after = [path for path in folder.iterdir() if path.suffix == ".parquet"]
    assert len(after) == len(before)
    assert len({*before} & {*after}) == len(before) - 1, "a file without the session is not touched"
    assert forget(str(folder), ["red"]).files == 0


def test_a_game_is_all_its_sessions_and_a_file_with_no_other_is_deleted(folder: Path) -> None:
    assert forget(str(folder), ["game"])[:3] == (2, 2 * TICKS, 2)
    assert sorted(sessions(folder)) == ["blue", "red"]
    assert forget(str(folder), ["blue", "r*"])[:3] == (2, 2 * TICKS, 1)
    assert list(folder.iterdir()) == []


def test_after_a_cut_off_the_next_one_leaves_no_copies(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "before")
    forget(str(folder), ["red"])
    for file in (tmp_path / "before").iterdir():  # as if no old file had been deleted yet
        shutil.copy(file, folder)
    forget(str(folder), ["red"])
    assert sorted(sessions(folder)) == ["blue", "game-agent-a", "game-agent-b"]
    assert not mentions(folder, "red")


def test_nothing_is_removed_if_a_file_cannot_be_read(folder: Path) -> None:
    (folder / "20200101T000000-00000000-000001.parquet").write_bytes(b"broken")
    with pytest.raises(BadRecording, match="nothing is removed"):
        forget(str(folder), ["red"])
    assert mentions(folder, "red")
    with pytest.raises(BadRecording, match="no folder of recordings"):
        forget(str(folder / "none"), ["red"])


@pytest.mark.parametrize("name", [".unfinished-a.parquet", ".unfinished-a.mp4", "20261127T175729-564cfb19-000009.mp4"])
def test_nothing_is_removed_while_a_file_is_not_finished(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"half of it")
    before = sorted(file.name for file in folder.iterdir())
    with pytest.raises(BadRecording) as refused:
        forget(str(folder), ["red"])
    (left,) = refused.value.details["files"]
    assert left.endswith(name)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_the_command_reaches_folders_and_trials(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = initialise(tracking_uri(tmp_path / "store"))
    trial = Trial.open("game", "first", uri)
    _, _, address = log(open_recordings(str(folder)), trial)
    trial.finish()
    words = ["recordings", "forget", str(folder), "--tracking", uri, "--session"]
    assert cli.main([*words, "red", "--session", "nobody", "--session", "game-agent-b"]) == 2
    out, error = capsys.readouterr()
    assert error == "brayx: no recorded session is nobody\n"
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(folder), address]
    assert all(line.partition(": ")[2].startswith("2 sessions of 20 ticks removed") for line in lines)
    assert sorted(sessions(folder)) == ["blue", "game-agent-a"]
    assert sorted(episode.session for episode in open_recordings(address, tracking=uri)) == ["blue", "game-agent-a"]
