"""The commands of `python -m app`. A command's module is imported when the command is used, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

BAD_USAGE = 2  # also of everything else that the user can mend


class Main(Protocol):
    """What a command's module offers under the name `main`: runs with the words after the command."""

    def __call__(self, argv: Sequence[str]) -> int: ...


class Command(NamedTuple):
    """Where a command is, and what `--help` says of it."""

    module: str
    words: str
    summary: str

    def run(self, argv: Sequence[str]) -> int:
        main: Main = import_module(self.module).main
        return main(argv)


COMMANDS = {
    "serve": Command(
        "app.commands.serve",
        "[--SETTING VALUE ...]",
        "start the gateway; every setting of .env.example is a flag too (--port 9000)",
    ),
    "keys": Command("app.commands.keys", "COMMAND", "create, list, rotate, disable and enable API keys"),
    "doctor": Command(
        "app.commands.doctor", "[--json]", "say what is wrong with this installation, and how to mend it"
    ),
    "nodes": Command("app.commands.nodes", "[drain NAME | enable NAME]", "show the running gateway's nodes"),
    "top": Command("app.commands.top", "[--once]", "watch what the running gateway does"),
    "usage": Command("app.commands.usage", "[--since WHEN] [--by WORDS]", "show what was used, spent and saved"),
    "explain": Command("app.commands.explain", "--model NAME", "show who would serve a request, and why not others"),
}
