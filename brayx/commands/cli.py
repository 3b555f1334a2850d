"""The command line: ``brayx --help``. Finds the file of each command in this folder.

A command's file has ``HELP``, its line in the help, ``options(parser)`` and ``run(arguments)``, which returns the exit
code. It imports what it needs when it runs: a gamecore must start fast and load neither Ray nor torch. So does this
file: Python shows a traceback if an interrupt comes during the imports at its top.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

COMMANDS = (
    "demo", "train", "serve", "evaluate", "match", "league", "recordings", "replay", "export", "new", "check",
    "convert", "trials", "promote", "scale", "console", "doctor", "load", "keys", "completion", "gamecore", "bridge",
    "ppo", "tune", "visualize", "mlagents-learn",
)  # fmt: skip
"""The commands in the order of the help, each the name of its file with hyphens for underscores."""
_AGAIN_S = 0.05
_cuts_import = False
"""An interrupt came during an import, which may then fail in any way."""


def run(argv: Sequence[str] | None = None) -> None:
    """The command ``brayx``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave_at_once)
    from brayx.shutdown import leave

    try:
        code = main(argv)
    except SystemExit as exited:  # argparse's help and errors
        code = exited.code if isinstance(exited.code, int) else 1
    leave(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a typed error is one line on standard error and exit code 2."""
    from brayx.errors import BrayxError
    from brayx.shutdown import is_ending

    words = list(sys.argv[1:] if argv is None else argv)
    # Other commands' files stay unread: only the help and completion need them all.
    arguments = parser(words[:1] if words and words[0] in COMMANDS else COMMANDS).parse_args(words)
    if words[0] not in ("gamecore", "bridge"):
        _prepare()
    elif signal.getsignal(signal.SIGINT) is _leave_at_once:  # they belong to the job that started them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code: int = arguments.run(arguments)
        return code
    except Exception as error:
        interrupted, expected = is_ending(), _cuts_import or isinstance(error, (BrayxError, ModuleNotFoundError))
        if not expected or os.environ.get("BRAYX_TRACEBACK"):
            raise
        hint = ""
        if isinstance(error, ModuleNotFoundError):  # as on a game's own machine, which has none of the engines
            hint = f": `brayx {words[0]}` needs this package; `pip install brayx` brings all but the extras"
        print(f"brayx: {'interrupted: ' * interrupted}{error}{hint}", file=sys.stderr)
        return 130 if interrupted else 2
    except KeyboardInterrupt:
        return 130


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands."""
    import brayx
    from brayx.command_line import Parser

    root = Parser(
        prog="brayx",
        description="Train game agents and serve them with one code path.",
        epilog="Set BRAYX_TRACEBACK=1 to see where an error was raised.",
    )
    root.add_argument("--version", action="version", version=f"brayx {brayx.__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in names:
        command = importlib.import_module(f"brayx.commands.{name.replace('-', '_')}")
        subparser = commands.add_parser(name, help=command.HELP)
        command.options(subparser)
        subparser.set_defaults(run=command.run)
    return root


def _prepare() -> None:
    """Prepares this process: interrupts end the command cleanly, and no thread starts Ray again."""
    from brayx.shutdown import mark

    # Read when Ray is imported: a thread that outlives its job must not start a new Ray by calling the one that ended.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    mark()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _interrupt_again


def _leave_at_once(*_: object) -> NoReturn:
    """Ends a command that is still being imported: there is nothing to clean up, or to say."""
    os._exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the command cleanly. Further interrupts during the clean-up, which has deadlines, are ignored."""
    from brayx.shutdown import end_within

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_within()
    _raise_in(frame)


def _raise_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_in(frame)


def _raise_in(frame: FrameType | None) -> NoReturn:
    """Raises an interrupt that came in this frame."""
    global _cuts_import
    while frame is not None:
        _cuts_import = _cuts_import or frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that arrived where nothing can be raised: in a finaliser, or in logging's hook of a fork."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGINT, _raise_once)
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    run()
