"""PPO for an environment in Python, from one command line: in this process, or over a cluster.

    python -m pipelines.ppo --env CartPole-v1 --distributed false --preset tuned --set target_return=475

Progress goes to standard error. The last line on standard output is one JSON object: ``env_steps``, ``seconds`` (since
the command began), ``steps_per_s`` (while collecting and learning), ``return_mean`` (of the last hundred training
episodes), ``seconds_to_target`` (since the command began; null: not reached, or no target) and ``trial`` (its id in
MLflow, as `pipelines.visualize` takes it).

It starts Ray unless you pass ``--distributed false`` (kept for compatibility).

Imports only what the first step needs: MLflow runs in a separate process, and Ray is imported only for a cluster.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from brayx.command_line import Parser, Settings, Switch, count, say
from brayx.errors import ConfigError
from brayx.metrics.totals import mean_return
from brayx.other_names import OTHER_NAMES
from brayx.shutdown import end_within

if TYPE_CHECKING:
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.train import LocalTrainResult
    from brayx.local.training import Training
    from brayx.tracking import Trial


HELP = "PPO for an environment in Python, in this process or over a cluster"
_FLAGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "timesteps": ("num_steps", count, "env steps to train for; schedules fall towards it"),
    "seed": ("seed", int, "seed of all random numbers"),
    "save-interval": ("checkpoint_interval", count, "updates between two checkpoints"),
    "lr": ("learning_rate", float, "learning rate"),
    "gamma": ("gamma", float, "discount"),
    "gae-lambda": ("gae_lambda", float, "decay of the advantage's trace"),
    "clip-param": ("clip_param", float, "clip range: ratios outside 1 +- this get no further reward"),
    "value-coef": ("value_coef", float, "weight of the value loss"),
    "entropy-coef": ("entropy_coef", float, "weight of the entropy bonus"),
    "max-grad-norm": ("max_grad_norm", float, "gradients are scaled down to this norm"),
}
"""Published options of the training: the name in Python, the parser, the help text. ``--set`` has all the others."""
_DEFAULTS: dict[str, Any] = {"num_steps": 1_000_000, "checkpoint_interval": 50}
"""Defaults of options of the training that differ from those in Python."""
_COMMON: dict[str, Any] = {
    "env": None, "distributed": True, "preset": "plain", "device": "cpu", "trial": None, "new": False, "tracking": None,
    "address": "", "log_interval": 10, "course": None, "num_workers": 4, "num_envs": 8, "buffer_size": None,
}  # fmt: skip
"""Defaults of the options that are not the training's; only `brayx.commands.parallel_ppo` sets ``buffer_size``."""
_OF_JOB = {"console_port"}
"""Options of the job that `brayx train` would run, which ``--set`` takes, too."""
_ANNEALED = {"learning_rate_schedule": "linear", "clip_schedule": "linear"}

_ATARI: dict[str, Any] = {
    "num_workers": 2, "num_envs": 8, "unroll_length": 64, "learning_rate": 5e-4, "clip_param": 0.1, "epochs": 3,
    "minibatch_size": 256, "reward_clip": 1.0, "network.convolutions": "small", "network.hidden": [],
    "blocking": False,  # games step in their own threads during updates
    **_ANNEALED,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "num_workers": 4, "num_envs": 8, "unroll_length": 64, "num_steps": 200_000, "learning_rate": 3e-3,
        "gamma": 0.98, "gae_lambda": 0.8, "entropy_coef": 0.0, "epochs": 8, "minibatch_size": 1024, **_ANNEALED,
    },
    "Pendulum-v1": {
        "num_workers": 4, "num_envs": 4, "unroll_length": 128, "num_steps": 400_000, "learning_rate": 1e-3,
        "gamma": 0.95, "entropy_coef": 0.0, "epochs": 10, "minibatch_size": 512, "normalise_obs": True,
        "normalise_reward": True, **_ANNEALED,
    },
    "Atari games": _ATARI,
}  # fmt: skip
"""Presets by Gymnasium id, tuned on two cores for wall time; all Atari games share one."""

