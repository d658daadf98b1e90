"""Spend, savings and budgets for whoever watches: what the ledger said some seconds ago."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from app.domain import LOCAL_TIER, Period, tier_name
from app.errors import LedgerUnavailable
from app.ledger.report import MICRO_DOLLARS, Books, Dimension, Query, Report, budget_document
from app.ledger.span import day_of, period_span
from app.sharing.meter import GATEWAY, Account

_EVERY_SECONDS = 10.0
_MOST_OF_THE_TIME = 0.05  # a large ledger takes longer, and is asked less often
_MOST_BUDGETS = 20


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Money:
    """Asks the ledger once in a while, and only when somebody wants to know.

    The period is that of the gateway's budget, else the month.
    """

    def __init__(self, books: Books, accounts: Sequence[Account], now_ms: Callable[[], int] = _now_ms) -> None:
        self._books = books
        self._accounts = accounts
        self._now_ms = now_ms
        gateway = next((account.budget for account in accounts if account.scope == GATEWAY), None)
        self._period = gateway.period if gateway else Period.MONTH
        self._asking = asyncio.Lock()
        self._due = 0.0
        self.document: dict[str, Any] | None = None  # None = not known yet

    async def refresh(self) -> None:
        """Asks if it is time to, and returns when `document` is as new as it gets."""
        async with self._asking:
            began = time.monotonic()
            if began < self._due:
                return
            try:
                self.document = await self._ask()
            except LedgerUnavailable as error:
                self.document = {**(self.document or {}), "trouble": error.message}
            took = time.monotonic() - began
            self._due = time.monotonic() + max(_EVERY_SECONDS, took / _MOST_OF_THE_TIME)

    async def keep(self) -> None:
        """Refreshes until it is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(max(0.1, self._due - time.monotonic()))

    async def _ask(self) -> dict[str, Any]:
        now = self._now_ms()
        span = period_span(self._period, now)
        report = await self._books.usage(Query(span, by=(Dimension.TIER,)))
        states = await self._books.budgets(self._accounts, now)
        return {
            "period": self._period.value,
            "since": day_of(span.since),
            "resets": day_of(span.until),
            "asked_at": now,
            "trouble": None,
            **_totals(report),
            "budget": next((budget_document(state) for state in states if state.account.scope == GATEWAY), None),
            "budgets": [budget_document(state) for state in states[:_MOST_BUDGETS]],
        }


def _totals(report: Report) -> dict[str, Any]:
    tiers = {line.group[0]: line.sums for line in report.lines}
    local = tiers.get(tier_name(LOCAL_TIER))
    requests = local.requests if local else 0
    total = report.total
    return {
        "requests": total.requests,
        "local_requests": requests,
        "local_share": round(requests / total.requests, 4) if total.requests else None,
        "tokens_in": total.tokens_in,
        "tokens_out": total.tokens_out,
        "spent_usd": total.cost / MICRO_DOLLARS,
        "saved_usd": total.saved / MICRO_DOLLARS,
    }
