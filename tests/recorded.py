"""Ticks of sessions, one by one, as columns of a recording; and whether all of a recording is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import brayx.recording
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


def ended(address: str | Path) -> int:
    """The recorded sessions whose end is written; before it, the last of their ticks may still come."""
    return sum(episode.end != "" for episode in brayx.recording.open(str(address)))
