"""PPO for an environment in Python, from one command line: in this process, or over a cluster.

    python -m pipelines.ppo --env CartPole-v1 --distributed false --preset tuned --target-return 475

Progress goes to standard error. The last line on standard output is one JSON object: ``env_steps``, ``seconds`` (since
the command began), ``steps_per_s`` (while collecting and learning), ``return_mean`` (of the last hundred training
episodes), ``seconds_to_target`` (since the command began; null: not reached, or no target) and ``trial`` (its id in
MLflow, as `pipelines.visualize` takes it).

Only what a first step needs is imported: MLflow is opened by a process of its own, and Ray where it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.errors import BrayxError, ConfigError
from brayx.rollout.envs import check_env
from pipelines.ending import end_within, temporary_files
from pipelines.presets import PRESETS, preset_for

if TYPE_CHECKING:
    from brayx.algorithms.ppo import PPOConfig
    from pipelines.rollouts import Result
    from pipelines.training import Training

_WORKERS = 4
_OF_PPO = (
    "gamma", "gae_lambda", "clip_param", "value_coef", "entropy_coef", "max_grad_norm", "epochs", "minibatch_size"
)  # fmt: skip
_OF_NETWORK = ("hidden", "activation", "convolutions", "shared", "distribution")
_SAME = (
    "unroll_length", "target_return", "seed", "blocking", "normalise_obs", "normalise_reward", "reward_clip",
    "sde_steps", "threads",
)  # fmt: skip
"""Options that have the name they have in `pipelines.training.Training`."""
_HERE = {"learning_rate": "lr", "total_steps": "timesteps"}
"""What is called otherwise on the command line."""


@cache
def defaults() -> Mapping[str, Any]:
    """Of the options that a preset may set: what they are from Python, where they are there."""
    from brayx.algorithms.ppo import PPOConfig
    from brayx.nets.policy import NetworkConfig
    from pipelines.training import Training

    algorithm, network = PPOConfig(), NetworkConfig()
    training = Training().of(algorithm)
    return {
        "num_workers": _WORKERS,
        "num_envs": training.num_envs // _WORKERS,
        "timesteps": 1_000_000,
        "lr": training.learning_rate,
        "anneal": False,
        **{name: getattr(training, name) for name in _SAME},
        **{name: getattr(algorithm, name) for name in _OF_PPO},
        **{name: getattr(network, name) for name in _OF_NETWORK},
    }


def parser() -> argparse.ArgumentParser:
    """The command line. An option that is not given is absent from what it parses."""
    made = argparse.ArgumentParser(
        prog="brayx ppo",
        description="Train a policy for a Gymnasium environment by PPO.",
        argument_default=argparse.SUPPRESS,
    )
    common = made.add_argument
    common("--env", required=True, help="Gymnasium id: classic control, Atari (with the extra `atari`), any other")
    common(
        "--distributed", type=_bool, metavar="BOOL", help="workers on a Ray cluster; else one process (default: true)"
    )
    common(
        "--preset",
        choices=["plain", "tuned"],
        help="tuned: what is not given is as it was found best for the environment; there are ones for "
        f"{', '.join(PRESETS)} (default: plain)",
    )
    common("--timesteps", type=_count, help=_told("env steps to train for; schedules fall towards it", "timesteps"))
    common("--target-return", type=float, help="stop when the last hundred episodes have this mean (default: never)")
    common("--seed", type=int, help="of everything that is drawn (default: 0)")
    common("--device", choices=["cpu", "cuda"], help="where it learns (default: cpu)")
    common("--trial", help="its name; an interrupted one goes on (default: of the environment and the seed)")
    common("--new", action="store_true", help="start a new trial even if there is one to go on with")
    common("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    common("--address", help="of a running Ray cluster, with --distributed true (default: start one)")
    common("--save-interval", type=_count, help="updates between two checkpoints (default: 50)")
    common(
        "--log-interval", type=_count,
        help="updates between two lines of progress; in one process there is one at the end of --timesteps, too "
        "(default: 10)",
    )  # fmt: skip
    common("--course", help="file to write the course of the training to, as JSON: [time, env steps, episodes, return]")
    common("--eval-episodes", type=int, help="played greedily in the end: eval_return_mean (default: 0)")
    groups: dict[str, list[tuple[str, Any, str]]] = {
        "collecting": [
            ("num_workers", _count, "rollout workers; in one process, groups of environments"),
            ("num_envs", _count, "environments of a worker"),
            ("unroll_length", _count, "steps of a run"),
            ("blocking", _bool, "collect with the newest weights only"),
            ("normalise_obs", _bool, "observations by their running moments"),
            ("normalise_reward", _bool, "rewards by the deviation of their discounted sums"),
            ("reward_clip", float, "rewards are learned from within +- this"),
        ],
        "learning": [
            ("lr", float, "learning rate"),
            ("gamma", float, "discount"),
            ("gae_lambda", float, "decay of the advantage's trace"),
            ("clip_param", float, "ratios beyond 1 +- this gain nothing"),
            ("value_coef", float, "weight of the value loss"),
            ("entropy_coef", float, "weight of the entropy bonus"),
            ("max_grad_norm", float, "gradients are scaled down to this norm"),
            ("epochs", _count, "passes over a batch"),
            ("minibatch_size", _count, "transitions of a gradient"),
            ("anneal", _bool, "learning rate and clip fall to zero"),
            ("threads", _count, "of torch"),
        ],
        "network": [
            ("shared", _bool, "policy and value share hidden layers; none: where there are images"),
            ("sde_steps", _count, "steps for which the noise of sde stays"),
        ],
    }
    for title, members in groups.items():
        group = made.add_argument_group(title)
        for name, kind, text in members:
            metavar = "BOOL" if kind is _bool else None
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=_told(text, name))
    group.add_argument("--hidden", type=_count, nargs="*", help=_told("sizes of the hidden layers", "hidden"))
    group.add_argument(
        "--activation", choices=["tanh", "relu", "silu", "elu"], help=_told("between hidden layers", "activation")
    )
    group.add_argument(
        "--convolutions", choices=["small", "nature", "impala"], help=_told("what sees images", "convolutions")
    )
    group.add_argument(
        "--distribution", choices=["gaussian", "sde"], help=_told("of continuous actions", "distribution")
    )
    return made


def options(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Every option by name: as given, else of the preset, else the default."""
    given = vars(parser().parse_args(argv))
    rest = {
        "distributed": True, "preset": "plain", "target_return": None, "seed": 0, "device": "cpu", "trial": None,
        "new": False, "tracking": None, "address": "", "save_interval": 50, "log_interval": 10, "eval_episodes": 0,
        "course": None,
    }  # fmt: skip
    chosen = preset_for(given["env"]) if given.get("preset") == "tuned" else {}
    return {**defaults(), **rest, **chosen, **given}


