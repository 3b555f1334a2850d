"""`brayx train game.yaml`: a game with nothing but HTTP and JSON says its contract, is learned, and is served; so is
another behaviour that comes while the first one learns."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from brayx.gamecore.contract import Contract
from brayx.jobs.recorded import read_meta
from brayx.tracking import find, local_files
from tests.end_to_end.jobs import FREE_PORTS, brayx, said_on_failure, setting, trials, without_ray

CONTRACT = {
    "contract": 1,
    "observations": {"side": {"shape": [1]}, "noise": {"shape": [3]}},
    "actions": {"go": {"kind": "discrete", "size": 2, "start": 1, "labels": ["left", "right"]}},
}
THREE = {
    "contract": 1,
    "behaviour": "three",
    "observations": {"side": {"shape": [2]}},
    "actions": {"go": {"kind": "discrete", "size": 3}},
}
"""Of another behaviour of the same game."""
LENGTH = 16
ALONE = 100
"""Games that each player of the first behaviour plays before the other one has come: fewer than it learns from."""
SMALL = ("buffer.batch_size=4", "trainer.num_steps=6000", "console_port=null")
OWN = (
    "behaviours.three.network={hidden: [32], encoders: {side: sides.Wide}}",
    "behaviours.thre.trainer.num_steps=1",
)
"""Options of single behaviours; there is none of the second name."""
ENCODER = """from torch import nn


class Wide(nn.Sequential):
    def __init__(self, spec):
        super().__init__(nn.Linear(*spec.shape, 8), nn.Tanh())
"""
"""Of the user, ``sides.Wide``."""


class Side:
    """A game in which one must go to the side that one sees: an action earns 1 or nothing, a game at most `LENGTH`."""

    contract: Any = CONTRACT

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
        self.post("start", session, **{**self.contract, **start})
        reward = total = 0.0
        for _ in range(LENGTH):
            seen, best = self.see()
            reward = float(self.post("tick", session, obs=seen, reward=reward)["go"] == best)
            total += reward
        self.post("stop", session, reward=reward, terminated=True)
        return total

    def see(self) -> tuple[Any, int]:
        """An observation, and the action that earns."""
        side = self._random.choice((-1, 1))
        return {"side": [side], "noise": [self._random.random() for _ in range(3)]}, 2 if side == 1 else 1


class Three(Side):
    """The same with three sides, of another behaviour."""

    contract = THREE

    def see(self) -> tuple[Any, int]:
        best = self._random.randrange(3)
        return {"side": [float(best == 1), float(best == 2)]}, best


class Players:
    """Plays both behaviours until the door closes. The second comes when the first one has learned for a while, and the
    first one does not learn to its end before. Then it has one player less, since it has less to learn."""

    def __init__(self, door: str) -> None:
        self._door = door
        self._began, self._joined = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, args=(seed,), daemon=True)
            for seed, target in enumerate((self._play, self._play, self._join, self._join))
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits for their end."""
        for thread in self._threads:
            thread.join(60)

    def _play(self, seed: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            game = Side(self._door, seed)
            Side(self._door, seed).post("start", f"broken-{seed}", **CONTRACT)  # a game that is never heard of again
            for number in itertools.count():
                if number == ALONE // 2:
                    self._began.set()
                if number == ALONE:
                    if seed:
                        return
                    self._joined.wait(240)
                game.play(f"{seed}-{number}")

    def _join(self, seed: int) -> None:
        self._began.wait(240)
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            game = Three(self._door, seed)
            for number in itertools.count():
                game.play(f"three-{seed}-{number}")
                self._joined.set()


def test_a_game_that_says_its_contract_is_learned_and_served(tmp_path: Path) -> None:
    environment = without_ray(tmp_path)
    (tmp_path / "without" / "sides.py").write_text(ENCODER)
    options = setting(*FREE_PORTS, *SMALL, *OWN)
    words = ("train", "game.yaml", *options, *setting("actor.forced.gone=1"))
    with brayx(tmp_path, *words, environment=environment) as train, said_on_failure(train):
        train.until(train.says("waiting for a game: it connects to http://"), "it waits")
        door = re.search(r"connects to (http://[\d.:]+)", train.err)
        assert door is not None
        players = Players(door[1])
        assert train.ended() == 0
        players.join()
    assert "observations: side: 1 float32; noise: 3 float32" in train.err
    assert "actions: go: one of 2 choices from 1" in train.err
    assert train.err.count("actor.forced.gone has no effect so far: no game has this action; nearest is 'go'") == 1
    assert train.err.index("no effect so far") < train.err.index("it is learning")
    assert "behaviour 'three' begins to learn; its games wait until its model acts" in train.err
    assert train.err.count("behaviours.thre has no effect: no game has this behaviour; nearest is 'three'") == 1
    assert train.err.count("actor.forced.gone has no effect: no game has this action; nearest is 'go'") == 1
    hidden = {"agent": [64, 64], "three": [32]}
    for name, contract in {"agent": CONTRACT, "three": THREE}.items():
        mean = re.search(rf"{name}: champion: game-{name} version 1, mean return ([\d.]+)", train.out)
        assert mean is not None
        assert float(mean[1]) > 0.7 * LENGTH, "chance is half of it, or a third"
        (trial,) = trials(tmp_path, "game")["main" if name == "agent" else name]
        champion = find(f"models:/game-{name}@champion", trial.uri)
        assert champion.run_id == trial.run_id
        assert champion.tags["brayx.contract"] == Contract.parse(contract).id
        network = read_meta(local_files(champion, trial.uri))["job"]["network"]
        assert network["hidden"] == hidden[name]
        assert network["encoders"] == ({"side": "sides.Wide"} if name == "three" else {})
    kept = [Contract.parse(json.loads(file.read_text())) for file in tmp_path.rglob("contract.json")]
    assert {contract.behaviour: contract for contract in kept} == {
        "agent": Contract.parse(CONTRACT),
        "three": Contract.parse(THREE),
    }

    with brayx(tmp_path, "serve", "game.yaml", *options, environment=environment) as served, said_on_failure(served):
        served.until(
            served.says("agent acts with models:/game-agent/1; three acts with models:/game-three/1"), "both act"
        )
        door = re.search(r"http  (http://\S+)", served.err)
        assert door is not None
        game = Side(door[1], 2)
        # Far from chance, and from the 0.94 of the worst champion seen, whose three games can earn less than 0.9.
        assert sum(game.play(f"served-{number}") for number in range(6)) > 0.7 * 6 * LENGTH
        assert sum(Three(door[1], 2).play(f"three-{number}") for number in range(6)) > 0.6 * 6 * LENGTH
        assert game.play("limited", forbidden={"go": [1]}) < LENGTH, "it may only go right"
        with pytest.raises(RuntimeError, match=r"observations\.noise\.shape is \[4\], expected \[3\]"):
            game.post(
                "start", "other", **{**CONTRACT, "observations": {"side": {"shape": [1]}, "noise": {"shape": [4]}}}
            )
        with pytest.raises(RuntimeError, match='behaviour is \'four\', expected one of "agent", "three"'):
            game.post("start", "other", **{**CONTRACT, "behaviour": "four"})
        served.control_c()
        assert served.ended() in (0, 130)
    imported = tmp_path / "imported.txt"
    assert not imported.exists(), imported.read_text()
