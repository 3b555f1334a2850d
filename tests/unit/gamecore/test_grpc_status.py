"""A typed error in the status of a gRPC call: within the limits of clients' metadata, and read back as itself."""

from __future__ import annotations

import pytest

from brayx.errors import BadBody, SessionLost, from_wire
from brayx.gamecore.v1 import ERROR_METADATA

pytest.importorskip("grpc")

from brayx.gamecore.grpc_status import refuse


class Call:
    """The parts of a call that an answer sets."""

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.metadata = dict(metadata)


def test_an_error_is_read_back_with_its_details() -> None:
    call = Call()
    refuse(call, SessionLost("ended", reason="idle"))
    error = from_wire(call.metadata[ERROR_METADATA])
    assert isinstance(error, SessionLost)
    assert error.details == {"reason": "idle"}
    assert call.details == "ended"
    assert call.code.name == SessionLost.grpc_status


def test_a_long_message_is_cut_without_breaking_a_character() -> None:
    call = Call()
    refuse(call, BadBody("ü" * 5000))
    assert isinstance(from_wire(call.metadata[ERROR_METADATA]), BadBody)
    assert len(call.metadata[ERROR_METADATA]) < 4096
    assert 0 < len(call.details.encode()) <= 512
    assert set(call.details) == {"ü"}
