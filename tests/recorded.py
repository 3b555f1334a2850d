"""Ticks of sessions, one by one, as columns of a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brayx.recording.columns import Forwarded, TickColumns, columns_by_field


class Tick(NamedTuple):
    """One tick of a session; fields as the arguments of `columns_by_field`."""

    number: int
    time_s: float
    seconds: float
    input: bytes
    output: bytes
    attributes: Mapping[str, Any]
    event: str = ""
    stop: bytes = b""
    queue_s: float = 0.0
    forwards: Sequence[Forwarded] = ()


def columns_of(ticks: Sequence[Tick], **options: Any) -> TickColumns:
    """The columns of one or more ticks; options as for `columns_by_field`."""
    return columns_by_field(*zip(*ticks, strict=True), **options)
