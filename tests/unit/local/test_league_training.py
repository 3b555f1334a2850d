"""The league of a process: what each seat acts with, what is learned from, and where the snapshots' weights are."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json

import numpy as np
import pytest
import torch

from brayx.actor.agent import Agent, Services, forward, push, record
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.players import LearningPlayer, Seating, scripted
from brayx.engines.torch import TorchEngine
from brayx.errors import AgentError, ModelError, VersionUnknown
from brayx.league.config import LeagueConfig
from brayx.league.ledger import Ledger
from brayx.local.league_training import LocalLeague
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotFiles, SnapshotModel, digest_of
from brayx.replay.buffer import NullBuffer
from brayx.types import Fragment
from tests.unit.league.play import Playing
from tests.unit.model.test_acting import OBS, Scale, factor
from tests.unit.replay.made import Box

SUM = float(OBS.sum())
VERSIONS = range(1, 6)


class Scaler(Agent):
    """Answers with the model's output; records and pushes the episode, and fails where the game says so."""

    async def on_tick(self, state):
        if (state.input or {}).get("fail"):
            raise ValueError("the game says so")
        outputs, version = await forward("model", OBS)
        state.output = {"value": float(outputs["value"]), "version": version}

    async def on_episode(self, episode, done):
        record("episode_return", 1.0)
        obs, action, number = np.stack([OBS, OBS]), np.zeros(1, np.int64), np.zeros(1, np.float32)
        push("games", Fragment(obs, action, number, number, True, False, np.zeros(1, np.int64)))


def by_script(state):
    state.output = {"by": "script"}


class Played:
    """A league of two learners and a script, and all that it is made of."""

    def __init__(self, folder, ledger=":memory:", **players):
        players = players or {
            "main": {"role": "main", "against": {"rival": 1.0}},
            "rival": {"role": "main", "against": {"main": 0.5, "script": 0.5}},
            "script": {"role": "script", "script": "module.function"},
        }
        config = LeagueConfig.model_validate({"model": "model", "players": players})
        self.ledger = Ledger(ledger)
        self.league = Playing(config, self.ledger)
        self.files = SnapshotFiles(folder / "weights")
        self.fetched = []
        self.snapshots = LocalModel(engine(), max_versions=2, fetch=self.fetch)
        self.learning = {
            name: LearningPlayer(LocalModel(engine()), {"games": Box()}, Recorder()) for name in self.league.learners
        }
        self.numbers = Recorder()
        self.games = itertools.count()
        scripts = {name: scripted(by_script) for name in players if name not in self.learning}
        self.players = LocalLeague(self.league, self.league.games, self.numbers)
        snapshot = functools.partial(SnapshotModel, self.snapshots)
        seating = Seating("model", snapshot, {}, scripts, self.numbers, {"games": NullBuffer()})
        for name, player in self.learning.items():
            seating.learn(name, player)
        self.players.open(seating)
        self.make = AgentActorFactory({"agent": Scaler}, {"mode": "train"}, Services(), players=self.players)

    async def fetch(self, version):
        self.fetched.append(version)
        return await self.files.get(version)

    async def game(self, learner, opponent):
        """Starts a game that is for a learner, and returns the actors of both sessions, by who plays them."""
        for number in self.games:
            sessions = [f"{number}-agent-{seat}" for seat in ("red", "blue")]
            members = [self.league.assign(str(number), session) for session in sessions]
            if sorted(member.label for member in members) == sorted([learner, opponent]):
                session_of = {member.label: session for member, session in zip(members, sessions, strict=True)}
                if self.league.learns(session_of[learner]):
                    actors = {label: self.make() for label in session_of}
                    for label, session in session_of.items():
                        await actors[label].start(session, b"")
                    return actors
        raise AssertionError

    def replace(self, name, version, value):
        """A learner restarts, with other parts."""
        before = self.learning[name].model
        model = LocalModel(engine(), version=version, weights=factor(value))
        self.learning[name] = LearningPlayer(model, {"games": Box()}, Recorder())
        self.players.replace(name, before, self.learning[name])
        return self.learning[name]

    async def close(self):
        for model in [self.snapshots, *(player.model for player in self.learning.values())]:
            await model.close()


