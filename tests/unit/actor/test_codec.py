"""Bodies as JSON values or bytes: what is parsed, and what is refused."""

from __future__ import annotations

import pytest

from brayx.actor.codec import Codec, dumps_json
from brayx.errors import BadBody


def test_json_bodies_are_values_and_an_empty_one_is_none() -> None:
    codec = Codec()
    assert codec.decode(b'{"obs": [1, 2.5]}') == {"obs": [1, 2.5]}
    assert codec.decode(b"") is None
    assert codec.decode(codec.encode({"action": 1})) == {"action": 1}


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"obs": NaN}', b'{"obs": [1, Infinity]}'])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadBody):
        Codec().decode(body)


def test_raw_bodies_stay_bytes() -> None:
    codec = Codec(None)
    assert codec.decode(b"\x00\xff") == b"\x00\xff"
    assert codec.encode(b"\x00\xff") == b"\x00\xff"


def test_a_stops_result_is_the_seats_result() -> None:
    codec = Codec()
    assert codec.results(codec.decode_stop(b'{"result": 0.5}')) == [0.5]
    assert codec.results(codec.decode_stop(b'{"score": 3}')) == []
    assert codec.results(None) == []


def test_nan_is_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps_json(float("nan"))
