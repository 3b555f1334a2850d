"""The shipped job of contracts, a small contract, and a checkpoint that records one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES

GAME = TEMPLATES / "game.yaml"
SMALL = {
    "contract": 1,
    "observations": {"speed": {"shape": [2]}},
    "actions": {"dash": {"kind": "discrete", "size": 2}},
}


def job(*overrides: str) -> JobConfig:
    return JobConfig.load(GAME, overrides)


def recorded_in(folder: Path, contract: Any) -> Path:
    (folder / "meta.json").write_text(json.dumps({"job": {"project": "game", "contract": contract}}))
    return folder
