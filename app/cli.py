"""The command line: `python -m app COMMAND`.

Only the command's name is read here. `serve` has every setting as a flag and must start with little, so that typer is
known to those command groups alone that it serves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from app import __version__
from app.commands import BAD_USAGE, COMMANDS

_HELP = ("--help", "-h")


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns the exit status."""
    match list(argv):
        case ["--version"]:
            print(f"hearth {__version__}")
            return 0
        case [word] if word in _HELP:
            print(_usage())
            return 0
        case ["serve", *flags] if "--help" in flags:
            print(_usage())
            return 0
        case [name, *rest] if name in COMMANDS:
            return COMMANDS[name].run(rest)
        case [name, *_]:
            print(f"hearth: '{name}' is not a command{_meant(name)}\n\n{_usage()}", file=sys.stderr)
            return BAD_USAGE
    print(_usage(), file=sys.stderr)
    return BAD_USAGE


def _meant(name: str) -> str:
    close = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _usage() -> str:
    calls = {f"{name} {command.words}": command.summary for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    lines = [f"  {call:<{width}}   {summary}" for call, summary in calls.items()]
    return "\n".join(
        [
            "usage: python -m app COMMAND",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --help, --version",
            "",
            "`python -m app COMMAND --help` says more of a command.",
        ]
    )
