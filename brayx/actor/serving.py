"""An actor's sessions behind its doors, with credentials. Both hosts run it.

Knows nothing of Ray, nor of an actor's content.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.ports import NativeDoors
from brayx.actor.examples import AcceptedBodies
from brayx.actor.ownership import Ownership
from brayx.actor.service import Holder, Reply, Service
from brayx.actor.table import SessionTable
from brayx.errors import BrayxError, ConfigError, Unauthorized
from brayx.gamecore.auth import READING, Keys
from brayx.gamecore.browser import Cors, Hosts
from brayx.gamecore.protocol import StepRequest
from brayx.metrics import Recorder
from brayx.metrics.openmetrics import OpenMetrics

if TYPE_CHECKING:
    from brayx.actor.tracing import TickTracing

GC_THRESHOLD = 10_000
"""New objects after which Python looks for cycles. At 700, the default, it would look several times at the objects that
episodes and recordings hold of hundreds of ticks."""


@dataclass
class Runtime:
    """The parts that an actor's sessions use.

    Attributes:
        make_actor: makes the actor of each session.
        recorder: recorder of the process.
        describe: JSON values for the status page, such as the policy version.
        close: coroutine functions that end what the actors use, in order, once the sessions have ended.
        admit: awaited with each start before its actor is made, and may refuse the start. It has its own deadline.
            None: starts go straight to the actor.
    """

    make_actor: Callable[[], Actor]
    recorder: Recorder = field(default_factory=Recorder)
    describe: Callable[[], dict[str, Any]] = dict
    close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    admit: Callable[[StepRequest], Awaitable[None]] | None = None


def tracing_of(config: ActorConfig, service: str, recorder: Recorder) -> list[TickTracing]:
    """A list with what makes spans of the ticks; empty: the actor does not trace.

    Args:
        config: the actor's options.
        service: name of the service in its spans.
        recorder: recorder of the process.

    Raises:
        ConfigError: the extra is missing.
    """
    if not config.tracing:
        return []
    try:
        from brayx.actor.tracing import TickTracing

        return [TickTracing.exporting(service, recorder)]
    except ImportError as error:
        raise ConfigError(f"actor.tracing needs its extra ({error}): pip install 'brayx[tracing]'") from None


class ActorService(Service):
    """The sessions of an actor in this process.

    Args:
        runtime: the parts that the sessions use.
        config: the actor's options.
        name: name of the application, on the status page.
        keys: keys that requests are signed with; None: every client is let in.
        ownership: as for `SessionTable`.
        shared: other processes of the application open the same native ports.
        is_local: no other machine can reach a door. Then clients get the text of exceptions, unless ``show_errors`` is
            false; without keys, HTTP doors answer to names of this machine only; and the status page may show bodies
            that a game has sent.

    Attributes:
        exported: the metrics that its HTTP doors show; None: none.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ActorConfig,
        name: str,
        *,
        keys: Keys | None = None,
        ownership: Ownership | None = None,
        shared: bool = False,
        is_local: bool = False,
    ) -> None:
        if config.show_errors is None:
            config = config.model_copy(update={"show_errors": is_local})
        gc.set_threshold(max(gc.get_threshold()[0], GC_THRESHOLD))
        self.table = SessionTable(runtime.make_actor, config, runtime.recorder, ownership, admit=runtime.admit)
        self.cors = Cors(config.cors_origins)
        self.hosts = Hosts(config.allowed_hosts if is_local and keys is None else None)
        self.door_app = DoorApp(self, max_body_bytes=config.max_body_bytes, idle_timeout_s=config.idle_timeout_s)
        self.doors = NativeDoors(self, self.door_app, config, name if shared else None)
        self.exported: OpenMetrics | None = None
        self._bodies = AcceptedBodies(wanted=is_local)
        self._runtime = runtime
        self._config = config
        self._name = name
        self._keys = keys

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        """See `Service.submit`."""
        if self._bodies.wanted:
            reply = self._bodies.watch(request, reply)
        if self._keys is not None and not let_in and (refusal := self.refusal(request)) is not None:
            reply(refusal)
        else:
            self.answer(request, reply)

    def refusal(self, request: StepRequest) -> Unauthorized | None:
        """The error in a request's credentials; None: they are valid, or this service requires none."""
        try:
            if self._keys is not None:
                self._keys.check(request, time.time())
        except Unauthorized as error:
            return error
        return None

    def lets_in(self, request: StepRequest) -> bool:
        """See `Service.lets_in`."""
        return self.refusal(request) is None

    def answer(self, request: StepRequest, reply: Reply) -> None:
        """Answers a request after its credentials were checked; arguments as for `submit`."""
        self.table.submit(request, reply)

    def refused(self, error: BrayxError) -> None:
        """See `Service.refused`."""
        self.table.refused(error)

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """See `Service.holder`."""
        return self.table.holder(on_end)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """See `Service.disconnect`."""
        await self.table.disconnect(session, holder, for_good=for_good)

    def withdraw(self, session: str, holder: str = "") -> None:
        """See `Service.withdraw`."""
        self.table.withdraw(session, holder)

    def metrics(self, authorization: str) -> str | None:
        """See `Service.metrics`. A key of the games does not suffice: a game's machine may be a player's."""
        if self.exported is None:
            return None
        if self._keys is not None and not self._keys.basic(authorization).startswith(READING):
            raise Unauthorized("the metrics require a key that may read: make one with `brayx keys new --scope read`")
        versions = self._runtime.describe().get("policy_versions", {})
        levels = [("acting_version", model, version) for model, version in versions.items()]
        return self.exported.text([("sessions_active", "", len(self.table)), *levels])

    def status(self) -> dict[str, Any]:
        """Values of the status page."""
        return {
            "service": "brayx",
            "application": self._name,
            "sessions": len(self.table),
            "draining": self.table.is_shut,
            "doors": self.doors.urls,
            "example": self._bodies.example,
            **self._runtime.describe(),
        }
