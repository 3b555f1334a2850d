"""Compression of WebSocket messages: against earlier ones, in the agreed window, and not of short ones."""

from __future__ import annotations

import pytest

pytest.importorskip("websockets")

from websockets.frames import Frame, Opcode

from brayx.gamecore.deflate import LEAST_BYTES, ClientDeflate, Deflate, ServerDeflate


def agreed(window_bits: int = 12) -> tuple[Deflate, Deflate]:
    """Both ends of a connection: the client's and the server's."""
    client = ClientDeflate()
    answer, server = ServerDeflate(window_bits).process_request_params(client.get_request_params(), [])
    return client.process_response_params(answer, []), server


def test_messages_arrive_whole_and_a_repeated_one_takes_a_fraction() -> None:
    client, server = agreed()
    body = bytes(range(256)) * 4
    sizes = []
    for _ in range(3):
        frame = client.encode(Frame(Opcode.BINARY, body))
        assert frame.rsv1
        sizes.append(len(frame.data))
        assert bytes(server.decode(frame).data) == body
    assert sizes[1] < sizes[0] < len(body)


def test_a_short_message_is_sent_as_it_is() -> None:
    client, server = agreed()
    frame = Frame(Opcode.BINARY, b"a" * (LEAST_BYTES - 1))
    assert client.encode(frame) is frame
    assert server.decode(frame).data == frame.data


@pytest.mark.parametrize("window_bits", [9, 15])
def test_the_server_chooses_the_window(window_bits: int) -> None:
    for end in agreed(window_bits):
        assert (end.local_max_window_bits, end.remote_max_window_bits) == (window_bits, window_bits)
