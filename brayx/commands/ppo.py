"""PPO for an environment in Python, from one command line: in this process, or over a cluster.

    python -m pipelines.ppo --env CartPole-v1 --distributed false --preset tuned --target-return 475

Progress goes to standard error. The last line on standard output is one JSON object: ``env_steps``, ``seconds`` (since
the command began), ``steps_per_s`` (while collecting and learning), ``return_mean`` (of the last hundred training
episodes), ``seconds_to_target`` (since the command began; null: not reached, or no target) and ``trial`` (its id in
MLflow, as `pipelines.visualize` takes it).

Without ``--distributed false`` it starts Ray: the command line is published, so that default stays.

Imports only what the first step needs: MLflow runs in a separate process, and Ray is imported only for a cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from brayx.command_line import Switch, boolean, count
from brayx.commands.presets import PRESETS, preset_for
from brayx.errors import BrayxError, ConfigError
from brayx.metrics.totals import mean_return
from brayx.shutdown import end_within, wait_to_save
from brayx.temporary import temporary_files

if TYPE_CHECKING:
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.train import LocalTrainResult
    from brayx.local.training import Training
    from brayx.tracking import Trial


HELP = "PPO for an environment in Python, in this process or over a cluster"
_OWN: Any = object()


class _Option(NamedTuple):
    """An option of the command line.

    Attributes:
        name: name on the command line, with ``_`` for ``-``.
        default: value without the option, unless a preset has another; `_OWN`: the default of its config.
        parse: makes the value from its text.
        text: help text.
        config: the config that has it: ``algorithm``, ``network`` or ``training``; empty: none.
        field: its name in the config; empty: ``name``.
        more: further arguments for `argparse`.
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    text: str
    config: str = ""
    field: str = ""
    more: Mapping[str, Any] = {}


def _pair(text: str) -> dict[str, Any]:
    """``NAME=VALUE``, the value as in a job's YAML."""
    from brayx.jobs.document import value_of

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"is {text!r}, expected NAME=VALUE, such as continuous=false")
    try:
        return {name: value_of(value)}
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: {error.message}") from None