_RENAMED = {
    "eval_episodes": "evaluation_episodes={}", "env_option": "env_options.{}", "hidden": "network.hidden=[{}]",
    "anneal": "learning_rate_schedule=linear --set clip_schedule=linear",
}  # fmt: skip
"""Former options whose ``--set`` is not their name and value."""


def _preset(env: str) -> dict[str, Any]:
    """The preset of an environment.

    Raises:
        ConfigError: there are none.
    """
    if env in PRESETS:
        return PRESETS[env]
    from brayx.rollout.envs import is_atari

    if is_atari(env):
        return _ATARI
    raise ConfigError(f"no preset for {env!r}; there are presets for {', '.join(PRESETS)}", env=env)


def _explain(words: list[str]) -> str:
    """The ``--set`` for each option in ``words`` that has one: all but the published options were flags once."""
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.training import option_names

    forms = {name.removeprefix("network."): f"{name}={{}}" for name in option_names(PPOConfig)} | _RENAMED
    forms |= {other: forms[name] for other, names in OTHER_NAMES.items() for name in names if name in forms}
    messages = []
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        given = option.removeprefix("--").replace("-", "_")
        name = given.removeprefix("no_")
        if option.startswith("--") and name in forms:
            values = [value] if equals else takewhile(lambda later: not later.startswith("--"), words[index + 1 :])
            setting = forms[name].format(",".join(values) or str(name == given).lower())
            messages.append(f"{option} is now --set {setting}")
    return "; ".join(messages)


def options(parser: Parser) -> None:
    """Adds the arguments. An option that is not given is absent from the result."""
    parser.description = (
        "Train a policy for a Gymnasium environment by PPO. Starts Ray, unlike other commands: "
        "--distributed false trains in this process."
    )
    parser.argument_default = argparse.SUPPRESS
    parser.formatter_class = _Help
    parser.explain = _explain
    common = parser.add_argument
    common(
        "--env",
        required=True,
        help="Gymnasium id: classic control, Atari (with the extra `atari`), any "
        "other; MODULE:ID if importing that module, found from this folder too, registers it",
    )
    common(
        "--distributed", action=Switch,
        help="workers on a Ray cluster, which starts here unless --address names one; else in this process "
        "(default: true)",
    )  # fmt: skip
    common(
        "--preset",
        choices=["plain", "tuned"],
        help="tuned: options that are not given get values tuned for the environment; there are presets for "
        f"{', '.join(PRESETS)} (default: plain)",
    )
    common("--device", choices=["cpu", "cuda"], help="device that learns (default: cpu)")
    common("--trial", help="name of the trial; an interrupted one is resumed (default: from environment and seed)")
    common("--new", action=Switch, help="start a new trial even if one could be resumed")
    common(
        "--tracking", "--log-dir",
        help="MLflow's URI, or its sqlite file, or the folder of that file (default: ./mlflow.db)",
    )  # fmt: skip
    common("--address", help="address of a running Ray cluster, with --distributed true (default: start one)")
    common(
        "--log-interval", type=count,
        help="updates between two lines of progress; in one process there is one at the end of --timesteps, too "
        "(default: 10)",
    )  # fmt: skip
    common("--course", help="file to write the course of the training to, as JSON: [time, env steps, episodes, return]")
    common("--num-workers", type=count, help="rollout workers; in one process, groups of environments (default: 4)")
    common("--num-envs", type=count, help="environments of a worker (default: 8)")
    for name, (field, parse, text) in _FLAGS.items():
        common(f"--{name}", dest=field, metavar=name.replace("-", "_").upper(), type=parse, help=text)
    common(
        "--set", dest="settings", action=Settings, metavar="KEY=VALUE",
        help="any other option of PPO, of its training or network, as a brayx.Trainer has it: --set epochs=4, "
        "--set target_return=475, --set network.hidden=[64,64], --set console_port=null (no console); may be given "
        "again",
    )  # fmt: skip


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options by their names in Python: as ``given``, else from the preset, else the command's default.

    Raises:
        ConfigError: there is no such preset, or ``--set`` names an option that is one of the command.
    """
    given = dict(given)
    settings = given.pop("settings", {})
    for name in settings.keys() & _COMMON.keys():
        raise ConfigError(f"--set {name}: write --{name.replace('_', '-')} {settings[name]}", key=name)
    preset = _preset(given["env"]) if given.get("preset") == "tuned" else {}
    return {**_COMMON, **_DEFAULTS, **preset, **given, **settings}


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0, or 130 if it was interrupted."""
    from brayx.rollout.envs import check_env

    chosen = chosen_options({name: value for name, value in vars(arguments).items() if name != "run"})
    check_env(chosen["env"])
    if chosen["course"] and not Path(chosen["course"]).absolute().parent.is_dir():
        raise ConfigError(f"--course {chosen['course']}: there is no such folder")
    stop = threading.Event()
    if not chosen["distributed"]:
        _on_interrupt(stop.set)
    began = _process_began()
    result, trial, (model, outcome) = train(chosen, stop)
    _write_course(chosen["course"], result)
    print(_line(_summary_of(result, began), trial.run_id), flush=True)
    if result.reason == "stopped":
        resume = "no version is registered; the same command resumes" + " without --new" * chosen["new"]
        resume += ", with --timesteps 1 it registers the best version so far"
        say(f"brayx: interrupted: {'the evaluation is given up' if outcome else resume}")
    if outcome:
        say(outcome)
    if model:
        if given := configs(chosen)[1].env_options:
            options = [f"--set=env_options.{name}={json.dumps(value)}" for name, value in given.items()]
            say(f"to evaluate it in the same environment: {shlex.join(['brayx', 'evaluate', chosen['env'], *options])}")
        elsewhere = ["--tracking", trial.uri] if chosen["tracking"] else []
        say(f"to serve it: {shlex.join(['brayx', 'serve', model, *elsewhere])}")
    return 130 if result.reason == "stopped" else 0


