"""The console of an actor on Serve: its control API and page, at the job's own `console_port`.

    applications:
      - {name: console, route_prefix: null, import_path: deployments.console:app, args: {config: match/match.yaml}}

It has no route at Serve's ingress, where the games' doors are: one replica on the head node listens itself.
"""

# No `from __future__ import annotations`: Serve reads the class of `app`'s argument from its annotation, not from text.

import logging
import time
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig

from brayx.cluster import ray_private
from brayx.cluster.actor_app import directory_of
from brayx.cluster.console import ReplicaSessions
from brayx.cluster.serve_run import serve_run
from brayx.console.job import MODULE, ConsoleJob, words_of
from brayx.console.port import ConsolePort
from brayx.errors import ConfigError, StartupError
from brayx.jobs.config import JobConfig, only
from brayx.tracking import tracking_uri

_PORT_S = 10.0
"""Time for the replica before this one to free the port."""
_AGAIN_S = 0.2
_ROUTE_S = 2.0
_HEAD = "node:__internal_head__"
"""Ray's resource that only the head node has, so that the console's address does not move."""


class ConsoleReplica:
    """Listens for the console of an actor, from its construction to its end.

    Args:
        project: name of the job's project.
        directory: name of the actor's session directory.
        host, port: where it listens; port 0: a free one.
        words: arguments of the console's process.

    Raises:
        StartupError: the port is taken.
    """

    def __init__(self, project: str, directory: str, host: str, port: int, words: tuple[str, ...]) -> None:
        self._project, self._sessions = project, ReplicaSessions(directory)
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
        logging.getLogger("ray.serve").info("the console is %s", self._console.url)

    async def __call__(self, request: Any = None) -> str:
        """Where the console is; that is all that a route at Serve's ingress answers."""
        return self._console.url

    def __del__(self) -> None:
        """Serve's shutdown hook."""
        if hasattr(self, "_console"):
            self._console.close()
            self._sessions.close()

    def _facts(self) -> dict[str, Any]:
        facts = self._sessions.facts()
        ingress = self._ingress(facts.pop("application", ""))
        return {"mode": "serve", "project": self._project, **facts, "doors": facts.get("doors", {}) | ingress}

    def _ingress(self, application: str) -> dict[str, str]:
        """The URL of the served actor at Serve's ingress, if it has one."""
        host, port = ray_private.serve_http_address()
        controller = ray_private.serve_controller()
        try:
            route = None if controller is None else ray_private.serve_route(controller, application, _ROUTE_S)
        except RayError:  # the controller starts again, say
            return {}
        return {} if host is None or route is None else {"ingress": f"http://{host}:{port}{route.rstrip('/')}"}


class ConsoleArgs(BaseModel):
    """Arguments of `app`, as ``serve run`` or a Serve config's ``args`` give them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    config: str
    """The YAML of the served job; its ``console_port``, ``console_host`` and ``console_keys_file`` are used."""
    actor: str = ""
    """The served actor; may be empty if the job has only one."""
    tracking: str | None = None
    """As the served actor's."""


@serve_run()
def app(args: ConsoleArgs) -> serve.Application:
    """The console of a served actor.

    Raises:
        ConfigError: the job has no such actor or no ``console_port``; or other machines can reach the console, and it
            has no keys.
    """
    job = JobConfig.load(args.config)
    return console_application(job, tracking_uri(args.tracking or job.tracking.uri), actor=args.actor)


def console_application(job: JobConfig, uri: str, *, actor: str = "") -> serve.Application:
    """The console of a served actor; arguments and errors as for `app`."""
    if job.console_port is None:
        raise ConfigError(f"{job.file}: console_port is null, so there is no console", key="console_port")
    deployment: Any = serve.deployment(
        ConsoleReplica,
        name="console",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        health_check_period_s=5.0,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    directory = directory_of(job, only("actor", job.actors, actor))
    application: serve.Application = deployment.bind(
        job.project, directory, job.console_host, job.console_port, words_of(job, uri)
    )
    return application
