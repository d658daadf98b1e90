"""What the ledger and the budgets are at: read when somebody scrapes, and not more often than every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from app.domain import MICRO_DOLLARS
from app.errors import LedgerUnavailable
from app.sharing.meter import Account, key_scope
from app.telemetry.look import Look
from app.telemetry.tallies import OTHER, Family, Followed, Gauge, Labels, Merge

_EVERY_SECONDS = 5.0
_WAIT_SECONDS = 0.5  # of one scrape; after that it shows what was known before
_KEYS = 200  # that are shown one by one
_AT_ONCE = 8
_KEY = key_scope("")


class Rows(Protocol):
    """Who writes the ledger."""

    dropped: int

    def __len__(self) -> int: ...
    @property
    def up(self) -> bool: ...


class Funds:
    """Metrics of money. `spent` is what is spent and reserved of an account in its period, in micro-dollars."""

    def __init__(
        self,
        *,
        accounts: Callable[[], Sequence[Account]],
        spent: Callable[[Account], Awaitable[int]],
        reserved: Callable[[], int],
        rows: Rows,
    ) -> None:
        """`reserved` says how many reservations are open here."""
        self._accounts = accounts
        self._spent = spent
        self._look = Look(self._refresh, "budget metrics", _EVERY_SECONDS)
        self._known: dict[Labels, tuple[int, int]] = {}  # scope and period -> limit and what is left
        own, labels = Merge.OWN, ("scope", "period")
        self.families: tuple[Family, ...] = (
            Gauge(
                "hearth_reservations_open",
                "Attempts in the cloud whose cost is not known yet.",
                source=lambda: [((), reserved())],
            ),
            Gauge(
                "hearth_budget_limit_dollars",
                "What may be spent in the budget's period.",
                *labels,
                source=lambda: self._dollars(0),
                merge=own,
            ),
            Gauge(
                "hearth_budget_left_dollars",
                "What is neither spent nor reserved yet in the budget's period.",
                *labels,
                source=lambda: self._dollars(1),
                merge=own,
            ),
            Gauge(
                "hearth_ledger_up",
                "1 while the ledger's database takes rows.",
                source=lambda: [((), rows.up)],
                merge=Merge.MIN,
            ),
            Gauge(
                "hearth_ledger_rows_waiting", "Rows that are not in the ledger yet.", source=lambda: [((), len(rows))]
            ),
            Followed(
                "hearth_ledger_rows_dropped_total",
                "Requests that never came into the ledger.",
                source=lambda: [((), rows.dropped)],
            ),
        )

    async def refresh(self) -> None:
        """Looks at the budgets if it is time to, and waits for it a moment."""
        await self._look.refresh(_WAIT_SECONDS)

    async def close(self) -> None:
        await self._look.close()

    async def _refresh(self) -> None:
        # What was known is shown without the ledger; `hearth_ledger_up` tells of it.
        with suppress(LedgerUnavailable):
            self._known = await self._read()

    async def _read(self) -> dict[Labels, tuple[int, int]]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def left(account: Account) -> int:
            async with turns:
                return account.budget.limit - await self._spent(account)

        accounts = self._accounts()
        found: dict[Labels, tuple[int, int]] = {}
        lefts = await asyncio.gather(*map(left, accounts))
        for scope, account, rest in zip(_scopes(accounts), accounts, lefts, strict=True):
            labels = (scope, account.budget.period.value)
            limit, before = found.get(labels, (0, 0))
            found[labels] = limit + account.budget.limit, before + rest
        return found

    def _dollars(self, index: int) -> Iterator[tuple[Labels, float]]:
        return ((labels, figures[index] / MICRO_DOLLARS) for labels, figures in self._known.items())


def _scopes(accounts: Iterable[Account]) -> Iterator[str]:
    """The scopes that are shown: of very many keys the last share one."""
    keys = 0
    for account in accounts:
        of_key = account.scope.startswith(_KEY)
        keys += of_key
        yield key_scope(OTHER) if of_key and keys > _KEYS else account.scope
