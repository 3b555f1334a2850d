"""`brayx replay` and `brayx promote --recordings`: a served model's games, recorded, and other versions of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import brayx
from brayx.actor.agent import State
from brayx.actor.config import GamecoreConfig
from brayx.errors import BadRecording, ConfigError, ModelNotFound, NotDeterministic, PromotionRefused, StartupError
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.shipped import TEMPLATES
from brayx.model.build import build_model
from brayx.recording import open as open_recordings
from brayx.regression.replay import Replay, draw, plays
from brayx.tracking import Trial, aliases, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from tests.recorded import ended
from tests.unit.conftest import Run
from tests.unit.regression.compared import comparison
from tests.unit.regression.test_moved import Process, Scripted
from tests.waiting import until

JOB = TEMPLATES / "cartpole.yaml"
WAIT_S = 60.0
GAME = "brayx gamecore gym CartPole-v1 --url {url} --games 2 --seed "
SEED = 3
UNSEEDED = """
import random, sys
from brayx import Client
with Client(sys.argv[1]) as client:
    client.start()
    for tick in range(3):
        client.tick(b'{"obs": [0, 0, 0, %f], "reward": 0.0}' % (random.random() if tick == 2 else 0.0))
    client.stop()
"""


@dataclass(frozen=True)
class Recorded:
    """Two versions of CartPole's model in a registry, and games that the first one played.

    Attributes:
        folder: has ``recordings``, and checkpoints ``1`` and ``2``.
        uri: tracking URI.
        name: of the folder with the recordings.
    """

    folder: Path
    uri: str
    name: str = "recordings"

    @property
    def recordings(self) -> str:
        return str(self.folder / self.name)


def served(uri: str, folder: Path) -> Any:
    """Serves the first version, and records all sessions."""
    options = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": None}
    recording = {"recording": {"kind": "recording", "folder": str(folder)}}
    return brayx.serve(JOB, options | recording, models={"model": "models:/cartpole/1"}, tracking=uri)


def written(folder: Path, sessions: int) -> None:
    """Waits for recordings: on a busy machine the writer may take longer than the service waits for it at its end."""
    until(lambda: folder.is_dir() and ended(folder) >= sessions, "they are written", WAIT_S)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, new_tracking_db) -> Recorded:
    folder = tmp_path_factory.mktemp("replay")
    uri = new_tracking_db(folder)
    config = JobConfig.load(JOB)
    trial = Trial.open("cartpole", "made", uri)
    for number in (1, 2):
        torch.manual_seed(number)
        module, _ = build_model(config.folder, config.models["model"].module, "model", config.as_dict())
        with torch.no_grad():
            for parameter in module.parameters():  # new policies are almost uniform, and so almost equal
                parameter.add_(0.5 * torch.randn(parameter.shape))
        (folder / f"{number}").mkdir()
        counters = Counters(env_steps=number, policy_version=number)
        about = {"job": config.as_dict(), "folder": config.folder}
        checkpoint.save(folder / f"{number}", module, torch.optim.Adam(module.parameters()), counters, about, None)
        register(trial, trial.save_checkpoint(folder / f"{number}", number, {}), "cartpole", alias=None)
    with served(uri, folder / "recordings") as service:
        brayx.evaluate(service, gamecore=f"{GAME}{SEED} --json", games=2, at_once=1)
    written(folder / "recordings", 2)
    return Recorded(folder, uri)


def replayed(command: Run, games: Recorded, *words: object):
    done = command("replay", games.recordings, "--tracking", games.uri, "--json", *map(str, words))
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_the_version_that_played_acts_as_recorded_and_another_one_does_not(
    recorded: Recorded, command: Run, tmp_path
) -> None:
    episodes = open_recordings(recorded.recordings)
    assert len(episodes) == 2
    same = replayed(command, recorded, "--model", "models:/cartpole/1")
    assert (same["model"], same["reference"]) == ("models:/cartpole/1", None)
    assert [row["recording"] for row in same["recordings"]] == [episode.id for episode in episodes]
    assert [row["first"] for row in same["recordings"]] == [None, None]
    assert same["total"]["ticks"] == sum(map(len, episodes))
    assert same["total"]["agreement"] == 1.0
    assert same["total"]["kl_max"] < 1e-6
    assert same["total"]["kl_exact"] is True, "the recorded forwards have the logits"
    assert same["total"]["value"] < 1e-5

    ticks, plot = tmp_path / "ticks.csv", tmp_path / "plot.png"
    other = replayed(command, recorded, "--model", recorded.folder / "2", "--trust", "--ticks", ticks, "--plot", plot)
    assert other["total"]["agreement"] < 1.0
    assert other["total"]["kl"] > 1e-3
    table = pd.read_csv(ticks)
    assert len(table) == other["total"]["ticks"]
    assert table["equal"].mean() == pytest.approx(other["total"]["agreement"])
    first = table[(table["session"] == other["recordings"][0]["session"]) & ~table["equal"]]["tick"].min()
    assert first == other["recordings"][0]["first"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_versions_are_compared_with_each_other_exactly(recorded: Recorded, command: Run) -> None:
    both = ("--model", "models:/cartpole/1", "--model", "models:/cartpole/2")
    replayed_both = replayed(command, recorded, *both)
    assert (replayed_both["model"], replayed_both["reference"]) == ("models:/cartpole/2", "models:/cartpole/1")
    assert replayed_both["total"]["kl_exact"] is True
    against = replayed(command, recorded, "--model", "models:/cartpole/2")
    assert replayed_both["total"]["agreement"] == against["total"]["agreement"], "the recorded version was greedy"
    library = brayx.replay_recording(recorded.recordings, "models:/cartpole/1", both[3], tracking=recorded.uri)
    assert library.as_dict() == replayed_both
    session = replayed_both["recordings"][0]["session"]
    first_only = replayed(command, recorded, *both, "--session", session)
    assert first_only["recordings"] == replayed_both["recordings"][:1]
    lines = command("replay", recorded.recordings, "--tracking", recorded.uri, *both).stdout.splitlines()
    assert lines[0] == "models:/cartpole/2 against models:/cartpole/1"
    assert [line.split()[0] for line in lines[2:5]] == [session, replayed_both["recordings"][1]["session"], "in"]


@pytest.mark.parametrize(
    ("behaviour", "start", "is_played"),
    [
        ("runner", '{"contract": 1, "behaviour": "runner"}', True),
        ("runner", '{"contract": 1, "behaviour": "chaser"}', False),
        ("runner", '{"contract": 1}', False),
        ("agent", '{"contract": 1}', True),
        ("runner", '{"contract": "sha256:1", "behaviour": "chaser"}', False),
        ("runner", '{"contract": "sha256:1"}', True),
        ("runner", "\udcff", True),
        ("runner", "", True),
        ("", '{"contract": 1, "behaviour": "chaser"}', True),
    ],
)
def test_a_version_is_compared_with_the_sessions_of_its_behaviour(behaviour: str, start: str, is_played: bool) -> None:
    version, episode = SimpleNamespace(behaviour=behaviour), SimpleNamespace(start=start)
    assert plays(version, episode) is is_played  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--model", "models:/cartpole/9"], ModelNotFound, "no version 9"),
        (["--model", "nowhere"], ConfigError, "nowhere .*models:/NAME@ALIAS"),
        (["--model", "models:/cartpole/1", "--session", "x"], BadRecording, "no session 'x'"),
        (["--model", "models:/cartpole/1"] * 3, ConfigError, "3 models are given"),
        (["--model", "models:/cartpole/1", "--from-tick", "2"], ConfigError, "need --resimulate"),
        (["--model", "models:/cartpole/1", "--resimulate", "true"], ConfigError, "2: .*--session"),
        (["--model", "models:/cartpole/1", "--plot", "no/such/folder/a.png"], ConfigError, "cannot be written"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    recorded: Recorded, words, error, message, command: Run, monkeypatch
) -> None:
    monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    with pytest.raises(error, match=message):
        command("replay", recorded.recordings, "--tracking", recorded.uri, *words)


def resimulated(command: Run, games: Recorded, session: str, *words: object):
    return replayed(command, games, "--session", session, "--resimulate", *words)


def test_a_game_is_played_again_and_goes_on_with_another_version(recorded: Recorded, command: Run, tmp_path) -> None:
    second = open_recordings(recorded.recordings)[1]  # the command plays another game before it
    game = f"{GAME}{SEED} --quiet"
    same = resimulated(command, recorded, second.session, game, "--model", "models:/cartpole/1", "--from-tick", 4)
    assert (same["model"], same["from_tick"]) == ("models:/cartpole/1", 4)
    (row,) = same["sessions"]
    assert (row["player"], row["first"], row["end"]) == ("models:/cartpole/1", None, "stop")
    assert row["ticks"] == row["ticks_before"] == len(second)
    assert row["result"] == row["result_before"] == second.result == len(second)

    before = replayed(command, recorded, "--model", "models:/cartpole/2", "--session", second.session)
    first = before["recordings"][0]["first"]
    assert first is not None
    (other,) = resimulated(
        command, recorded, second.session, game, "--model", "models:/cartpole/2", "--out", tmp_path / "new"
    )["sessions"]
    assert other["first"] == first, "until then the games are the same"
    (new,) = open_recordings(str(tmp_path / "new"))
    assert (len(new), new.result) == (other["ticks"], other["result"])
    assert new.inputs()[: first + 1] == second.inputs()[: first + 1]
    assert new.outputs()[first] != second.outputs()[first]

    late = first + 1  # the recorded replies lead past the tick at which this version would have left
    (after,) = resimulated(
        command, recorded, second.session, game, "--model", recorded.folder / "2", "--job", JOB, "--from-tick", late,
        "--out", tmp_path / "late",
    )["sessions"]  # fmt: skip
    assert after["first"] is None or after["first"] >= late
    (new,) = open_recordings(str(tmp_path / "late"))
    assert new.read().number.tolist() == list(range(late, after["ticks"]))
    assert new.inputs()[0] == second.inputs()[late]


def test_a_game_whose_session_moved_is_played_again_as_one(recorded: Recorded, command: Run, tmp_path) -> None:
    """Its agent gives the replies of the recorded game, in two processes' recordings."""
    second = open_recordings(recorded.recordings)[1]
    bodies, replies = second.inputs(), [json.loads(reply) for reply in second.outputs()]

    class Again(Scripted):
        async def on_tick(self, state: State) -> None:
            state.output.update(replies[state.tick])

    async def record() -> None:
        processes = [Process(tmp_path / "moved", Again) for _ in range(2)]
        actor = await processes[0].start(second.session, second.start.encode())
        for number, body in enumerate(bodies):
            if number == 6:
                actor = await processes[1].take_over(second.session, actor)
            await actor.tick(body)
        await actor.stop(second.stop)
        await actor.on_end("stop")
        for process in processes:
            await asyncio.to_thread(process.recorder.close, WAIT_S)

    asyncio.run(record())
    # Two processes' files of the same second have no order.
    assert sorted(len(part) for part in open_recordings(str(tmp_path / "moved"))) == sorted([6, len(bodies) - 6])
    moved = Recorded(tmp_path, recorded.uri, "moved")
    game = f"{GAME}{SEED} --quiet"
    (row,) = resimulated(command, moved, second.session, game, "--model", "models:/cartpole/1", "--from-tick", 9)[
        "sessions"
    ]
    assert (row["ticks_before"], row["ticks"], row["first"], row["end"]) == (len(bodies), len(bodies), None, "stop")


