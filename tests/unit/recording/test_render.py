"""Pictures from render functions: saved results, refusals, and the choice of sessions."""

from __future__ import annotations

import io
import logging
from concurrent.futures import Future
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from brayx.actor.agent import State
from brayx.errors import ConfigError
from brayx.recording.render import EpisodeRenderer, Render, draw_episode, frames_of, log_failure, save_frames
from brayx.tracking import Trial


def frame(value: int) -> np.ndarray:
    return np.full((4, 6, 3), value, np.uint8)


def test_an_image_becomes_a_png_and_a_list_an_animation(tmp_path: Path) -> None:
    png = save_frames([frame(7)], f"{tmp_path}/a.b")
    assert png == tmp_path / "a.b.png"
    assert np.asarray(Image.open(png)).tolist() == frame(7).tolist()
    gif = save_frames([frame(0), frame(128), frame(255)], f"{tmp_path}/c")
    assert Image.open(gif).n_frames == 3


def test_a_video_has_every_frame_also_if_its_sides_are_odd(tmp_path: Path) -> None:
    shades = [0, 60, 120, 180, 240]
    path = save_frames([np.full((33, 47, 3), shade, np.uint8) for shade in shades], f"{tmp_path}/a", "mp4")
    with av.open(path) as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 20)
        frames = [each.to_ndarray(format="rgb24") for each in video.decode(stream)]
    assert [each.shape for each in frames] == [(34, 48, 3)] * 5
    assert [each.mean() for each in frames] == pytest.approx(shades, abs=3)


@pytest.mark.parametrize("picture", [np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), [], [frame(1), "x"]])
def test_other_results_are_refused(picture: object) -> None:
    with pytest.raises(ConfigError, match="uint8"):
        frames_of(picture)


def test_sessions_are_chosen_at_the_given_interval() -> None:
    renderer = EpisodeRenderer(lambda episode: Future(), every=3)
    assert [renderer.open("s", b"", "", "", b"") is not None for _ in range(7)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_a_drawn_game_is_saved_in_the_trial_and_a_broken_function_loses_only_its_picture(
    tmp_path: Path, tracking_db: str
) -> None:
    (tmp_path / "drawing.py").write_text(
        "import numpy as np\n"
        "def good(episode): return np.full((2, len(episode), 3), 9, np.uint8)\n"
        "def bad(episode): raise KeyError('obs')\n"
    )
    trial = Trial.open("p", "t", tracking_db)
    trial.log_metrics({"replay/env_steps": 68331.0}, 68331)
    episode = [State("../odd/id", tick=tick) for tick in range(5)]
    renders = {"bad": Render("drawing", "bad"), "good": Render("drawing", "good")}
    assert draw_episode(episode, 21.5, renders, str(tmp_path), trial) == ["good/step-0068331-return-21.5.png"]
    (found,) = tmp_path.parent.rglob("episodes/good/step-*.png")
    assert Image.open(found).size == (5, 2)
    (poster,) = (path for path in tmp_path.parent.rglob("images/episodes~good+step+68331+*.png"))
    assert Image.open(poster).size == (5, 2)


def test_an_animation_has_a_poster_and_is_in_the_event_files(tmp_path: Path, tracking_db: str) -> None:
    (tmp_path / "moving.py").write_text(
        "import numpy as np\n"
        "def film(episode): return [np.full((30, 40, 3), 8 * state.tick, np.uint8) for state in episode]\n"
    )
    trial = Trial.open("p", "t", tracking_db, tensorboard=str(tmp_path / "board"))
    for _ in range(2):
        draw_episode(
            [State("a", tick=tick) for tick in range(30)], None, {"a": Render("moving", "film")}, str(tmp_path), trial
        )
    posters = sorted(tmp_path.parent.rglob("images/episodes~a+step+0+*.png"))
    assert len(posters) == 2
    assert Image.open(posters[0]).size == (4 * 40 + 3 * 4, 3 * 30 + 2 * 4)
    read = EventAccumulator(f"{trial.tensorboard}/episodes")
    read.Reload()
    shown = read.Images("a")
    assert [(event.step, event.width, event.height) for event in shown] == [(0, 40, 30)] * 2
    assert Image.open(io.BytesIO(shown[0].encoded_image_string)).n_frames == 30  # type: ignore[attr-defined]


def test_a_failed_drawing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    good: Future[list[str]] = Future()
    good.set_result([])
    bad: Future[list[str]] = Future()
    bad.set_exception(RuntimeError("no room"))
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    try:
        log_failure(good)
        log_failure(bad)
    finally:
        logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {
        "an episode could not be drawn: RuntimeError: no room"
    }
