"""Drops an environment's steps if one of them holds NaN or infinity; the other environments' are learned from."""

from __future__ import annotations

import numpy as np

from brayx.arrays import is_finite
from brayx.metrics import Recorder
from brayx.replay.packing import Batch


def without_unfit(arrays: Batch, sink: Recorder, *, keep_shape: bool) -> tuple[Batch | None, int, str]:
    """Drops, and counts, the columns of a run that are not finite.

    Args:
        arrays: a run ``[B, T, ...]`` of ``B`` environments.
        sink: counts ``replay_dropped`` and ``fragments_dropped``; the note names the field and the environment.
        keep_shape: zero the columns, which masks them out, instead of removing them.

    Returns:
        The run, None if no column is left; the transitions that were dropped; and the note.
    """
    bad, note = np.zeros(len(arrays["mask"]), np.bool_), ""
    for key, array in arrays.items():
        if not is_finite(array.reshape(-1)):
            rows = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
            note = note or f"{key}: holds NaN or infinity in environment {rows.argmax()} of {len(bad)}"
            bad |= rows
    if not note:
        return arrays, 0, ""
    lost, left = int(arrays["mask"][bad].sum()), int((~bad).sum())
    sink.add("replay_dropped", lost, label="bad_fragment")
    # What is left counts as one fragment, of however many environments, so this keeps the share of what is lost.
    sink.add("fragments_dropped", bad.sum() / left if left else 1.0, label="refused", note=f"BadFragment: {note}")
    if not left:
        return None, lost, note
    if not keep_shape:
        return {key: array[~bad] for key, array in arrays.items()}, lost, note
    fit = {key: array.copy() for key, array in arrays.items()}
    for array in fit.values():
        array[bad] = 0
    return fit, lost, note
