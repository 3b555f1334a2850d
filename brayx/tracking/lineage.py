"""Lineage of a model: the models that its weights started from, as one readable line in a tag.

Knows nothing of MLflow or of building models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LINEAGE_TAG = "brayx.lineage"
"""Tag of a run: the origins of its weights, the nearest first."""

_ORIGIN = re.compile(r"([^;]+) version (\d+) step (\d+)(?:; |$)")


@dataclass(frozen=True)
class Origin:
    """The model that another one started from.

    Attributes:
        name: name of the model; ``models:/NAME`` if it is in the registry.
        version: its policy version, or the registry's.
        step: step at which that version was published.
    """

    name: str
    version: int
    step: int


def lineage_text(origins: Iterable[Origin]) -> str:
    """Origins, the nearest first, as one line: ``models:/walker version 3 step 2000; older version 1 step 0``."""
    return "; ".join(f"{origin.name} version {origin.version} step {origin.step}" for origin in origins)


def origins_in(text: str) -> tuple[Origin, ...]:
    """Parses such a line; returns no origins for any other text."""
    return tuple(Origin(name, int(version), int(step)) for name, version, step in _ORIGIN.findall(text))
