"""What the purse asks of the meter, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.domain import NodeSpec, Operation, Outcome, Rate, Request, Usage
from app.errors import SpendingRefused
from app.ledger.estimates import TokenEstimator
from app.ledger.purse import LedgerPurse
from app.ledger.rows import Settlement, SpendRow
from app.ledger.tariffs import FREE, Tariff
from app.routing.gate import Reservation
from app.routing.routes import Route
from app.routing.trail import Trail
from app.sharing.memory import MemoryMeter
from app.sharing.meter import Hold
from tests.fakes.spending import Clock, SpendingLedger
from tests.unit.nodes import candidate, node


class SlowMeter(MemoryMeter):
    """Settles only while it is `open`."""

    def __init__(self) -> None:
        super().__init__(SpendingLedger().read_spent, Clock())
        self.open = asyncio.Event()

    async def settle(self, hold: Hold, cost: int, tokens: int) -> None:
        await self.open.wait()
        await super().settle(hold, cost, tokens)


class Prices:
    async def find(self, node: NodeSpec, model: str) -> Tariff | None:
        return FREE


class Log:
    async def opened(self, row: SpendRow) -> None: ...
    def settle(self, settlement: Settlement) -> None: ...


def make_purse(meter: MemoryMeter) -> LedgerPurse:
    return LedgerPurse(
        prices=Prices(),
        meter=meter,
        log=Log(),
        estimator=TokenEstimator(),
        budget=None,
        max_tokens=0,
        instance="one",
        on_trouble=lambda message, **fields: None,
    )


async def reserve(purse: LedgerPurse, tokens: int) -> Reservation:
    """For an answer of so many tokens, at a cloud that takes 100,000 a minute."""
    cloud = node("cloud", tier=1, rate=Rate(None, 100_000))
    fields: Any = {"messages": [], "max_tokens": tokens}
    request = Request("r", Operation.CHAT, "m", b"", fields)
    return await purse.reserve(request, Route("m", "m"), candidate(cloud), Trail())


async def test_a_reservation_is_open_until_it_ends_and_ends_once() -> None:
    purse = make_purse(MemoryMeter(SpendingLedger().read_spent, Clock()))
    first, second = [await reserve(purse, 1) for _ in range(2)]
    reserved = purse.open

    first.settle(Outcome.OK, None, Trail(usage=Usage(0, 1)))
    first.release()

    assert (reserved, purse.open) == (2, 1)
    second.release()
    assert purse.open == 0
    await purse.close()


async def test_who_leaves_before_the_meter_was_asked_gives_no_tokens_back() -> None:
    """A reservation waits for what has ended. Nothing was charged for it by then."""
    meter = SlowMeter()
    purse = make_purse(meter)
    await reserve(purse, 60_000)
    ended = await reserve(purse, 1)
    ended.settle(Outcome.OK, None, Trail(usage=Usage(0, 1)))
    leaving = asyncio.create_task(reserve(purse, 60_000))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    meter.open.set()

    with pytest.raises(SpendingRefused, match="tokens a minute"):
        await reserve(purse, 60_000)
    assert leaving.cancelled()
    await purse.close()
