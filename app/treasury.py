"""Puts together what has to do with money and keys: the ledger, its keys and prices, the budgets. Imported only where
there is a ledger, as SQLAlchemy takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack
from typing import Self

from app.domain import MICRO_DOLLARS, NodeSpec
from app.errors import LedgerUnavailable, ModelNotFound
from app.ledger.bookkeeper import Bookkeeper, OnFigures
from app.ledger.estimates import TokenEstimator
from app.ledger.keys import KeyBook
from app.ledger.prices import PriceBook
from app.ledger.purse import LedgerPurse, budgets
from app.ledger.report import LostSpend
from app.ledger.store import Store
from app.ledger.usage import LedgerBooks
from app.ledger.writer import Writer
from app.routing.registry import Registry
from app.routing.routes import Routes
from app.settings import Settings
from app.sharing.link import Link
from app.sharing.memory import MemoryMeter
from app.sharing.meter import Account, key_scope
from app.sharing.periods import now_ms
from app.sharing.shared import FailurePolicy, SharedMeter
from app.telemetry.funds import Funds

_LOST_AFTER_MS = 15_000  # a process that was not heard of for so long, as processes beat every second
_LOOK_FOR_LOST_SECONDS = 5.0
_MODELS = 1024

Alive = Callable[[], Awaitable[Collection[str] | None]]


class Treasury:
    """The money of one process. Open it after `link` and before the first request, and close it after the last.

    `alive` says which processes live that share the ledger; None where that is not known now. Without a `link` there is
    no other.
    """

    def __init__(
        self,
        settings: Settings,
        url: str,
        *,
        registry: Registry,
        routes: Routes,
        link: Link | None,
        instance: str,
        alive: Alive | None,
        estimator: TokenEstimator,
        on_trouble: Callable[..., None],
        on_figures: OnFigures,
        on_saved: Callable[[Iterable[tuple[str, int]]], None],
    ) -> None:
        self._cloud = settings.cloud_specs()
        self._routes = routes
        self._registry = registry
        self._instance = instance
        self._alive = alive
        self._on_trouble = on_trouble
        self._warn_at = settings.budget_warn_at
        self._store = Store(url)
        self._prices = PriceBook(settings.cloud_prices)
        self._writer = Writer(
            self._store,
            on_trouble,
            on_written=lambda rows: on_saved([(row.node, row.saved) for row in rows if row.saved]),
        )
        self._meter = self._make_meter(settings, link)
        self._stack = AsyncExitStack()
        self._equivalents: dict[str, tuple[NodeSpec, str] | None] = {}
        self.accounts = budgets(
            settings.cloud_budget(),
            ((spec.pattern, spec.budget) for spec in settings.routes_config() if spec.budget is not None),
            iter(self._cloud),
        )
        self.keys = KeyBook(self._store, on_trouble=on_trouble)
        self.books = LedgerBooks(self._store)
        self.purse = LedgerPurse(
            prices=self._prices,
            meter=self._meter,
            log=self._writer,
            estimator=estimator,
            budget=settings.cloud_budget(),
            max_tokens=settings.cloud_max_tokens,
            instance=instance,
            on_trouble=on_trouble,
        )
        self.bookkeeper = Bookkeeper(
            self._writer,
            self._prices,
            estimator,
            instance=instance,
            in_the_cloud=self._in_the_cloud,
            on_figures=on_figures,
        )

    def _make_meter(self, settings: Settings, link: Link | None) -> MemoryMeter | SharedMeter:
        alone = MemoryMeter(self._store.spent, now_ms, None if link else self._spent)
        if link is None:
            return alone
        policy: FailurePolicy = "local" if settings.sharing_failure == "local" else "closed"
        return SharedMeter(link, self._store.spent, policy, alone, on_trouble=self._on_trouble, on_spent=self._spent)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._store)
            await self.keys.refresh()
            if self._cloud:
                await self._load_prices()
            if self._alive is None:
                await self._store.lose_open(None, now_ms())
            await stack.enter_async_context(self._writer)
            if isinstance(self._meter, SharedMeter):
                await stack.enter_async_context(self._meter)
            stack.push_async_callback(self.purse.close)
            for work, name in ((self.keys.run(), "keys"), (self._look_for_lost(), "lost spends")):
                stack.push_async_callback(_cancelled, asyncio.create_task(work, name=name))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def reconciled(self, lost: LostSpend) -> None:
        """An operator knows what a lost attempt came to: the budgets of its time are read from the ledger again."""
        self._meter.look_again(self.all_accounts(), lost.at)

    def all_accounts(self) -> list[Account]:
        """Every budget that there is now: those of the settings, and then those of keys, always in the same order."""
        callers = sorted(self.keys.callers(), key=lambda caller: caller.id)
        of_keys = [Account(key_scope(each.id), each.budget) for each in callers if each.budget is not None]
        return [*self.accounts, *of_keys]

    def funds(self) -> Funds:
        """The metrics of all this."""
        return Funds(
            accounts=self.all_accounts,
            spent=lambda account: self._meter.spent(account, now_ms()),
            reserved=lambda: self.purse.open,
            rows=self._writer,
        )

    async def _load_prices(self) -> None:
        """Of all models that the settings name, so that no request waits for it."""
        await self._prices.load(self._cloud)
        for node in self._registry.cloud():
            for wanted in self._routes.cloud_names():
                name = node.cloud_name(wanted)
                if name is not None:
                    await self._prices.find(node.spec, name)

    def _in_the_cloud(self, model: str) -> tuple[NodeSpec, str] | None:
        if model not in self._equivalents:
            if len(self._equivalents) >= _MODELS:
                self._equivalents.clear()
            self._equivalents[model] = self._find_in_the_cloud(model)
        return self._equivalents[model]

    def _find_in_the_cloud(self, model: str) -> tuple[NodeSpec, str] | None:
        try:
            wanted = self._routes.resolve(model).cloud
        except ModelNotFound:
            return None
        named = ((node.spec, node.cloud_name(wanted)) for node in self._registry.cloud())
        return next(((spec, name) for spec, name in named if name is not None), None)

    def _spent(self, account: Account, before: int, after: int) -> None:
        """Warns where a share of a budget is passed."""
        limit = account.budget.limit
        passed = [share for share in (*self._warn_at, 1.0) if before < share * limit <= after]
        if passed:
            self._on_trouble(
                "a cloud budget is spent" if passed[-1] == 1.0 else "a share of a cloud budget is spent",
                budget=account.scope,
                share=passed[-1],
                spent_usd=after / MICRO_DOLLARS,
                limit_usd=limit / MICRO_DOLLARS,
                period=account.budget.period,
            )

    async def _look_for_lost(self) -> None:
        """Gives up what dead processes left open, and hears of what operators know of it, until it is cancelled."""
        known = None  # so that it looks once in any case: somebody may have reconciled while no gateway ran
        while True:
            try:
                await self._give_up()
                lost = await self._store.lost()
                if lost != known:
                    self._meter.look_again(self.all_accounts(), now_ms())
                known = lost
            except LedgerUnavailable:
                pass  # the writer tells of it
            await asyncio.sleep(_LOOK_FOR_LOST_SECONDS)

    async def _give_up(self) -> None:
        alive = None if self._alive is None else await self._alive()
        if alive is not None:
            await self._store.lose_open({*alive, self._instance}, now_ms() - _LOST_AFTER_MS)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
