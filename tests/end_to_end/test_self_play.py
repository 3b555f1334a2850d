"""A game whose contracts name two teams is learned by self-play: the learner beats its first version. If the teams are
different behaviours, they learn against each other's past."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from brayx.tracking import find
from tests.end_to_end.jobs import FREE_PORTS, Command, brayx, said_on_failure, setting, trials, without_ray
from tests.end_to_end.test_game import Side

CONTRACT = {
    "contract": 1,
    "behaviour": "duel",
    "observations": {"noise": {"shape": [1]}},
    "actions": {"say": {"kind": "discrete", "size": 6}},
}
DOOR = r"(?:connects to|the door is) (http://[\d.:]+)"
DUEL = [{**CONTRACT, "team": team} for team in range(2)]
RIVALS = [{**CONTRACT, "behaviour": behaviour, "team": team} for team, behaviour in enumerate(("striker", "keeper"))]
LENGTH = 6
ALONE = 8
"""Games before self-play begins: too few to learn from."""
OPTIONS = (
    "buffer.batch_size=2",
    "console_port=null",
    "self_play.snapshot_every=1000",
    "self_play.swap_every=96",
    "self_play.team_every=2000",
    "self_play.pool_size=100",
    "self_play.gate={min_games: 10, share: 0.4}",
)


class Duel(Side):
    """A game of two teams that say numbers: the greater sum wins. Only the end is rewarded."""

    def duel(self, contracts: Sequence[Mapping[str, Any]] = DUEL) -> None:
        game, sums = uuid.uuid4().hex, [0, 0]
        sessions = [self.session(game, team) for team in range(2)]
        for session, contract in zip(sessions, contracts, strict=True):
            self.post("start", session, **contract)
        for _ in range(LENGTH):
            for team, session in enumerate(sessions):
                sums[team] += self.post("tick", session, obs=[0.0], reward=0.0)["say"]
        won = (sums[0] > sums[1]) - (sums[0] < sums[1])
        for session, reward in zip(sessions, (won, -won), strict=True):
            self.post("stop", session, reward=float(reward), terminated=True)

    def session(self, game: str, team: int) -> str:
        return f"{game}{team}"


class OfRivals(Duel):
    """The same, and then one of which each team is a behaviour."""

    def duel(self, contracts: Sequence[Mapping[str, Any]] = DUEL) -> None:
        super().duel(contracts)
        super().duel(RIVALS)


class Duels:
    """A context in which games are played until the door closes; only few of them before ``may_learn`` is set."""

    def __init__(self, door: str, kind: type[Duel] = Duel) -> None:
        self.may_learn, self._ended = threading.Event(), threading.Event()
        self._door, self._kind = door, kind
        self._threads = [threading.Thread(target=self._play, args=(seed,), daemon=True) for seed in range(2)]

    def __enter__(self) -> Duels:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.may_learn.set()
        for thread in self._threads:
            thread.join(60)

    def _play(self, seed: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            game = self._kind(self._door, seed)
            for _ in range(ALONE):
                game.duel()
            self.may_learn.wait(240)
            while not self._ended.is_set():
                game.duel()


@contextlib.contextmanager
def training(folder: Path, kind: type[Duel], *options: str) -> Iterator[tuple[Command, Duels]]:
    """A training whose games are played; interrupted in the end, which shows its standings."""
    words = ("train", "game.yaml", *setting(*FREE_PORTS, *OPTIONS, *options))
    with brayx(folder, *words, environment=without_ray(folder)) as train, said_on_failure(train):
        train.until(lambda: re.search(DOOR, train.err) is not None, "it is open")
        with Duels(re.findall(DOOR, train.err)[0], kind) as duels:
            yield train, duels
            train.control_c()
            assert train.ended() in (0, 130)
        standings = train.out + train.err
        assert re.search(r"main:1 +\d+ ", standings), "the table has the first version"
        assert re.search(r"main:\d+ .*champion", standings)


def test_teams_are_learned_by_self_play_and_different_behaviours_against_each_other_s_past(tmp_path: Path) -> None:
    with training(tmp_path, Duel) as (train, duels):
        train.until(train.says("behaviour 'duel' has teams 0, 1: one learns"), "it begins")
        duels.may_learn.set()
        better = r"main:\d+ is champion: its win rate against main:1 is"
        train.until(lambda: re.search(better, train.err) is not None, "the learner becomes better")

    (tmp_path / "rivals.json").write_text(json.dumps([DUEL[0], *RIVALS]))
    with training(tmp_path, OfRivals, "contract=rivals.json", "self_play.snapshot_every=200") as (train, duels):
        duels.may_learn.set()  # a trial is open once something was learned
        train.until(train.says("behaviour 'duel' goes on with its self-play"), "the first one plays itself")
        for team, behaviour in enumerate(("striker", "keeper")):
            train.until(train.says(f"behaviour '{behaviour}' has team {team}: while another team learns"), "it begins")
        for behaviour in ("striker", "keeper"):
            train.until(train.says(f"'{behaviour}': {behaviour}:1 is champion: there is no champion yet"), "it plays")
        train.until(lambda: re.search(r"main:\d+ joins the pool", train.err) is not None, "the first one learns on")
    for behaviour in ("striker", "keeper"):
        (trial,) = trials(tmp_path, "game")[behaviour]
        assert find(f"models:/game-{behaviour}/1", trial.uri).run_id == trial.run_id
    options = setting(*FREE_PORTS, "console_port=null")
    with (
        brayx(tmp_path, "serve", "game.yaml", *options, environment=without_ray(tmp_path)) as served,
        said_on_failure(served),
    ):
        served.until(served.says("striker acts with models:/game-striker/"), "it acts")
        door = re.search(r"http  (http://\S+)", served.err)
        assert door is not None
        game = Duel(door[1], 0)
        for request in ({"version": 1}, {"player": "keeper"}, {"rating": -1e6}):
            session = uuid.uuid4().hex
            reply = game.post("start", session, **RIVALS[1], opponent=request)
            assert reply["opponent"]["player"] == "keeper"
            assert reply["opponent"]["points"] is not None
            assert game.post("tick", session, obs=[0.0], reward=0.0)["say"] in range(6)
        with pytest.raises(RuntimeError, match="brayx league calibrate"):
            game.post("start", "none", **RIVALS[1], opponent={"level": "easy"})
