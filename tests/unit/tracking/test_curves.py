"""Curves: of the named trials, over the requested axis, in a picture."""

from __future__ import annotations

import pytest

from brayx.commands import cli
from brayx.errors import ConfigError
from brayx.metrics import Recorder
from brayx.tracking import Trial
from brayx.tracking.curves import curve, draw, labels, trials_with
from brayx.tracking.hub import Hub


@pytest.fixture
def trials(tracking_db):
    opened = []
    for number, name in enumerate(["first", "second", "second"]):
        trial = Trial.open(f"project {number}", name, tracking_db)
        for step in (100, 200):
            trial.log_metrics({"return/last_100_games": step + number, "learner/seconds": step / 10}, step)
        trial.finish()
        opened.append(trial)
    return opened


def test_a_curve_is_over_steps_or_seconds(trials):
    assert curve(trials[1], "return/last_100_games", "env_steps") == [(100, 101), (200, 201)]
    assert curve(trials[1], "return/last_100_games", "seconds") == [(10, 101), (20, 201)]
    with pytest.raises(ConfigError, match="has no metric 'nothing'"):
        curve(trials[1], "nothing", "env_steps")


@pytest.mark.parametrize("x_axis", ["env_steps", "updates", "seconds"])
def test_a_curve_is_over_what_was_asked_for_whatever_its_trial_is_written_over(tracking_db, x_axis):
    trial = Trial.open("project", x_axis, tracking_db)
    hub = Hub(trial, interval_s=3600, x_axis=x_axis)
    recorder = Recorder()
    for number in range(3):
        for name, value in (("env_steps", 500), ("updates", 2), ("episode_return", number), ("seconds", 10 * number)):
            recorder.add(name, value)
        hub.push(recorder.drain())
        hub.flush()
    hub.close()
    metric = "return/last_100_games"
    assert curve(trial, metric, "env_steps") == [(500, 0), (1000, 0.5), (1500, 1)]
    assert curve(trial, metric, "updates") == [(2, 0), (4, 0.5), (6, 1)]
    assert curve(trial, metric, "seconds") == [(0, 0), (10, 0.5), (20, 1)]


def test_a_number_that_is_written_while_no_steps_come_is_at_those_that_had(tracking_db):
    trial = Trial.open("project", "waiting", tracking_db)
    trial.log_metrics({"loss": 3, "replay/env_steps": 500}, 1)
    trial.log_metrics({"loss": 2}, 2)
    trial.log_metrics({"loss": 1, "replay/env_steps": 700}, 3)
    assert curve(trial, "loss", "env_steps") == [(500, 2), (500, 3), (700, 1)]
    with pytest.raises(ConfigError, match="has no metric 'learner/updates'"):
        curve(trial, "loss", "updates")


def test_every_curve_is_drawn_with_its_label():
    figure = draw([("a", [(0, 1), (2, 3)]), ("b", [(0, 5)])], metric="return", against="seconds")
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [2, 3]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds", "return")


def test_trials_of_one_name_are_told_apart_by_the_settings_that_differ_or_else_by_id(tracking_db):
    named = [Trial.open("project", "same", tracking_db, resume=False) for _ in range(2)]
    other = Trial.open("project", "other", tracking_db)
    ids = [f"same ({trial.run_id[:8]})" for trial in named]
    assert labels([*named, other]) == [*ids, "other"]
    named[1].log_params({"gamma": 0.9})
    assert labels([*named, other]) == ["same (gamma=default)", "same (gamma=0.9)", "other"]


def test_the_command_writes_a_picture_or_says_why_not(trials, tmp_path, command):
    out = tmp_path / "curves.png"
    words = ["--tracking", trials[0].uri, "--out", str(out)]
    assert command("visualize", "first", trials[1].run_id, *words).returncode == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    for wrong in (["third", *words], ["first", *words[:-1], str(tmp_path / "none" / "curves.png")]):
        done = command("visualize", *wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("brayx: ")


def test_the_published_command_line_draws_every_trial_of_a_folder(trials, tmp_path, capsys):
    folder = str(tmp_path)
    assert cli.main(["visualize", "--logdir", folder, "--save_fig", "True"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["visualize", "--logdir", folder, "--save_fig", "False"]) == 0
    ends = capsys.readouterr().out.splitlines()
    assert ends == ["project 0: first: 200 at 200", "project 1: second: 201 at 200", "project 2: second: 202 at 200"]
    with pytest.raises(ConfigError) as none:
        trials_with("nothing", trials[0].uri)
    assert none.value.details["metric"] == "nothing"