Registered: TypeAlias = tuple[str, str]
"""The registered version as ``models:/NAME/VERSION``, empty if there is none; and a message for the user."""


def train(chosen: Mapping[str, Any], stop: threading.Event) -> tuple[LocalTrainResult, Trial, Registered]:
    """Trains with these options; returns the result, its trial and what was registered.

    Args:
        chosen: every option by name, as from `chosen_options`.
        stop: once set, a training in this process ends after the next update, with reason ``stopped``.

    Raises:
        BrayxError: the options do not fit each other or the environment, or the training failed.
    """
    algorithm, training = configs(chosen)
    project, name = _names(chosen, training.seed)
    if not chosen["distributed"]:
        from brayx.commands.in_process import train_in_process

        progress = _progress(chosen["log_interval"], training.num_steps)
        of_job = {option: chosen[option] for option in _OF_JOB & chosen.keys()}
        return train_in_process(chosen, of_job, algorithm, training, project, name, progress, stop)
    if chosen.get("console_port") is not None:
        raise ConfigError("console_port: only a training in this process has a console: add --distributed false")
    from brayx.commands.distributed import train_distributed

    return train_distributed(
        chosen["env"],
        algorithm,
        training,
        num_workers=chosen["num_workers"],
        project=project,
        trial=name,
        resume=not chosen["new"],
        tracking=chosen["tracking"],
        cluster=chosen["address"],
        log_interval=chosen["log_interval"],
        buffer_size=chosen["buffer_size"],
    )


def _on_interrupt(stop: Callable[[], None]) -> None:
    """Makes the first interrupt end training in order. Processes that still run at the deadline are killed."""

    def interrupted(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        end_within()
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, interrupted)


