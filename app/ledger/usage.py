"""What was used and spent, from the ledger's tables.

What is grouped is grouped in the database. A request and its spending are never joined, as one request may have spent
several times: each table is summed alone, and the sums are put side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Row,
    Select,
    Subquery,
    and_,
    case,
    cast,
    func,
    literal,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.sql.elements import ColumnElement

from app.domain import LOCAL_TIER, Budget, Outcome, Period, tier_name
from app.ledger.engines import AsyncConnection
from app.ledger.report import BudgetState, Dimension, LostSpend, Query, Report, Sums, UsageLine, fold
from app.ledger.span import DAY_MS, Span, day_of, period_span
from app.ledger.store import Store
from app.ledger.tables import keys, requests, spend
from app.sharing.meter import GATEWAY, Account, key_scope, provider_scope, route_scope

MOST_LOST = 1000
_CLOUD_TIER = LOCAL_TIER + 1
# What an attempt counts as: its cost, and its reservation while nobody knows it.
_COUNTED = func.coalesce(spend.c.cost, spend.c.reserved)
_LOST = select(*(spend.c[name] for name in LostSpend._fields)).where(spend.c.state == "lost")


class LedgerBooks:
    """Answers from a ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def usage(self, query: Query) -> Report:
        """Sums every group that the query names. A spend belongs to the day of its reservation, as in its budget."""
        async with self._store.connect() as connection:
            rows = (await connection.execute(_grouped(query, query.by).limit(query.most_lines + 1))).all()
            cut = len(rows) > query.most_lines
            total = (await connection.execute(_grouped(query, ()))).one() if cut else None
            names = await _key_names(connection) if Dimension.KEY in query.by else {}
        # Thousands of rows would hold up the loop.
        lines = await asyncio.to_thread(_lines, rows[: query.most_lines], query.by)
        return Report(query, lines, _total(lines) if total is None else Sums(*total), cut, names)

    async def budgets(self, accounts: Sequence[Account], now_ms: int) -> list[BudgetState]:
        """What became of each account's budget, and of each key's, with one query for each kind of period."""
        async with self._store.connect() as connection:
            accounts = [*accounts, *await _key_accounts(connection)]
            periods = {account.budget.period for account in accounts}
            spent = {period: await _spent(connection, period_span(period, now_ms)) for period in periods}
        return fold(accounts, spent, now_ms)

    async def lost(self) -> list[LostSpend]:
        """The spends whose process died, the oldest first, at most `MOST_LOST`."""
        async with self._store.connect() as connection:
            found = await connection.execute(_LOST.order_by(spend.c.at, spend.c.id).limit(MOST_LOST))
            return [LostSpend(*row) for row in found]

    async def reconcile(self, spend_id: str, cost: int) -> LostSpend | None:
        """Settles a lost spend at what it did cost (micro-dollars). None when there is no lost one with this id."""
        async with self._store.connect() as connection:
            row = (await connection.execute(_LOST.where(spend.c.id == spend_id))).one_or_none()
        # Of two who do this at the same time, one finds it settled.
        settled = row is not None and await self._store.reconcile(spend_id, cost)
        return LostSpend(*row) if row is not None and settled else None


async def _spent(connection: AsyncConnection, span: Span) -> dict[str, tuple[int, int]]:
    """Settled and held micro-dollars of every scope."""
    settled = spend.c.state == "settled"
    found = (
        select(
            spend.c.key,
            spend.c.route,
            spend.c.node,
            _sum(case((settled, _COUNTED), else_=0)),
            _sum(case((settled, 0), else_=_COUNTED)),
        )
        .where(_within(spend.c.at, span))
        .group_by(spend.c.key, spend.c.route, spend.c.node)
    )
    spent: dict[str, tuple[int, int]] = {}
    for key, route, node, done, held in await connection.execute(found):
        for scope in (GATEWAY, key_scope(key), route_scope(route), provider_scope(node)):
            before = spent.get(scope, (0, 0))
            spent[scope] = (before[0] + done, before[1] + held)
    return spent


async def _key_accounts(connection: AsyncConnection) -> list[Account]:
    limited = select(keys.c.id, keys.c.budget_limit, keys.c.budget_period).where(keys.c.budget_limit.is_not(None))
    rows = await connection.execute(limited.order_by(keys.c.name))
    return [Account(key_scope(id), Budget(limit, Period(period))) for id, limit, period in rows]


