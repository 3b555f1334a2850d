"""``brayx demo``: trains a champion, serves it, and plays games against it.

It trains CartPole through the door, registers and serves the champion, plays the games through the HTTP door, and
prints the next commands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.command_line import announced, count
from brayx.commands.train import training_options
from brayx.jobs.shipped import TEMPLATES

if TYPE_CHECKING:
    from brayx.front import Ingress
    from brayx.jobs.config import JobConfig
    from brayx.jobs.result import TrainResult

HELP = "train CartPole through the door, serve the champion, play 20 games"
PASSING_RETURN = 475.0
"""Gymnasium's threshold of a solved CartPole-v1."""
_ENV_ID = "CartPole-v1"
_SERVE_FILE = "serve_config.yaml"
_EVALUATION_SEED = 1_000_000
"""Seed of the final games. Gamecores use their numbers from 0 on as seeds, so a low seed would repeat games that the
agent was trained on."""

Serve = Callable[["TrainResult"], "contextlib.AbstractContextManager[str]"]
"""A context that serves the trained model; its value is the URL of the HTTP door."""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    training_options(parser)
    parser.add_argument("--games", type=count, default=20, help="games of the final evaluation (default: 20)")
    parser.set_defaults(config=str(TEMPLATES / "cartpole.yaml"))


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; exit code 0 only if the trained agent reached a mean return of `PASSING_RETURN`."""
    with announced(arguments.config, "before the demo was over"):
        return _demo(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from brayx.front import cluster_of
    from brayx.jobs.champion import CURVE_FILE
    from brayx.jobs.config import JobConfig, only
    from brayx.jobs.evaluate import draw_curve, evaluate
    from brayx.jobs.rating import rate
    from brayx.tracking import tracking_uri

    began = time.monotonic()
    job = JobConfig.load(arguments.config, arguments.overrides)
    actor = only("actor", job.actors)
    uri = tracking_uri(arguments.tracking or job.tracking.uri)
    cluster = cluster_of(job, arguments.cluster)
    trial_options = {"trial_name": arguments.trial, "resume": not arguments.new}
    with contextlib.ExitStack() as stack:
        if cluster is None:
            result, serve = _in_process(job, uri, trial_options)
        else:
            result, serve = stack.enter_context(_on_ray(job, uri, cluster, arguments.ingress, trial_options))
        print(result.summary())
        if not result.finished:
            return 130
        if result.version is None:
            return 1
        print(f"serving version {result.version}", file=sys.stderr, flush=True)
        url = stack.enter_context(serve(result))
        keys_file = job.actors[actor].keys_file
        played = evaluate(url, _ENV_ID, games=arguments.games, seed=_EVALUATION_SEED, keys_file=keys_file)
    rate(result.pool_name, result.version, _ENV_ID, played, uri)
    curve = Path(CURVE_FILE).absolute()
    draw_curve(result.curve, title=job.project, target=PASSING_RETURN).savefig(curve)
    print(f"  version {result.version}, greedy, through the HTTP door: {played}")
    print(f"  curve: {curve}, and in MLflow")
    print(f"  {time.monotonic() - began:.0f} s in all, from the start to the last game\n")
    if played.mean < PASSING_RETURN:
        print(f"the mean return {played.mean:.1f} is below {PASSING_RETURN:g}")
        return 1
    print("next:")
    store = shlex.quote(uri)
    print(f"  {_command('mlflow')} ui --backend-store-uri {store} --workers 1  # the trial, its curves and checkpoints")
    if cluster is None:
        print(f"  {_command('brayx')} demo --cluster  # the same on Ray")
    print(f"  {_command('brayx')} serve {shlex.quote(arguments.config)} --tracking {store}  # serves the champion")
    application = _served(arguments.config, uri, uri == tracking_uri())
    print(f"  {_command('serve')} run {application}  # serves it on Ray")
    return 0


def _in_process(job: JobConfig, uri: str, trial_options: dict[str, Any]) -> tuple[TrainResult, Serve]:
    """Trains in this process; returns the context that serves the model here."""
    from brayx.local.job import train_in_process

    @contextlib.contextmanager
    def serve(result: TrainResult) -> Iterator[str]:
        from brayx.local.serving import Serving

        (model,) = job.models
        with Serving(job, uri, models={model: result.reference}) as serving:
            yield serving.url

    return train_in_process(job, tracking=uri, **trial_options), serve


@contextlib.contextmanager
def _on_ray(
    job: JobConfig, uri: str, cluster: str, ingress: Ingress, trial_options: dict[str, Any]
) -> Iterator[tuple[TrainResult, Serve]]:
    """Trains on a cluster that stays up for this context; returns the context that serves the model there."""
    from brayx.cluster.job import cluster_for, deploy, train_on
    from brayx.cluster.serving import serving_application
    from brayx.jobs.checks import check_job
    from brayx.tracking import initialise

    actor, layout = check_job(job)
    initialise(uri)
    with cluster_for(job, ingress, cluster) as ray:

        @contextlib.contextmanager
        def serve(result: TrainResult) -> Iterator[str]:
            (model,) = job.models
            deploy(serving_application(job, uri, models={model: result.reference}), actor)
            yield ray.url

        yield train_on(ray, job, layout, uri, **trial_options), serve


def _served(config: str, uri: str, is_default: bool) -> str:
    """Arguments of ``serve run`` for the champion: the shipped file, if it exists here and uses this store."""
    if Path(_SERVE_FILE).is_file() and is_default:
        return _SERVE_FILE
    return shlex.join(["deployments.actor:app", f"config={config}", f"tracking={uri}"])


def _command(name: str) -> str:
    """The command that calls this environment's ``name``: its path, unless the environment is activated."""
    path = Path(sys.executable).parent / name
    return name if shutil.which(name) == str(path) else shlex.quote(os.path.relpath(path))
