"""The command line of PPO: its names and defaults, presets that override nothing, and its last line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from brayx.algorithms.ppo import PPOConfig
from brayx.bridges.gym import run_games
from brayx.commands import cli
from brayx.commands.ppo import PRESETS, _names, _progress, chosen_options, configs
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.env_door import job_of_version
from brayx.local.serving import Serving
from brayx.local.training import Training
from brayx.nets.policy import NetworkConfig
from brayx.tracking import Trial
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[3]


def options(words: list[str]) -> dict[str, Any]:
    """The options by their names in Python, as the command has them."""
    given = vars(cli.parser(["ppo"]).parse_args(["ppo", *words]))
    return chosen_options({name: value for name, value in given.items() if name != "run"})


def test_the_promised_names_have_the_promised_defaults():
    promised = (
        "--env Pendulum-v1 --num_workers 4 --timesteps 1000000 --lr 3e-4 --gamma 0.99 --gae_lambda 0.95 "
        "--clip_param 0.2 --value_coef 0.5 --entropy_coef 0.01 --max_grad_norm 0.5 --device cpu --distributed True "
        "--log_dir ./logs --save_interval 50 --log_interval 10 --seed 0"
    )
    defaults = options(["--env", "Pendulum-v1"])
    for words in (promised.split(), promised.replace("_", "-").split()):
        given = options(words)
        assert configs(given) == configs(defaults)
        assert {name: value for name, value in given.items() if name in defaults} == {**defaults, "tracking": "./logs"}
    assert options(["--env", "a_b", "--trial=a_b", "--num_envs=3"])["trial"] == "a_b", "values keep their underscores"


@pytest.mark.parametrize("env", [name for name in PRESETS if name.endswith("-v1")])
def test_a_preset_yields_to_what_is_given(env):
    plain, tuned = options(["--env", env]), options(["--env", env, "--preset", "tuned"])
    assert {name for name in tuned if plain.get(name) != tuned[name]} <= {*PRESETS[env], "preset"}
    assert all(tuned[name] == value for name, value in PRESETS[env].items())
    for given in (["--lr", "0.5"], ["--set", "learning_rate=0.5"]):
        assert options(["--env", env, "--preset", "tuned", *given])["learning_rate"] == 0.5


def test_a_negated_switch_takes_no_value(capsys):
    with pytest.raises(SystemExit):
        options(["--env", "CartPole-v1", "--no-distributed", "true"])
    assert "--no-distributed takes no value" in capsys.readouterr().err
    assert options(["--env", "CartPole-v1", "--no-distributed"])["distributed"] is False


def test_presets_set_only_options_that_exist():
    for preset in PRESETS.values():
        configs({**options(["--env", "CartPole-v1"]), **preset})


def test_an_environment_without_a_preset_is_reported():
    with pytest.raises(ConfigError, match="no preset for 'Acrobot-v1'"):
        options(["--env", "Acrobot-v1", "--preset", "tuned"])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--set engine=torch", {"engine": "torch"}),
        ("--set vectorization=async", {"vectorization": "async"}),
        (
            "--set env_options.continuous=false --set env_options.x=1e-1 --set env_options.x=2e-1 "
            "--set env_options.map_name=8x8",
            {"env_options": {"continuous": False, "x": 0.2, "map_name": "8x8"}},
        ),
        ("--set network.lstm=16", {"lstm": 16}),
        ("--set normalise_value=true --set clip_value=0.3", {"normalise_value": True, "clip_value": 0.3}),
        (
            "--set normalise_obs=true --set blocking=no --set normalise_reward=false",
            {"normalise_obs": True, "blocking": False},
        ),
        (
            "--timesteps 7 --lr 0.5 --set evaluation_episodes=3",
            {"num_steps": 7, "learning_rate": 0.5, "evaluation_episodes": 3},
        ),
    ],
)
def test_an_option_reaches_its_config(words, changed):
    def configured(argv):
        algorithm, training = configs(options(["--env", "CartPole-v1", *argv]))
        return {**dict(algorithm), **dict(training), **dict(training.network or NetworkConfig())}

    plain, got = configured([]), configured(words.split())
    assert {name: value for name, value in got.items() if name != "network" and value != plain[name]} == changed


@pytest.mark.parametrize("text", ["epochs", "=1", "epochs=["])
def test_a_malformed_setting_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        options(["--env", "CarRacing-v3", "--set", text])
    assert f"argument --set: is {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs 4", "--epochs is now --set epochs=4"),
        ("--epochs=4 --seed 1", "--epochs is now --set epochs=4"),
        ("--target-return -475", "--target-return is now --set target_return=-475"),
        ("--target_return=475", "--target_return is now --set target_return=475"),
        (
            "--normalise-obs --lstm 8",
            "--normalise-obs is now --set normalise_obs=true; --lstm is now --set network.lstm=8",
        ),
        ("--no-blocking", "--no-blocking is now --set blocking=false"),
        ("--hidden 64 32 --lr 1", "--hidden is now --set network.hidden=[64,32]"),
        ("--env-option continuous=false", "--env-option is now --set env_options.continuous=false"),
        ("--eval_episodes 3", "--eval_episodes is now --set evaluation_episodes=3"),
        ("--anneal", "--anneal is now --set learning_rate_schedule=linear --set clip_schedule=linear"),
        ("--n-steps 64", "--n-steps is now --set unroll_length=64"),
        ("--net-arch 64 32", "--net-arch is now --set network.hidden=[64,32]"),
        ("--epoch 4", "unrecognized arguments: --epoch 4"),
        ("--lrr 1e-3 --seed 1", "unrecognized arguments: --lrr 1e-3; the nearest option is --lr"),
        ("--timestep 9", "unrecognized arguments: --timestep 9; the nearest option is --timesteps"),
    ],
)
def test_a_former_option_is_refused_with_its_setting(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options(["--env", "CartPole-v1", *words.split()])
    assert capsys.readouterr().err.endswith(f"\nbrayx: {message}\n")
    for setting in re.findall(r"--set \S+[^;\s]", message):
        configs(options(["--env", "CartPole-v1", *setting.split()]))


def test_each_command_in_the_documentation_is_valid():
    """In sentences too, where it may lack its environment."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("notebooks/*.ipynb"),
        ROOT / "brayx/commands/ppo.py",
    ]
    text = "\n".join(page.read_text() for page in pages)
    commands = re.findall(r"(?:brayx |pipelines\.)ppo (--[^`]*?)(?:`|\n(?!--))", text)
    assert len(commands) > 5
    for words in commands:
        configs(options(["--env", "CartPole-v1", *words.split()]))


def test_a_setting_that_is_an_option_of_the_command_is_refused():
    with pytest.raises(ConfigError, match="write --num-envs 4"):
        options(["--env", "CartPole-v1", "--set", "num_envs=4"])


def test_python_and_the_command_line_have_the_same_defaults():
    algorithm, training = configs(options(["--env", "CartPole-v1"]))
    assert algorithm == PPOConfig()
    plain = Training().of(algorithm)
    changed = {name: value for name, value in dict(training.of(algorithm)).items() if value != getattr(plain, name)}
    # A command trains for longer, and says which checkpoints there are.
    assert changed == {"num_steps": 1_000_000, "checkpoint_interval": 50}


def test_a_training_of_few_updates_has_a_line_of_progress_too(capsys):
    show = _progress(10, 4_000)
    show(1, 2_048, {})
    show(2, 4_096, {"entropy": 1.4})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("update 2: 4,096 of 4,000 env steps, ")
    assert line.endswith("return - (0 games), kl nan, entropy 1.400"), "no episode has ended"


def test_progress_says_how_long_the_training_still_takes(capsys):
    show = _progress(1, 3)
    for update in (1, 2, 3):
        show(update, update, {})
    first, second, third = capsys.readouterr().err.splitlines()
    assert "left" not in first, "no rate yet"
    assert second.endswith(", 0:00:00 left")
    assert "left" not in third, "it has ended"


def test_progress_has_the_number_of_games_of_a_return_and_digits_of_a_small_one(capsys):
    numbers = {"episode_return.last100": 0.0412, "games_in_window": 7, "games_failed_in_window": 2, "entropy": 1.4}
    _progress(1, 4_000)(1, 2_048, numbers)
    assert "return 0.0412 (7 games, 2 failed), kl" in capsys.readouterr().err


@pytest.fixture
def run(command):
    """``brayx ppo`` of CartPole in this process."""
    return lambda *words: command("ppo", "--env", "CartPole-v1", "--distributed", "false", *words)


@pytest.mark.slow  # runs the whole command
def test_the_last_line_is_the_result_and_the_trial_is_in_mlflow(tracking_db):
    """Of a memory that learns with the torch engine in the given environment."""
    small = ["--timesteps", "4000", "--set", "epochs=1", "--log-interval", "1", "--tracking", tracking_db]
    memory = "--set env_options.sutton_barto_reward=true --set vectorization=sync --set engine=torch"
    memory += " --set network.lstm=8 --set clip_value=0.2 --set normalise_value=true --set target_return=-2"
    memory += " --set console_port=null"
    words = ["--env", "CartPole-v1", "--distributed", "false", *small, *memory.split()]
    command = [sys.executable, "-m", "pipelines.ppo", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == ["env_steps", "seconds", "steps_per_s", "return_mean", "seconds_to_target", "trial"]
    assert result["return_mean"] == -1, "only the end of a game gives a reward, and every game ends"
    assert 0 < result["seconds_to_target"] <= result["seconds"]
    assert 0 < result["env_steps"] <= result["steps_per_s"] * result["seconds"]
    assert "update 1: " in done.stderr
    assert "console" not in done.stderr
    trial = Trial.attach(tracking_db, result["trial"])
    assert trial.status == "FINISHED"
    assert trial.metrics()["replay/env_steps"] == result["env_steps"]
    assert trial.latest_checkpoint() is not None
    command, _, reference, *_ = done.stderr.splitlines()[-1].removeprefix("to serve it: ").split()
    assert (command, reference) == ("brayx", "models:/CartPole-v1/1")
    free = [f"actor.{port}=0" for port in ("port", "native_port", "tcp_port")]
    job, model = job_of_version(reference, tracking_db, free)
    with Serving(job, tracking_db, models={model: reference}) as serving:
        (game,) = run_games("CartPole-v1", serving.urls["tcp"], games=1)
        assert serving.registered == {model: [reference]}
    assert game.ended == "terminated"


def test_the_project_is_named_as_the_registry_takes_it():
    project, trial = _names(chosen_options({"env": "reach:games/Reach-v0"}), 7)
    assert (project, trial) == ("reach-games Reach-v0", "ppo reach-games Reach-v0 seed 7")
    assert JobConfig.of({"project": project, "trial": trial}, "").project == project


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_an_unknown_environment_is_one_line_and_nothing_starts(run, distributed, tmp_path):
    store = str(tmp_path / "mlflow.db")
    done = run("--env", "CartPoll-v1", "--distributed", distributed, "--tracking", store)
    assert done.returncode == 2
    nearest = "no environment 'CartPoll-v1': the nearest known id is 'CartPole-v1'"
    assert done.stderr == f"brayx: {nearest}; write MODULE:CartPoll-v1 if a module of yours registers it\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gamma 2", "--gamma is 2.0: Input should be less than or equal to 1"),
        ("--lr 0", "--lr is 0.0: Input should be greater than 0"),
        ("--lr 2", "--lr is 2.0: Input should be less than or equal to 1"),
        ("--set threads=300", "threads is 300: Input should be less than or equal to 256"),
        ("--value-coef inf", "--value-coef is inf: Input should be a finite number"),
        ("--set engine=int8", "engine is 'int8': Input should be 'onnx' or 'torch'"),
        ("--set network.lstm=-1", "lstm is -1: Input should be greater than or equal to 0"),
        ("--set clip_value=0", "clip_value is 0: Input should be greater than 0"),
        ("--set reward_clip=0 --distributed true", "reward_clip is 0: Input should be greater than 0"),
        (
            "--set console_port=1 --distributed true",
            "console_port: only a training in this process has a console: add --distributed false",
        ),
        ("--set epoch=3", "there is no option 'epoch'; nearest is 'epochs'"),
        ("--course nowhere/course.json", "--course nowhere/course.json: there is no such folder"),
    ],
)
def test_an_invalid_option_is_one_line_and_nothing_starts(run, words, message, tmp_path):
    done = run(*words.split(), "--tracking", str(tmp_path / "mlflow.db"))
    assert (done.returncode, done.stderr) == (2, f"brayx: {message}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # runs the whole command
def test_a_network_that_does_not_fit_is_one_line_and_leaves_no_trial(run, tmp_path):
    done = run("--set", "network.distribution=sde", "--tracking", str(tmp_path / "mlflow.db"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "network.distribution is sde, but actions are discrete" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_preset_is_one_line(run):
    done = run("--env", "Acrobot-v1", "--preset", "tuned")
    assert done.returncode == 2
    assert done.stderr.startswith("brayx: no preset for 'Acrobot-v1'")
    assert len(done.stderr.splitlines()) == 1


HANGING = """
import sys, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Hanging(CartPoleEnv):
    steps = 0

    def step(self, action):
        Hanging.steps += 1
        if Hanging.steps > 1_000:
            print("hangs", file=sys.stderr, flush=True)
            while True:
                time.sleep(60)
        return super().step(action)

gymnasium.register("Hanging-v0", Hanging)
"""


@pytest.mark.alone(reason="eight seconds to end, of which starting MLflow takes four on an idle machine")
@pytest.mark.slow  # runs the whole command, and the seconds that it has to end
def test_ctrl_c_ends_a_command_whose_environment_hangs(tmp_path, tracking_db):
    (tmp_path / "hanging.py").write_text(HANGING)
    words = ["--env", "hanging:Hanging-v0", "--distributed", "false", "--set", "epochs=1", "--tracking", tracking_db]
    command = [sys.executable, "-m", "pipelines.ppo", *words]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any(line == "hangs\n" for line in process.stderr)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=WAIT_S)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "ending took too long: 1 processes were killed" in said, "the clerk's process"
    assert not list(temporary.glob("brayx-*")), "nor are its files left"


@pytest.mark.alone(reason="eight seconds to end, in which MLflow may still start beside other tests")
def test_ctrl_c_gives_up_a_long_evaluation_and_what_was_learned_is_kept(tracking_db):
    words = ["--env", "CartPole-v1", "--distributed", "false", "--set", "epochs=1", "--tracking", tracking_db]
    words += ["--timesteps", "1", "--log-interval", "1", "--set", f"evaluation_episodes={10**9}"]
    command = [sys.executable, "-m", "pipelines.ppo", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            page = next(line for line in process.stderr if "the console is " in line).split()[-1]
            assert any(line.startswith("evaluation: ") for line in process.stderr), "it says how far it is"
            shown = httpx.get(f"{page}/api/job", timeout=WAIT_S).json()
            process.send_signal(signal.SIGINT)
            out, said = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert (shown["mode"], shown["trial"], shown["can_stop"]) == ("train", "ppo CartPole-v1 seed 0", True)
    result = json.loads(out.splitlines()[-1])
    assert "eval_return_mean" not in result
    assert "brayx: interrupted: the evaluation is given up\n" in said, "the training has ended"
    assert Trial.attach(tracking_db, result["trial"]).latest_checkpoint() is not None
