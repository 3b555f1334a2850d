"""The arguments of ``brayx train``: overrides add up, and ``--cluster`` may stand alone."""

from __future__ import annotations

from typing import Any

import pytest

from brayx.commands import cli


def parsed(*words: str) -> dict[str, Any]:
    return vars(cli.parser(["train"]).parse_args(["train", "cartpole.yaml", *words]))


@pytest.mark.parametrize(
    ("words", "cluster"), [([], None), (["--cluster"], ""), (["--cluster", "auto"], "auto"), (["--cluster", ""], "")]
)
def test_a_cluster_is_joined_started_or_not_used(words: list[str], cluster: str | None) -> None:
    assert parsed(*words)["cluster"] == cluster


def test_overrides_add_up_in_their_order() -> None:
    assert parsed()["overrides"] == []
    assert parsed("--set", "a.b=1", "--set", "a.b=2")["overrides"] == ["a.b=1", "a.b=2"]
