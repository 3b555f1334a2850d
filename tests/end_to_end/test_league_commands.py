"""`brayx league`, `brayx match`, `brayx promote --league` and levels that are served, after a short training of the
league template."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from brayx.commands import cli
from brayx.gamecore.client import Client
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.payoff import Pair
from brayx.ports import free_port
from brayx.tracking import aliases
from tests.end_to_end.jobs import FREE_PORTS, TEMPLATES, Command, brayx, serves, setting

LEAGUE = {
    "kind": "league",
    "model": "model",
    "players": {
        "main": {"role": "main", "snapshot_every": 800, "against": {"latest": 0.4, "uniform": 0.6}},
        "random": {"role": "script", "script": "four_agent.random_move"},
    },
    "gate": {"min_games": 5, "confidence": 0.01},
}
SMALL = (
    "trainer.num_steps=2500", "moves.batch_size=8", "network.channels=8", "network.hidden=16", "actor.share=none",
    "actor.gamecores.0.num=1", "trainer.max_lost_share=null",
)  # fmt: skip


EMPTY = {"board": [0] * 42, "legal": [True] * 7, "reward": 0.0}
"""A tick of an empty board."""


def job_folder(folder: Path) -> Path:
    """The template's files, with a league in the job."""
    for file in (TEMPLATES / "league").iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    job = yaml.safe_load((folder / "four.yaml").read_text())
    (folder / "four.yaml").write_text(yaml.safe_dump({**job, "league": LEAGUE}, sort_keys=False))
    return folder


def ended(command: Command, code: int = 0) -> Command:
    assert command.process.wait(240) == code, command.err
    return command


@pytest.mark.cluster
def test_players_of_a_league_are_shown_matched_and_promoted(tmp_path: Path) -> None:
    folder, small = job_folder(tmp_path), setting(*SMALL, *FREE_PORTS)
    with brayx(folder, "train", "four.yaml", *small, *setting("trainer.num_steps=1000000")) as training:
        training.until(training.says("main:2 joins the pool"), "two snapshots")
        with brayx(folder, "league", "show", "four.yaml") as shown:
            ended(shown)
        assert "main:1" in shown.out
        with brayx(folder, "promote", "--league", "main:1") as refused:
            ended(refused, 2)
        assert "is in training" in refused.err
        training.process.send_signal(signal.SIGINT)
        ended(training, 130)

    with brayx(folder, "league", "export", "books.json") as exported:
        ended(exported)
    books = json.loads((folder / "books.json").read_text())
    assert books["counters"]["counted"] > 0
    newest = books["snapshots"][-1]["member"]

    with brayx(
        folder, "match", "four.yaml", newest, "random", "--games", "30", "--explore", "--json", *small
    ) as played:
        ended(played)
    result = json.loads(played.out)
    assert (result["games"], result["a"], result["b"]) == (30, newest, "random")
    assert {name: seat["games"] for name, seat in result["seats"].items()} == {"red": 15, "yellow": 15}
    assert result["wins"] + result["draws"] + result["losses"] == 30
    assert 0.0 < result["predicted"] < 1.0

    with brayx(
        folder, "league", "calibrate", "four.yaml", "--levels", "low,high", "--games", "12", *small
    ) as calibrated:
        ended(calibrated)
    assert "levels.yaml" in calibrated.out
    levels = yaml.safe_load((folder / "levels.yaml").read_text())["levels"]
    assert list(levels) == ["low", "high"]
    assert levels["low"]["points"] <= levels["high"]["points"]
    port = free_port()
    with brayx(folder, "serve", "four.yaml", *small, *setting(f"actor.port={port}")) as serving:
        serving.until(lambda: serves(f"http://127.0.0.1:{port}", "model"), "it served the champion")
        for level, rated in levels.items():
            with Client(f"http://127.0.0.1:{port}", timeout_s=120.0) as client:
                said = json.loads(client.start(opponent={"level": level}))["opponent"]
                assert (said["level"], said["version"], said["points"]) == (level, rated["version"], rated["points"])
                assert json.loads(client.tick(json.dumps(EMPTY)))["move"] in range(7)
        with Client(f"http://127.0.0.1:{port}", timeout_s=120.0) as client:
            assert json.loads(client.start(b'{"opponent": {"player": "random"}}'))["opponent"]["version"] is None
            assert json.loads(client.tick(json.dumps(EMPTY)))["move"] in range(7)

    tactical = ("models:/four@champion", "four_agent.tactical_move")
    with brayx(folder, "match", "four.yaml", *tactical, "--games", "100000", *small) as long:
        long.until(long.says(" of 100000 games"), "a line of progress")
        long.process.send_signal(signal.SIGINT)
        assert long.process.wait(60) == 130
    assert "of 100000 games\n" in long.out
    assert "as red" in long.out
    assert "broken off" not in long.out

    champion = Member.parse(books["champion"])
    other = next(member for snapshot in books["snapshots"] if (member := Member.parse(snapshot["member"])) != champion)
    for wins, code, said in (
        (0, 2, f"{other.label} does not become champion: its win rate against {champion.label} is 0.000 to "),
        (40, 0, f"its win rate against {champion.label} is "),
    ):
        decide(folder, books, other, champion, wins)
        with brayx(folder, "promote", "--league", other.label) as promoted:
            ended(promoted, code)
        assert said in promoted.out + promoted.err
        served = other if code == 0 else champion
        assert aliases("four", f"sqlite:///{folder / 'mlflow.db'}")["champion"] == served.version


def decide(folder: Path, books: dict[str, Any], member: Member, champion: Member, wins: int) -> None:
    """Writes games into the books: a member has so many wins of 40 against the champion, and all against the others."""
    (file,) = folder.glob("leagues/*/books.sqlite")
    rivals = {Member.parse(row["member"]) for row in books["ratings"]} - {member}
    pairs = {}
    for rival in rivals:
        won = wins if rival == champion else 40
        pair = Pair(won, 0, 40 - won, float(won), 40.0)
        pairs[min(member, rival), max(member, rival)] = pair if member < rival else pair.reversed()
    with contextlib.closing(Ledger(file)) as ledger:
        ledger.count_game(f"{wins} wins", pairs, {}, {}, {"counted": 40 * len(rivals)})


def test_a_match_that_cannot_be_played_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job_folder(tmp_path))
    gamecore = "actor.gamecores.0.command"
    for words, said in {
        ("randon", "random"): "no player is 'randon'; nearest is 'random'",
        ("random", "random", "--set", "actor.gamecores=[]"): "actor.gamecores is empty",
        ("random", "random", "--set", f"{gamecore}=sleep 60", "--timeout-s", "1"): "no session came within 1 s",
        ("random", "random", "--set", f"{gamecore}='false'"): "a gamecore ended with status 1",
        ("random", "four_agent.encode", *setting(*SMALL)): "no game has counted",
    }.items():
        assert cli.main(["match", "four.yaml", *words]) == 2
        assert said in capsys.readouterr().err
