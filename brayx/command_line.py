"""Parsers of command lines, whose errors begin with ``brayx: `` like every other error of brayx; and their results."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any, NoReturn

SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
"""Keyword arguments of an option that is off by default: ``--x`` turns it on, ``--no-x`` off again."""


class Parser(argparse.ArgumentParser):
    """As `argparse.ArgumentParser`, which would begin an error with the command's name and ``error:``."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage, which names the command, and the error; exits with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"brayx: {message}\n")


def count(text: str) -> int:
    """An option's value that is 1 or more.

    Raises:
        ArgumentTypeError, ValueError: it is less, or no number; the parser reports both.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected 1 or more")
    return value


def print_result(result: object, end: str = "\n") -> None:
    """Prints the result of a command. It is no error if the reader has enough of it, as ``head`` does."""
    with contextlib.suppress(BrokenPipeError):
        print(result, end=end, flush=True)
