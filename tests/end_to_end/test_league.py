"""`brayx train` of a league, where Ray cannot even be imported: killed, resumed, finished; a player that diverges."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.engines.base import load_weights
from brayx.jobs.config import JobConfig
from brayx.league.config import LeagueConfig
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.tracking import Trial, aliases, files_of, find
from tests.end_to_end.jobs import Command, brayx, setting, trials, without_ray
from tests.league_games import AT_ONCE, Players

PARTS = Path(__file__).parent / "own_league"
PICTURES = {"league-ratings.png", "league-payoff.png", "league-drawn.png"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The job of `own_league`."""
    for file in PARTS.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    return tmp_path


def train(folder: Path, *options: str) -> Command:
    return brayx(folder, "train", "league.yaml", *setting(*options), environment=without_ray(folder))


def door(command: Command) -> str:
    """The WebSocket door's URL: there a session ends with its connection."""
    command.until(command.says("the door is http://"), "the door is open")
    match = re.search(r"the door is (http://127\.0\.0\.1:\d+)", command.err)
    assert match is not None
    return match[1].replace("http", "ws")


def books(folder: Path) -> League:
    """The league as its books have it."""
    (file,) = folder.glob("leagues/*/books.sqlite")
    config = JobConfig.load(folder / "league.yaml").leagues["league"]
    assert isinstance(config, LeagueConfig)
    return League(config, Ledger(file))


def children(folder: Path, parent: Trial) -> dict[str, list[str]]:
    """Status of the trials below a trial, by name."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        rows = database.execute(
            "SELECT name, status FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND value = ? "
            "ORDER BY start_time",
            (parent.run_id,),
        ).fetchall()
    return {
        name: [status for _, status in group] for name, group in itertools.groupby(sorted(rows), lambda row: row[0])
    }


@pytest.mark.cluster
def test_a_league_is_killed_resumed_and_finished_and_its_books_have_each_game_once(folder: Path) -> None:
    with train(folder) as killed, Players(door(killed)) as players:
        killed.until(killed.says("main:1 joins the pool"), "a first snapshot")
        killed.until(lambda: players.ended >= 100, "a hundred games")
        killed.process.kill()
        killed.process.wait(30)
    league = books(folder)
    counted = league.counters()["counted"]
    assert players.ended <= counted <= players.ended + AT_ONCE
    before = {snapshot.member: snapshot.digest for snapshot in league.snapshots}
    rated = {row.member: row.games for row in league.standings()}
    assert sum(rated.values()) > 0
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    if aliases("higher", uri):  # as if the kill had come between the books and the registry
        MlflowClient(uri).delete_registered_model_alias("higher", "champion")

    with train(folder) as resumed:
        assert door(resumed)
        assert "(resumed)" in resumed.err
        assert books(folder).counters()["counted"] == counted
        with Players(door(resumed)) as more:
            resumed.until(lambda: resumed.process.poll() is not None or "finished after" in resumed.out, "its end")
        assert resumed.process.wait(60) == 0, resumed.err
    league = books(folder)
    after = {snapshot.member: snapshot.digest for snapshot in league.snapshots}
    assert before.items() <= after.items()
    assert len(set(after.values())) == len(after)  # never twice the same weights
    assert more.ended <= league.counters()["counted"] - counted <= more.ended + AT_ONCE
    assert league.counters()["contradictory"] == 0
    for row in league.standings():
        assert row.member.label in resumed.out
    (trial,) = trials(folder, "higher")["league"]
    status = children(folder, trial)
    assert status["main"] == ["FINISHED"]
    assert set(status["exploiter"]) == {"FINISHED"}
    frozen = [snapshot for snapshot in after if snapshot.player == "exploiter"]
    # After each of its snapshots, but the last at the end of the training.
    assert len(frozen) - 1 <= len(status["exploiter"]) <= len(frozen) + 1, (frozen, status)
    for member, digest in after.items():
        tags = find(f"models:/higher/{member.version}", uri).tags
        assert (tags["brayx.player"], tags["brayx.digest"]) == (member.player, digest)
    assert league.champion() is not None
    assert aliases("higher", uri) == {"champion": league.champion().version}
    assert {picture.name for picture in folder.rglob("league-*.png")} == PICTURES


@pytest.mark.cluster
def test_ctrl_c_prints_the_standings_and_a_restart_that_was_killed_goes_on(folder: Path) -> None:
    said = "player 'exploiter' restarts from its first weights"
    with train(folder, "trainer.num_steps=100000") as stopped, Players(door(stopped)):
        stopped.until(stopped.says(said), "the exploiter restarts")
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.process.wait(60) == 130, stopped.err
    league = books(folder)
    for row in league.standings():
        assert re.search(rf"^ +{row.member.label} +{row.points:.0f} .* {row.games}\b", stopped.out, re.M), stopped.out
    ended = sum(count for name, count in league.counters().items() if name != "refused")
    assert f" env steps, {ended:,} games" in stopped.out, "each once, however many of its seats learned"

    # As if a kill had come between the snapshot and the end of its trial.
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    newest = [snapshot for snapshot in league.snapshots if snapshot.member.player == "exploiter"][-1]
    before = client.get_model_version("higher", str(newest.member.version)).run_id
    for run in client.search_runs([client.get_run(before).info.experiment_id], "attributes.run_name = 'exploiter'"):
        if run.info.start_time > client.get_run(before).info.start_time:
            client.delete_run(run.info.run_id)
    client.update_run(before, status="KILLED")
    with train(folder, "trainer.num_steps=100000") as resumed, Players(door(resumed)):
        resumed.until(lambda: said in resumed.err or "exploiter:" in resumed.err, "the exploiter has restarted")
        assert said in resumed.err
        assert "exploiter:" not in resumed.err.partition(said)[0], "its steps were in the books, so no snapshot was due"
        resumed.process.send_signal(signal.SIGINT)
        assert resumed.process.wait(60) == 130, resumed.err
    assert client.get_run(before).info.status == "FINISHED"


@pytest.mark.cluster
def test_a_player_that_diverges_is_out_and_the_league_goes_on(folder: Path) -> None:
    text = (folder / "league.yaml").read_text()
    broken = "exploiter: {role: exploiter, of: main, share: 0.3, trainer: {hooks: break_it},"
    (folder / "league.yaml").write_text(text.replace("exploiter: {role: exploiter, of: main, share: 0.3,", broken))
    (folder / "break_it.py").write_text('def loss(outputs, obs):\n    return outputs["value"].sum() * float("nan")\n')
    with train(folder, "trainer.num_steps=600") as command, Players(door(command)):
        command.until(command.says("player 'exploiter' is out, the league continues"), "the exploiter is out")
        command.until(lambda: command.process.poll() is not None or "finished after" in command.out, "its end")
        assert command.process.wait(60) == 0, command.err
    (trial,) = trials(folder, "higher")["league"]
    assert children(folder, trial) == {"main": ["FINISHED"], "exploiter": ["FAILED"]}


@pytest.mark.cluster
def test_a_past_player_is_a_registered_version_and_must_have_the_models_graph(folder: Path) -> None:
    with train(folder, "trainer.num_steps=300", "league.players={main: {role: main, snapshot_every: 150}}") as first:
        with Players(door(first)):
            first.until(lambda: first.process.poll() is not None, "its end")
        assert first.process.returncode == 0, first.err
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    before = aliases("higher", uri)["champion"]
    past = "league.players={main: {role: main, against: {old: 1}, snapshot_every: 50}, old: {role: past, version: 1}}"
    with train(folder, "trial=second", "trainer.num_steps=200", past) as second:
        with Players(door(second)):
            second.until(lambda: second.process.poll() is not None, "its end")
        assert second.process.returncode == 0, second.err
    incumbent = "old:1" if before == 1 else f"champion:{before}"
    assert f"{incumbent} is the champion to beat: the alias champion of higher is at version {before}" in second.err
    assert "there is no champion yet" not in second.err, "the alias moves through the gate alone"
    crowned = re.findall(r"main:(\d+) is champion: its win rate against", second.err)
    assert aliases("higher", uri)["champion"] == int([before, *crowned][-1])
    assert re.search(r"old:1 +\d+ +[\d.]+ +[1-9]", second.out), second.out
    parts = folder / "league_parts.py"
    parts.write_text(parts.read_text().replace("nn.Linear(1, 1)", "nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))"))
    with train(folder, "trial=third", past) as third:
        assert third.process.wait(120) != 0
    assert "player 'old', version 1 of higher: weights lack 'value.0.weight'" in third.err


STYLES = """
  players:
    bold: {role: main, against: {latest: 1}, trainer: {algorithm: {reward_heads: [{weight: 0.1}, {weight: 1}]}}}
    timid: {role: main, against: {latest: 1}, trainer: {algorithm: {reward_heads: [{weight: 0.1}, {weight: -1}]}}}