def engine():
    return TorchEngine(Scale(), (torch.zeros(2, 2),))


@pytest.fixture
async def played(tmp_path):
    played = Played(tmp_path)
    yield played
    await played.close()


async def tick(actor, **body):
    return json.loads(await actor.tick(json.dumps(body).encode()))


async def finish(actor, result):
    await actor.stop(json.dumps({"result": result}).encode())
    await actor.on_end("stop")


async def test_only_the_seat_of_the_learner_that_the_game_is_for_is_learned_from(played):
    for label, value in (("main", 2.0), ("rival", 5.0)):
        played.learning[label].model.load(1, factor(value))
    actors = await played.game("main", "rival")
    assert await tick(actors["main"]) == {"value": 2.0 * SUM, "version": 1}
    assert await tick(actors["rival"]) == {"value": 5.0 * SUM, "version": 1}
    await finish(actors["main"], "win")
    await finish(actors["rival"], "loss")
    main, rival = played.learning["main"], played.learning["rival"]
    assert len(main.buffers["games"].fragments) == 1
    assert main.numbers.summary()["episode_return"] == 1.0
    assert rival.buffers["games"].fragments == []
    assert rival.numbers.empty
    assert played.numbers.summary() == {"league_games.counted": 1.0}

    actors = await played.game("rival", "main")
    await tick(actors["rival"])
    await finish(actors["rival"], "draw")
    assert len(rival.buffers["games"].fragments) == 1, "the other learner has its own games"


def test_a_session_waits_for_the_learner_that_learns_from_it():
    async def caught_up(): ...

    seating = Seating("model", None, {}, {}, Recorder(), {})
    seating.learn("main", LearningPlayer(None, {}, Recorder(), caught_up))
    seats = [seating.seated("main", 0, learns=learns, report=print, leave=print) for learns in (True, False)]
    assert [seat.services.caught_up for seat in seats] == [caught_up, None]


async def test_a_learner_acts_with_its_newest_weights_also_within_a_game(played):
    actors = await played.game("main", "rival")
    for version in (1, 2):
        played.learning["rival"].model.load(version, factor(float(version)))
        assert await tick(actors["rival"]) == {"value": version * SUM, "version": version}


async def test_the_faults_of_an_opponent_are_counted_and_no_learner_s(played):
    actors = await played.game("main", "rival")
    with pytest.raises(AgentError):
        await tick(actors["rival"], fail=True)
    await actors["rival"].on_end("error")
    counted = played.numbers.summary()
    assert {name.partition(".")[0] for name in counted} == {"agent_errors", "games_failed"}
    assert all(value == 1.0 for value in counted.values())
    assert played.learning["rival"].numbers.empty
    assert played.learning["rival"].buffers["games"].fragments == []


async def test_a_script_plays_without_a_model(played):
    actors = await played.game("rival", "script")
    assert await tick(actors["script"]) == {"by": "script"}
    await finish(actors["script"], "loss")
    await tick(actors["rival"])
    await finish(actors["rival"], "win")
    assert played.numbers.summary() == {"league_games.counted": 1.0}


async def test_a_learner_that_is_replaced_has_other_parts_in_games_from_then_on(played):
    before = await played.game("main", "rival")
    after = played.replace("main", 7, 9.0)
    actors = await played.game("main", "rival")
    assert (await tick(actors["main"]))["version"] == 7
    assert (await tick(before["main"]))["version"] == 0
    await finish(actors["main"], "draw")
    assert len(after.buffers["games"].fragments) == 1


async def test_a_model_that_was_replaced_is_closed_when_the_last_session_that_acts_with_it_has_ended(played):
    first = played.learning["main"].model
    running = [await played.game("main", "rival") for _ in range(2)]
    second = played.replace("main", 2, 2.0).model
    assert await works(first), "two sessions act with it"
    await finish(running[0]["main"], "draw")
    await running[1]["main"].stop(b'{"result": "draw"}')
    await settle()
    assert await works(first), "its result is counted, and its agent has yet to get the episode"
    await running[1]["main"].on_end("stop")
    await settle()
    assert not await works(first)
    assert played.players.replaced == []
    played.replace("main", 3, 3.0)
    await settle()
    assert not await works(second), "no session acted with it"
    assert await works(played.learning["main"].model)


