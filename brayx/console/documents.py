"""What the documents of all subjects share. Each subject's module has its own: bodies of requests and replies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

MAX_POINTS = 500
"""Maximum points of a curve; a longer one is thinned."""


class Document(BaseModel):
    """Base of all documents."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Done(Document):
    """What a control call did, in words."""

    done: str


class Refusal(Document):
    """A typed error; see `brayx.errors`."""

    error: str
    """Its code."""
    message: str
    """What is wrong, and what was expected."""
    details: dict[str, Any]
    """Facts for programs."""
