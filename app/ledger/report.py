"""Usage as values: what can be asked, what is answered, and the answer as JSON or CSV. Knows no database."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from app.domain import MICRO_DOLLARS, Period
from app.ledger.span import Span, day_of, period_span
from app.sharing.meter import Account

MOST_LINES = 10_000
LARGEST_COST_USD = 1_000_000  # of one attempt

# What spreadsheets take for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Dimension(StrEnum):
    """What usage can be grouped and filtered by. `model` is the name that the node was asked for, `tier` local or
    cloud."""

    DAY = "day"
    KEY = "key"
    MODEL = "model"
    NODE = "node"
    TIER = "tier"
    ROUTE = "route"


FILTERS = tuple(dimension for dimension in Dimension if dimension is not Dimension.DAY)


class Query(NamedTuple):
    """What is asked. `only` keeps what has exactly these values."""

    span: Span
    by: tuple[Dimension, ...] = (Dimension.DAY,)
    only: Mapping[Dimension, str] = {}
    most_lines: int = MOST_LINES


class Sums(NamedTuple):
    """Everything that is summed. Money is in micro-dollars.

    `cost` is what the cloud's attempts cost, those that are open or lost at their reservation, and what local nodes
    with a price cost; `saved` what the cloud would have taken for what local nodes served.
    """

    requests: int = 0
    failed: int = 0
    estimated: int = 0  # requests whose tokens are a guess
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost: int = 0
    saved: int = 0
    first_content_ms: int = 0  # the sum over the requests that had content
    first_contents: int = 0  # their number

    @property
    def estimated_share(self) -> float:
        return self.estimated / self.requests if self.requests else 0.0

    @property
    def mean_first_content_ms(self) -> float | None:
        return self.first_content_ms / self.first_contents if self.first_contents else None


class UsageLine(NamedTuple):
    """One group. `group` has a value for each of the query's `by`: days as 2026-11-01; "" = there was none."""

    group: tuple[str, ...]
    sums: Sums


class Report(NamedTuple):
    """The answer, its lines in the order of their groups. `cut`: there are more lines than these.

    `total` is of everything, cut or not. `key_names` has the names of those keys that have one.
    """

    query: Query
    lines: Sequence[UsageLine]
    total: Sums
    cut: bool = False
    key_names: Mapping[str, str] = {}


class LostSpend(NamedTuple):
    """An attempt whose process died. It counts as `reserved` (micro-dollars) until somebody looks up what it cost."""

    id: str
    request: str
    at: int
    instance: str
    key: str
    route: str
    node: str
    model: str
    reserved: int


class BudgetState(NamedTuple):
    """What became of a budget in the period that runs. `held` is open or lost, and counts. Micro-dollars."""

    account: Account
    span: Span
    spent: int
    held: int

    @property
    def left(self) -> int:
        return max(0, self.account.budget.limit - self.spent - self.held)


class Books(Protocol):
    """Who answers from the ledger."""

    async def usage(self, query: Query) -> Report: ...

    async def budgets(self, accounts: Sequence[Account], now_ms: int) -> list[BudgetState]:
        """Of these accounts, and of the keys that have a budget."""
        ...

    async def lost(self) -> list[LostSpend]:
        """The oldest first, a bounded number of them."""
        ...

    async def reconcile(self, spend_id: str, cost: int) -> LostSpend | None:
        """Settles a lost spend at its true cost (micro-dollars); None when there is no lost one with this id."""
        ...


def dimensions(text: str) -> tuple[Dimension, ...]:
    """Reads `day,key`; every word counts once, none at all means one line for everything.

    Raises `ValueError` as `span` does.
    """
    words = dict.fromkeys(text.split(",")) if text else {}
    wrong = next((word for word in words if word not in tuple(Dimension)), None)
    if wrong is not None:
        raise ValueError(f"'{wrong[:100]}' is not one of {', '.join(Dimension)}", "by")
    return tuple(map(Dimension, words))


def document(report: Report) -> dict[str, Any]:
    """For JSON. Money is in dollars."""
    query = report.query
    return {
        "since": day_of(query.span.since),
        "until": day_of(query.span.until - 1),
        "by": list(query.by),
        "lines": [_row(report, line) for line in report.lines],
        "total": _figures(report.total),
        "cut": report.cut,
    }


def table(report: Report) -> Iterator[str]:
    """For CSV, some lines at a time. Money is in dollars with six decimals. No cell is a formula to a spreadsheet."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([*_heads(report.query.by), *_figures(report.total)])
    for line in report.lines:
        cells = {**_row(report, line), "cost_usd": dollars(line.sums.cost), "saved_usd": dollars(line.sums.saved)}
        writer.writerow([_safe(cell) for cell in cells.values()])
        if buffer.tell() > 32_768:
            yield _emptied(buffer)
    yield _emptied(buffer)


def dollars(amount: int) -> str:
    """Micro-dollars, as dollars with six decimals."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    return f"{sign}{amount // MICRO_DOLLARS}.{amount % MICRO_DOLLARS:06}"


def budget_document(state: BudgetState) -> dict[str, Any]:
    scope, budget = state.account
    return {
        "scope": scope,
        "period": budget.period.value,
        "limit_usd": budget.limit / MICRO_DOLLARS,
        "spent_usd": state.spent / MICRO_DOLLARS,
        "held_usd": state.held / MICRO_DOLLARS,
        "left_usd": state.left / MICRO_DOLLARS,
        "since": day_of(state.span.since),
        "resets": day_of(state.span.until),
        "resets_at": state.span.until,
    }


def lost_document(lost: LostSpend) -> dict[str, Any]:
    fields = lost._asdict()
    return {**fields, "reserved_usd": fields.pop("reserved") / MICRO_DOLLARS}


def fold(
    accounts: Sequence[Account], spent: Mapping[Period, Mapping[str, tuple[int, int]]], now_ms: int
) -> list[BudgetState]:
    """Every account with what its scope has settled and held in its period."""
    return [
        BudgetState(account, period_span(period, now_ms), *spent[period].get(account.scope, (0, 0)))
        for account in accounts
        for period in [account.budget.period]
    ]


def _row(report: Report, line: UsageLine) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for dimension, value in zip(report.query.by, line.group, strict=True):
        row[dimension.value] = value
        if dimension is Dimension.KEY:
            row["key_name"] = report.key_names.get(value, "")
    return row | _figures(line.sums)


def _heads(by: Sequence[Dimension]) -> Iterator[str]:
    for dimension in by:
        yield dimension.value
        if dimension is Dimension.KEY:
            yield "key_name"


def _figures(sums: Sums) -> dict[str, Any]:
    first = sums.mean_first_content_ms
    return {
        "requests": sums.requests,
        "failed": sums.failed,
        "tokens_in": sums.tokens_in,
        "tokens_out": sums.tokens_out,
        "tokens_cached": sums.tokens_cached,
        "estimated_share": round(sums.estimated_share, 4),
        "cost_usd": sums.cost / MICRO_DOLLARS,
        "saved_usd": sums.saved / MICRO_DOLLARS,
        "first_content_ms": None if first is None else round(first, 1),
    }


def _safe(cell: Any) -> Any:
    """Puts an apostrophe before a text that a spreadsheet would run. Figures stay what they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def _emptied(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text
