"""`python -m app usage`: what was used, spent and saved, from the ledger itself, so that the gateway need not run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from app.commands import terminal
from app.commands.terminal import Refused
from app.ledger.report import (
    LARGEST_COST_USD,
    BudgetState,
    Dimension,
    LostSpend,
    Query,
    Report,
    Sums,
    dimensions,
    document,
    dollars,
    table,
)
from app.ledger.span import SINCE_WORDS, day_of, span
from app.sharing.meter import GATEWAY, Account

if TYPE_CHECKING:
    from app.ledger.store import Store
    from app.ledger.usage import LedgerBooks

T = TypeVar("T")

_FIGURES = ("requests", "failed", "tokens in", "out", "cached", "guessed", "cost", "saved", "first content")
_NOBODY = "-"

commands = terminal.group("What was used, spent and saved. Days begin at midnight UTC.")


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "usage", argv)


@commands.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    since: Annotated[str, typer.Option(metavar="WHEN", help=f"{SINCE_WORDS[0].upper()}{SINCE_WORDS[1:]}.")] = "month",
    until: Annotated[str | None, typer.Option(metavar="DAY", help="The last day, included; today if left out.")] = None,
    by: Annotated[str, typer.Option(metavar="WORDS", help=f"What to group by: {','.join(Dimension)}.")] = "day",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV in place of a table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show usage in groups, then what local nodes saved and what is left of the budget."""
    if context.invoked_subcommand is not None:
        return
    if as_csv and as_json:
        raise Refused("--csv and --json exclude each other")
    now = time.time_ns() // 1_000_000
    query = _query(since, until, by, now)
    if as_csv or as_json:
        report = _from_books(lambda books: books.usage(query))
        _print_cut(report)
        print(json.dumps(document(report), indent=2) if as_json else "".join(table(report)), end="\n" * as_json)
        return
    budget = terminal.settings().cloud_budget()
    accounts = [Account(GATEWAY, budget)] if budget is not None else []
    report, states = _from_books(lambda books: _both(books, query, accounts, now))
    terminal.print_table((*report.query.by, *_FIGURES), _rows(report))
    _print_cut(report)
    print(f"\n{_saved(report)} {_budget(states)}")


@commands.command()
def lost(as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False) -> None:
    """List what was spent by processes that died: it counts as reserved until it is reconciled."""
    found = _from_books(lambda books: books.lost())
    if as_json:
        from app.ledger.report import lost_document

        print(json.dumps({"lost": [lost_document(one) for one in found]}, indent=2))
    elif not found:
        print("nothing is lost", file=sys.stderr)
    else:
        terminal.print_table(("id", "day", "key", "route", "cloud", "model", "reserved"), map(_lost_cells, found))


@commands.command()
def reconcile(
    spend_id: Annotated[str, typer.Argument(metavar="ID", help="One that `usage lost` lists.")],
    cost_usd: Annotated[str, typer.Option(metavar="DOLLARS", help="What the provider took for it.")],
) -> None:
    """Say what a lost spend did cost. Gateways that run hear of it within seconds."""
    from app.setting_values import micro_dollars

    try:
        cost = micro_dollars(cost_usd)
        if cost > LARGEST_COST_USD * 1_000_000:
            raise ValueError(f"{cost_usd} is more than one request can cost")
    except ValueError as error:
        raise Refused(f"--cost-usd: {error}") from error
    settled = _from_books(lambda books: books.reconcile(spend_id, cost))
    if settled is None:
        raise Refused(f"there is no lost spend '{spend_id[:100]}'; `python -m app usage lost` lists them")
    print(f"{settled.id} did cost ${dollars(cost)}; ${dollars(settled.reserved)} was reserved", file=sys.stderr)


def _query(since: str, until: str | None, by: str, now_ms: int) -> Query:
    try:
        return Query(span(since, until, now_ms), dimensions(by))
    except ValueError as error:
        message, name = error.args
        raise Refused(f"--{name}: {message}") from error


def _from_books(use: Callable[[LedgerBooks], Awaitable[T]]) -> T:
    async def with_books(store: Store) -> T:
        from app.ledger.usage import LedgerBooks

        return await use(LedgerBooks(store))

    return terminal.in_ledger(with_books, "usage is kept in the ledger, and DATABASE_URL is off; set it")


async def _both(
    books: LedgerBooks, query: Query, accounts: Sequence[Account], now_ms: int
) -> tuple[Report, list[BudgetState]]:
    return await books.usage(query), await books.budgets(accounts, now_ms)


def _rows(report: Report) -> Iterator[Sequence[str]]:
    for line in report.lines:
        named = zip(report.query.by, line.group, strict=True)
        groups = [report.key_names.get(value, value) if by is Dimension.KEY else value for by, value in named]
        yield [*(group or _NOBODY for group in groups), *_figures(line.sums)]
    if report.query.by and len(report.lines) != 1:
        yield ["total", *[""] * (len(report.query.by) - 1), *_figures(report.total)]


def _figures(sums: Sums) -> Iterator[str]:
    yield from (f"{figure:,}" for figure in (sums.requests, sums.failed, sums.tokens_in, sums.tokens_out))
    yield f"{sums.tokens_cached:,}"
    yield f"{sums.estimated_share:.0%}"
    yield from (f"${dollars(amount)}" for amount in (sums.cost, sums.saved))
    first = sums.mean_first_content_ms
    yield _NOBODY if first is None else f"{first:,.0f} ms"


def _saved(report: Report) -> str:
    total, (since, until) = report.total, report.query.span
    return (
        f"From {day_of(since)} to {day_of(until - 1)}, local nodes saved ${dollars(total.saved)} against the cloud's "
        f"price, and ${dollars(total.cost)} was spent."
    )


def _budget(states: Sequence[BudgetState]) -> str:
    """Of the whole gateway's budget; what is held counts as spent until it is settled."""
    state = next((state for state in states if state.account.scope == GATEWAY), None)
    if state is None:
        return "No CLOUD_BUDGET_USD is set."
    budget, used = state.account.budget, state.spent + state.held
    share = f" ({used / budget.limit:.0%})" if budget.limit else ""
    return (
        f"Of this {budget.period}'s budget of ${dollars(budget.limit)}, ${dollars(used)}{share} is spent or reserved; "
        f"it begins anew on {day_of(state.span.until)}."
    )


def _print_cut(report: Report) -> None:
    if report.cut:
        shown = f"only the first {len(report.lines):,} groups are shown"
        print(f"hearth: {shown}; take a shorter time or fewer words for --by", file=sys.stderr)


def _lost_cells(lost: LostSpend) -> Sequence[str]:
    return (
        lost.id,
        day_of(lost.at),
        lost.key or _NOBODY,
        lost.route,
        lost.node,
        lost.model,
        f"${dollars(lost.reserved)}",
    )
