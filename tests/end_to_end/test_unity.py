"""`brayx train unity.yaml`: a game that speaks ML-Agents' wire is learned and served, with one command and no file; its
agents have two behaviours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

from brayx.bridges.unity import run_games
from brayx.gamecore.contract import Contract
from brayx.recording import dataset
from brayx.replay.files import Dataset
from tests.end_to_end.jobs import FREE_PORTS, LEFT_S, ROOT, brayx, said_on_failure, setting, without_ray
from tests.guide_job import guide_job
from tests.recorded import ended
from tests.unity_game import expert_demo
from tests.waiting import until

BUILD = f"{sys.executable} -m tests.unity_game --agents 8 --runners 8 --limit 40"


def test_a_unity_game_is_learned_and_served(tmp_path: Path) -> None:
    environment = without_ray(tmp_path) | {"PYTHONPATH": str(ROOT)}
    options = setting(
        *FREE_PORTS, "game.listen=0", f"game.command={BUILD} --rounds 10", "trainer.num_steps=6000", "console_port=null"
    )
    with brayx(tmp_path, "train", "unity.yaml", *options, environment=environment) as train, said_on_failure(train):
        assert train.ended() == 0
    assert "observations: VectorSensor: 4 float32" in train.err
    assert "has left after 8 calls" in train.err
    for behaviour, least in {"Chaser": 0.8, "Runner": 0.25}.items():  # at random 0.2 and 0, at best some 2 and 1
        mean = re.search(rf"champion: unity-{behaviour} version 1, mean return (-?[\d.]+)", train.out)
        assert mean is not None
        assert float(mean[1]) > least
    contracts = [Contract.parse(json.loads(file.read_text())) for file in tmp_path.rglob("contract.json")]
    assert {contract.behaviour: [part.name for part in contract.actions] for contract in contracts} == {
        "Chaser": ["continuous", "branch_0"],
        "Runner": ["continuous"],
    }

    # A designer's, of which a game of Unity cannot send any.
    limits = ("actor.forbidden.branch_0=[1]", "behaviours.Runner.actor.forced.continuous=[0.25, -1]")
    words = ("serve", "unity.yaml", *options, *setting(*limits, "recording.kind=recording", "recording.flush_s=0.2"))
    recorded = tmp_path / "recordings"
    with brayx(tmp_path, *words, environment=environment) as served, said_on_failure(served):
        served.until(served.says("Chaser acts with models:/unity-Chaser/1; Runner acts with"), "both act")
        door = re.search(r"(tcp://\S+)", served.err)
        assert door is not None
        assert f"to play in Unity: brayx bridge unity --url {door[1]} --time-scale 1\n" in served.err
        results = run_games(door[1], listen=0, command=BUILD, games=40)
        assert sum(result.total_reward for result in results) > 0.5 * len(results), "at random it is 0.1"
        until(lambda: recorded.is_dir() and ended(recorded) == 2, "both sessions are written", LEFT_S)
        served.control_c()
        assert served.ended() in (0, 130)
    actions = [fragment.action for fragment in dataset(recorded)]
    dashes = np.concatenate([action[:, 0] for action in actions if action.shape[1] == 3])
    steered = np.concatenate([action for action in actions if action.shape[1] == 2])
    assert set(dashes.tolist()) == {0.0}, "no chaser has dashed"
    assert set(map(tuple, steered.tolist())) == {(0.25, -1.0)}, "as each runner must"


RECIPE = """
behaviors:
  Chaser:
    hyperparameters: {batch_size: 128, buffer_size: 512, beta_schedule: linear}
    network_settings: {hidden_units: 32, normalize: true}
    behavioral_cloning: {demo_path: expert.demo, strength: 0.5, steps: 1000}
    max_steps: 2000
    summary_freq: 1000
  Runner:
    trainer_type: poca
    hyperparameters: {batch_size: 128, buffer_size: 512}
    network_settings: {hidden_units: 16}
    max_steps: 2000
