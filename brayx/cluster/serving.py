"""The Serve applications that users name in `deployments`: an actor, a league, a model alone, a console.

serve run serve_config.yaml        # serves the champion, with `actor_app` below
"""

# No `from __future__ import annotations`: Serve reads the class of an argument from its annotation, not from text.

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig

from brayx.cluster import ray_private
from brayx.cluster.actor_app import actor_spec, application
from brayx.cluster.console import ReplicaSessions
from brayx.cluster.model import model_application
from brayx.cluster.named import HEAD
from brayx.cluster.pool import PoolClient
from brayx.cluster.serve_run import serve_run
from brayx.console.job import MODULE, ConsoleJob, words_of
from brayx.console.port import ConsolePort
from brayx.errors import ConfigError, StartupError
from brayx.jobs.checks import check_one_contract
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig, only
from brayx.jobs.contracts import by_contract, check_served_limits
from brayx.jobs.recorded import with_contract
from brayx.jobs.weights import pool_args, pooled, sources_of
from brayx.league.served import served_league
from brayx.model.arms import Followed, WeightSource
from brayx.model.build import acting_model
from brayx.tracking import tracking_uri

_PORT_S = 10.0
"""Time for the console's replica before this one to free the port."""
_AGAIN_S = 0.2
_ROUTE_S = 2.0


class _Args(BaseModel):
    """Arguments of an application, as ``serve run`` or a Serve config's ``args`` give them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    config: str
    """The job's YAML."""
    tracking: str | None = None
    """MLflow's URI, or its sqlite file; default: the job's, ``MLFLOW_TRACKING_URI``, then ``mlflow.db``."""

    def job(self) -> tuple[JobConfig, str]:
        """The job, and its tracking URI."""
        job = JobConfig.load(self.config)
        return job, tracking_uri(self.tracking or job.tracking.uri)


class ServeArgs(_Args):
    """Arguments of `actor_app` and `league_app`."""

    actor: str = ""
    """The actor to serve; may be empty if the job has only one."""
    models: dict[str, str] = {}
    """Version that each model serves (``models:/cartpole@champion``); default: the champion of the job's project."""
    num_workers: int | None = None
    """Replicas; default: as in the job."""
    trial: str = ""
    """Trial of the league whose players clients can request; default: the newest league of the project."""


class ModelArgs(_Args):
    """Arguments of `model_app`."""

    model: str = ""
    """Which of its models; may be empty if the job has only one."""
    version: str = ""
    """Of the registry: ``models:/cartpole/3``, or an alias, which is followed; default: the project's champion."""
    num_workers: int | None = None
    """Replicas; default: as in the job."""


class ConsoleArgs(_Args):
    """Arguments of `console_app`; the job's ``console_port``, ``console_host`` and ``console_keys_file`` are used."""

    actor: str = ""
    """The served actor; may be empty if the job has only one."""


@serve_run()
def actor_app(args: ServeArgs) -> serve.Application:
    """Serves a trained job: the same agents, acting greedily with registered weights.

    A model without a champion is served as built, untrained, and the log says what to run.
    """
    return serving_application(*args.job(), **args.model_dump(exclude={"config", "tracking"}))


@serve_run()
def league_app(args: ServeArgs) -> serve.Application:
    """Serves a job with a league, as `actor_app` does: a start may request its opponent.

    Raises:
        ConfigError: the job has no league.
    """
    job, uri = args.job()
    if not job.leagues:
        raise ConfigError(f"{job.file}: the job has no league; deployments.actor:app serves it")
    return serving_application(job, uri, **args.model_dump(exclude={"config", "tracking"}))


@serve_run()
def model_app(args: ModelArgs) -> serve.Application:
    """Serves a trained model alone, without agents; see `brayx.model.http` and ``brayx/model/v1/model.proto``.

    Raises:
        ConfigError: the job has no such model.
        TrackingError: the registry cannot be read, or has no such version.
    """
    job, uri = args.job()
    name = only("model", job.models, args.model)
    source = pooled(job, name, uri, args.version)
    pool = _pool(job, uri, f"{job.project}/{name}/alone", {name: source})
    config = job.models[name]
    if args.num_workers is not None:
        config = config.model_copy(update={"num_workers": args.num_workers})
    build = functools.partial(acting_model, job.folder, config.module, name, job.in_mode("serve").as_dict())
    return model_application(build, config, source, name=name, pool=pool)


@serve_run()
def console_app(args: ConsoleArgs) -> serve.Application:
    """The console of a served actor.

    Raises:
        ConfigError: the job has no such actor or no ``console_port``; or other machines can reach the console, and it
            has no keys.
    """
    return console_application(*args.job(), actor=args.actor)


