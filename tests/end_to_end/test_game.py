"""`brayx train game.yaml`: a game with nothing but HTTP and JSON says its contract, is learned, and is served."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from brayx.gamecore.contract import Contract
from brayx.tracking import find
from tests.end_to_end.jobs import FREE_PORTS, brayx, said_on_failure, setting, trials, without_ray

CONTRACT = {
    "contract": 1,
    "observations": {"side": {"shape": [1]}, "noise": {"shape": [3]}},
    "actions": {"go": {"kind": "discrete", "size": 2, "start": 1, "labels": ["left", "right"]}},
}
LENGTH = 16
SMALL = ("buffer.batch_size=4", "trainer.num_steps=6000", "console_port=null")


class Side:
    """A game in which one must go to the side that one sees: an action earns 1 or nothing, a game at most `LENGTH`."""

    def __init__(self, door: str, seed: int) -> None:
        host, port = door.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=240)
        self._random = random.Random(seed)

    def post(self, kind: str, session: str, **body: Any) -> Any:
        self._connection.request("POST", "/step", json.dumps(body), {"session": session, "step_kind": kind})
        with self._connection.getresponse() as reply:
            text = reply.read()
            if reply.status != 200:
                raise RuntimeError(json.loads(text)["message"])
            return json.loads(text) if kind != "stop" else None

    def play(self, session: str, **start: Any) -> float:
        """Plays a game; returns what it earned."""
        self.post("start", session, **CONTRACT, **start)
        reward = total = 0.0
        for _ in range(LENGTH):
            side = self._random.choice((-1, 1))
            seen = {"side": [side], "noise": [self._random.random() for _ in range(3)]}
            reward = float(self.post("tick", session, obs=seen, reward=reward)["go"] == (2 if side == 1 else 1))
            total += reward
        self.post("stop", session, reward=reward, terminated=True)
        return total


def played(door: str, seed: int) -> None:
    """Plays until the door closes."""
    game = Side(door, seed)
    number = 0
    while True:
        try:
            game.play(f"{seed}-{number}")
        except (OSError, http.client.HTTPException, RuntimeError):
            return
        number += 1


def test_a_game_that_says_its_contract_is_learned_and_served(tmp_path: Path) -> None:
    environment = without_ray(tmp_path)
    options = setting(*FREE_PORTS, *SMALL)
    with brayx(tmp_path, "train", "game.yaml", *options, environment=environment) as train, said_on_failure(train):
        train.until(train.says("waiting for a game: it connects to http://"), "it waits")
        door = re.search(r"connects to (http://[\d.:]+)", train.err)
        assert door is not None
        games = [threading.Thread(target=played, args=(door[1], seed), daemon=True) for seed in range(2)]
        for game in games:
            game.start()
        assert train.ended() == 0
        for game in games:
            game.join(60)
    assert "observations: side: 1 float32; noise: 3 float32" in train.err
    assert "actions: go: one of 2 choices from 1" in train.err
    mean = re.search(r"champion: game version 1, mean return ([\d.]+)", train.out)
    assert mean is not None
    assert float(mean[1]) > 0.7 * LENGTH, "chance is half of it"
    (trial,) = trials(tmp_path, "game")["main"]
    assert find("models:/game@champion", trial.uri).tags["brayx.contract"] == Contract.parse(CONTRACT).id
    (kept,) = tmp_path.rglob("contract.json")
    assert Contract.parse(json.loads(kept.read_text())) == Contract.parse(CONTRACT)

    with brayx(tmp_path, "serve", "game.yaml", *options, environment=environment) as served, said_on_failure(served):
        served.until(served.says("model acts with models:/game/1"), "the champion acts")
        door = re.search(r"http  (http://\S+)", served.err)
        assert door is not None
        game = Side(door[1], 2)
        # Far from chance, and from the 0.94 of the worst champion seen, whose three games can earn less than 0.9.
        assert sum(game.play(f"served-{number}") for number in range(6)) > 0.7 * 6 * LENGTH
        assert game.play("limited", forbidden={"go": [1]}) < LENGTH, "it may only go right"
        with pytest.raises(RuntimeError, match=r"observations\.noise\.shape is \[4\], expected \[3\]"):
            game.post(
                "start", "other", **{**CONTRACT, "observations": {"side": {"shape": [1]}, "noise": {"shape": [4]}}}
            )
        served.control_c()
        assert served.ended() in (0, 130)
    imported = tmp_path / "imported.txt"
    assert not imported.exists(), imported.read_text()
