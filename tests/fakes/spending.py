"""A ledger of spending in memory, and a clock that is set: what meters stand on in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from app.domain import Budget, Rate
from app.sharing.meter import Account, Flow, Hold, Spent

NOON = 1_773_835_200_000  # Wednesday 2026-03-18 12:00 UTC
DAY_MS = 24 * 3_600_000


class Clock:
    """Milliseconds since 1970, as somebody set them."""

    def __init__(self, now: int = NOON) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


@dataclass
class Row:
    at: int
    scopes: frozenset[str]
    amount: int
    cost: int | None = None


class SpendingLedger:
    """Rows as the ledger has them; `read_spent` is what a meter is given."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.reads = 0

    def open(self, hold: Hold) -> None:
        self.rows[hold.id] = Row(hold.at, frozenset(account.scope for account in hold.accounts), hold.amount)

    def settle(self, hold_id: str, cost: int) -> None:
        self.rows[hold_id].cost = cost

    def total(self, scope: str, since: int = 0) -> int:
        rows = self._rows(scope, since)
        return sum(row.amount if row.cost is None else row.cost for _, row in rows)

    async def read_spent(self, scope: str, since: int) -> Spent:
        self.reads += 1
        rows = list(self._rows(scope, since))
        await asyncio.sleep(0)
        settled = sum(row.cost for _, row in rows if row.cost is not None)
        return Spent(settled, {hold_id: row.amount for hold_id, row in rows if row.cost is None})

    def _rows(self, scope: str, since: int) -> Iterable[tuple[str, Row]]:
        return [(hold_id, row) for hold_id, row in self.rows.items() if scope in row.scopes and row.at >= since]


def account(limit: int, scope: str = "gateway", **budget: object) -> Account:
    return Account(scope, Budget(limit, **budget))  # type: ignore[arg-type]


def flow(requests: int | None = None, tokens: int | None = None, scope: str = "provider:p") -> Flow:
    return Flow(scope, Rate(requests, tokens))


def hold(
    hold_id: str, *accounts: Account, amount: int = 10, tokens: int = 0, at: int = NOON, flows: Iterable[Flow] = ()
) -> Hold:
    return Hold(hold_id, at, amount, tokens, accounts, tuple(flows))
