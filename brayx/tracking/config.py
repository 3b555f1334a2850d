"""Options of tracking, at the top of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from brayx.urls import sqlite_path


class TrackingConfig(BaseModel):
    """Where a job's trials are kept. A string, or null, is the ``uri`` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str | None = None
    """MLflow URI, or path of a sqlite file or its folder; null: ``mlflow.db`` in the current folder."""
    tensorboard: bool | str = False
    """Also write TensorBoard's event files. true: into the folder ``tensorboard`` next to ``mlflow.db``, or in the
    current folder if MLflow is a server; a string names another. Needs the extra ``tensorboard``."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"uri": value} if value is None or isinstance(value, str) else value

    def tensorboard_folder(self, uri: str) -> str:
        """The absolute folder of all trials' event files; empty: there are none.

        Args:
            uri: the tracking store, as from `tracking_uri`.
        """
        if not self.tensorboard:
            return ""
        database = sqlite_path(uri)
        beside = Path() if database is None else database.parent
        folder = beside / "tensorboard" if self.tensorboard is True else Path(self.tensorboard).expanduser()
        return str(folder.absolute())
