"""WebSocket compression, permessage-deflate with context takeover: each message is compressed against those before it.

It differs from the package ``websockets`` in two points: short messages are sent as they are, since compressing them
takes longer than it saves; and ISA-L compresses if the package ``isal`` is installed, in a third of zlib's time. zlib
decompresses the messages of both.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from websockets.extensions import Extension
from websockets.extensions.permessage_deflate import (
    ClientPerMessageDeflateFactory,
    PerMessageDeflate,
    ServerPerMessageDeflateFactory,
)
from websockets.frames import Frame
from websockets.typing import ExtensionParameter

CODEC: Any = zlib
"""Compresses messages to send."""
try:
    import isal.isal_zlib as CODEC
except ImportError:
    pass
LEVEL = 1
"""Level of both codecs: higher ones save few bytes for their CPU (`benchmarks/wire.py`)."""
LEAST_BYTES = 256
"""Shorter messages are not compressed."""


class ServerDeflate(ServerPerMessageDeflateFactory):
    """Accepts a client's offer of compression.

    Args:
        window_bits: each message is compressed against the 2^this bytes before it, 9 to 15, in both directions.
    """

    def __init__(self, window_bits: int) -> None:
        super().__init__(server_max_window_bits=window_bits, client_max_window_bits=window_bits)

    def process_request_params(
        self, params: Sequence[ExtensionParameter], accepted_extensions: Sequence[Extension]
    ) -> tuple[list[ExtensionParameter], Deflate]:
        """As the base class."""
        answer, extension = super().process_request_params(params, accepted_extensions)
        return answer, Deflate(extension)


class ClientDeflate(ClientPerMessageDeflateFactory):
    """Offers compression; the server chooses the window."""

    def __init__(self) -> None:
        super().__init__(client_max_window_bits=True)

    def process_response_params(
        self, params: Sequence[ExtensionParameter], accepted_extensions: Sequence[Extension]
    ) -> Deflate:
        """As the base class."""
        return Deflate(super().process_response_params(params, accepted_extensions))


class Deflate(PerMessageDeflate):
    """The compression of one connection, both ways.

    Args:
        agreed: the windows and modes that both sides agreed on.
    """

    def __init__(self, agreed: PerMessageDeflate) -> None:
        bits = agreed.local_max_window_bits
        super().__init__(
            agreed.remote_no_context_takeover,
            agreed.local_no_context_takeover,
            agreed.remote_max_window_bits,
            bits,
            {"level": LEVEL, "memLevel": bits - 7},
        )
        if CODEC is not zlib and not self.local_no_context_takeover:
            self.encoder = CODEC.compressobj(LEVEL, zlib.DEFLATED, -bits)

    def encode(self, frame: Frame) -> Frame:
        """A message's only frame, compressed unless it is short."""
        return frame if len(frame.data) < LEAST_BYTES else super().encode(frame)
