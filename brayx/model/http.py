"""A model over HTTP, from a request's bytes to its reply. Knows nothing of servers, Serve, or sources of weights.

``GET`` returns the signature as JSON, or as a page for a browser. ``POST`` with JSON is ``{"args": [...], "batch":
false, "version": null, "deadline_s": null}`` and gives ``{"outputs": ..., "policy_version": 7}``. ``POST`` with
``application/x-safetensors`` takes inputs by their paths, each ``[N, ...]``, with the optional metadata ``version`` and
``deadline_s``, and returns the outputs likewise, with the int64 array ``policy_version`` ``[N]``. Errors are the JSON
documents of every door.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.engines.base import ModelSpec
from brayx.errors import BadBody, BodyTooLarge, BrayxError, ProtocolError
from brayx.faults import report
from brayx.gamecore.browser import Cors, Hosts, document
from brayx.model import encoding
from brayx.model.inputs import check_columns, to_columns
from brayx.model.local import LocalModel
from brayx.types import NestedArray

DEFAULT_MAX_BODY_BYTES = 64 * 2**20

VERSIONS = "policy_version"
"""Name of the array with the policy versions."""

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


async def answer(
    model: LocalModel,
    method: str,
    content_type: str,
    body: bytes,
    *,
    accept: str = "",
    cors: Cors = Cors(),
    host: str | None = None,
    hosts: Hosts = Hosts(),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> Answer:
    """Answers one request; errors become replies. ``cors.headers`` are added to the answer."""
    try:
        hosts.check(host)
        if len(body) > max_body_bytes:
            raise too_large(max_body_bytes)
        if method in ("GET", "HEAD"):
            described = encoding.describe(model.spec, model.version)
            if "text/html" in accept.lower():
                return 200, "text/html; charset=utf-8", page(described).encode()
            return 200, encoding.JSON, encoding.dump(described)
        if method == "OPTIONS" and cors.is_on:
            return 200, "text/plain", b""
        if method != "POST":
            raise ProtocolError(f"method {method}, expected GET or POST")
        kind = content_type.partition(";")[0].strip().lower()
        if kind == encoding.SAFETENSORS:
            return 200, encoding.SAFETENSORS, await forward_packed(model, body)
        if kind in (encoding.JSON, ""):
            return 200, encoding.JSON, await _json(model, body)
        raise ProtocolError(f"content-type {kind!r}, expected {encoding.JSON} or {encoding.SAFETENSORS}")
    except Exception as failure:
        error = report(failure, "the model failed", "a forward over HTTP", show_text=False, kind=BrayxError)
        return error.http_status, encoding.JSON, error.to_wire()


def page(described: Mapping[str, Any]) -> str:
    """The page of a model for browsers: its signature, and how to call it.

    Args:
        described: as from `encoding.describe`.
    """
    rows = "".join(
        f"<tr><th>{what.removesuffix('s')}</th><td><code>{html.escape(leaf['path'])}</code></td>"
        f"<td>{leaf['dtype']} {leaf['shape']}</td></tr>"
        for what in ("inputs", "outputs")
        for leaf in described[what]
    )
    return document(
        f"a model, policy version {described['policy_version']}",
        f"<table>{rows}</table>\n<p>With <code>URL</code> for the address of this page, a forward is:</p>\n"
        """<pre>curl -X POST URL -H 'content-type: application/json' -d '{"args": [...]}'</pre>""",
    )


def too_large(max_body_bytes: int) -> BodyTooLarge:
    """The error for a body above the limit."""
    return BodyTooLarge(f"body of more than {max_body_bytes} bytes", max_body_bytes=max_body_bytes)


async def _json(model: LocalModel, body: bytes) -> bytes:
    document = encoding.parse(body)
    unknown = set(document) - {"args", "batch", "version", "deadline_s"}
    args, batch, version = document.get("args"), document.get("batch", False), document.get("version")
    if unknown or not isinstance(args, list) or not isinstance(batch, bool) or not _is_version(version):
        raise BadBody(
            "expected {'args': [...], 'batch': true or false, 'version': integer or null, 'deadline_s': number or null}"
            f", got keys {sorted(document)!s:.200}: args {type(args).__name__}, batch {batch!r:.40}, "
            f"version {version!r:.40}"
        )
    deadline_s = _deadline(document.get("deadline_s"))
    arguments = _as_nested(model.spec, args)
    if not batch:
        outputs, made_by = await model.forward(*arguments, version=version, deadline_s=deadline_s)
        return encoding.dump({"outputs": outputs, "policy_version": made_by})
    leaves, versions = await model.forward_columns(
        to_columns(model.spec, arguments), version=version, deadline_s=deadline_s
    )
    return encoding.dump({"outputs": model.spec.unflatten_outputs(leaves), "policy_version": versions})


async def forward_packed(
    model: LocalModel, body: bytes, version: int | None = None, deadline_s: float | None = None
) -> bytes:
    """Runs a forward from safetensors to safetensors; the reply includes ``policy_version``.

    Args:
        model: the model.
        body: every input by its path, ``[N, ...]``.
        version: policy version to act with; None: the metadata's ``version``, else the newest.
        deadline_s: seconds until it fails; None: the metadata's ``deadline_s``, else the model's own.

    Raises:
        BadBody: it is not in that format, or has other arrays.
        ShapeMismatch, VersionUnknown, QueueFull, DeadlineExceeded, ModelError: as `Model.forward`.
    """
    arrays, metadata = encoding.unpack(body)
    columns = encoding.columns_of(model.spec, arrays)
    check_columns(model.spec.inputs, columns)
    if version is None and "version" in metadata:
        try:
            version = int(metadata["version"])
        except ValueError:
            raise BadBody(f"metadata 'version' is {metadata['version']!r:.40}, expected an integer") from None
    deadline_s = _deadline(metadata.get("deadline_s") if deadline_s is None else deadline_s)
    leaves, versions = await model.forward_columns(columns, version=version, deadline_s=deadline_s)
    outputs = encoding.outputs_of(model.spec, leaves)
    return encoding.pack({**outputs, VERSIONS: np.asarray(versions)})


def _deadline(value: Any) -> float | None:
    """Seconds from a number or its digits; raises `BadBody` for anything else."""
    if value is None:
        return None
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: JSON integers have any number of digits
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadBody(f"deadline_s is {value!r:.40}, expected a number of seconds above 0")
    return seconds


def _is_version(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _as_nested(spec: ModelSpec, args: list[NestedArray]) -> tuple[NestedArray, ...]:
    """Converts lists to tuples where the model takes these, since JSON has none. Misfits are left to the check."""

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
