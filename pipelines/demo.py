"""``make demo``: the main job from nothing to a champion that is served and played against.

Trains CartPole through the door, registers the champion, serves it as ``serve run serve_config.yaml`` would, plays
games against it through the HTTP door, and says what to type next.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from brayx.tracking import initialise, tracking_uri
from deployments.actor import serving_application
from deployments.job import JobConfig
from pipelines.evaluate import draw_curve, evaluate
from pipelines.train import CURVE_FILE, check_job, cluster_for, deploy, train_on

PASSING_RETURN = 475.0
"""What Gymnasium registers as solved for CartPole-v1."""
_ENV_ID = "CartPole-v1"


def demo(arguments: argparse.Namespace) -> int:
    """Runs the demo; exit code 0 only if the champion's mean return reached `PASSING_RETURN`."""
    console = Console(file=sys.stderr, highlight=False)
    began = time.monotonic()
    job = JobConfig.load(arguments.config, arguments.overrides)
    actor = check_job(job)
    uri = initialise(tracking_uri(arguments.tracking or job.tracking))
    with cluster_for(job, arguments.ingress, arguments.address) as cluster:
        result = train_on(cluster, job, uri, trial_name=arguments.trial, resume=not arguments.new)
        print(result.summary())
        if not result.finished:
            return 130
        if result.version is None:
            console.print("[red]no checkpoint saw enough finished games: there is no champion[/red]")
            return 1
        console.print("[dim]serving the champion[/dim]")
        (model,) = job.models
        champion = {model: f"models:/{result.pool_name}/{result.version}"}
        deploy(serving_application(job, uri, models=champion), actor)
        played = evaluate(cluster.url, _ENV_ID, games=arguments.games, seed=job.seed)
    curve = Path(CURVE_FILE).absolute()
    draw_curve(result.curve, title=job.project, target=PASSING_RETURN).savefig(curve)
    passed = played.mean >= PASSING_RETURN
    print(f"  champion, greedy, through the HTTP door: {played}")
    print(f"  curve: {curve}, and in MLflow")
    print(f"  {time.monotonic() - began:.0f} s in all\n")
    if not passed:
        print(f"the champion's mean return {played.mean:.1f} is below {PASSING_RETURN:g}")
        return 1
    print("next:")
    print(f"  {_command('mlflow')} ui --backend-store-uri {uri} --workers 1")
    print(f"  {_command('serve')} run serve_config.yaml")
    return 0


def _command(name: str) -> str:
    """How this environment's ``name`` is called from here: by its path, unless the environment is activated."""
    path = Path(sys.executable).parent / name
    return name if shutil.which(name) == str(path) else os.path.relpath(path)