def test_a_game_that_differs_is_refused_with_its_tick(recorded: Recorded, command: Run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    episode = open_recordings(recorded.recordings)[0]
    words = ["replay", recorded.recordings, "--tracking", recorded.uri, "--model", "models:/cartpole/1"]
    words += ["--session", episode.session, "--resimulate"]
    with pytest.raises(StartupError, match=r"recorded one, .*; the last start was "):
        command(*words, f"{GAME}{SEED + 1} --quiet")
    with pytest.raises(StartupError, match="no such game"):
        command(*words, "sh -c 'echo no such game >&2; exit 3'")
    with pytest.raises(ConfigError, match=f"has ticks 0 to {len(episode) - 1}"):
        command(*words, "true", "--from-tick", str(len(episode)))
    with pytest.raises(ConfigError, match=r"--resimulate: .*'gone\.py'"):
        command(*words, "python gone.py {http_url}")
    with pytest.raises(ConfigError, match=r"ppo_env\.yaml .*actor.* --job"):
        command(*words, "true", "--job", "ppo_env.yaml")

    (tmp_path / "game.py").write_text(UNSEEDED)
    game = f"python {tmp_path / 'game.py'} {{http_url}}"
    with (
        served(recorded.uri, tmp_path / "random") as service,
        Gamecores([GamecoreConfig(command=game)], service.urls, tmp_path) as cores,
    ):
        until(lambda: cores.restarts > 0, "a game is over", WAIT_S)
    written(tmp_path / "random", 1)
    words[1] = str(tmp_path / "random")
    words[words.index("--session") + 1] = open_recordings(words[1])[0].session
    with pytest.raises(NotDeterministic, match=r"body .* recorded one is ") as refused:
        command(*words, game, "--from-tick", "2")
    assert refused.value.details["tick"] == 2
    assert command(*words, game, "--from-tick", "1").returncode == 0, "up to there it is deterministic"


def test_a_version_is_promoted_only_if_it_acts_as_recorded(recorded: Recorded, command: Run, monkeypatch) -> None:
    monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    words = ["promote", "--tracking", recorded.uri, "--recordings", recorded.recordings]
    out = command(*words, "models:/cartpole/1", "--min-agreement", "1", "--max-kl", "0.001", "--to", "gate").stdout
    assert "recorded actions are its own, at least 1; its mean KL divergence from the recorded policy is" in out
    assert out.splitlines()[-1] == "cartpole version 1 is gate now; before it was none"
    again = command(*words, "models:/cartpole/1", "--min-agreement", "1", "--to", "gate").stdout
    assert again.splitlines()[-1] == "cartpole version 1 is gate already"
    with pytest.raises(PromotionRefused, match=r"models:/cartpole/2 .* at least 1") as no:
        command(*words, "models:/cartpole/2", "--min-agreement", "1", "--to", "gate")
    assert f"{no.value.details['agreement']:.4f}" in no.value.message
    with pytest.raises(PromotionRefused, match=r"KL .* at most 0\.0001"):
        command(*words, "models:/cartpole", "--version", "2", "--max-kl", "0.0001", "--to", "gate")
    assert aliases("cartpole", recorded.uri) == {"gate": 1}
    for more, message in (
        (["models:/cartpole/1"], "--min-agreement or --max-kl"),
        (["models:/cartpole/1", "--min-agreement", "2"], "--min-agreement is 2"),
        (["main:7", "--max-kl", "1"], "models:/NAME/VERSION"),
    ):
        with pytest.raises(ConfigError, match=message):
            command(*words, *more)
    with pytest.raises(ConfigError, match="need --recordings"):
        command("promote", "models:/cartpole/1", "--tracking", recorded.uri, "--max-kl", "1")


def test_a_report_of_nothing_is_a_report() -> None:
    empty = Replay("a", "", [comparison([], [])])
    assert empty.as_dict()["total"]["agreement"] is None
    assert json.loads(json.dumps(empty.as_dict()))["recordings"][0]["first"] is None
    assert "KL is not known" in str(empty)
    for replay in (empty, Replay("a", "b", []), Replay("a", "b", [comparison([True], [0.1]), comparison([], [])])):
        draw(replay).canvas.draw()
