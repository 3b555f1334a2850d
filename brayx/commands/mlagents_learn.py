"""``brayx mlagents-learn``: trains a Unity project by the flags of `mlagents-learn` 1.1.0.

`brayx.jobs.mlagents` converts them to a job, and `brayx.front` trains it.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.command_line import SWITCH, announced, say
from brayx.commands.arguments import add_set, add_tracking

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.mlagents import LearnOptions

HELP = "train a Unity project by the options and the YAML of ML-Agents' mlagents-learn"
_EXPORT_S = 60.0
"""Seconds to write the models of an interrupted training; loading MLflow takes most of it."""
_FLAG: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_NEGATION: dict[str, Any] = {"action": "store_true"}
_OF_BUILDS = ("num", "headless", "restarts", "lifetime_restarts", "restarts_within_s")
"""Options of the bridge for builds that it starts."""
FLAGS: dict[str, dict[str, tuple[str, dict[str, Any], str]]] = {
    "env_settings": {
        "--env": ("env_path", {}, "build to start; without it, press Play in the Editor"),
        "--base-port": ("base_port", {"type": int}, "port of the first build; the next ones follow (default: 5005)"),
        "--num-envs": ("num_envs", {"type": int}, "number of builds (default: 1)"),
        "--num-areas": ("num_areas", {"type": int}, "copies of the training area in each game (default: 1)"),
        "--seed": ("seed", {"type": int}, "seed of the training and the games (default: -1, a random one)"),
        "--timeout-wait": ("timeout_wait", {}, "without effect: a game may take as long as it needs"),
        "--max-lifetime-restarts": (
            "max_lifetime_restarts", {"type": int}, "most restarts of one build in all; -1: no limit (default: 10)"
        ),
        "--restarts-rate-limit-n": (
            "restarts_rate_limit_n", {"type": int}, "most restarts of one build in that time; -1: no limit (default: 1)"
        ),
        "--restarts-rate-limit-period-s": (
            "restarts_rate_limit_period_s", {"type": float}, "time for --restarts-rate-limit-n in seconds (default: 60)"
        ),
        "--env-args": ("env_args", {"nargs": argparse.REMAINDER}, "the build gets all arguments after this flag"),
    },
    "engine_settings": {
        "--width": ("width", {"type": int}, "width of a build's window (default: 84)"),
        "--height": ("height", {"type": int}, "height of a build's window (default: 84)"),
        "--quality-level": ("quality_level", {"type": int}, "index of the project's quality level (default: 5)"),
        "--time-scale": ("time_scale", {"type": float}, "how much faster than real time (default: 20)"),
        "--target-frame-rate": ("target_frame_rate", {"type": int}, "most frames drawn per second (default: no limit)"),
        "--capture-frame-rate": (
            "capture_frame_rate", {"type": int}, "frames per second of the game's time (default: 60)"
        ),
        "--no-graphics": ("no_graphics", _NEGATION, "builds draw nothing; not for agents that see"),
        "--no-graphics-monitor": ("no_graphics_monitor", _NEGATION, "without effect"),
    },
    "checkpoint_settings": {
        "--run-id": ("run_id", {}, "name of the run (default: ppo)"),
        "--resume": ("resume", _FLAG, "go on with the run of that name"),
        "--force": ("force", _FLAG, "start a new run even if the name exists; the former one stays in MLflow"),
        "--initialize-from": ("initialize_from", {"metavar": "RUN_ID"}, "start from the weights of this run"),
        "--inference": ("inference", _FLAG, "refused; the message says how to play the champion"),
        "--load": ("load_model", _FLAG, argparse.SUPPRESS),
        "--train": ("train_model", _FLAG, argparse.SUPPRESS),
        "--results-dir": ("results_dir", {}, "folder of the models, RUN_ID/BEHAVIOUR.onnx (default: results)"),
    },
    "network_settings": {
        "--deterministic": ("deterministic", _FLAG, argparse.SUPPRESS),
    },
    "torch_settings": {
        "--torch-device": ("device", {}, "cpu, or cuda to learn on a GPU (default: cpu)"),
    },
}  # fmt: skip
"""The flags by section of the YAML: key in the section, arguments of the parser, help."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments. A flag that is not given is absent from the result."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="ML-Agents' YAML (default: ML-Agents' defaults)"
    )
    for flags in FLAGS.values():
        for flag, (key, arguments, text) in flags.items():
            parser.add_argument(flag, dest=key, default=argparse.SUPPRESS, help=text, **arguments)
    for flag in ("--debug", "--torch", "--tensorflow"):
        parser.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **_FLAG)
    parser.add_argument(
        "--ignore-unsupported", help="train even if options without a counterpart change what is learned", **SWITCH
    )
    add_set(parser)
    add_tracking(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0, or 130 if it was interrupted."""
    with announced(arguments.config or "unity.yaml", "before training began"):
        if arguments.config is not None:
            from brayx.jobs.document import read_yaml

            read_yaml(arguments.config)  # an error before the imports, which take seconds
        from brayx.errors import ConfigError
        from brayx.front import train_job
        from brayx.jobs.contracts import plain_name
        from brayx.jobs.export import export_behaviours
        from brayx.jobs.mlagents import learn_options
        from brayx.shutdown import end_within, is_ending
        from brayx.tracking import tracking_uri

        learn = learn_options(arguments.config, flags_of(arguments))
        for line in [*learn.notes, *(learn.refused if arguments.ignore_unsupported else [])]:
            say(f"brayx: {line}")
        if learn.refused and not arguments.ignore_unsupported:
            raise ConfigError(f"{'; '.join(learn.refused)}; --ignore-unsupported trains without", errors=learn.refused)
        job = learn.load(arguments.overrides)
        uri = tracking_uri(arguments.tracking or job.tracking.uri)
        job, resume = _started(learn, job, uri)
        result = train_job(job, resume=resume, tracking=uri)
        if is_ending():
            say(f"writing the models, for at most {_EXPORT_S:g} s")
            end_within(_EXPORT_S)
        for line in export_behaviours(
            result.trial, "unity", Path(learn.checkpoints.results_dir, plain_name(job.trial))
        ):
            say(f"brayx: {line}")
    print(result.summary())
    if result.finished:
        return 0
    print("mlagents-learn: the same command with --resume goes on with it")
    return 130


def flags_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The flags that were given, by section and key."""
    given = vars(arguments)
    return {
        section: {key: given[key] for key, _, _ in flags.values() if key in given} for section, flags in FLAGS.items()
    }


def _bridge(job: JobConfig) -> str:
    """The command that plays at the service, with the options that are not its defaults. The seed is the training's."""
    from brayx.bridges.unity import parser
    from brayx.jobs.kinds import flags_of

    words = ["--url", "tcp://127.0.0.1:8101"]
    defaults = vars(parser().parse_args(words))
    given = job.configs["game"].model_extra or {}
    useless = {"seed"} if given["command"] else {"seed", *_OF_BUILDS}
    own = {name: given[name] for name in given if name not in useless and given[name] != defaults.get(name)}
    return shlex.join(["brayx", "bridge", "unity", *words, *flags_of(own)])


def _started(learn: LearnOptions, job: JobConfig, uri: str) -> tuple[JobConfig, bool]:
    """The job, and whether it resumes its trial.

    Raises:
        ConfigError: the name is taken, there is nothing to resume, or ``--inference`` is set.
    """
    from brayx.errors import ConfigError
    from brayx.tracking.finding import newest_runs
    from brayx.tracking.trial import PARENT_TAG

    given, name = learn.checkpoints, job.trial
    if given.inference:
        raise ConfigError(
            f"--inference learns nothing: serve the champion, {learn.serve_command(job)}, and run {_bridge(job)}"
        )
    try:
        runs = [
            run
            for run in newest_runs(uri, job.project)[1]
            if run.info.run_name == name and PARENT_TAG not in run.data.tags
        ]
    except ConfigError:  # nothing was trained before
        runs = []
    if given.resume and not runs:
        raise ConfigError(f"--resume: project {job.project!r} has no run {name!r}: see `brayx trials`", trial=name)
    if runs and not given.resume and not given.force:
        raise ConfigError(
            f"project {job.project!r} has a run {name!r}: --resume goes on with it, --force starts a new one, or name "
            "another with --run-id",
            trial=name,
        )
    if given.resume and runs[0].info.status == "FINISHED":
        say(f"brayx: run {name!r} is finished: a new one of that name starts from its weights")
        return job.with_initial_weights(f"runs:/{runs[0].info.run_id}"), False
    return job, given.resume
