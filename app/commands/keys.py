"""`python -m app keys`: API keys, in the ledger itself, so that the gateway need not run.

A gateway that runs learns of every change within some seconds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from app.commands import terminal
from app.commands.terminal import Refused
from app.domain import Period, Priority
from app.ledger import key as values
from app.ledger.key import Key, Traits

if TYPE_CHECKING:
    from app.ledger.keys import KeyBook
    from app.ledger.store import Store

T = TypeVar("T")

_SPAN = re.compile(r"([1-9]\d{0,4})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}

commands = terminal.group("API keys. Clients that show one may do what it allows; it is kept as a digest only.")

Which = Annotated[str, typer.Argument(metavar="NAME", help="The key's name or id.")]


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "keys", argv)


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="What people know the key by.")],
    route: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="A model that it may ask for, * for anything; repeat it for several."),
    ] = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="Never serve its requests from the cloud.")] = False,
    budget_usd: Annotated[
        str | None, typer.Option(metavar="DOLLARS", help="What it may spend in the cloud in a period.")
    ] = None,
    budget_period: Annotated[Period, typer.Option(help="How long its budget lasts.")] = Period.MONTH,
    requests_per_minute: Annotated[int | None, typer.Option(metavar="N", help="How often it may ask.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(metavar="N", help="How many tokens it may use.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="When it ends: in 30d (or 12h, 4w), or on 2027-01-31.")
    ] = None,
    weight: Annotated[
        int, typer.Option(metavar="N", help="Turns that it has at a time, where its requests and others' wait.")
    ] = 1,
    priority: Annotated[
        Priority | None, typer.Option(help="Who of those who wait comes first; its models say when it is left out.")
    ] = None,
) -> None:
    """Make a key, and print its secret, which is shown this once."""
    traits: Traits = {
        "routes": route or (),
        "local_only": local_only,
        "budget_limit": _micro_dollars(budget_usd),
        "budget_period": budget_period,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "expires_at": None if expires is None else expiry(expires, _now()),
        "weight": weight,
        "priority": priority,
    }
    _show(*_in_book(lambda book: book.create(name, traits)))


@commands.command("list")
def list_keys(as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False) -> None:
    """Show all keys, without their secrets."""
    keys = _in_book(lambda book: book.list())
    if as_json:
        print(json.dumps({"keys": [values.document(key) for key in keys]}, indent=2))
    else:
        now = _now()
        headers = ("name", "id", "key", "state", "routes", "cloud", "requests/min", "tokens/min", "expires")
        terminal.print_table(headers, (_cells(key, now) for key in keys))


@commands.command()
def rotate(name: Which) -> None:
    """Give a key a new secret, and print it. The old one is refused from then on."""
    _show(*_in_book(lambda book: book.rotate(name)))


@commands.command()
def disable(name: Which) -> None:
    """Refuse a key until it is enabled again."""
    _say(f"the key '{_in_book(lambda book: book.disable(name)).name}' is disabled")


@commands.command()
def enable(name: Which) -> None:
    """Accept a disabled key again."""
    _say(f"the key '{_in_book(lambda book: book.enable(name)).name}' is enabled")


def expiry(written: str, now_ms: int) -> int:
    """The moment (ms since 1970) that `30d` or `2027-01-31` means; dates begin at midnight UTC. Raises `Refused`."""
    if span := _SPAN.fullmatch(written):
        return now_ms + int(span[1]) * _HOURS[span[2]] * 3_600_000
    try:
        moment = datetime.fromisoformat(written)
    except ValueError as error:
        raise Refused(f"--expires: '{written}' is neither a time from now such as 30d nor a date") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - values.EPOCH) // timedelta(milliseconds=1)


def _micro_dollars(written: str | None) -> int | None:
    from app.setting_values import micro_dollars

    try:
        return None if written is None else micro_dollars(written)
    except ValueError as error:
        raise Refused(f"--budget-usd: {error}") from error


def _in_book(use: Callable[[KeyBook], Awaitable[T]]) -> T:
    async def with_book(store: Store) -> T:
        from app.ledger.keys import KeyBook

        return await use(KeyBook(store))

    refusal = "keys are kept in the ledger, and DATABASE_URL is off; set it, or use API_KEYS"
    return terminal.in_ledger(with_book, refusal)


def _show(key: Key, secret: str) -> None:
    """The secret alone goes to stdout, so that a script can take it from there."""
    _say(f"this is the key '{key.name}' ({key.id}). Keep it: it is not shown again")
    print(secret)


def _say(message: str) -> None:
    print(f"hearth: {message}", file=sys.stderr)


def _cells(key: Key, now: int) -> tuple[str, ...]:
    state = "disabled" if key.disabled else "expired" if key.expired(now) else "enabled"
    shown = values.document(key)
    return (
        key.name,
        key.id,
        f"{key.hint}...",
        state,
        " ".join(key.routes) or "all",
        _cloud(key),
        _limit(key.requests_per_minute),
        _limit(key.tokens_per_minute),
        (shown["expires_at"] or "never")[:16],
    )


def _cloud(key: Key) -> str:
    if key.local_only:
        return "never"
    if key.budget_limit is None:
        return "any"
    return f"${key.budget_limit / values.MICRO_DOLLARS:.6f}".rstrip("0").rstrip(".") + f" a {key.budget_period}"


def _limit(limit: int | None) -> str:
    return "any" if limit is None else str(limit)


def _now() -> int:
    return time.time_ns() // 1_000_000