class _Merge(argparse.Action):
    """Merges the values of a repeated option into one dict."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


_BOOL = {"action": Switch}
_OPTIONS: dict[str, tuple[_Option, ...]] = {
    "training": (
        _Option(
            "timesteps", 1_000_000, count, "env steps to train for; schedules fall towards it", "training",
            "num_steps",
        ),
        _Option("target_return", _OWN, float, "stop when the last hundred episodes have this mean", "training"),
        _Option("seed", _OWN, int, "seed of all random numbers", "training"),
        _Option("save_interval", 50, count, "updates between two checkpoints", "training", "checkpoint_interval"),
        _Option(
            "eval_episodes", 0, int, "greedy episodes at the end: eval_return_mean", "training", "evaluation_episodes"
        ),
    ),
    "collecting": (
        _Option("num_workers", 4, count, "rollout workers; in one process, groups of environments"),
        _Option("num_envs", 8, count, "environments of a worker"),
        _Option(
            "env_option", _OWN, _pair, "keyword argument of each environment; may be given again", "training",
            "env_options", {"metavar": "NAME=VALUE", "action": _Merge},
        ),
        _Option(
            "vectorization", _OWN, str, "native: the environment's own, sync: one after the other, async: a process "
            "each, auto: native where there is one, else sync", "training", "", {"metavar": "{auto,sync,async,native}"},
        ),
        _Option("engine", _OWN, str, "engine that acts: onnx, or torch without an export", "training"),
        _Option("unroll_length", _OWN, count, "steps of a run", "training"),
        _Option("blocking", _OWN, boolean, "collect with the newest weights only", "training", "", _BOOL),
        _Option(
            "normalise_obs", _OWN, boolean, "normalise observations by their running moments", "training", "", _BOOL
        ),
        _Option(
            "normalise_reward", _OWN, boolean, "divide rewards by the deviation of their discounted sums", "training",
            "", _BOOL,
        ),
        _Option("reward_clip", _OWN, float, "clip rewards to +- this for learning", "training"),
    ),
    "learning": (
        _Option("lr", _OWN, float, "learning rate", "training", "learning_rate"),
        _Option("gamma", _OWN, float, "discount", "algorithm"),
        _Option("gae_lambda", _OWN, float, "decay of the advantage's trace", "algorithm"),
        _Option("clip_param", _OWN, float, "clip range: ratios outside 1 +- this get no further reward", "algorithm"),
        _Option("value_coef", _OWN, float, "weight of the value loss", "algorithm"),
        _Option("clip_value", _OWN, float, "clip new value predictions to within this of the old", "algorithm"),
        _Option(
            "normalise_value", _OWN, boolean, "values in units of the returns' running deviation", "algorithm", "",
            _BOOL,
        ),
        _Option("entropy_coef", _OWN, float, "weight of the entropy bonus", "algorithm"),
        _Option("max_grad_norm", _OWN, float, "gradients are scaled down to this norm", "algorithm"),
        _Option("epochs", _OWN, count, "passes over a batch", "algorithm"),
        _Option("minibatch_size", _OWN, count, "transitions of a gradient", "algorithm"),
        _Option("anneal", False, boolean, "learning rate and clip fall to zero", more=_BOOL),
        _Option("threads", _OWN, count, "threads of torch", "training"),
    ),
    "network": (
        _Option("hidden", _OWN, count, "sizes of the hidden layers", "network", "", {"nargs": "*"}),
        _Option(
            "activation", _OWN, str, "between hidden layers", "network", "",
            {"choices": ["tanh", "relu", "silu", "elu"]},
        ),
        _Option(
            "convolutions", _OWN, str, "network for images", "network", "",
            {"choices": ["small", "nature", "impala"]},
        ),
        _Option("lstm", _OWN, int, "size of a memory after the hidden layers; 0: none", "network"),
        _Option(
            "shared", _OWN, boolean, "policy and value share hidden layers; none: where there are images or memory",
            "network", "", _BOOL,
        ),
        _Option(
            "distribution", _OWN, str, "of continuous actions", "network", "", {"choices": ["gaussian", "sde"]}
        ),
        _Option("sde_steps", _OWN, count, "steps for which the noise of sde stays", "training"),
    ),
}  # fmt: skip
"""Options by their group's title. A preset may set any."""
_COMMON: dict[str, Any] = {
    "distributed": True, "preset": "plain", "device": "cpu", "trial": None, "new": False, "tracking": None,
    "address": "", "log_interval": 10, "course": None, "buffer_size": None,
}  # fmt: skip
"""Defaults of the options that have no group, and of ``buffer_size``, which only `brayx.commands.parallel_ppo` sets."""
_ALL = [option for options in _OPTIONS.values() for option in options]


