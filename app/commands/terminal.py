"""What the commands for people share: a typer group runs here, and what the user can mend becomes one line."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import typer
from typer.exceptions import TyperException

from app.commands import BAD_USAGE
from app.commands.printable import one_line
from app.errors import HearthError

if TYPE_CHECKING:
    from app.ledger.store import Store
    from app.settings import Settings

T = TypeVar("T")

_WIDE_CHARACTERS = 1000


class Refused(Exception):
    """A command cannot do what it was told. `message` is one line that says what to mend."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def group(help: str) -> typer.Typer:
    """A command group, without anything that typer would add of its own."""
    return typer.Typer(
        help=help,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )


def run(commands: typer.Typer, name: str, argv: Sequence[str]) -> int:
    """Runs one command of the group and returns the exit status."""
    command = typer.main.get_command(commands)
    try:
        status = command.main(args=list(argv), prog_name=f"python -m app {name}", standalone_mode=False)
    except TyperException as error:
        # typer says in pydantic's way what is not one of several values.
        message = error.format_message().replace("Value error, ", "")
        return _refused(f"{message} See `python -m app {name} --help`")
    except (Refused, HearthError) as error:
        return _refused(error.message)
    except typer.Abort:
        return 1
    return status if isinstance(status, int) else 0


def settings() -> Settings:
    """The gateway's settings, from the environment, `.env` and CONFIG_FILE. Raises `Refused`."""
    from app.settings import SettingsError, load_settings  # most of a command's start

    try:
        return load_settings()
    except SettingsError as error:
        raise Refused(error.message) from error


def in_ledger(use: Callable[[Store], Awaitable[T]], refusal: str) -> T:
    """What `use` gives, with the ledger open. Raises `Refused` with these words where there is none."""
    import asyncio  # commands that ask the gateway do without

    url = settings().database()
    if url is None:
        raise Refused(refusal)
    return asyncio.run(_with_store(url, use))


async def _with_store(url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    from app.ledger.store import Store

    async with Store(url) as store:
        return await use(store)


def print_table(headers: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints cells, each made safe for a terminal. Where nobody sees them they are not made to fit a width."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDE_CHARACTERS).print(table)


def _refused(message: str) -> int:
    print("hearth: " + one_line(" ".join(message.split())), file=sys.stderr)
    return BAD_USAGE