async def test_a_game_that_the_books_do_not_take_is_lost_and_its_stop_is_answered(tmp_path):
    played = Played(tmp_path, ledger=tmp_path / "league.db")
    first = played.learning["main"].model
    actors = await played.game("main", "rival")
    played.replace("main", 2, 2.0)
    played.ledger._db.execute("PRAGMA query_only=1")  # as if the disk were full
    await finish(actors["rival"], "loss")
    await finish(actors["main"], "win")
    assert played.numbers.summary() == {"league_games.lost": 1.0}
    assert "readonly" in str(played.numbers.drain())
    await settle()
    assert not await works(first), "no session acts with it"
    await played.close()


async def works(model):
    """Whether a model is open."""
    try:
        await model.forward(OBS)
    except ModelError:
        return False
    return True


async def settle():
    """Lets the loop run what is due."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def frozen(tmp_path):
    """A learner that plays five snapshots of itself, of which one is in memory beside the module's own weights."""
    played = Played(tmp_path, main={"role": "main", "against": {"uniform": 1.0}})
    played.learning["main"].model.load(100, factor(100.0))
    for version in VERSIONS:
        weights = factor(float(version))
        played.files.put(version, weights)
        played.players.freeze("main", version, digest_of(weights), 10 * version)
    yield played
    await played.close()


async def test_a_snapshot_acts_with_its_weights_which_are_fetched_when_they_are_not_in_memory(frozen):
    for turn in range(2):
        for version in VERSIONS:
            actors = await frozen.game("main", f"main:{version}")
            seen = [await tick(actors[f"main:{version}"]) for _ in range(3)]
            assert seen == [{"value": version * SUM, "version": version}] * 3
            assert await tick(actors["main"]) == {"value": 100 * SUM, "version": 100}
            assert frozen.fetched == [*VERSIONS] * turn + [*range(1, version + 1)], "once, not at each tick"
            for label in actors:
                await finish(actors[label], "draw")
    assert len(frozen.learning["main"].buffers["games"].fragments) == 2 * len(VERSIONS)


async def test_a_snapshot_whose_file_is_missing_is_named_with_those_that_are_there(frozen):
    frozen.files.path(3).unlink()
    actors = await frozen.game("main", "main:3")
    with pytest.raises(VersionUnknown, match=r"there is no policy version 3") as unknown:
        await tick(actors["main:3"])
    assert unknown.value.details["known"] == [0, 1, 2, 4, 5]
    actors = await frozen.game("main", "main:4")
    assert (await tick(actors["main:4"]))["version"] == 4, "the others go on"


async def test_weights_that_were_frozen_are_known(frozen):
    assert frozen.players.has(digest_of(factor(3.0)))
    assert not frozen.players.has(digest_of(factor(6.0)))


async def test_a_half_written_file_is_not_a_snapshot(tmp_path):
    files = SnapshotFiles(tmp_path / "weights")
    files.put(1, factor(1.0))
    whole = files.path(1).read_bytes()
    (tmp_path / "weights" / ".2.npz").write_bytes(whole[: len(whole) // 2])  # as a kill leaves it
    with pytest.raises(VersionUnknown) as unknown:
        await files.get(2)
    assert unknown.value.details == {"version": 2, "known": [1]}
    files.put(2, factor(2.0))
    assert (await files.get(2))["factor"] == 2.0
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1.npz", "2.npz"]


def test_a_digest_is_of_names_shapes_dtypes_and_values_and_not_of_their_order():
    weights = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    others = [
        {"c": weights["a"], "b": weights["b"]},
        weights | {"a": weights["a"].reshape(2, 3)},
        weights | {"a": weights["a"].view(np.int32)},
        weights | {"a": weights["a"] + np.float32(1e-6)},
        {"a": weights["b"], "b": weights["a"]},
        {"a": weights["a"]},
    ]
    digests = [digest_of(arrays) for arrays in [weights, *others]]
    assert len(set(digests)) == len(digests)
    assert digest_of(dict(reversed(weights.items()))) == digests[0]
    apart = np.zeros((6, 2), np.float32)
    apart[:, 0] = weights["a"]
    assert digest_of(weights | {"a": apart[:, 0]}) == digests[0], "wherever the values lie in memory"
