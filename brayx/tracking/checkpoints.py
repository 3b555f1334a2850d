"""A trial's checkpoints as MLflow keeps them: a folder of the run's artifacts each, and a tag that makes it count.

Knows nothing of a checkpoint's contents: it is a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from brayx.metrics import STEPS_OF_CHECKPOINT

FOLDER = "checkpoints"
"""Folder of a run's artifacts with its checkpoints."""
_TAG = "brayx.checkpoint."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was written whole.

    Attributes:
        run_id: the trial it is of.
        step: transitions that it has learned from; off-policy, a step counts each time that it is sampled.
        artifact_path: its folder below the run's artifacts.
        metrics: numbers by name at that time.
        saved_at_s: Unix time.
        files: number of its files; 0: not known.
    """

    run_id: str
    step: int
    artifact_path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at_s: float = 0.0
    files: int = 0

    @property
    def env_steps(self) -> int:
        """Env steps that had been played when it was saved; of one of an earlier brayx, `step`."""
        return round(self.metrics.get(STEPS_OF_CHECKPOINT, self.step))

    @property
    def tag(self) -> str:
        """Name of its tag: a checkpoint of the same step replaces it."""
        return f"{_TAG}{self.step:012d}"

    @property
    def tag_value(self) -> str:
        """``path=checkpoints/000000002048&files=5&saved_at_s=1.5&episode_return=21.5``."""
        facts = {"path": self.artifact_path, "files": self.files, "saved_at_s": repr(self.saved_at_s)}
        return urlencode({**facts, **self.metrics}, safe="/")


def of_tags(run_id: str, tags: Mapping[str, str]) -> list[Checkpoint]:
    """The whole checkpoints of a run with these tags, the oldest first."""
    found = [
        _read(run_id, int(name.removeprefix(_TAG)), value) for name, value in tags.items() if name.startswith(_TAG)
    ]
    return sorted(found, key=lambda checkpoint: (checkpoint.saved_at_s, checkpoint.step))


def _read(run_id: str, step: int, tag: str) -> Checkpoint:
    if tag.startswith("{"):  # of a trial begun with an earlier brayx
        data = json.loads(tag)
        return Checkpoint(run_id, step, data["path"], data["metrics"], data["saved_at_s"], data.get("files", 0))
    facts = dict(parse_qsl(tag))
    path, files, saved_at_s = facts.pop("path"), int(facts.pop("files")), float(facts.pop("saved_at_s"))
    return Checkpoint(run_id, step, path, {name: float(value) for name, value in facts.items()}, saved_at_s, files)


def count_files(folder: Path) -> int:
    """Number of files below a folder."""
    return sum(path.is_file() for path in folder.rglob("*"))


def changed_at_s(folder: Path) -> float:
    """Unix time of the newest change below a folder; not of files' modification times, which are copied, too."""
    return max(path.stat().st_ctime for path in (folder, *folder.rglob("*")))


def best(checkpoints: Sequence[Checkpoint], metric: str) -> Checkpoint | None:
    """The one with the highest ``metric``, the newest of equals; None: none has it."""
    having = [checkpoint for checkpoint in checkpoints if metric in checkpoint.metrics]
    return max(having, key=lambda c: (c.metrics[metric], c.saved_at_s)) if having else None
