"""Arrays on the wire: the literal bytes of the format, round trips, and malformed bodies."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from brayx.errors import BadBody, ModelError
from brayx.model.encoding import dump, pack, parse, unpack


def body_of(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def test_the_bytes_follow_the_format():
    packed = pack({"x": np.array([1, 2], np.int16)}, {"version": "7"})
    header = b'{"__metadata__":{"version":"7"},"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    assert packed == struct.pack("<Q", len(header)) + header + b"\x01\x00\x02\x00"


DTYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64, np.float16,
          np.float32, np.float64]  # fmt: skip


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from(DTYPES).flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, min_side=0))),
        max_size=4,
    )
)
def test_packing_round_trips(nested):
    unpacked, metadata = unpack(pack(nested))
    assert metadata == {}
    assert list(unpacked) == list(nested)
    for name, array in nested.items():
        assert unpacked[name].dtype == array.dtype
        np.testing.assert_array_equal(unpacked[name], array)


def test_big_endian_arrays_are_converted():
    unpacked, _ = unpack(pack({"x": np.array([1, 2], ">f4")}))
    assert unpacked["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"short", "at least 8"),
        (body_of(b"{}", length=2**60), "header of"),
        (body_of(b"not json"), "JSONDecodeError"),
        (body_of(b"[]"), "header"),
        (body_of(entry(), b"1234"), "does not fill"),
        (body_of(entry(offsets=(4, 12)), b"12345678"), "does not fill"),
        (body_of(entry(offsets=(-8, 0)), b"12345678"), "does not fill"),
        (body_of(entry(shape=(3,)), b"12345678"), "does not fill"),
        (body_of(entry(shape=(-2, -1)), b"12345678"), "has shape"),
        (body_of(entry(offsets=(0, 8, 9)), b"12345678"), "offsets"),
        (body_of(entry(dtype="BF16"), b"12345678"), "KeyError"),
        (body_of({"x": 3}), "TypeError"),
        (body_of(b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}'), "OverflowError"),
        (body_of(entry(shape=(0, 2**70), offsets=(0, 0))), "'x': Maximum allowed dimension"),
        (body_of(entry(shape=(1,) * 100, offsets=(0, 4)), b"1234"), "'x': maximum supported dimension"),
        (body_of({"__metadata__": []}), "AttributeError"),
        (body_of(b"[" * 100_000), "RecursionError|header"),
    ],
)
def test_malformed_bodies_are_refused(body, message):
    with pytest.raises(BadBody, match=message):
        unpack(body)


@given(st.binary(max_size=200))
def test_any_bytes_unpack_or_raise_a_typed_error(body):
    for sent in (body, struct.pack("<Q", max(0, len(body) - 8)) + body):
        try:
            unpack(sent)
        except BadBody:
            pass


def test_values_that_the_formats_cannot_hold_are_refused():
    with pytest.raises(ModelError, match="complex"):
        pack({"x": np.zeros(1, np.complex64)})
    with pytest.raises(ModelError, match="NaN"):
        dump({"x": np.array([np.nan])})
    assert dump({"x": (np.float32(1), [np.zeros((1, 2))]), "n": None}) == b'{"x":[1.0,[[[0.0,0.0]]]],"n":null}'
    with pytest.raises(BadBody, match="JSON list"):
        parse(b"[]")
