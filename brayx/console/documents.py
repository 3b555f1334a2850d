"""What the documents of all subjects share. Each subject's module has its own: bodies of requests and replies.

The name of their classes ends in `Document`, as in OpenAPI: `TrialDocument` is the JSON of a `brayx.tracking.Trial`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from brayx.jobs.champion import lead_of

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


class ResultDocument(Document):
    """A mean return."""

    mean: float
    error: float | None = None
    """Its standard error (the 95 % interval is the mean ± 1.96 times this); null: not known."""
    games: float | None = None
    """Number of games in it; null: not known."""
    how: Literal["", "training", "evaluation", "service"] = ""
    """How these games were played: a training samples its actions; empty: not known."""


def result_of(tags: Mapping[str, str]) -> ResultDocument | None:
    """The result of a registered version: of an evaluation, or else of its training; None: it has none."""
    prefix = "rating" if "rating_games" in tags else "return"
    mean = number_of(tags, "rating", "return")
    if mean is None:
        return None
    error, games = number_of(tags, f"{prefix}_error"), number_of(tags, f"{prefix}_games")
    return ResultDocument(mean=mean, error=error, games=games, how="training" if prefix == "return" else "evaluation")


def lead_of_version(tags: Mapping[str, str], rival: Mapping[str, str]) -> ResultDocument | None:
    """How much higher a registered version's result is than a rival's, as `brayx.jobs.champion.lead_of`."""
    lead, error = lead_of(tags, rival)
    return None if math.isnan(lead) else ResultDocument(mean=lead, error=None if math.isnan(error) else error)


def served_result(tags: Mapping[str, str | float]) -> ResultDocument | None:
    """The result of a registered version in service; see `brayx.model.pool.Pool`."""
    mean = number_of(tags, "serving.episode_return")
    if mean is None:
        return None
    error, games = number_of(tags, "serving.return_error"), number_of(tags, "serving.games")
    return ResultDocument(mean=mean, error=error, games=games, how="service")


def number_of(tags: Mapping[str, str | float], *names: str) -> float | None:
    """The first of these tags that is a finite number; None: none is."""
    for name in names:
        try:
            value = float(tags.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None
