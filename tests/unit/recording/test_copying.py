"""`brayx.recording.copying`: sessions are copied with their frames, each under a name of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from brayx.commands import cli
from brayx.errors import BadRecording
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.copying import copy, file_name
from brayx.recording.group import PACK_TICKS
from brayx.recording.index import SessionPart
from brayx.recording.recorder import SessionRecorder
from brayx.recording.source import reader
from brayx.recording.video import Video
from brayx.recording.writer import Folder
from tests.recorded import columns_of
from tests.unit.recording.demonstrations import tick
from tests.unit.recording.pictures import config, image, is_close, play, write


@pytest.mark.parametrize("session", ["x" * 3000, "\U0001f600" * 3000, "../../etc/passwd", "a\x00b\n"])
def test_any_session_has_a_name_for_its_file(tmp_path: Path, session: str) -> None:
    Folder(str(tmp_path), 10**9).write([SessionPart("e", session, 0.0, 0, 1)], columns_of([tick(0)]))
    name = file_name(reader(tmp_path).recordings()[0])
    (tmp_path / f"{name}.mp4").touch()
    assert (tmp_path / f"{name}.mp4").parent.samefile(tmp_path)


def test_sessions_are_copied_with_their_frames(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path / "from", fps=12), Recorder())
    for session in "abc":
        play(recorder, session, [image(number) if number % 9 else None for number in range(PACK_TICKS + 9)])
    recorder.close(60.0)
    a, b, c = open_recordings(str(tmp_path / "from"))
    target = str(tmp_path / "to")
    assert copy([a, c, a], target) == (2, 2 * len(a))
    assert copy([a, b, c], target, without=[a.id, c.id]) == (1, len(b))
    copied = {episode.session: episode for episode in open_recordings(target)}
    for episode in (a, b, c):
        other = copied[episode.session]
        assert (other.fps, other.frames, other.left_out) == (12, episode.frames, episode.left_out)
        assert other.inputs() == episode.inputs()
        assert np.array_equal(other["score"], episode["score"])
        for frame, two in zip(episode.images(), other.images(), strict=True):
            assert (frame is None and two is None) or np.array_equal(frame, two)  # type: ignore[arg-type]


def test_a_session_over_several_files_becomes_one_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Folder(str(tmp_path / "from"), 10**9), 5)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "mp4", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"1 sessions of 20 frames: {tmp_path / 'to'}\n"
    video = Video((tmp_path / "to" / "s-s.mp4").open("rb"), "s", [(48, 64)], 30)
    assert all(is_close(video.image(number), image(number)) for number in range(20))
    assert video.image(20) is None
    video.close()
    recorder = SessionRecorder(config(tmp_path / "none"), Recorder())
    play(recorder, "s", [None])
    recorder.close(60.0)
    words[2] = str(tmp_path / "none")
    assert cli.main(words) == 2
    assert "no selected session has frames" in capsys.readouterr().err
    with pytest.raises(BadRecording, match="has no frames"):
        open_recordings(str(tmp_path / "none"))[0].save_video(tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()