"""


@pytest.mark.cluster
def test_players_with_other_reward_weights_learn_other_styles(folder: Path) -> None:
    """A reward of two parts, the result and the number named: one player likes high numbers, the other low ones."""
    job, parts = folder / "league.yaml", folder / "league_parts.py"
    text = job.read_text()
    job.write_text(text[: text.index("  players:")].rstrip() + STYLES)
    parts.write_text(
        parts.read_text()
        .replace("self.value(obs).squeeze(-1)", "self.value(obs)")
        .replace("self.value = nn.Linear(1, 1)", "self.value = nn.Linear(1, 2)")
        .replace(
            'push("games", fragment)',
            'heads = np.array([[episode[-1].input["reward"], int(episode[0].step.action) - 1]], np.float32)\n'
            '            push("games", dataclasses.replace(fragment, extras={"reward_heads": heads}))',
        )
        .replace("import random", "import dataclasses\nimport random")
    )
    with train(folder, "trainer.num_steps=1000", "trainer.learning_rate=0.05") as command, Players(door(command)):
        command.until(lambda: command.process.poll() is not None or "finished after" in command.out, "its end")
        assert command.process.wait(60) == 0, command.err
    numbers = {}
    for player in ("bold", "timid"):
        members = [snapshot.member for snapshot in books(folder).snapshots]
        newest = [member.version for member in members if member.player == player][-1]
        with files_of(f"models:/higher/{newest}", f"sqlite:///{folder / 'mlflow.db'}") as version:
            weights = load_weights(version / "weights.npz")
        scores = np.exp(weights["logits.weight"][:, 0] + weights["logits.bias"])  # of the one observation, 1
        numbers[player] = float(np.arange(3) @ scores / scores.sum())
    assert numbers["bold"] > 1.4, numbers
    assert numbers["timid"] < 0.6, numbers