async def _key_names(connection: AsyncConnection) -> dict[str, str]:
    return {row.id: row.name for row in await connection.execute(select(keys.c.id, keys.c.name))}


def _grouped(query: Query, by: Sequence[Dimension]) -> Select[Any]:
    """One row per group: its dimensions, then the fields of `Sums`, in their order."""
    parts = union_all(*(_summed(table, query, by) for table in (_requests(query.span), _spend(query.span)))).subquery()
    groups = [parts.c[dimension] for dimension in by]
    sums = [_sum(parts.c[name]).label(name) for name in Sums._fields]
    return select(*groups, *sums).group_by(*groups).order_by(*groups)


def _summed(rows: Subquery, query: Query, by: Sequence[Dimension]) -> Select[Any]:
    groups = [rows.c[dimension] for dimension in by]
    sums = [_sum(rows.c[name]).label(name) for name in Sums._fields]
    chosen = [rows.c[dimension] == value for dimension, value in query.only.items()]
    return select(*groups, *sums).where(*chosen).group_by(*groups)


def _requests(span: Span) -> Subquery:
    table = requests.c
    figures: dict[str, ColumnElement[Any]] = {
        "requests": literal(1),
        "failed": case((table.outcome == Outcome.FAILED.value, 1), else_=0),
        "estimated": case((table.estimated, 1), else_=0),
        "tokens_in": table.tokens_in,
        "tokens_out": table.tokens_out,
        "tokens_cached": table.tokens_cached,
        "cost": _local_cost(span),
        "saved": table.saved,
        "first_content_ms": table.first_content_ms,
        "first_contents": case((table.first_content_ms.is_(None), 0), else_=1),
    }
    tier = case((table.tier == LOCAL_TIER, tier_name(LOCAL_TIER)), else_=tier_name(_CLOUD_TIER))
    return _rows(requests, tier, figures, span)


def _spend(span: Span) -> Subquery:
    """Only the cloud has rows there. Its tokens are counted with its request."""
    figures: dict[str, ColumnElement[Any]] = {name: literal(0) for name in Sums._fields}
    return _rows(spend, literal(tier_name(_CLOUD_TIER)), figures | {"cost": _COUNTED}, span)


def _local_cost(span: Span) -> ColumnElement[Any]:
    """What a local node with a price cost: no spend tells of it. A request that spent is left to its spends."""
    around = Span(span.since - DAY_MS, span.until + DAY_MS)  # no request lasts a day
    spent = select(spend.c.request).where(_within(spend.c.at, around))
    local = and_(requests.c.tier == LOCAL_TIER, requests.c.cost > 0, requests.c.id.not_in(spent))
    return case((local, requests.c.cost), else_=0)


def _rows(table: Any, tier: ColumnElement[Any], figures: dict[str, ColumnElement[Any]], span: Span) -> Subquery:
    """A table's rows in the span with all dimensions and all figures, not grouped yet."""
    day = table.c.at // literal_column(str(DAY_MS), BigInteger)  # no parameter: PostgreSQL groups by the same text only
    same = [table.c[name] for name in (Dimension.KEY, Dimension.MODEL, Dimension.NODE, Dimension.ROUTE)]
    counted = [figures[name].label(name) for name in Sums._fields]
    chosen = select(day.label(Dimension.DAY), tier.label(Dimension.TIER), *same, *counted)
    return chosen.where(_within(table.c.at, span)).subquery()


def _within(at: ColumnElement[int], span: Span) -> ColumnElement[bool]:
    return and_(at >= span.since, at < span.until)


def _sum(figure: ColumnElement[Any]) -> ColumnElement[int]:
    """0 where there is nothing. PostgreSQL would make a decimal of it."""
    return cast(func.coalesce(func.sum(figure), 0), BigInteger)


def _lines(rows: Sequence[Row[Any]], by: Sequence[Dimension]) -> list[UsageLine]:
    width = len(by)
    days = [index for index, dimension in enumerate(by) if dimension is Dimension.DAY]
    lines = []
    for row in rows:
        group = list(row[:width])
        for index in days:
            group[index] = day_of(group[index] * DAY_MS)
        lines.append(UsageLine(tuple(group), Sums(*row[width:])))
    return lines


def _total(lines: Sequence[UsageLine]) -> Sums:
    columns = zip(*(line.sums for line in lines), strict=True)
    return Sums(*map(sum, columns))