"""


def test_a_project_of_mlagents_changes_one_word(tmp_path: Path) -> None:
    environment = without_ray(tmp_path) | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "chase.yaml").write_text(RECIPE)
    (tmp_path / "expert.demo").write_bytes(expert_demo())
    # Without --env the bridge listens where the Editor calls, which another test may do.
    words = ["chase.yaml", "--run-id=first", "--env", sys.executable, "--base-port=0", "--no-graphics"]
    options = [*setting(*FREE_PORTS, "console_port=null"), "--env-args", *BUILD.split()[1:], "--pairs"]
    with brayx(tmp_path, "mlagents-learn", *words, *options, environment=environment) as train, said_on_failure(train):
        assert train.ended() == 0
    assert "beta_schedule: the entropy's weight stays at beta" in train.err
    assert "without effect: summary_freq" in train.err
    assert "num_steps 2,000 reached" in train.out
    assert "trial 'first' of project 'chase': finished" in train.out
    for behaviour, inputs in {"Chaser": ["obs_0", "action_masks"], "Runner": ["obs_0"]}.items():
        written = ort.InferenceSession(tmp_path / "results" / "first" / f"{behaviour}.onnx")
        assert [value.name for value in written.get_inputs()] == inputs

    with brayx(tmp_path, "mlagents-learn", *words, *options, environment=environment) as again, said_on_failure(again):
        assert again.ended() == 2
    assert "project 'chase' has a run 'first': --resume goes on with it, --force starts a new one" in again.err


def test_the_guides_clone_needs_no_game(tmp_path: Path) -> None:
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos" / "expert.demo").write_bytes(expert_demo())
    words = ["train", guide_job(tmp_path, "unity", "agent", "actor"), *setting("console_port=null")]
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as train, said_on_failure(train):
        assert train.ended() == 0
    assert "no more transitions to learn from" in train.out
    demonstrated = sum(len(episode) for episode in Dataset(tmp_path / "demos" / "expert.demo"))
    assert f"\n  {100 * demonstrated:,} env steps, 0 games\n" in train.out


MORE = """
default_settings:
  hyperparameters: {batch_size: 128, buffer_size: 512}
  network_settings: {hidden_units: 16, num_layers: 1}
behaviors:
  Chaser:
    network_settings: {memory: {sequence_length: 16, memory_size: 16}}
    self_play: {save_steps: 500, team_change: 2000, swap_steps: 100, window: 3, initial_elo: 1200.0}
  Runner:
    trainer_type: sac
    hyperparameters: {batch_size: 64, buffer_size: 20000, steps_per_update: 10.0, init_entcoef: 0.5}
    network_settings: {normalize: true}
    reward_signals: {extrinsic: {gamma: 0.99, strength: 2.0}}
    max_steps: 300
"""


def test_a_project_of_mlagents_with_sac_and_self_play_of_a_memory(tmp_path: Path) -> None:
    environment = without_ray(tmp_path) | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "more.yaml").write_text(MORE)
    words = ["more.yaml", "--ignore-unsupported", "--env", sys.executable, "--base-port=0", "--no-graphics"]
    game = ["-m", "tests.unity_game", "--agents=4", "--runners=4", "--limit=10", "--teams"]
    options = [*setting(*FREE_PORTS, "console_port=null"), "--env-args", *game]
    with brayx(tmp_path, "mlagents-learn", *words, *options, environment=environment) as train, said_on_failure(train):
        train.until(train.says("behaviour 'Runner' has all its steps"), "sac has learned")
        train.until(train.says("behaviour 'Chaser' has teams 0, 1: one learns"), "it plays itself")
        train.until(train.says("'Chaser': main:1 joins the pool"), "it has an opponent")
        train.control_c()
        assert train.ended() == 130
    assert "behaviors.Runner.reward_signals.extrinsic.strength: let the game scale its rewards" in train.err
    assert "the same command with --resume goes on with it" in train.out
    assert re.search(r"main +\d+ ", train.out), "its points"
    for behaviour, inputs in {"Chaser": ["obs_0", "action_masks", "recurrent_in"], "Runner": ["obs_0"]}.items():
        written = ort.InferenceSession(tmp_path / "results" / "ppo" / f"{behaviour}.onnx")
        assert [value.name for value in written.get_inputs()] == inputs