def serving_application(
    job: JobConfig,
    uri: str,
    *,
    actor: str = "",
    models: Mapping[str, str] | None = None,
    num_workers: int | None = None,
    trial: str = "",
) -> serve.Application:
    """The application that serves a job; arguments as in `ServeArgs`.

    Raises:
        ConfigError: the job's code cannot be loaded; the levels file or a limit of the actor is wrong; or there is no
            league of this trial.
        TrackingError: the registry cannot be read, or has no version that ``models`` names.
    """
    actor = only("actor", job.actors, actor)
    check_one_contract(job, "only a training, or a service in one process, has several")
    check_code(job, [actor], mode="serve")
    weights = sources_of(job, uri, models or {})
    job = with_contract(job, weights)
    job = next(iter(by_contract(job)), job)
    check_served_limits(by_contract(job))
    league = served_league(job, uri, weights, trial=trial, on_ray=True)
    directory = _directory(job, actor)
    pool = _pool(job, uri, directory, weights, league.versions)
    spec = actor_spec(job, actor, mode="serve", weights=weights, pool=pool)
    spec = dataclasses.replace(spec, models=league.resident(spec.models), served_league=league)
    if num_workers is not None:
        spec = dataclasses.replace(spec, actor=spec.actor.model_copy(update={"num_workers": num_workers}))
    return application(spec, name=actor, directory=directory)


def console_application(job: JobConfig, uri: str, *, actor: str = "") -> serve.Application:
    """The console of a served actor; arguments and errors as for `console_app`."""
    if job.console_port is None:
        raise ConfigError(f"{job.file}: console_port is null, so there is no console", key="console_port")
    deployment: Any = serve.deployment(
        ConsoleReplica,
        name="console",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},  # its address must not move
        health_check_period_s=5.0,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    directory = _directory(job, only("actor", job.actors, actor))
    application: serve.Application = deployment.bind(
        job.project, directory, job.console_host, job.console_port, words_of(job, uri), bool(job.leagues)
    )
    return application


def _directory(job: JobConfig, actor: str) -> str:
    """Name of the session directory of a served actor."""
    return f"{job.project}/{actor}/sessions"


def _pool(
    job: JobConfig,
    uri: str,
    name: str,
    weights: Mapping[str, WeightSource],
    versions: Mapping[str, Followed] | None = None,
) -> PoolClient | None:
    """The registry as the replicas of the application ``name`` see it; None: they need none. Others as `pool_args`."""
    args = pool_args(job, uri, weights, versions)
    return PoolClient(f"{name}/pool", *args) if args[2] else None


class ConsoleReplica:
    """Listens for the console of an actor, from its construction to its end.

    It has no route at Serve's ingress, where the games' doors are: one replica on the head node listens itself.

    Args:
        project: name of the job's project.
        directory: name of the actor's session directory.
        host, port: where it listens; port 0: a free one.
        words: arguments of the console's process.
        league: whether the job serves a league.

    Raises:
        StartupError: the port is taken.
    """

    def __init__(
        self, project: str, directory: str, host: str, port: int, words: tuple[str, ...], league: bool
    ) -> None:
        self._head = {"mode": "serve", "project": project, "league": league}
        self._sessions = ReplicaSessions(directory)
        parts = ConsoleJob(self._facts, self._sessions, self._sessions.set_share)
        until = time.monotonic() + _PORT_S
        while True:
            try:
                self._console = ConsolePort(host, port, MODULE, words, parts.answer)
                break
            except StartupError:
                if time.monotonic() > until:
                    self._sessions.close()
                    raise
                time.sleep(_AGAIN_S)
        self._sessions.tell(self._console.url)
        logging.getLogger("ray.serve").info("the console is %s", self._console.url)

    async def __call__(self, request: Any = None) -> str:
        """Returns the console's URL; a Serve route answers nothing else."""
        return self._console.url

    def __del__(self) -> None:
        """Serve's shutdown hook."""
        if hasattr(self, "_console"):
            self._console.close()
            self._sessions.close()

    def _facts(self) -> dict[str, Any]:
        facts = self._sessions.facts()
        ingress = self._ingress(facts.pop("application", ""))
        return {**self._head, **facts, "doors": facts.get("doors", {}) | ingress}

    def _ingress(self, application: str) -> dict[str, str]:
        """The URL of the served actor at Serve's ingress, if it has one."""
        host, port = ray_private.serve_http_address()
        controller = ray_private.serve_controller()
        try:
            route = None if controller is None else ray_private.serve_route(controller, application, _ROUTE_S)
        except RayError:  # the controller starts again, say
            return {}
        return {} if host is None or route is None else {"ingress": f"http://{host}:{port}{route.rstrip('/')}"}
