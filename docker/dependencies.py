"""Prints what brayx and the extras that are named depend on, a requirement a line, from the pyproject.toml here."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for group in (project["dependencies"], *(project["optional-dependencies"][extra] for extra in sys.argv[1:])):
    print("\n".join(group))
