"""Values and files of jobs as YAML: types, and errors with their line."""

from __future__ import annotations

from typing import Any

import pytest

from brayx.errors import ConfigError
from brayx.jobs.document import JobFile, value_of


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("true", True), ("null", None), ("", None), ("[1, a]", [1, "a"]), ("a b", "a b")],
)
def test_a_value_on_the_command_line_is_read_as_in_a_file(text: str, value: Any) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)
    assert JobFile.parse(f"key: {text}\n", "job.yaml").values == {"key": value}


def test_a_value_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(ConfigError):
        value_of("[1, 2")


def test_a_file_that_is_no_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError) as refused:
        JobFile.parse("project: p\ntrial: [1\n", "job.yaml")
    assert str(refused.value).startswith("job.yaml:")
    assert refused.value.details["file"] == "job.yaml"
