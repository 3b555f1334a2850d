"""A model over HTTP: a request's bytes to an answer's. Knows nothing of servers, Serve, or where weights come from.

``GET`` tells the signature. ``POST`` with JSON is ``{"args": [...], "batch": false, "version": null}`` and gives
``{"outputs": ..., "policy_version": 7}``. ``POST`` with ``application/x-safetensors`` takes the inputs by their paths,
each ``[N, ...]``, with the metadata ``version`` if one is asked for, and gives the outputs so, with the int64 array
``policy_version`` ``[N]`` beside them. Errors are the JSON documents of every door.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from brayx.engines.base import ModelSpec
from brayx.errors import BadBody, BodyTooLarge, BrayxError, ProtocolError
from brayx.model import encoding
from brayx.model.columns import check_columns, to_columns
from brayx.model.local import LocalModel
from brayx.types import NestedArray

_log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 64 * 2**20

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


async def answer(
    model: LocalModel, method: str, content_type: str, body: bytes, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
) -> Answer:
    """Answers one request; whatever goes wrong is an answer too."""
    try:
        if len(body) > max_body_bytes:
            raise too_large(max_body_bytes)
        if method in ("GET", "HEAD"):
            return 200, encoding.JSON, encoding.dump(encoding.describe(model.spec, model.version))
        if method != "POST":
            raise ProtocolError(f"method {method}, expected GET or POST")
        kind = content_type.partition(";")[0].strip().lower()
        if kind == encoding.SAFETENSORS:
            return 200, encoding.SAFETENSORS, await _binary(model, body)
        if kind in (encoding.JSON, ""):
            return 200, encoding.JSON, await _json(model, body)
        raise ProtocolError(f"content-type {kind!r}, expected {encoding.JSON} or {encoding.SAFETENSORS}")
    except BrayxError as error:
        return error.http_status, encoding.JSON, error.to_wire()
    except Exception:
        _log.exception("a forward over HTTP failed")
        return 500, encoding.JSON, BrayxError("the model failed; the replica's log says how").to_wire()


def too_large(max_body_bytes: int) -> BodyTooLarge:
    """The error of a body that is not read to its end."""
    return BodyTooLarge(f"body of more than {max_body_bytes} bytes", max_body_bytes=max_body_bytes)


async def _json(model: LocalModel, body: bytes) -> bytes:
    asked = encoding.parse(body)
    unknown = set(asked) - {"args", "batch", "version"}
    args, batch, version = asked.get("args"), asked.get("batch", False), asked.get("version")
    if unknown or not isinstance(args, list) or not isinstance(batch, bool) or not _is_version(version):
        raise BadBody(
            "expected {'args': [...], 'batch': true or false, 'version': integer or null}, "
            f"got keys {sorted(asked)}: args {type(args).__name__}, batch {batch!r:.40}, version {version!r:.40}"
        )
    arguments = _as_nested(model.spec, args)
    if not batch:
        outputs, made_by = await model.forward(*arguments, version=version)
        return encoding.dump({"outputs": outputs, "policy_version": made_by})
    leaves, versions = await model.forward_columns(to_columns(model.spec, arguments), version=version)
    return encoding.dump({"outputs": model.spec.unflatten_outputs(leaves), "policy_version": versions})


async def _binary(model: LocalModel, body: bytes) -> bytes:
    arrays, metadata = encoding.unpack(body)
    columns = encoding.columns_of(model.spec, arrays)
    check_columns(model.spec.inputs, columns)
    try:
        version = int(metadata["version"]) if "version" in metadata else None
    except ValueError:
        raise BadBody(f"metadata 'version' is {metadata['version']!r:.40}, expected an integer") from None
    leaves, versions = await model.forward_columns(columns, version=version)
    outputs = encoding.outputs_of(model.spec, leaves)
    return encoding.pack({**outputs, "policy_version": np.asarray(versions)})


def _is_version(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _as_nested(spec: ModelSpec, args: list[NestedArray]) -> tuple[NestedArray, ...]:
    """JSON has no tuples: lists become such where the model takes them. What does not fit is left for the check."""

    def shaped(tree: Any, value: Any) -> Any:
        if tree.is_leaf():
            return value
        children, entries = tree.children(), tree.entries()
        if tree.type in (list, tuple) and isinstance(value, list) and len(value) == len(children):
            return tree.type(shaped(child, part) for child, part in zip(children, value, strict=True))
        if isinstance(value, dict) and set(value) == set(entries):
            return {key: shaped(child, value[key]) for key, child in zip(entries, children, strict=True)}
        return value

    nested: Any = shaped(spec.input_tree, args)
    return tuple(nested)
