"""ML-Agents' YAML and flags come to a job, and what has no counterpart is named."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.bridges import unity
from brayx.commands import mlagents_learn
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import read_contracts
from brayx.jobs.gamecores import gamecores_of
from brayx.jobs.mlagents import LearnOptions, learn_options
from brayx.jobs.mlagents_keys import SECTIONS
from brayx.jobs.shipped import TEMPLATES
from brayx.jobs.sources import check_sources
from tests.unit.replay.test_engine_demos import PEER

PPO = """
default_settings:
  trainer_type: ppo
  network_settings: {normalize: true, hidden_units: 32, num_layers: 3, vis_encode_type: nature_cnn}
  summary_freq: 1000
behaviors:
  Runner:
    hyperparameters:
      batch_size: 64
      buffer_size: 12_000
      learning_rate: 5.0e-4
      learning_rate_schedule: constant
      beta: 0.001
      epsilon: 0.25
      lambd: 0.9
      num_epoch: 4
      shared_critic: true
    network_settings: {num_layers: 2}
    reward_signals: {extrinsic: {gamma: 0.98, strength: 1.0}}
    max_steps: 2.0e5
    time_horizon: 1000
    keep_checkpoints: 7
"""
SAC = """
behaviors:
  Runner:
    trainer_type: sac
    hyperparameters:
      batch_size: 64
      buffer_size: 6400
      buffer_init_steps: 500
      tau: 0.01
      steps_per_update: 10.0
      init_entcoef: 0.5
      save_replay_buffer: true
      reward_signal_steps_per_update: 10.0
    max_steps: 100000
    time_horizon: 100
"""
EVERYTHING = """
behaviors:
  Runner:
    hyperparameters: {beta_schedule: linear, epsilon_schedule: linear}
    network_settings:
      memory: {sequence_length: 32, memory_size: 256}
      vis_encode_type: match3
      goal_conditioning_type: hyper
      deterministic: true
    reward_signals:
      gail: {gamma: 0.99, strength: 1.0, demo_path: Run.demo, use_vail: false}
      extrinsic: {network_settings: {hidden_units: 64}}
      curiosity: {gamma: 0.99, strength: 0.02, encoding_size: 256}
      rnd: {gamma: 0.99, strength: 0.01, network_settings: {hidden_units: 64}}
    self_play: {save_steps: 20000, team_change: 100000, swap_steps: 2000, window: 10, initial_elo: 1200.0}
    init_path: results/a/Runner.pt
    checkpoint_interval: 10000
    even_checkpoints: true
    threaded: true
environment_parameters:
  speed: 2
  mass: {sampler_type: uniform, sampler_parameters: {min_value: 0.5, max_value: 10}}
  scale: {sampler_type: gaussian, sampler_parameters: {mean: 1, st_dev: 0.3}}
  size: {sampler_type: multirangeuniform, sampler_parameters: {intervals: [[1, 2], [7, 8]]}}
  height:
    curriculum:
      - name: low
        completion_criteria: {measure: progress, behavior: Runner, threshold: 0.1}
        value: 1.5
      - {name: high, value: 4.0}
env_settings:
  env_args: []
  timeout_wait: 60
  max_lifetime_restarts: -1
  restarts_rate_limit_n: 3
  restarts_rate_limit_period_s: 9.5
  num_areas: 4
