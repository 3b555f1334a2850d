"""`probe`: asks a service whether it answers, and accepts a key, without a session.

Standard library only, apart from what the URL's scheme needs.
"""

from __future__ import annotations

import time
import uuid

from brayx.errors import BrayxError, TransportError
from brayx.gamecore import transports
from brayx.gamecore.auth import sign
from brayx.gamecore.protocol import PROBE, StepKind, StepRequest


def probe(url: str, *, key: str = "", secret: bytes = b"", timeout_s: float) -> BrayxError:
    """Ticks a session that does not exist, which every door answers: only brayx refuses it with a brayx error.

    Args:
        url: URL of a door.
        key, secret: sign the tick; without a secret it is not signed.
        timeout_s: time limit.

    Returns:
        the service's refusal, a `SessionError` if it is well and accepts the key; or the error of the connection.
    """
    session, now = f"{PROBE}{uuid.uuid4().hex}", str(int(time.time()))
    shown = (key, now, sign(secret, key, session, now)) if secret else ("", "", "")
    # Numbered, so that a WebSocket takes it without a start.
    request = StepRequest(StepKind.TICK, session, b"", *shown, seq=0)
    transport = transports.connect(url)
    try:
        transport.step(request, timeout_s)
    except BrayxError as error:
        return error
    finally:
        transport.close()
    return TransportError(f"{url}: a tick of a session that was never started got a reply")
