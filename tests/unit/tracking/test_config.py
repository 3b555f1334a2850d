"""Options of tracking: the short form, and the folder of event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.tracking.config import TrackingConfig


class TestOptions:
    def test_a_string_or_null_is_the_uri(self) -> None:
        assert TrackingConfig.model_validate("sqlite:///a.db") == TrackingConfig(uri="sqlite:///a.db")
        assert TrackingConfig.model_validate(None) == TrackingConfig()
        assert TrackingConfig.model_validate({"tensorboard": True}).uri is None

    def test_event_files_are_beside_the_database_or_where_the_option_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert TrackingConfig().tensorboard_folder("sqlite:////data/mlflow.db") == ""
        assert TrackingConfig(tensorboard=True).tensorboard_folder("sqlite:////data/mlflow.db") == "/data/tensorboard"
        assert TrackingConfig(tensorboard=True).tensorboard_folder("http://host:5000") == f"{tmp_path}/tensorboard"
        assert TrackingConfig(tensorboard="here").tensorboard_folder("sqlite:////data/mlflow.db") == f"{tmp_path}/here"