engine_settings: {width: 64, height: 48, time_scale: 5, no_graphics_monitor: true}
checkpoint_settings: {run_id: second, initialize_from: first, results_dir: out, train_model: true}
torch_settings: {device: "cuda:0"}
debug: true
"""


def read(tmp_path: Path, text: str, **flags: dict[str, Any]) -> LearnOptions:
    """The options of a file."""
    file = tmp_path / "run 1.yaml"
    file.write_text(text)
    return learn_options(str(file), flags)


def bridge_of(options: LearnOptions) -> argparse.Namespace:
    """What the bridge's parser makes of the gamecore's command."""
    brayx, gamecore, kind, *words = shlex.split(gamecores_of(options.load(), "actor")[0].command)
    assert (brayx, gamecore, kind) == ("brayx", "gamecore", "unity")
    return unity.parser().parse_args(words)


def test_ppo(tmp_path: Path) -> None:
    options = read(tmp_path, PPO)
    job = options.load(["console_port=null"]).of_behaviour("Runner")
    assert (job.project, job.trial, job.console_port) == ("run 1", "ppo", None)
    assert (job.file, job.folder) == (str(tmp_path / "run 1.yaml"), str(Path.cwd()))
    assert job.configs["network"].model_dump() | {"kind": "config"} == {
        "kind": "config", "hidden": [32, 32], "normalise": True, "convolutions": "nature", "shared": True
    }  # fmt: skip
    trainer, buffer = job.trainers["trainer"], job.buffers["buffer"]
    assert (trainer.learning_rate, trainer.num_steps, trainer.checkpoints_kept) == (5e-4, 200_000, 7)
    expected = {
        "name": "ppo", "minibatch_size": 64, "entropy_coef": 0.001, "clip_param": 0.25, "gae_lambda": 0.9, "epochs": 4,
        "gamma": 0.98, "learning_rate_schedule": "constant", "clip_schedule": "constant", "kl_target": None,
    }  # fmt: skip
    assert trainer.algorithm.model_dump(include=set(expected)) == expected
    assert (buffer.batch_size, buffer.unroll_length, job.actors["actor"].episode_length) == (12, 1000, 1000)
    assert (options.notes, options.refused) == (["without effect: summary_freq"], [])


def test_sac(tmp_path: Path) -> None:
    options = read(tmp_path, SAC)
    job = options.load()
    buffer, algorithm = job.buffers["buffer"], job.trainers["trainer"].algorithm
    assert (buffer.sampler, buffer.batch_size, buffer.unroll_length, buffer.size) == ("uniform", 64, 1, 100)
    assert (buffer.min_columns, buffer.samples_per_insert) == (500, 6.4), "one update of 64 in ten steps"
    assert job.trainers["trainer"].num_steps == 640_000, "100,000 of the game, each sampled 6.4 times"
    expected = {"name": "sac", "tau": 0.01, "alpha_initial": 0.5, "learning_rate_schedule": "constant"}
    assert algorithm.model_dump(include=set(expected)) == expected
    assert "save_replay_buffer: a resumed run fills a new buffer" in options.notes[0]


def test_without_a_file_the_options_are_those_of_mlagents() -> None:
    options = learn_options(None, {})
    job = options.load()
    assert (job.project, job.trial) == ("unity", "ppo")
    assert (job.trainers["trainer"].num_steps, job.trainers["trainer"].learning_rate) == (500_000, 3e-4)
    assert job.configs["network"].model_dump()["hidden"] == [128, 128]
    assert (job.buffers["buffer"].batch_size, job.buffers["buffer"].unroll_length) == (160, 64)
    assert (options.notes, options.refused) == ([], [])
    bridge = bridge_of(options)
    assert (bridge.time_scale, bridge.width, bridge.quality_level, bridge.headless) == (20, 84, 5, False)
    assert (bridge.command, bridge.listen) == ("", None), "the Editor calls"
    assert (bridge.restarts, bridge.restarts_within_s, bridge.lifetime_restarts) == (1, 60, 10)


def test_every_other_key_is_taken_or_named(tmp_path: Path) -> None:
    options = read(tmp_path, EVERYTHING)
    job = options.load()
    assert (job.trial, job.trainers["trainer"].initial_weights) == ("second", "runs:/first")
    assert job.trainers["trainer"].use_gpu
    assert job.configs["network"].model_dump()["lstm"] == 128
    assert job.buffers["buffer"].unroll_length == 32, "a memory learns over its sequence_length"
    bridge = bridge_of(options)
    assert (bridge.width, bridge.height, bridge.time_scale, bridge.num_areas) == (64, 48, 5, 4)
    assert (bridge.restarts, bridge.restarts_within_s, bridge.lifetime_restarts) == (3, 9.5, None)
    assert bridge.parameters == [
        "speed=2", "mass=uniform:0.5:10", "scale=gaussian:1:0.3", "size=multirangeuniform:1:2:7:8"
    ]  # fmt: skip
    behaviour = "behaviors.Runner"
    named = [line.partition(": ")[0] for line in options.refused]
    assert sorted(named) == sorted(
        [
            f"{behaviour}.reward_signals.gail",
            f"{behaviour}.reward_signals.curiosity",
            f"{behaviour}.reward_signals.rnd",
            f"{behaviour}.init_path",
            "environment_parameters.height",
        ]
    )
    noted = [line.partition(": ")[0] for line in options.notes]
    assert set(noted) == {
        f"{behaviour}.hyperparameters.beta_schedule",
        f"{behaviour}.network_settings.vis_encode_type",
        f"{behaviour}.network_settings.goal_conditioning_type",
        f"{behaviour}.network_settings.deterministic",
        "engine_settings.no_graphics_monitor",
        "without effect",
    }
    assert "extrinsic.network_settings" in options.notes[-1]


def test_what_the_game_earns_is_learned_also_if_extrinsic_is_left_out(tmp_path: Path) -> None:
    options = read(tmp_path, "behaviors: {Runner: {reward_signals: {rnd: {}}}}")
    assert "reward_signals: there is no extrinsic" in options.refused[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_device_that_nothing_learns_on_is_named(device: str) -> None:
    options = learn_options(None, {"torch_settings": {"device": device}})
    assert options.load().trainers["trainer"].use_gpu is (device == "cuda")
    assert [line.partition(": ")[0] for line in options.notes] == ["torch_settings.device"] * (device == "mps")


def test_demonstrations_are_imitated_beside_the_reward(tmp_path: Path) -> None:
    text = """