@cache
def defaults() -> Mapping[str, Any]:
    """Value of each option that neither the command line nor a preset sets, as in Python."""
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.training import Training
    from brayx.nets.policy import NetworkConfig

    algorithm = PPOConfig()
    plain = {"algorithm": algorithm, "network": NetworkConfig(), "training": Training().of(algorithm)}
    return {
        option.name: getattr(plain[option.config], option.field or option.name)
        if option.default is _OWN
        else option.default
        for option in _ALL
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments. An option that is not given is absent from the result."""
    parser.description = (
        "Train a policy for a Gymnasium environment by PPO. Starts Ray, unlike other commands: "
        "--distributed false trains in this process."
    )
    parser.argument_default = argparse.SUPPRESS
    parser.formatter_class = _Help
    common = parser.add_argument
    common("--env", required=True, help="Gymnasium id: classic control, Atari (with the extra `atari`), any other")
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
    for title, members in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in members:
            group.add_argument(_flag(option.name), type=option.parse, help=option.text, **option.more)


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option by name: as ``given``, else from the preset, else the default."""
    preset = preset_for(given["env"]) if given.get("preset") == "tuned" else {}
    return {**defaults(), **_COMMON, **preset, **given}


def _of(config: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one config, by their names there."""
    return {option.field or option.name: chosen[option.name] for option in _ALL if option.config == config}


def algorithm_of(chosen: Mapping[str, Any]) -> PPOConfig:
    """PPO's options."""
    from brayx.algorithms.ppo import PPOConfig

    annealed = bool(chosen["anneal"])
    return PPOConfig(
        **_of("algorithm", chosen),
        learning_rate_schedule="linear" if annealed else "constant",
        clip_schedule="linear" if annealed else "constant",
    )


def training_of(chosen: Mapping[str, Any]) -> Training:
    """All options but the algorithm's."""
    from brayx.local.training import Training
    from brayx.nets.policy import NetworkConfig

    return Training(
        **_of("training", chosen),
        num_envs=chosen["num_workers"] * chosen["num_envs"],
        network=NetworkConfig(**_of("network", chosen)),
        use_gpu=chosen["device"] == "cuda",
    )


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
    result, trial = train(chosen, stop)
    _write_course(chosen["course"], result)
    print(_line(_summary_of(result, began), trial.run_id), flush=True)
    return 130 if result.reason == "stopped" else 0


def train(chosen: Mapping[str, Any], stop: threading.Event) -> tuple[LocalTrainResult, Trial]:
    """Trains with these options; returns the result and its trial.

    Args:
        chosen: every option by name, as from `chosen_options`.
        stop: once set, a training in this process ends after the next update, with reason ``stopped``.

    Raises:
        BrayxError: the options do not fit each other or the environment, or the training failed.
    """
    if not chosen["distributed"]:
        return _local(chosen, stop)
    from brayx.commands.distributed import train_distributed

    project, name = _names(chosen)
    algorithm, training = configs(chosen)
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


def _local(chosen: Mapping[str, Any], stop: threading.Event) -> tuple[LocalTrainResult, Trial]:
    """Trains in this process."""
    from brayx.tracking.clerk import Clerk
    from brayx.tracking.store import tracking_uri

    project, name = _names(chosen)
    algorithm, training = configs(chosen)
    with temporary_files():  # the clerk's, where this is killed
        clerk = Clerk(project, name, tracking_uri(chosen["tracking"]), chosen, resume=not chosen["new"])
        try:
            try:
                from brayx.local.train import train_local  # meanwhile the clerk's process imports MLflow

                show = _progress(chosen["log_interval"], chosen["timesteps"])
                result = train_local(chosen["env"], algorithm, training, on_update=show, clerk=clerk, stop=stop)
            except BaseException as error:
                with contextlib.suppress(BrayxError):
                    clerk.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
                raise
            if result.reason == "stopped" and result.updates:
                wait_to_save(clerk.opened, lambda line: print(line, file=sys.stderr, flush=True))
            trial = clerk.close("KILLED" if result.reason == "stopped" else "FINISHED")
        finally:
            clerk.end()
    return replace(result, reason="stopped") if stop.is_set() else result, trial


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


def configs(
    chosen: Mapping[str, Any], shown: Callable[[str], str] = lambda name: _flag(name)
) -> tuple[PPOConfig, Training]:
    """PPO's options and all others.

    Args:
        chosen: every option by name.
        shown: an option's name in messages; default: as on the command line.

    Raises:
        ConfigError: an option is invalid.
    """
    from pydantic import ValidationError

    try:
        return algorithm_of(chosen), training_of(chosen)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        name = next((option.name for option in _ALL if field in (option.field, option.name)), field)
        raise ConfigError(f"{shown(name)} {first['input']}: {first['msg']}", key=shown(name)) from None


def _names(chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the project and of the trial in MLflow."""
    project = chosen["env"].replace("/", " ")
    return project, chosen["trial"] or f"ppo {project} seed {chosen['seed']}"


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
        print(
            f"update {update}: {env_steps:,} of {total:,} env steps, {rate:,.0f}/s, "
            f"return {mean_return(numbers)}, kl {numbers.get('approx_kl', float('nan')):.4f}, "
            f"entropy {numbers.get('entropy', float('nan')):.3f}",
            file=sys.stderr,
            flush=True,
        )

    return show


def _process_began() -> float:
    """Start of this process, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Help(argparse.HelpFormatter):
    """Adds the defaults, which come from the configs: only ``--help`` waits for their imports."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.dest not in defaults():
            return action.help
        default = defaults()[action.dest]
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, Sequence) and not isinstance(default, str):
            default = " ".join(map(str, default))
        return f"{action.help} (default: {'none' if default in (None, {}) else default})"
