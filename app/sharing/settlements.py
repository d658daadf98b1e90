"""Settlements on their way to the shared meter. None is lost while its process lives; the ledger has them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from app.sharing.link import Link, LinkDown
from app.sharing.memory import OnSpent
from app.sharing.meter import Account
from app.sharing.scripts import SETTLE

_WAITING = 100_000
_BATCH = 200
_RETRY_SECONDS = 0.1
_LAST_SECONDS = 1.0  # to bring what is left when the gateway ends


class Settlement(NamedTuple):
    """One hold's end: the keys and arguments of the script that takes it, and the accounts in the script's order."""

    id: str
    keys: Sequence[str]
    args: Sequence[str | int]
    accounts: Sequence[Account]


class Settlements:
    """Sends them in batches, and again until the server has answered: a hold that is not open is not settled twice."""

    def __init__(self, link: Link, on_trouble: Callable[..., None], on_spent: OnSpent | None) -> None:
        self._link = link
        self._on_trouble = on_trouble
        self._on_spent = on_spent
        self._waiting: dict[str, Settlement] = {}
        self._wanted = asyncio.Event()
        self._sending = asyncio.Lock()
        self._dropped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, settlement: Settlement) -> None:
        self._waiting.setdefault(settlement.id, settlement)
        if len(self._waiting) > _WAITING:
            # The pool is compared with the ledger while the hold is open, so that this corrects itself.
            del self._waiting[next(iter(self._waiting))]
            if not self._dropped:
                self._on_trouble("too many settlements wait for the shared state: the ledger will set it right")
            self._dropped = True
        self._wanted.set()

    async def run(self) -> None:
        """Sends until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            with suppress(LinkDown):  # the link has told of it
                await self.flush()
            if self._waiting:
                self._wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def finish(self) -> None:
        """Brings what is left, if that goes quickly."""
        with suppress(LinkDown, TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self.flush()

    async def flush(self) -> None:
        """Returns once all that waited is taken. Raises LinkDown."""
        async with self._sending:
            while self._waiting:
                batch = list(self._waiting.values())[:_BATCH]
                answers = await self._link.scripts(SETTLE, [(each.keys, each.args) for each in batch])
                self._dropped = False
                for settlement, sums in zip(batch, answers, strict=True):
                    self._waiting.pop(settlement.id, None)
                    self._tell(settlement, sums)

    def _tell(self, settlement: Settlement, sums: Sequence[int]) -> None:
        if self._on_spent is None:
            return
        for account, before, after in zip(settlement.accounts, sums[::2], sums[1::2], strict=True):
            if before >= 0:
                self._on_spent(account, before, after)
