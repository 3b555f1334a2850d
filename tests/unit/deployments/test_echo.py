"""The echo application's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brayx.actor.config import ActorConfig
from deployments import echo


def test_a_keys_file_is_relative_to_the_folder_where_the_application_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[ActorConfig] = []

    def deployment(build: Any, config: ActorConfig, **_: Any) -> None:
        configs.append(config)

    monkeypatch.setattr(echo, "actor_deployment", deployment)
    monkeypatch.chdir(tmp_path)
    for keys_file in (None, "keys.txt", "/etc/keys.txt"):
        echo.app(echo.EchoArgs(keys_file=keys_file))
    assert [config.keys_file for config in configs] == [None, str(tmp_path / "keys.txt"), "/etc/keys.txt"]
