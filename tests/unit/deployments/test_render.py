"""Pictures from render functions: saved results, refusals, and the choice of sessions."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brayx.actor.agent import State
from brayx.errors import ConfigError
from brayx.tracking import Trial
from deployments.render import EpisodeRenderer, draw_episode, log_failure, save_picture


def frame(value: int) -> np.ndarray:
    return np.full((4, 6, 3), value, np.uint8)


def test_an_image_becomes_a_png_and_a_list_an_animation(tmp_path: Path) -> None:
    png = save_picture(frame(7), f"{tmp_path}/a.b")
    assert png == tmp_path / "a.b.png"
    assert np.asarray(Image.open(png)).tolist() == frame(7).tolist()
    gif = save_picture([frame(0), frame(128), frame(255)], f"{tmp_path}/c")
    assert Image.open(gif).n_frames == 3


@pytest.mark.parametrize("picture", [np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), [], [frame(1), "x"]])
def test_other_results_are_refused(tmp_path: Path, picture: object) -> None:
    with pytest.raises(ConfigError, match="uint8"):
        save_picture(picture, f"{tmp_path}/a")  # type: ignore[arg-type]


def test_sessions_are_chosen_at_the_given_interval() -> None:
    renderer = EpisodeRenderer(lambda episode: Future(), every=3)
    assert [renderer.open("s", b"", "") is not None for _ in range(7)] == [True, False, False, True, False, False, True]


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
    renders = {"bad": ("drawing", "bad"), "good": ("drawing", "good")}
    assert draw_episode(episode, 21.5, renders, str(tmp_path), trial) == ["good/step-0068331-return-21.5.png"]
    (found,) = tmp_path.parent.rglob("episodes/good/step-*.png")
    assert Image.open(found).size == (5, 2)


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
