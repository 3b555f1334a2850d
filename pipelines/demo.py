"""``make demo``: the main job from nothing to a champion that is served and played against.

Trains CartPole through the door, registers what came of it, serves that as ``serve run serve_config.yaml`` would, plays
games against it through the HTTP door, and says what to type next.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from brayx.tracking import initialise, tracking_uri
from deployments.actor import serving_application
from deployments.job import JobConfig
from pipelines.champion import CURVE_FILE
from pipelines.checks import check_job
from pipelines.evaluate import draw_curve, evaluate
from pipelines.rating import rate
from pipelines.train import cluster_for, deploy, train_on

PASSING_RETURN = 475.0
"""What Gymnasium registers as solved for CartPole-v1."""
_ENV_ID = "CartPole-v1"
_SERVE_FILE = "serve_config.yaml"
_EVALUATION_SEED = 1_000_000
"""Of the final games. The gamecores' seeds are their numbers from 0 on: from one of those, the games that are meant to
tell how well it plays would begin as games did that it was trained on."""


def demo(arguments: argparse.Namespace) -> int:
    """Runs the demo; exit code 0 only if what it trained reached a mean return of `PASSING_RETURN`."""
    console = Console(file=sys.stderr, highlight=False)
    began = time.monotonic()
    job = JobConfig.load(arguments.config, arguments.overrides)
    actor, layout = check_job(job)
    uri = initialise(tracking_uri(arguments.tracking or job.tracking))
    with cluster_for(job, arguments.ingress, arguments.address) as cluster:
        result = train_on(cluster, job, layout, uri, trial_name=arguments.trial, resume=not arguments.new)
        print(result.summary())
        if not result.finished:
            return 130
        if result.version is None:
            return 1
        console.print(f"[dim]serving version {result.version}[/dim]")
        (model,) = job.models
        trained = {model: f"models:/{result.pool_name}/{result.version}"}
        deploy(serving_application(job, uri, models=trained), actor)
        keys_file = job.actors[actor].keys_file
        played = evaluate(cluster.url, _ENV_ID, games=arguments.games, seed=_EVALUATION_SEED, keys_file=keys_file)
    rate(result.pool_name, result.version, _ENV_ID, played, uri)
    curve = Path(CURVE_FILE).absolute()
    draw_curve(result.curve, title=job.project, target=PASSING_RETURN).savefig(curve)
    passed = played.mean >= PASSING_RETURN
    print(f"  version {result.version}, greedy, through the HTTP door: {played}")
    print(f"  curve: {curve}, and in MLflow")
    print(f"  {time.monotonic() - began:.0f} s in all, from Ray's start to the last game\n")
    if not passed:
        print(f"the mean return {played.mean:.1f} is below {PASSING_RETURN:g}")
        return 1
    print("next:")
    print(f"  {_command('mlflow')} ui --backend-store-uri {uri} --workers 1")
    print(f"  {_command('serve')} run {_served(arguments.config, uri)}")
    return 0


def _served(config: str, uri: str) -> str:
    """What ``serve run`` takes here to serve the champion: the shipped file, where it is and finds the same books."""
    if Path(_SERVE_FILE).is_file() and uri == tracking_uri():
        return _SERVE_FILE
    return shlex.join(["deployments.actor:app", f"config={config}", f"tracking={uri}"])


def _command(name: str) -> str:
    """How this environment's ``name`` is called from here: by its path, unless the environment is activated."""
    path = Path(sys.executable).parent / name
    return name if shutil.which(name) == str(path) else os.path.relpath(path)
