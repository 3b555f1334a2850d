"""``brayx completion``: a shell script that completes commands, their options and file names; made from the parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping

from brayx.commands import bridge, gamecore

HELP = "print shell completion: source <(brayx completion bash)"

_SCRIPT = """\
_brayx() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words
    case "$COMP_CWORD:${{COMP_WORDS[*]:1}}" in
        1:*) words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _brayx brayx
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    from brayx.commands.cli import parser

    kinds = {
        f"{command.__name__.rpartition('.')[2]} {kind}": importlib.import_module(f"brayx.bridges.{kind}").parser()
        for command in (gamecore, bridge)
        for kind in command.KINDS
    }
    print(script(parser(), arguments.shell, kinds), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str, subparsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """A script that completes ``brayx``: ``source <(brayx completion bash)``.

    Args:
        parser: parser of the command, with its subcommands.
        shell: ``bash`` or ``zsh``.
        subparsers: parsers of subcommands that ``parser`` has by name only, by their words, such as ``gamecore gym``.
    """
    commands, *_ = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    cases = "\n".join(
        f'        *:"{name} "*) words="{" ".join(words)}" ;;' for name, words in _commands(parser, subparsers, "")
    )
    head = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _SCRIPT.format(commands=" ".join(commands), cases=cases)


def _commands(
    parser: argparse.ArgumentParser, subparsers: Mapping[str, argparse.ArgumentParser], before: str
) -> Iterator[tuple[str, list[str]]]:
    """Each command, and the words that may follow it: options and verbs. ``keys new`` comes before ``keys``, as the
    script takes the first that fits."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                name = f"{before}{word}"
                command = subparsers.get(name, command)
                yield from _commands(command, subparsers, f"{name} ")
                actions = [action for action in command._actions if action.help != argparse.SUPPRESS]
                yield name, [word for action in actions for word in (*action.option_strings, *_verbs(action))]


def _verbs(action: argparse.Action) -> list[str]:
    return list(action.choices) if isinstance(action, argparse._SubParsersAction) else []
