"""Nested arrays on the wire of a model deployment: JSON or, faster, safetensors. No pickles; NumPy only.

The binary form is that of the safetensors project (https://github.com/huggingface/safetensors), which many languages
read: eight bytes with the length of a JSON header, the header, the arrays. Arrays are named by their paths in the
model's signature.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import optree

from brayx.arrays import jsonable
from brayx.engines.base import LeafSpec, ModelSpec
from brayx.errors import BadBody, ModelError
from brayx.strict_json import parse_json
from brayx.types import NestedArray, unflatten

JSON = "application/json"
SAFETENSORS = "application/x-safetensors"

_MAX_HEADER_BYTES = 1 << 20
_DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays by name, in the safetensors format.

    Raises:
        ModelError: a dtype that the format does not have.
    """
    return b"".join(_parts(arrays, metadata))


def pack_into(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """As `pack`, into a file, without a second copy in memory."""
    file.writelines(_parts(arrays, None))


def _parts(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None) -> list[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[bytes | memoryview] = []
    offset = 0
    for name, array in arrays.items():
        little = array.dtype.newbyteorder("<")
        if little not in _NAMES:
            raise ModelError(f"{name!r} is {array.dtype}, which safetensors cannot carry")
        data = np.ascontiguousarray(array, little).reshape(-1).view(np.uint8).data
        header[name] = {
            "dtype": _NAMES[little],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [struct.pack("<Q", len(encoded)), encoded, *parts]


def unpack(body: bytes | mmap.mmap) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The inverse of `pack`: read-only views of ``body`` by name, and the metadata.

    Raises:
        BadBody: it is not in that format; says where.
    """
    if len(body) < 8:
        raise BadBody(f"body of {len(body)} bytes, expected safetensors: at least 8")
    (length,) = struct.unpack_from("<Q", body)
    if length > min(_MAX_HEADER_BYTES, len(body) - 8):
        raise BadBody(f"safetensors header of {length} bytes in a body of {len(body)}")
    try:
        header = json.loads(body[8 : 8 + length])
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = {
            str(name): (
                _DTYPES[entry["dtype"]],
                [int(n) for n in entry["shape"]],
                [int(n) for n in entry["data_offsets"]],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadBody(f"safetensors header: {type(error).__name__}: {error}") from None
    data, arrays = memoryview(body)[8 + length :], {}
    for name, (dtype, shape, offsets) in entries.items():
        if len(offsets) != 2 or min(shape, default=0) < 0:
            raise BadBody(f"safetensors: {name!r} has shape {shape} and offsets {offsets}")
        begin, end = offsets
        if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
            raise BadBody(f"safetensors: {name!r} of shape {shape} does not fill bytes {begin} to {end}")
        try:
            arrays[name] = np.frombuffer(data[begin:end], dtype).reshape(shape)
        except ValueError as error:  # more axes, or longer ones, than NumPy supports
            raise BadBody(f"safetensors: {name!r}: {error}") from None
    return arrays, metadata


def columns_of(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The input leaves in the order of the signature.

    Raises:
        BadBody: one is missing or unknown.
    """
    wanted = [leaf.path for leaf in spec.inputs]
    if set(wanted) != set(arrays):
        raise BadBody(f"arrays {sorted(arrays)}, expected {sorted(wanted)}", expected=wanted, got=sorted(arrays))
    return [arrays[name] for name in wanted]


def outputs_of(spec: ModelSpec, leaves: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Output leaves by their paths."""
    return {leaf.path: array for leaf, array in zip(spec.outputs, leaves, strict=True)}


def parse(body: bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        BadBody: the body is not a JSON object, or has a number that is NaN or infinite.
    """
    parsed = parse_json(body)
    if not isinstance(parsed, dict):
        raise BadBody(f"body is a JSON {type(parsed).__name__}, expected an object with 'args'")
    return parsed


def dump(document: Mapping[str, Any]) -> bytes:
    """A JSON object whose values may be nested arrays.

    Raises:
        ModelError: the values hold NaN or infinity, which JSON does not have.
    """
    try:
        return json.dumps(jsonable(document), allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise ModelError("the outputs hold NaN or infinity, which JSON cannot carry; safetensors can") from None


def describe(spec: ModelSpec, version: int) -> dict[str, Any]:
    """The description of a model deployment: its signature and policy version."""

    def described(leaves: Sequence[LeafSpec]) -> list[dict[str, Any]]:
        return [{"path": leaf.path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)} for leaf in leaves]

    return {"inputs": described(spec.inputs), "outputs": described(spec.outputs), "policy_version": version}


def spec_of(inputs: Sequence[LeafSpec], outputs: Sequence[LeafSpec]) -> ModelSpec:
    """A signature from its leaves alone, for a client that has the model's description.

    Parts of a path that count from 0 make a tuple, others a dictionary with string keys. The leaves are in the order of
    that nesting, which may differ from the model's, for instance for an ordered dictionary.
    """

    def tree(leaves: Sequence[LeafSpec]) -> dict[str, Any]:
        """A nest with each leaf's index."""
        return unflatten({leaf.path: index for index, leaf in enumerate(leaves)})

    def nested(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        values = [nested(value) for value in part.values()]
        return (
            tuple(values) if list(part) == [str(i) for i in range(len(part))] else dict(zip(part, values, strict=True))
        )

    arguments: NestedArray = tuple(nested(value) for value in tree(inputs).values())
    structure = tree(outputs)
    result: NestedArray = 0 if list(structure) == ["output"] and structure["output"] == 0 else nested(structure)
    into, input_tree = optree.tree_flatten(arguments)
    out_of, output_tree = optree.tree_flatten(result)
    return ModelSpec(tuple(inputs[i] for i in into), tuple(outputs[i] for i in out_of), input_tree, output_tree)
