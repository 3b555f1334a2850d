"""What the documents of all subjects share. Each subject's module has its own: bodies of requests and replies.

The name of their classes ends in `Document`, as in OpenAPI: `TrialDocument` is the JSON of a `brayx.tracking.Trial`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

MAX_POINTS = 500
"""Maximum points of a curve; a longer one is thinned."""


class Document(BaseModel):
    """Base of all documents."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class DoneDocument(Document):
    """What a control call did, in words."""

    done: str


class RefusalDocument(Document):
    """A typed error; see `brayx.errors`."""

    error: str
    """Its code."""
    message: str
    """What is wrong, and what was expected."""
    details: dict[str, Any]
    """Facts for programs."""


def number_of(tags: Mapping[str, str], *names: str) -> float | None:
    """The first of these tags that is a finite number; None: none is."""
    for name in names:
        try:
            value = float(tags.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None
