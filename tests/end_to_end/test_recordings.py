"""Sessions recorded at a door of the local host are exported, and cloned: the clone acts like the records."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import optree
import pytest
import torch
from yaml import safe_dump, safe_load

import brayx.recording
from brayx import Agent, Client, Dataset, State, Step
from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.codec import Codec
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.metrics import Recorder
from brayx.model.checkpoints import read_checkpoint
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import closing, recorders_of
from pipelines.templates.gym_model import build_model
from tests import shipped_game
from tests.end_to_end.jobs import FREE_PORTS, job_folder, trials, without_ray
from tests.end_to_end.jobs import brayx as run_brayx
from tests.recorded import ended
from tests.waiting import until

GAMES = 12
WAIT_S = 60.0


def balance(obs: np.ndarray) -> int:
    """A policy that balances CartPole's pole."""
    return int(obs[2] + 0.3 * obs[3] > 0)


class Balancer(Agent):
    async def on_tick(self, state: State) -> None:
        obs = np.asarray(state.input["obs"], np.float32)
        action = balance(obs)
        state.step = Step(obs, np.asarray(action), 0.0, 0)
        state.output["action"] = action


def record(folder: Path) -> None:
    """Plays whole games of CartPole over WebSocket; the first is started as a human's and is broken off."""
    recorder = Recorder()
    recorders = recorders_of(RecordingConfig(folder=str(folder)), recorder)
    factory = AgentActorFactory({"agent": Balancer}, {}, Services(), Codec("json"), recorders=recorders)
    actor = ActorConfig(agents=["agent"], port=0, native_port=0, tcp_port=None)
    host = LocalHost(actor, Runtime(factory, recorder, close=closing(recorders)))
    host.open()
    try:
        with Client(host.urls["ws"]) as client:
            for game in range(GAMES):
                play(client, game)
    finally:
        host.close()


def play(client: Client, game: int) -> None:
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=game)
    env.unwrapped.state = tuple(np.random.default_rng(game).uniform(-0.08, 0.08, 4))
    reward = 0.0
    client.start(json.dumps({"human": game == 0}))
    for _ in range(20 if game == 0 else 10_000):
        reply = json.loads(client.tick(json.dumps({"obs": obs.tolist(), "reward": reward})))
        obs, reward, terminated, truncated, _ = env.step(reply["action"])
        if terminated or truncated:
            body = {"obs": obs.tolist(), "reward": reward, "terminated": terminated, "truncated": truncated}
            client.stop(json.dumps(body))
            return
    client.stop()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "recordings"
    record(folder)
    # On a busy machine the writer may take longer than the host waits for it at its end.
    until(lambda: folder.is_dir() and ended(folder) == GAMES, "they are written", WAIT_S)
    return folder


def test_every_tick_became_a_transition(recordings: Path) -> None:
    episodes = brayx.recording.open(str(recordings))
    ticks = [len(episode) for episode in episodes]
    bodies = list(brayx.recording.dataset(recordings))
    assert len(bodies) == len(episodes) == GAMES
    # The first game has no known end, and the others are cut off by the time limit, without an observation after it.
    assert [len(body) for body in bodies] == [count - 1 for count in ticks]
    assert all(body.reward.tolist() == [1.0] * len(body) for body in bodies)
    assert json.loads(episodes[-1].stop)["truncated"] is True
    with_end = brayx.recording.dataset(recordings, fields={"obs": "input/obs"}, only={"human": False})
    assert [len(body) for body in with_end] == ticks[1:]
    for seen, body in zip(bodies[1:], with_end, strict=True):
        assert np.array_equal(body.obs[:-1], seen.obs)


def test_an_export_to_minari_is_read_back_equal(recordings: Path, tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="the extra `minari` is not installed")
    words = ["recordings", "export", str(recordings), "--format", "minari", "--only", "human=false"]
    with run_brayx(tmp_path, *words, "--out", "cartpole", environment=without_ray(tmp_path)) as command:
        assert command.ended() == 0, command.err
    want = list(brayx.recording.dataset(recordings, only={"human": False}))
    assert command.out == f"{len(want)} episodes of {sum(map(len, want))} steps: cartpole\n"
    read_back = list(Dataset(tmp_path / "cartpole"))
    assert len(read_back) == len(want)
    for ours, theirs in zip(want, read_back, strict=True):
        for name in ("obs", "action", "reward", "terminated", "truncated"):
            expected, other = np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name))
            assert (expected.dtype, expected.tolist()) == (other.dtype, other.tolist())
    with run_brayx(tmp_path, *words, "--out", "cartpole") as again:
        assert again.ended() == 2
    assert "cartpole is not empty" in again.err


@pytest.mark.cluster
def test_a_clone_acts_like_the_records(recordings: Path, tmp_path: Path) -> None:
    yaml = job_folder(tmp_path)
    job = safe_load(yaml.read_text())
    for name in ("actor", "agent", "render"):
        del job[name]
    job["data"] = {
        "kind": "source",
        "path": str(recordings),
        "only": {"human": False},
        "demonstration": True,
        "buffer": "buffer",
        "epochs": 20,
    }
    job["buffer"]["batch_size"] = 4
    job["trainer"]["algorithm"] = {"name": "bc"}
    job["trainer"] |= {"target_return": None, "num_steps": 10_000_000, "learning_rate": 0.003}
    job["trainer"]["checkpoint_interval"] = 1000
    yaml.write_text(safe_dump(job))
    with run_brayx(tmp_path, "train", str(yaml), environment=without_ray(tmp_path)) as command:
        assert command.ended() == 0, command.err
        assert "no more transitions to learn from" in command.out
        assert "versions old" not in command.out, "no version acted"
        assert "through the door" not in command.out, "nothing played"
        assert "not registered: nothing played" in command.out
    (checkpoint,) = [named[-1].latest_checkpoint() for named in trials(tmp_path).values()]
    assert checkpoint is not None
    module, _ = build_model("model", job)
    module.load_state_dict(optree.tree_map(torch.from_numpy, read_checkpoint(checkpoint)[1]))
    obs = np.concatenate([body.obs for body in brayx.recording.dataset(recordings)])
    with torch.no_grad():
        acted = module(torch.from_numpy(obs))["logits"].argmax(-1).numpy()
    alike = acted == [balance(row) for row in obs]
    assert alike.mean() > 0.9


@pytest.mark.cluster
def test_a_shipped_game_is_recorded_cloned_and_learned_on_from(tmp_path: Path) -> None:
    shipped_game.example(tmp_path)
    returns = shipped_game.record(tmp_path, games=20, seed=1)
    assert min(returns) > 100
    clone = shipped_game.train(tmp_path, "clone.yaml", "recorded.epochs=20")
    cloned = shipped_game.greedy_return(clone)
    assert cloned > 100
    options = (*FREE_PORTS, "trainer.initial_weights=runs:/clone", "trainer.num_steps=6_000")
    main = shipped_game.train(tmp_path, "cartpole.yaml", *options)
    assert main.tags()["brayx.initial_weights"] == f"runs:/{clone.run_id}"
    # A training from the seed's weights has returns of 20 to 40 at first.
    assert main.metrics()["return/last_100_games"] > 80
