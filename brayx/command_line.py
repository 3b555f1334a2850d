"""Parsers of command lines, whose errors begin with ``brayx: `` like all errors of brayx; and what commands print."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from brayx.errors import ConfigError

_Number = TypeVar("_Number", int, float)

SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
"""Keyword arguments of an option that is off by default: ``--x`` turns it on, ``--no-x`` off again."""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors begin with ``brayx: ``.

    Accepts ``--max_grad_norm`` as ``--max-grad-norm``, because other systems publish their options with underscores.
    Refuses abbreviations, and names the nearest option of a misspelt one.

    Attributes:
        explain: makes the error for words that the parser does not know; an empty one, or None: argparse's own.
    """

    explain: Callable[[list[str]], str] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allow_abbrev = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. Replaces underscores in option names by hyphens, up to a lone ``--``."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(self._hyphenated, words[:end])
        known, unknown = super().parse_known_args(words, namespace)
        if unknown and (message := (self.explain and self.explain(unknown)) or self._nearest(unknown)):
            self.error(message)
        return known, unknown

    def _nearest(self, words: list[str]) -> str:
        """The error that names the option nearest to the first unknown one; empty: none is near."""
        option = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        near = difflib.get_close_matches(option, self._option_string_actions, n=1)
        return f"unrecognized arguments: {' '.join(words)}; the nearest option is {near[0]}" if near else ""

    def _hyphenated(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphenated = name.replace("_", "-")
        return f"{hyphenated}{equals}{value}" if hyphenated in self._option_string_actions else word

    def error(self, message: str) -> NoReturn:
        """Prints the usage, which names the command, and the error; exits with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"brayx: {message}\n")


_SILENT_S = 2.0
_said_at = math.inf
"""Time of a command's newest line, on the monotonic clock. A notebook has none, so it gets no line after a silence."""


def say(line: str) -> None:
    """Prints a line for the person who runs the command, on standard error."""
    global _said_at
    _said_at = time.monotonic()
    print(line, file=sys.stderr, flush=True)


def say_after_silence(line: str) -> None:
    """Prints a line, as `say`, if there has been none for two seconds: what a command does, and how far it is."""
    if time.monotonic() - _said_at > _SILENT_S:
        say(line)


def boolean(text: str) -> bool:
    """Parses ``true`` or ``false``, ``yes`` or ``no``, ``1`` or ``0``, in upper or lower case.

    Raises:
        ArgumentTypeError: the text is anything else.
    """
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"is {text!r}, expected true or false")


class Switch(argparse.Action):
    """A boolean option with an optional value: ``--x``, ``--no-x``, or ``--x true``.

    Use it for published command lines only: it takes a positional argument that follows it for its value.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        names = [*option_strings, *(f"--no-{name.removeprefix('--')}" for name in option_strings)]
        super().__init__(names, dest, nargs="?", metavar="BOOL", **{"type": boolean, **options})

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        negated = (option_string or "").startswith("--no-")
        if negated and values is not None:
            raise argparse.ArgumentError(self, f"{option_string} takes no value")
        setattr(namespace, self.dest, not negated if values is None else values)


class Settings(argparse.Action):
    """Merges ``KEY=VALUE``, the value as in a job's YAML, into one dict; ``env_options`` are set one by one, too."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        from brayx.yaml_text import value_of

        path, equals, text = values.partition("=")
        name, _, key = path.partition(".")
        if not equals or not name:
            raise argparse.ArgumentError(self, f"is {values!r}, expected KEY=VALUE, such as epochs=4")
        try:
            value = value_of(text)
        except ConfigError as error:
            raise argparse.ArgumentError(self, f"is {values!r}: {error.message}") from None
        settings = getattr(namespace, self.dest, {})
        if name == "env_options" and key:
            path, value = name, {**settings.get(name, {}), key: value}
        setattr(namespace, self.dest, {**settings, path: value})


class EnvOptions(Settings):
    """Merges ``env_options.KEY=VALUE`` into a dict of the keyword arguments of an environment."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        option = values.removeprefix("env_options.")
        if option == values:
            raise argparse.ArgumentError(self, f"is {values!r}, expected env_options.KEY=VALUE")
        super().__call__(parser, namespace, option)

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        """Adds it as ``--set``, and as ``env_kwargs`` of the result."""
        parser.add_argument(
            "--set", dest="env_kwargs", action=EnvOptions, default={}, metavar="env_options.KEY=VALUE",
            help="keyword argument of the environment, as of the training; may be given again",
        )  # fmt: skip


def count(text: str) -> int:
    """An option's value that is 1 or more.

    Raises:
        ArgumentTypeError: it is less, or no number.
    """
    return _number(text, int, 1, "a whole number, 1 or more")


def whole(text: str) -> int:
    """An option's value that is 0 or more; raises as `count`."""
    return _number(text, int, 0, "a whole number, 0 or more")


def seconds(text: str) -> float:
    """An option's value that is a time; raises as `count`."""
    return _number(text, float, 0, "seconds, 0 or more")


def _number(text: str, kind: Callable[[str], _Number], least: int, expected: str) -> _Number:
    with contextlib.suppress(ValueError):
        value = kind(text)
        if least <= value < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"is {text!r}, expected {expected}")


def print_result(result: object, end: str = "\n") -> None:
    """Prints the result of a command. It is no error if the reader has enough of it, as ``head`` does."""
    with contextlib.suppress(BrokenPipeError):
        print(result, end=end, flush=True)


@contextlib.contextmanager
def announced(config: str, interrupted: str) -> Iterator[None]:
    """Prints a line before the imports, which take seconds, and another one if an interrupt leaves no result.

    Args:
        config: the job's file.
        interrupted: line for an interrupt, unless the exception has a note.
    """
    try:
        say(f"{config}: checking the job ...")
        yield
    except KeyboardInterrupt as error:
        when = getattr(error, "__notes__", [interrupted])[0]
        say(f"brayx: interrupted {when}")
        raise