def configs(chosen: Mapping[str, Any], shown: Callable[[str], str] | None = None) -> tuple[PPOConfig, Training]:
    """PPO's options and those of its training.

    Args:
        chosen: options by their names in Python, as from `chosen_options`.
        shown: an option's name in messages; default: as on the command line.

    Raises:
        ConfigError: an option is invalid.
    """
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.training import with_options

    values = {name: value for name, value in chosen.items() if name not in _COMMON.keys() | _OF_JOB}
    values["num_envs"] = chosen["num_workers"] * chosen["num_envs"]
    values.setdefault("use_gpu", chosen["device"] == "cuda")
    try:
        algorithm, training = with_options(PPOConfig, values)
    except ConfigError as error:
        field = str(error.details["key"])
        name = (shown or _flag)(field)
        message = f"{name}{error.message.removeprefix(field)}" if error.message.startswith(field) else error.message
        raise ConfigError(message, key=name) from None
    assert isinstance(algorithm, PPOConfig)
    return algorithm, training


def _names(chosen: Mapping[str, Any], seed: int) -> tuple[str, str]:
    """Names of the project and of the trial in MLflow."""
    project = chosen["env"].replace("/", " ").replace(":", "-")  # as MLflow's registry takes it
    return project, chosen["trial"] or f"ppo {project} seed {seed}"


def _write_course(file: str | None, result: LocalTrainResult) -> None:
    """Writes the course of a training, with Unix times."""
    if file is not None:
        began = time.time() - time.monotonic() + result.began
        points = [[began + point.seconds, point.env_steps, point.episodes, point.return_mean] for point in result.curve]
        try:
            Path(file).write_text(json.dumps(points))
        except OSError as error:  # the trial has its checkpoint, and the summary follows
            print(f"brayx: the course is not written: {error}", file=sys.stderr)


def _summary_of(result: LocalTrainResult, process_began: float) -> dict[str, Any]:
    """The numbers of a result that the command reports, with seconds from the process's start."""
    before = result.began - process_began
    summary = {
        "reason": result.reason,
        "env_steps": result.env_steps,
        "seconds": before + result.seconds,
        "steps_per_s": result.steps_per_s,
        "return_mean": result.return_mean,
        "seconds_to_target": None if result.seconds_to_target is None else before + result.seconds_to_target,
    }
    if result.evaluation is not None:
        summary["eval_return_mean"] = result.evaluation.mean
        if result.evaluation.cut:
            summary["eval_cut"] = result.evaluation.cut
    return summary


def _line(summary: Mapping[str, Any], trial: str) -> str:
    """The last line on standard output; see the module's docstring."""
    shown = {name: value for name, value in summary.items() if name != "reason"}
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in shown.items()}
    # NaN is no JSON.
    return json.dumps({**{name: None if value != value else value for name, value in shown.items()}, "trial": trial})


def _progress(every: int, total: int) -> Callable[[int, int, Mapping[str, float]], None]:
    began = time.monotonic()
    first: list[int] = []

    def show(update: int, env_steps: int, numbers: Mapping[str, float]) -> None:
        first.append(env_steps) if not first else None
        if update % every and env_steps < total:
            return
        rate = (env_steps - first[0]) / max(time.monotonic() - began, 1e-9)
        left = f", {timedelta(seconds=round((total - env_steps) / rate))} left" if rate and env_steps < total else ""
        say(
            f"update {update}: {env_steps:,} of {total:,} env steps, {rate:,.0f}/s, "
            f"return {mean_return(numbers)}, kl {numbers.get('approx_kl', float('nan')):.4f}, "
            f"entropy {numbers.get('entropy', float('nan')):.3f}{left}"
        )

    return show


def _process_began() -> float:
    """Start of this process, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _flag(field: str) -> str:
    """The published name of an option on the command line; others are named as with ``--set``."""
    return next((f"--{name}" for name, (named, _, _) in _FLAGS.items() if named == field), field)


class _Help(argparse.HelpFormatter):
    """Adds the defaults, which come from the configs: only ``--help`` waits for their imports."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if all(field != action.dest for field, _, _ in _FLAGS.values()):
            return action.help
        from brayx.algorithms.ppo import PPOConfig
        from brayx.local.training import Training

        fields = {**Training.model_fields, **PPOConfig.model_fields}
        return f"{action.help} (default: {_DEFAULTS.get(action.dest, fields[action.dest].default)})"
