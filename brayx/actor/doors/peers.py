"""The paths and options of a replica's listener for other replicas. Knows nothing of sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from brayx.errors import Unauthorized
from brayx.gamecore.protocol import STEP_PATH, StepRequest

FORWARDED_PREFIX = "/-/peer"
"""Path prefix of requests that a replica forwards to a session's owner, which never forwards them again. Only listeners
for peers have it."""
LEFT_PREFIX = "/-/left"
"""Path prefix by which a replica notifies a peer that the connection of one of the peer's sessions is gone; with a
body, for good."""
ENDED_PREFIX = "/-/ended"
"""Path prefix by which a replica notifies a peer that one of the peer's connections lost its session; the body is the
reason."""
CONSOLE_PREFIX = "/-/console"
"""Path prefix of a console's questions to a replica; the body is a JSON list of a verb and its arguments."""
SECRET_HEADER = "peer-secret"
"""Header with the secret by which a replica proves to a peer that it is a replica."""
PEER = "peer"
"""Layer of the errors on the way from replica to replica."""
PeerHandler = Callable[[StepRequest], Awaitable[bytes | None]]
"""Answers a peer's message; None: with an empty body."""

FORWARDED_STEP, LEFT_STEP, ENDED_STEP, CONSOLE_STEP = (
    (prefix + STEP_PATH).encode() for prefix in (FORWARDED_PREFIX, LEFT_PREFIX, ENDED_PREFIX, CONSOLE_PREFIX)
)
_MESSAGE_STEPS = (LEFT_STEP, ENDED_STEP, CONSOLE_STEP)
PEERS_STEPS = (FORWARDED_STEP, *_MESSAGE_STEPS)


@dataclass(frozen=True)
class ForPeers:
    """Options of a listener for peers.

    Attributes:
        left: handles messages about sessions whose connection is gone.
        ended: handles messages about connections that lost their session.
        asked: answers a console's questions.
        secret: gives the secret that a peer's requests carry.
        closed: refuse all other requests; False: the listener is also a normal door.
    """

    left: PeerHandler
    ended: PeerHandler
    asked: PeerHandler
    secret: Callable[[], str]
    closed: bool = True

    def handler(self, url: bytes) -> PeerHandler | None:
        """The handler of a peer's message at this path; None if the path is that of a request."""
        if not url.startswith(_MESSAGE_STEPS):
            return None
        if url.startswith(LEFT_STEP):
            return self.left
        return self.ended if url.startswith(ENDED_STEP) else self.asked


def not_a_peer() -> Unauthorized:
    """The error for a client at a listener for peers."""
    return Unauthorized("this port accepts requests of the application's replicas only", layer=PEER)
