"""`brayx replay --resimulate` of a game of several seats: the replies of each seat, and games of connect four."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import brayx
from brayx.errors import BadRecording, ConfigError
from brayx.gamecore.protocol import game_of
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.model.build import build_model
from brayx.recording import open as open_recordings
from brayx.recording.copying import copy
from brayx.tracking import Trial, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from tests.recorded import ended
from tests.unit.conftest import Run
from tests.waiting import until

WAIT_S = 60.0

FOLDER = TEMPLATES / "league"
GAME = f"python {FOLDER / 'four_game.py'} {{tcp_url}} --games 1"


@dataclass(frozen=True)
class Four:
    """Two versions of a model, and a game that the first one played with itself.

    Attributes:
        folder: has ``recordings``.
        uri: tracking URI.
        name: the game's.
    """

    folder: Path
    uri: str
    name: str


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, new_tracking_db) -> Four:
    folder = tmp_path_factory.mktemp("four")
    uri = new_tracking_db(folder)
    config = JobConfig.load(FOLDER / "four.yaml", ["network.channels=8", "network.hidden=16"])
    trial = Trial.open("four", "made", uri)
    for number in (1, 2):
        torch.manual_seed(number)
        module, _ = build_model(config.folder, config.models["model"].module, "model", config.as_dict())
        with torch.no_grad():
            for parameter in module.parameters():  # new policies are almost uniform, and so almost equal
                parameter.add_(0.3 * torch.randn(parameter.shape))
        (folder / f"{number}").mkdir()
        about = {"job": config.as_dict(), "folder": config.folder}
        counters = Counters(env_steps=number, policy_version=number)
        checkpoint.save(folder / f"{number}", module, torch.optim.Adam(module.parameters()), counters, about, None)
        register(trial, trial.save_checkpoint(folder / f"{number}", number, {}), "four", alias=None)
    options = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": 0, "console_port": None}
    options |= {"network.channels": 8, "network.hidden": 16}
    recording = {"recording": {"kind": "recording", "folder": str(folder / "recordings")}}
    models = {"model": "models:/four/1"}
    with brayx.serve(FOLDER / "four.yaml", options | recording, models=models, tracking=uri) as service:
        words = [sys.executable, str(FOLDER / "four_game.py"), service.urls["tcp"], "--games", "1"]
        subprocess.run(words, check=True, timeout=WAIT_S)
    recorded = folder / "recordings"  # on a busy machine its writer starts later than the service ends
    until(lambda: recorded.is_dir() and ended(recorded) == 2, "they are written", WAIT_S)
    return Four(folder, uri, game_of(open_recordings(str(recorded))[0].session))


def resimulated(command: Run, game: Four, session: str, *words: object, recordings: str = "recordings") -> Any:
    done = command(
        "replay", str(game.folder / recordings), "--tracking", game.uri, "--session", session, "--json",
        "--resimulate", GAME, *map(str, words),
    )  # fmt: skip
    assert done.returncode == 0
    return json.loads(done.stdout)


def rows(report: Any) -> dict[str, Any]:
    return {row["session"].rpartition("-")[2]: row for row in report["sessions"]}


def test_both_seats_are_played_again_and_then_by_another_version(four: Four, command: Run) -> None:
    same = resimulated(command, four, four.name, "--model", "models:/four/1", "--from-tick", 2)
    assert (same["model"], same["from_tick"]) == ("models:/four/1", 2)
    for row in rows(same).values():
        assert (row["first"], row["ticks"], row["end"]) == (None, row["ticks_before"], "stop")
        assert row["result"] == row["result_before"]
        assert row["player"] == "models:/four/1"
    assert {row["result"] for row in rows(same).values()} == {1.0, -1.0}
    other = resimulated(command, four, four.name, "--model", "models:/four/2", "--from-tick", 2)
    firsts = [row["first"] for row in rows(other).values() if row["first"] is not None]
    assert firsts
    assert min(firsts) >= 2


def test_one_seat_is_played_by_another_version_against_the_recorded_player(
    four: Four, command: Run, tmp_path: Path
) -> None:
    report = resimulated(
        command, four, f"{four.name}-agent-red", "--model", "models:/four/2", "--others", "models:/four/1",
        "--out", tmp_path,
    )  # fmt: skip
    red, yellow = rows(report)["red"], rows(report)["yellow"]
    assert (red["player"], red["first"] is None) == ("models:/four/2", False)
    assert yellow["player"] in ("models:/four/1", "")
    new = {episode.session.rpartition("-")[2]: episode for episode in open_recordings(str(tmp_path))}
    assert (len(new["red"]), new["red"].player, new["red"].result) == (red["ticks"], "models:/four/2", red["result"])
    if yellow["player"]:  # its board differs as soon as red's move does
        assert new["yellow"].read().number.tolist() == list(
            range(yellow["ticks"] - len(new["yellow"]), yellow["ticks"])
        )
        assert new["yellow"].player == "models:/four/1"
    text = command(
        "replay", str(four.folder / "recordings"), "--tracking", four.uri, "--session", f"{four.name}-agent-red",
        "--model", "models:/four/1", "--resimulate", GAME,
    ).stdout.splitlines()  # fmt: skip
    assert text[0] == "the game's inputs were equal up to tick 0; from there on models:/four/1 played"
    assert [line.split()[0] for line in text[2:]] == [f"{four.name}-agent-red", f"{four.name}-agent-yellow"]
    assert text[-1].endswith("its recording")


def test_a_game_with_a_seat_that_is_not_recorded_is_refused(
    four: Four, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    red = [episode for episode in open_recordings(str(four.folder / "recordings")) if episode.session.endswith("red")]
    copy(red, str(four.folder / "red"))
    words = ["--model", "models:/four/1", "--from-tick", 1]
    with pytest.raises(BadRecording, match="seat 'yellow'"):
        resimulated(command, four, four.name, *words, recordings="red")
    with pytest.raises(ConfigError, match="--others"):
        resimulated(command, four, four.name, *words, "--others", "random")
    with pytest.raises(ConfigError, match="no player is 'nobody'"):
        resimulated(command, four, f"{four.name}-agent-red", *words, "--others", "nobody")


def test_the_sessions_of_a_game_are_compared_together(four: Four, command: Run) -> None:
    report = brayx.replay_recording(
        str(four.folder / "recordings"), "models:/four/1", tracking=four.uri, session=four.name
    )
    assert [comparison.session for comparison in report.compared] == [
        f"{four.name}-agent-{seat}" for seat in ("red", "yellow")
    ]
    assert np.isfinite(report.total.kl)