behaviors:
  Pilot:
    hyperparameters: {batch_size: 64, beta: 0.001}
    behavioral_cloning: {demo_path: %s, steps: 1000, strength: 0.25, samples_per_update: 0, batch_size: 128}
    max_steps: 10000
"""
    job = read(tmp_path, text % PEER).load([f"contract={json.dumps(read_contracts(PEER)[0].as_dict())}"])
    algorithm = job.trainers["trainer"].algorithm
    assert isinstance(algorithm, MixedConfig)
    assert (algorithm.imitation_coef, algorithm.imitation_until, algorithm.imitation_final) == (0.25, 0.1, 0)
    assert (algorithm.imitation_columns, algorithm.reinforcement.entropy_coef) == (2, 0.001), "2 columns of 64 steps"
    assert set(check_sources(job)) == {"expert"}, "the file is read, and fits"
    assert job.sources["expert"].path == str(PEER)
    folder = read(tmp_path, text % PEER.parent).load()
    assert folder.sources["expert"].path == str(PEER.parent / "*.demo")
    constant = read(tmp_path, (text % PEER).replace("steps: 1000, ", "")).load().trainers["trainer"].algorithm
    assert isinstance(constant, MixedConfig)
    assert constant.imitation_final == 1, "without steps the weight stays"


def test_rewards_that_would_be_scaled_need_consent(tmp_path: Path) -> None:
    text = "behaviors: {A: {reward_signals: {extrinsic: {strength: 0.5}}}}"
    (line,) = read(tmp_path, text).refused
    assert line.startswith("behaviors.A.reward_signals.extrinsic.strength: ")


def test_flags_come_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Ball.x86_64").touch()
    file = "engine_settings: {time_scale: 5, width: 100}\ncheckpoint_settings: {resume: true, run_id: other}\n"
    Path("ball.yaml").write_text(file)
    parser = argparse.ArgumentParser()
    mlagents_learn.options(parser)
    line = "ball.yaml --env=Ball --run-id=first --num-envs=2 --time-scale 10 --no-graphics --seed 3 --initialize-from x"
    arguments = parser.parse_args([*line.split(), "--env-args", "--level", "a b"])
    options = learn_options(arguments.config, mlagents_learn.flags_of(arguments))
    bridge = bridge_of(options)
    assert shlex.split(bridge.command) == [str(tmp_path / "Ball.x86_64"), "--level", "a b"]
    assert (bridge.num, bridge.listen, bridge.seed, bridge.headless) == (2, 5005, 3, True)
    assert (bridge.time_scale, bridge.width) == (10, 100)
    job = options.load()
    assert (job.project, job.trial, job.seed) == ("ball", "first", 3)
    assert (job.trainers["trainer"].initial_weights, options.checkpoints.resume) == ("runs:/x", False)


def test_each_flag_is_a_key_of_its_section() -> None:
    for name, flags in mlagents_learn.FLAGS.items():
        if name in SECTIONS:
            assert {key for key, _, _ in flags.values()} == {*SECTIONS[name].model_fields}


def test_each_behaviour_keeps_its_own_settings(tmp_path: Path) -> None:
    text = """
