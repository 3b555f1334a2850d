"""YAML as brayx reads it, in files and in values on the command line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from brayx.errors import ConfigError, first_line


class Loader(yaml.SafeLoader):
    """Loads YAML with ``1e-3`` as a number, dates as text, and an error for a key that is given twice."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _number(loader: Loader, node: yaml.ScalarNode) -> float | int:
    """A float; but ``1e6``, which is often a count, is an integer."""
    value = float(loader.construct_yaml_float(node))
    return int(value) if _EXPONENT.match(str(node.value)) and value.is_integer() else value


Loader.add_constructor("tag:yaml.org,2002:float", _number)


def value_of(text: str) -> Any:
    """Parses a value from the command line as in a YAML file.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value is not YAML: {getattr(error, 'problem', first_line(error))}") from None