def algorithm_of(chosen: Mapping[str, Any]) -> PPOConfig:
    """PPO's options."""
    from brayx.algorithms.ppo import PPOConfig

    annealed = bool(chosen["anneal"])
    return PPOConfig(
        **{name: chosen[name] for name in _OF_PPO},
        learning_rate_schedule="linear" if annealed else "constant",
        clip_schedule="linear" if annealed else "constant",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; 0, 130 if it was interrupted, 2 with a line on standard error if it could not."""
    try:
        chosen = options(argv)
        check_env(chosen["env"])
        if chosen["course"] and not Path(chosen["course"]).absolute().parent.is_dir():
            raise ConfigError(f"--course {chosen['course']}: there is no such folder")
        result, trial = (_distributed if chosen["distributed"] else _local)(chosen)
    except BrayxError as error:
        if os.environ.get("BRAYX_TRACEBACK"):
            raise
        print(f"ppo: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_summary(result, trial)), flush=True)
    return 130 if result["reason"] == "stopped" else 0


def _local(chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """In this process."""
    stop = threading.Event()
    _on_interrupt(stop.set)
    began = _process_began()
    from brayx.tracking.store import tracking_uri
    from pipelines.books import Clerk

    project, name = _names(chosen)
    algorithm, training = _configs(chosen)
    with temporary_files():  # the clerk's, where this is killed
        clerk = Clerk(project, name, tracking_uri(chosen["tracking"]), chosen, resume=not chosen["new"])
        try:
            try:
                result = _train(chosen, algorithm, training, clerk, stop)
            except BaseException:
                with contextlib.suppress(BrayxError):
                    clerk.close("FAILED")
                raise
            trial = clerk.close("KILLED" if result.reason == "stopped" else "FINISHED")
        finally:
            clerk.end()
    _write_course(chosen["course"], result)
    told = _told_of(result, began)
    return {**told, "reason": "stopped"} if stop.is_set() else told, trial.run_id


def _on_interrupt(stop: Callable[[], None]) -> None:
    """Has an interrupt end training in order, once: what still hangs when the command's time is over is killed."""

    def interrupted(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        end_within()
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, interrupted)


def _train(
    chosen: Mapping[str, Any], algorithm: PPOConfig, training: Training, clerk: Any, stop: threading.Event
) -> Result:
    from pipelines.rollouts import train_local

    return train_local(
        chosen["env"],
        algorithm,
        training,
        on_update=_telling(chosen["log_interval"], chosen["timesteps"]),
        clerk=clerk,
        stop=stop,
    )


def _configs(chosen: Mapping[str, Any]) -> tuple[PPOConfig, Training]:
    """PPO's options and all others.

    Raises:
        ConfigError: one of them cannot be; named as on the command line.
    """
    from pydantic import ValidationError

    try:
        return algorithm_of(chosen), _training(chosen)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][-1]) if first["loc"] else ""
        option = f"--{_HERE.get(name, name).replace('_', '-')}"
        raise ConfigError(f"{option} {first['input']}: {first['msg']}", key=option) from None


