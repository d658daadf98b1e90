"""Which attempts have a cost that is not known yet."""

from __future__ import annotations

from typing import Protocol

from app.ledger.rows import Settlement, SpendRow


class SpendLog(Protocol):
    """Where spending is written down."""

    async def opened(self, row: SpendRow) -> None: ...
    def settle(self, settlement: Settlement) -> None: ...


class OpenReservations:
    """A `SpendLog` before another one, which knows what is open in this process. Its length says how many are."""

    def __init__(self, log: SpendLog) -> None:
        self._log = log
        self._open: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def opened(self, row: SpendRow) -> None:
        """Returns once the row is safe. One that cannot be written is settled, too."""
        self._open.add(row.id)
        await self._log.opened(row)

    def settle(self, settlement: Settlement) -> None:
        self._open.discard(settlement.id)
        self._log.settle(settlement)
