"""Sessions whose bodies have rewards, as demonstrations are recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brayx.recording.chunks import write_chunk
from brayx.recording.columns import packed
from brayx.recording.index import SessionPart
from brayx.types import Fragment, Step
from tests.recorded import Tick, columns_of

STOP = {"obs": [9.0, 9.0], "reward": 7.0, "terminated": True}


def encoded(body: Mapping[str, Any] | None) -> bytes:
    return b"" if body is None else json.dumps(body).encode()


def tick(number: int, *, event: str = "", stop: Mapping[str, Any] | None = None, **more: Any) -> Tick:
    """A tick whose observation is its number, and whose body has the reward of the action before."""
    obs = np.array([number, -number], np.float32)
    step = Step(obs, np.asarray(number % 3), -0.5, 4, {"state/h": np.full(2, number, np.float32)})
    body = {"obs": obs.tolist(), "reward": float(number), "move": number % 2, **more.pop("body", {})}
    attributes = {"step": step, "value": 0.5, **more}
    return Tick(number, 0.1, 0.01, json.dumps(body).encode(), b'{"action": 5}', attributes, event, encoded(stop))


def save(folder: Path, name: str, ticks: Sequence[Tick], **part: Any) -> None:
    """Writes a session as one chunk."""
    with (folder / f"{name}.parquet").open("wb") as file:
        row = SessionPart(name, part.pop("session", name), 0.0, 0, len(ticks), **part)
        write_chunk(file, [row], packed(columns_of(ticks)))


def rewards(fragments_read: Sequence[Fragment]) -> list[list[float]]:
    return [fragment.reward.tolist() for fragment in fragments_read]
