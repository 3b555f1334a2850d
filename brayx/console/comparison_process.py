"""The process that compares a recorded session with versions of its model, for the console.

It loads the code of the job that made a version, so it is not the console's own process. It sends its progress, and at
last the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import brayx.recording
from brayx import actions
from brayx.children import Channel
from brayx.errors import BrayxError, RecordingUnknown
from brayx.recording.comparison import Comparison, compare
from brayx.recording.reader import Recording
from brayx.tracking import PoolEntry

if TYPE_CHECKING:
    from brayx.recording.version import Version

_MAX_LOGITS = 2**23
"""Logits of one version that are kept; of a session with more, there are no probabilities."""

_LOOKED_AT = 2000
"""Ticks in which it is looked whether actions were sampled."""
Say = Callable[..., None]
"""Writes a message of these fields."""


class _Chosen:
    """What a version chose at each tick: arrays ``[N, ...]`` by name."""

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks
        self._pieces: dict[str, list[np.ndarray]] = {}

    def add(self, outputs: Mapping[str, Any]) -> None:
        """The outputs of the next ticks."""
        action = actions.greedy(outputs)
        arrays = {"action": action}
        logits, value = outputs.get("logits"), outputs.get("value")
        if isinstance(logits, np.ndarray) and logits.ndim == 2 and self._ticks * logits.shape[1] <= _MAX_LOGITS:
            arrays["logits"] = logits.astype(np.float32)
        if isinstance(value, np.ndarray) and value.size == len(action):
            arrays["value"] = value.reshape(-1).astype(np.float32)
        for name, array in arrays.items():
            self._pieces.setdefault(name, []).append(array)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """All arrays, their names after ``prefix/``."""
        return {f"{prefix}/{name}": np.concatenate(pieces) for name, pieces in self._pieces.items()}


def compared(request: Mapping[str, Any], say: Say) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Compares a session.

    Args:
        request: ``folder`` of the recordings, id of the ``recording``, ``versions`` (one, or two of which the first is
            the reference; each a `PoolEntry`, and the folder of its files, or None if they are not local), tracking
            ``uri``, and ``trust``, as for `brayx.jobs.stored_models.stored_model`.
        say: called with ``state`` and ``progress``, a share.

    Returns:
        The summary, `ReplaySummary` as a dict with ``first_at``, the index of its ``first``, and ``sampled``; and
        arrays over the ``N`` compared ticks: ``number``, ``equal``, ``kl``, ``value``, and as far as the version has
        them ``version/action``, ``version/logits``, ``version/value``, and the same of the ``reference``.

    Raises:
        BrayxError: there is no comparison.
    """
    # Not before it is needed: the console imports this file, and should not load torch.
    from brayx.jobs.stored_models import registered_model
    from brayx.regression.replay import ReplaySummary, built_version, version_of

    def loaded(entry: PoolEntry, files: Path | None) -> Version:
        if files is None:
            return version_of(entry.reference, request["uri"], trust=request["trust"])
        return built_version(registered_model(entry, files, request["uri"], request["trust"]))  # without MLflow

    episode = _episode(request["folder"], request["recording"])
    say(state="loading the versions", progress=0.0)
    *reference, version = [loaded(*found) for found in request["versions"]]
    chosen = [_Chosen(len(episode)) for _ in request["versions"]]
    done = 0

    def on_piece(_: str, numbers: np.ndarray, outputs: Sequence[Mapping[str, Any]]) -> None:
        nonlocal done
        done += len(numbers)
        for choices, output in zip(chosen, outputs, strict=True):
            choices.add(output)
        say(state="comparing", progress=done / len(episode))

    (comparison,) = compare([episode], version, *reference, on_piece=on_piece)
    if not isinstance(comparison, Comparison):
        raise comparison.error
    arrays = {"number": comparison.number, "equal": comparison.equal, "kl": comparison.kl, "value": comparison.value}
    for name, choices in zip(("version", "reference"), chosen, strict=False):
        arrays |= choices.arrays(name)
    facts = {"first_at": _index(episode, comparison.first), "sampled": not reference and _is_sampled(episode)}
    return {**asdict(ReplaySummary.of([comparison])), **facts}, arrays


def _episode(folder: str, recording: str) -> Recording:
    episode = brayx.recording.open(folder).find(recording)
    if episode is None:
        raise RecordingUnknown(f"there is no recording {recording!r} in {folder}")
    return episode


def _is_sampled(episode: Recording) -> bool:
    """Whether some recorded action is not the most likely one of the recorded logits, among the first ticks."""
    names = {name.rpartition("/")[2]: name for name in reversed(episode.columns)}
    if not {"logits", "action"} <= names.keys():
        return False
    columns = episode.read(0, _LOOKED_AT, [names["logits"], names["action"]])
    logits, action = (columns.arrays[names[name]] for name in ("logits", "action"))
    return logits.ndim == 2 and action.ndim == 1 and bool((logits.argmax(-1) != action).any())


def _index(episode: Recording, number: int | None) -> int | None:
    """The index of a tick by its number; lost ticks have neither."""
    if number is None:
        return None
    low, high = 0, len(episode)
    while low < high:
        middle = (low + high) // 2
        if episode.read(middle, 1, names=[]).number[0] < number:
            low = middle + 1
        else:
            high = middle
    return low


def main(console: Channel) -> None:
    """Compares once, and ends with the console.

    Args:
        console: sends the request, and gets the messages: progress as for `compared`; at last its ``summary`` and
            ``arrays``, or an ``error``.
    """
    request = console.receive()

    def say(**message: Any) -> None:
        console.send(message)

    try:
        summary, arrays = compared(request, say)
        say(summary=summary, arrays=arrays)
    except BrayxError as error:
        say(error=error)
    except Exception as error:  # a user's model may raise anything
        say(error=BrayxError(f"the comparison failed: {type(error).__name__}: {error}"))