def _training(chosen: Mapping[str, Any]) -> Training:
    """Everything that is not the algorithm's."""
    from brayx.nets.policy import NetworkConfig
    from pipelines.training import Training

    return Training(
        total_steps=chosen["timesteps"],
        num_envs=chosen["num_workers"] * chosen["num_envs"],
        learning_rate=chosen["lr"],
        network=NetworkConfig(**{name: chosen[name] for name in _OF_NETWORK}),
        use_gpu=chosen["device"] == "cuda",
        evaluation_episodes=chosen["eval_episodes"],
        checkpoint_interval=chosen["save_interval"],
        **{name: chosen[name] for name in _SAME},
    )


def _names(chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Of the project and of the trial in MLflow."""
    project = chosen["env"].replace("/", " ")
    return project, chosen["trial"] or f"ppo {project} seed {chosen['seed']}"


def _distributed(chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Over a Ray cluster."""
    began = _process_began()
    from pipelines.distributed import train_distributed

    project, name = _names(chosen)
    algorithm, training = _configs(chosen)
    result, trial = train_distributed(
        chosen["env"],
        algorithm,
        training,
        num_workers=chosen["num_workers"],
        project=project,
        trial=name,
        resume=not chosen["new"],
        tracking=chosen["tracking"],
        address=chosen["address"],
        log_interval=chosen["log_interval"],
    )
    _write_course(chosen["course"], result)
    return _told_of(result, began), trial.run_id


def _write_course(file: str | None, result: Result) -> None:
    """Writes the course of a training, with Unix times."""
    if file is not None:
        at = time.time() - time.monotonic() + result.began
        points = [[at + point.seconds, point.env_steps, point.episodes, point.return_mean] for point in result.curve]
        try:
            Path(file).write_text(json.dumps(points))
        except OSError as error:  # what was learned is in the books, and is told all the same
            print(f"ppo: the course is not written: {error}", file=sys.stderr)


def _told_of(result: Result, process_began: float) -> dict[str, Any]:
    """What is said of a result in the end, with seconds from the process's start."""
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


def _summary(result: Mapping[str, Any], trial: str) -> dict[str, Any]:
    told = {name: value for name, value in result.items() if name != "reason"}
    told = {name: round(value, 4) if isinstance(value, float) else value for name, value in told.items()}
    # NaN is no JSON.
    return {**{name: None if value != value else value for name, value in told.items()}, "trial": trial}


def _telling(every: int, total: int) -> Callable[[int, int, Mapping[str, float]], None]:
    began = time.monotonic()
    first: list[int] = []

    def tell(update: int, env_steps: int, numbers: Mapping[str, float]) -> None:
        first.append(env_steps) if not first else None
        if update % every and env_steps < total:
            return
        rate = (env_steps - first[0]) / max(time.monotonic() - began, 1e-9)
        mean = numbers.get("episode_return.last100")
        print(
            f"update {update}: {env_steps:,} of {total:,} env steps, {rate:,.0f}/s, "
            f"return {'-' if mean is None else f'{mean:.1f}'}, kl {numbers.get('approx_kl', float('nan')):.4f}, "
            f"entropy {numbers.get('entropy', float('nan')):.3f}",
            file=sys.stderr,
            flush=True,
        )

    return tell


def _process_began() -> float:
    """When this process began, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _told(text: str, name: str) -> str:
    """The help of an option with a default."""
    default = defaults()[name]
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, list):
        default = " ".join(map(str, default))
    return f"{text} (default: {'none' if default is None else default})"


def _bool(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"is {text!r}, expected true or false")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected 1 or more")
    return value


if __name__ == "__main__":
    from pipelines.cli import run

    run(["ppo", *sys.argv[1:]])  # as `brayx ppo`, which ends all that it started in time
