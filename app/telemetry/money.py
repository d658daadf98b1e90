"""Spend, savings and budgets for whoever watches: what the ledger said some seconds ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from app.domain import LOCAL_TIER, MICRO_DOLLARS, Period, tier_name
from app.errors import LedgerUnavailable
from app.ledger.report import Books, Dimension, Query, Report, budget_document
from app.ledger.span import day_of, period_span
from app.sharing.meter import GATEWAY, Account
from app.sharing.periods import now_ms
from app.telemetry.look import Look

_EVERY_SECONDS = 10.0
_WAIT_SECONDS = 1.0  # of one who asks; after that it is shown without, or as it was
_MOST_BUDGETS = 20


class Money:
    """Asks the ledger once in a while, and only when somebody wants to know.

    The period is that of the gateway's budget, else the month.
    """

    def __init__(self, books: Books, accounts: Sequence[Account], now_ms: Callable[[], int] = now_ms) -> None:
        self._books = books
        self._accounts = accounts
        self._now_ms = now_ms
        gateway = next((account.budget for account in accounts if account.scope == GATEWAY), None)
        self._period = gateway.period if gateway else Period.MONTH
        self._look = Look(self._refresh, "money for the dashboard", _EVERY_SECONDS)
        self.document: dict[str, Any] | None = None  # None = not known yet

    def begin(self) -> None:
        """Asks if it is time to; `document` is new some time later."""
        self._look.begin()

    async def refresh(self) -> None:
        """Asks if it is time to, and waits for it a moment."""
        await self._look.refresh(_WAIT_SECONDS)

    async def close(self) -> None:
        await self._look.close()

    async def _refresh(self) -> None:
        try:
            self.document = await self._ask()
        except LedgerUnavailable as error:
            self.document = {**(self.document or {}), "trouble": error.message}

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