default_settings: {max_steps: 1000, network_settings: {num_layers: 1, hidden_units: 16}}
behaviors:
  Big: {time_horizon: 32, hyperparameters: {epsilon: 0.3}}
  Small: {trainer_type: sac, max_steps: 2000, hyperparameters: {buffer_init_steps: 70}}
  Third: {max_steps: 3000, network_settings: {hidden_units: 8}, hyperparameters: {num_epoch: 9}}
"""
    options = read(tmp_path, text)
    assert options.refused == []
    jobs = [options.load().of_behaviour(name) for name in ("Big", "Small", "Third")]
    assert [job.trainers["trainer"].num_steps for job in jobs] == [1000, 2000 * 128, 3000]
    assert [job.configs["network"].model_dump()["hidden"] for job in jobs] == [[16], [16], [8]]
    assert [job.buffers["buffer"].unroll_length for job in jobs] == [32, 1, 64]
    assert [job.actors["actor"].episode_length for job in jobs] == [32, 64, 64]
    assert [job.buffers["buffer"].min_columns for job in jobs][1:] == [70, 1]
    alone = read(tmp_path, text.replace("  Small: {", "#").replace("  Third: {", "#")).load().of_behaviour("Big")
    algorithms = [job.trainers["trainer"].algorithm for job in (alone, *jobs)]
    assert [algorithm.name for algorithm in algorithms] == ["ppo", "ppo", "sac", "ppo"]
    assert algorithms[1] == algorithms[0], "as if it were the only one"
    assert algorithms[3].model_dump(include={"clip_param", "epochs"}) == {"clip_param": 0.2, "epochs": 9}
    job = options.load()
    assert job.other_behaviours == "learn", "by default_settings"
    command = shlex.split(options.serve_command(job))
    assert command[:4] == ["brayx", "serve", "unity.yaml", "--set"]
    served = JobConfig.load(TEMPLATES / "unity.yaml", command[4::2])
    assert served.project == job.project
    for name, own in zip(("Big", "Small", "Third"), jobs, strict=True):
        same = served.of_behaviour(name)
        assert same.configs["network"] == own.configs["network"]
        assert same.trainers["trainer"].algorithm == own.trainers["trainer"].algorithm
    fourth = job.of_behaviour("Fourth")
    assert fourth.trainers["trainer"].num_steps == 1000
    assert fourth.actors["actor"].episode_length == 64


def test_a_behaviour_that_the_file_lacks_is_refused_without_default_settings(tmp_path: Path) -> None:
    job = read(tmp_path, "behaviors: {Big: {time_horizon: 32}, Small: {}}").load()
    assert (job.other_behaviours, [*job.behaviours]) == ("refuse", ["Big", "Small"])
    single = read(tmp_path, "behaviors: {Big: {time_horizon: 32}}")
    assert single.serve_command(single.load()) == f"brayx serve models:/{single.project}@champion"
    assert read(tmp_path, "default_settings: {time_horizon: 32}").load().other_behaviours == "learn"
    assert learn_options(None, {}).load().other_behaviours == "learn"


def test_one_of_several_behaviours_imitates(tmp_path: Path) -> None:
    text = f"behaviors: {{Big: {{behavioral_cloning: {{demo_path: {PEER}}}}}, Small: {{time_horizon: 32}}}}"
    job = read(tmp_path, text).load()
    assert job.sources == {}
    assert {*job.of_behaviour("Big").sources} == {"expert"}
    big, small = (job.of_behaviour(name).trainers["trainer"] for name in ("Big", "Small"))
    assert (big.buffers, small.buffers) == (["buffer", "demonstrations"], ["buffer"])
    assert (big.algorithm.name, small.algorithm.name) == ("mixed", "ppo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "behaviors:\n  A:\n    hyperparameters:\n      batch_sise: 1",
            ":4: behaviors.A.hyperparameters.batch_sise: unk",
        ),
        ("behaviors:\n  A:\n    hyperparameters:\n      epsilon: big", ':4: .*epsilon: is "big", expected a valid num'),
        ("behaviors: {A: {trainer_type: a2c}}", "trainer_type: is 'a2c', expected ppo, sac, poca"),
        (
            "behaviors: {A: {network_settings: {memory: {memory_size: 7}}}}",
            "memory_size: is 7, expected .*multiple of 2",
        ),
        ("A: {trainer: ppo, batch_size: 64}", ":1: A: unknown key.*upgrade_config"),
        ("behaviors: [A]", "behaviors: is .*, expected keys with values"),
        ("env_settings: {num_envs: 8}", "num_envs: is more than 1 without a build: give --env BUILD"),
        ("env_settings: {env_path: none}", "--env none: there is no such build"),
        (
            "environment_parameters: {mass: {sampler_type: beta}}",
            "environment_parameters.mass: is .*, expected a number",
        ),
        (
            "environment_parameters: {mass: {sampler_type: uniform, sampler_parameters: {min_value: low}}}",
            "parameter is 'mass=uniform:low:1.0', expected NAME=NUMBER",
        ),
        (
            "behaviors: {A: {network_settings: {memory: {size: 7}}}}",
            "memory.size: unknown key; nearest is 'memory_size'",
        ),
        ("a: 1\na: 2", "given twice"),
        ("behaviors: {A: {behavioral_cloning: {strength: 1}}}", "behavioral_cloning.demo_path: "),
    ],
)
def test_a_key_or_value_that_does_not_exist_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_what_an_algorithm_lacks_needs_consent(tmp_path: Path, trainer: str) -> None:
    text = f"behaviors: {{A: {{trainer_type: {trainer}, behavioral_cloning: {{demo_path: a.demo}}%s}}}}"
    options = read(tmp_path, text % ", network_settings: {memory: {}}")
    lost = ["behavioral_cloning"] if trainer == "ppo" else ["network_settings.memory", "behavioral_cloning"]
    assert [line.partition(": ")[0] for line in options.refused] == [f"behaviors.A.{key}" for key in lost]
    job = options.load().of_behaviour("A")
    assert job.configs["network"].model_dump().get("lstm", 0) == (64 if trainer == "ppo" else 0)
    assert job.sources == {}
    assert len(read(tmp_path, text % "").refused) == (trainer != "ppo")


def test_poca_is_mappo_for_groups(tmp_path: Path) -> None:
    text = "behaviors: {A: {trainer_type: poca, hyperparameters: {shared_critic: true, beta: 0.01, batch_size: 32}}}"
    options = read(tmp_path, text)
    algorithm = options.load().of_behaviour("A").trainers["trainer"].algorithm
    assert isinstance(algorithm, MAPPOConfig)
    assert (algorithm.entropy_coef, algorithm.minibatch_size, algorithm.clip_param) == (0.01, 32, 0.2)
    assert [line.partition(": ")[0] for line in options.notes] == ["behaviors.A.hyperparameters.shared_critic"]
    assert not options.refused


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        learn_options("none.yaml", {})


def test_self_play(tmp_path: Path) -> None:
    text = """
behaviors:
  Soccer: {self_play: {save_steps: 1000, swap_steps: 200, window: 5, play_against_latest_model_ratio: 0.75}}
  Ball: {max_steps: 10}
"""
    options = read(tmp_path, text)
    assert (options.notes, options.refused) == ([], [])
    soccer, ball = (options.load().of_behaviour(name) for name in ("Soccer", "Ball"))
    (given,) = soccer.self_plays.values()
    assert (given.snapshot_every, given.team_every, given.swap_every, given.pool_size) == (1000, 5000, 400, 5)
    assert given.against == {"latest": 0.75, "uniform": 0.25}
    assert ball.self_plays == {}, "its teams learn together, as with ML-Agents"
    assert learn_options(None, {}).load().self_plays == {}
    told = read(tmp_path, "behaviors: {A: {self_play: {team_change: 7, initial_elo: 1000}}}")
    assert told.notes == ["behaviors.A.self_play.initial_elo: points begin at 1200"]
    (given,) = told.load().of_behaviour("A").self_plays.values()
    assert (given.team_every, given.snapshot_every) == (7, 20_000)
