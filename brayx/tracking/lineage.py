"""What a model started from, as one readable line in a tag.

Knows nothing of MLflow, nor of how a model is made.
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
    """What a model started from.

    Attributes:
        name: of the other model; ``models:/NAME`` of one in the registry.
        version: its policy version, or the registry's.
        step: the step that was published with.
    """

    name: str
    version: int
    step: int


def lineage_text(origins: Iterable[Origin]) -> str:
    """The line of some origins, the nearest first: ``models:/walker version 3 step 2000; older version 1 step 0``."""
    return "; ".join(f"{origin.name} version {origin.version} step {origin.step}" for origin in origins)


def origins_in(text: str) -> tuple[Origin, ...]:
    """The origins of such a line; none of any other text."""
    return tuple(Origin(name, int(version), int(step)) for name, version, step in _ORIGIN.findall(text))
