"""The options of a trial. Imports nothing of MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Options(NamedTuple):
    """The options of a trial; JSON values, nested.

    Attributes:
        whole: all of them, saved as the artifact ``options.json``.
        chosen: those that differ from the defaults, as MLflow's params; they are few, and so can be compared.
    """

    whole: Mapping[str, Any]
    chosen: Mapping[str, Any]
