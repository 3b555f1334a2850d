"""Folders of a checkpoint, with a text to tell them apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from brayx.tracking import (
    files_of,
)


def folder_with(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f"made-{text}"
    folder.mkdir()
    np.savez(folder / "weights.npz", w=np.arange(3, dtype=np.float32))
    (folder / "meta.json").write_text(json.dumps({"text": text}))
    return folder


def text_of(folder: Path | None) -> str:
    assert folder is not None
    return str(json.loads((folder / "meta.json").read_text())["text"])


def text_at(reference: str, uri: str) -> str:
    with files_of(reference, uri) as folder:
        return text_of(folder)
