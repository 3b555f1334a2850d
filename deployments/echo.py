"""An actor that answers each body with itself: for conformance and load tests.

serve run deployments.echo:app
serve run deployments.echo:app num_workers=2
"""

# No `from __future__ import annotations`: Serve reads the class of `app`'s argument from its annotation, not from text.

from pathlib import Path

from pydantic import BaseModel, ConfigDict
from ray import serve

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.cluster.replica import ActorRuntime, actor_deployment
from brayx.cluster.serve_run import serve_run
from brayx.gamecore.protocol import DEFAULT_MAX_BODY_BYTES


class EchoActor(Actor):
    """Every reply is its request's body. It has no state, so its sessions can move."""

    async def snapshot(self) -> bytes:
        return b""

    async def restore(self, session: str, snapshot: bytes) -> None:
        pass

    async def start(self, session: str, body: bytes) -> bytes:
        return body

    async def tick(self, body: bytes) -> bytes:
        return body

    async def stop(self, body: bytes) -> bytes:
        return body

    async def call(self, body: bytes) -> bytes:
        return body


class EchoArgs(BaseModel):
    """Arguments of `app`, as ``serve run`` or a Serve config's ``args`` give them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_workers: int = 1
    max_sessions: int = 4096
    idle_timeout_s: float = 60.0
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    native_host: str = "127.0.0.1"
    native_port: int | None = 8100
    tcp_port: int | None = 8101
    snapshot_every: int = 0
    drain_timeout_s: float = 10.0
    cors_origins: list[str] = []
    allowed_hosts: list[str] = []
    keys_file: str | None = None
    """Relative to the current directory of the process that builds the application, as with ``serve run``."""


async def build_runtime(handles: object) -> ActorRuntime:
    """An echo replica needs nothing but the actor."""
    return ActorRuntime(make_actor=EchoActor)


@serve_run()
def app(args: EchoArgs) -> serve.Application:
    """The echo application."""
    options = args.model_dump(exclude={"max_sessions"})
    if args.keys_file is not None:
        options["keys_file"] = str(Path(args.keys_file).absolute())
    config = ActorConfig(agents=["echo"], actors_per_worker=args.max_sessions, serialize=None, **options)
    return actor_deployment(build_runtime, config, name="echo", directory="echo/sessions")
