"""The ledger's writer: fast for whoever hands it rows, and it loses none that concern money."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from app.errors import LedgerRefused, LedgerUnavailable
from app.ledger.rows import Batch, RequestRow
from app.ledger.store import Store
from app.ledger.tables import requests
from app.ledger.writer import MakeRow, Writer
from tests.servers import Postgres
from tests.system.harness import until
from tests.system.ledger_rows import NOON, request_row, settlement, spend_row

ROWS_PER_SECOND = 5_000


class Troubles:
    """What the writer told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, message: str, **fields: Any) -> None:
        self.told.append((message, fields))

    def about(self, words: str) -> list[dict[str, Any]]:
        return [fields for message, fields in self.told if words in message]


class FakeLedger:
    """Keeps batches. It fails as often as `faults` says, and refuses rows whose ids are in `refused`."""

    def __init__(self, faults: Sequence[bool] = (), refused: Sequence[str] = ()) -> None:
        self.batches: list[Batch] = []
        self.asked = 0
        self.down = False
        self.wait_for: asyncio.Event | None = None
        self._faults = iter(faults)
        self._refused = set(refused)

    async def write(self, batch: Batch) -> None:
        self.asked += 1
        if self.wait_for is not None:
            await self.wait_for.wait()
        await asyncio.sleep(0)
        if self.down or next(self._faults, False):
            raise LedgerUnavailable("the database is out")
        if any(row.id in self._refused for rows in batch for row in rows):
            raise LedgerRefused("not this one")
        self.batches.append(batch)

    @property
    def ids(self) -> list[str]:
        """Of all requests' rows, in the order in which they came."""
        return [row.id for batch in self.batches for row in batch.requests]


def ready(row: RequestRow) -> MakeRow:
    return lambda: row


@pytest.fixture
def troubles() -> Troubles:
    return Troubles()


@asynccontextmanager
async def writing(url: str, troubles: Troubles) -> AsyncIterator[tuple[Store, Writer]]:
    async with Store(url) as store, Writer(store, troubles) as writer:
        yield store, writer


async def count(store: Store) -> int:
    async with store.connect() as connection:
        return (await connection.scalars(select(func.count()).select_from(requests))).one()


def many(number: int) -> list[RequestRow]:
    return [request_row(f"{index:032x}") for index in range(number)]


# On real databases


async def test_rows_are_there_soon(database_url: str, troubles: Troubles) -> None:
    async with writing(database_url, troubles) as (store, writer):
        writer.add(ready(request_row()))

        async def there() -> bool:
            return await count(store) == 1

        await until(there, "the row is written", 2)
        assert len(writer) == 0


async def test_an_opened_row_is_there_at_once(database_url: str, troubles: Troubles) -> None:
    async with writing(database_url, troubles) as (_, writer), Store(database_url) as other:
        began = time.monotonic()
        await writer.opened(spend_row())
        took = time.monotonic() - began

        assert await other.spent("gateway", NOON) == (0, {"r1-1": 500})
        assert took < 0.2


async def test_closing_writes_what_waits(database_url: str, troubles: Troubles) -> None:
    async with writing(database_url, troubles) as (_, writer):
        await writer.opened(spend_row())
        for row in many(1_000):
            writer.add(ready(row))
        writer.settle(settlement())

    async with Store(database_url) as store:
        assert await count(store) == 1_000
        assert await store.spent("gateway", NOON) == (70, {})
    assert troubles.told == []


async def test_many_reservations_share_transactions(database_url: str, troubles: Troubles) -> None:
    async with writing(database_url, troubles) as (store, writer):
        await asyncio.gather(*(writer.opened(spend_row(f"s{number}")) for number in range(1_000)))

        assert len((await store.spent("gateway", NOON)).open) == 1_000


async def test_thousands_of_rows_a_second(database_url: str, troubles: Troubles) -> None:
    """Of a few rounds the best counts: the machine has other things to do as well."""
    rounds = 4
    rows = many(ROWS_PER_SECOND * rounds)
    best = 60.0
    async with writing(database_url, troubles) as (_, writer):
        for number in range(rounds):
            began = time.monotonic()
            for row in rows[number::rounds]:
                writer.add(ready(row))
            await until(lambda: len(writer) == 0, "all is written")
            best = min(best, time.monotonic() - began)

    assert best < 1
    assert writer.dropped == 0


async def test_a_database_that_dies_and_comes_back_misses_nothing(postgres: Postgres, troubles: Troubles) -> None:
    async with writing(postgres.url, troubles) as (store, writer):
        await writer.opened(spend_row("before"))
        await asyncio.to_thread(postgres.kill)
        writer.settle(settlement("before"))
        writer.add(ready(request_row()))
        with pytest.raises(LedgerUnavailable):
            await writer.opened(spend_row("meanwhile"))
        began = time.monotonic()
        with pytest.raises(LedgerUnavailable):
            await writer.opened(spend_row("meanwhile"))
        took = time.monotonic() - began
        assert not writer.up
        await asyncio.to_thread(postgres.start)
        await until(lambda: writer.up, "the writer is back", 5)
        await writer.opened(spend_row("after"))

        assert took < 0.05  # once it is known, nobody waits
        assert await store.spent("gateway", NOON) == (70, {"after": 500})
        assert await count(store) == 1
    assert [message for message, _ in troubles.told] == [
        "the ledger cannot be written; rows are kept, and the cloud is closed until it can",
        "the ledger is written again",
    ]


async def test_a_refused_row_holds_up_no_other(database_url: str, troubles: Troubles) -> None:
    async with writing(database_url, troubles) as (store, writer):
        for row in [*many(20), request_row("bad", cost=2**63), request_row("good")]:
            writer.add(ready(row))
        opening = [writer.opened(spend_row("s")), writer.opened(spend_row("t", reserved=2**63))]
        good, bad = await asyncio.gather(*opening, return_exceptions=True)
        await until(lambda: len(writer) == 0, "all is written")

        assert good is None
        assert isinstance(bad, LedgerRefused)
        assert await count(store) == 21
        assert await store.spent("gateway", NOON) == (0, {"s": 500})
    assert [fields["row"] for fields in troubles.about("refused a row")] == ["bad"]
    assert writer.dropped == 1


# On a fake one


async def test_a_full_queue_drops_requests_and_keeps_money(troubles: Troubles) -> None:
    ledger = FakeLedger()
    ledger.wait_for = asyncio.Event()
    async with Writer(ledger, troubles, limit=10) as writer:
        opening = [asyncio.create_task(writer.opened(spend_row(str(number)))) for number in range(30)]
        await asyncio.sleep(0)
        for row in many(15):
            writer.add(ready(row))
        for number in range(30):
            writer.settle(settlement(str(number)))
        assert len(writer) == 70
        ledger.wait_for.set()
        await asyncio.gather(*opening)

    assert writer.dropped == 5
    assert len(ledger.ids) == 10
    assert sum(len(batch.settled) for batch in ledger.batches) == 30
    assert troubles.about("dropped") == [{"rows": 1}]  # and for a minute nothing more is said


async def test_an_idle_writer_leaves_the_database_alone(troubles: Troubles) -> None:
    ledger = FakeLedger()
    async with Writer(ledger, troubles) as writer:
        writer.add(ready(request_row()))
        await until(lambda: ledger.asked, "it is written")
        await asyncio.sleep(0.6)

        assert ledger.asked == 1


async def test_a_fault_nobody_thought_of_does_not_end_the_writer(troubles: Troubles) -> None:
    class Broken(FakeLedger):
        async def write(self, batch: Batch) -> None:
            if not self.asked:
                self.asked = 1
                raise ZeroDivisionError("a bug")
            await super().write(batch)

    ledger = Broken()
    async with Writer(ledger, troubles) as writer:
        writer.add(ready(request_row()))
        with pytest.raises(LedgerUnavailable, match="a bug"):
            await writer.opened(spend_row())
        await until(lambda: ledger.ids, "the row is written")


async def test_closing_waits_for_a_dead_database_for_a_while_only(troubles: Troubles) -> None:
    ledger = FakeLedger()
    ledger.wait_for = asyncio.Event()
    writer = Writer(ledger, troubles, close_seconds=0.1)
    writer.start()
    writer.add(ready(request_row()))
    waiting = asyncio.create_task(writer.opened(spend_row()))
    await until(lambda: ledger.asked, "it is being written")
    began = time.monotonic()
    await writer.close()
    took = time.monotonic() - began

    assert took < 1
    with pytest.raises(LedgerUnavailable, match="closed"):
        await waiting
    with pytest.raises(LedgerUnavailable, match="closed"):
        await writer.opened(spend_row())
    assert troubles.about("could not be written") == [{"rows": 1}]


async def test_one_who_stops_waiting_leaves_a_row_that_can_be_settled(troubles: Troubles) -> None:
    ledger = FakeLedger()
    async with Writer(ledger, troubles) as writer:
        waiting = asyncio.create_task(writer.opened(spend_row()))
        await asyncio.sleep(0)
        waiting.cancel()
        writer.settle(settlement())
        await until(lambda: len(writer) == 0, "all is written")

    rows = [row.id for batch in ledger.batches for rows in (batch.opened, batch.settled) for row in rows]
    assert rows == ["r1-1", "r1-1"]


async def test_handing_over_a_row_costs_next_to_nothing(troubles: Troubles) -> None:
    rows = many(10_000)
    writer = Writer(FakeLedger(), troubles)
    best = 1.0
    for _ in range(3):
        began = time.process_time()
        for row in rows[:3_000]:
            writer.add(ready(row))
        best = min(best, (time.process_time() - began) / 3_000)

    assert best < 3e-6


@settings(max_examples=40, deadline=None)
@given(
    faults=st.lists(st.booleans(), max_size=4),
    steps=st.lists(st.sampled_from(["add", "open", "settle", "turn", "bad"]), max_size=20),
)
async def test_whatever_fails_rows_are_written_in_order(faults: list[bool], steps: list[str]) -> None:
    """Every request and every settlement arrives; an attempt that was granted is opened before it is settled."""
    ledger = FakeLedger(faults, refused=["bad"])
    granted: list[str] = []
    added, settled = [], []
    writer = Writer(ledger, Troubles())
    async with writer, asyncio.TaskGroup() as tasks:

        async def attempt(id: str) -> None:
            try:
                await writer.opened(spend_row(id))
                granted.append(id)
            except LedgerUnavailable:
                pass
            finally:
                writer.settle(settlement(id))
                settled.append(id)

        for number, step in enumerate(steps):
            match step:
                case "add":
                    writer.add(ready(request_row(str(number))))
                    added.append(str(number))
                case "bad":
                    writer.add(ready(request_row("bad")))
                case "turn":
                    await asyncio.sleep(0.001)
                case _:
                    tasks.create_task(attempt(str(number)))

    assert list(dict.fromkeys(ledger.ids)) == added
    opened: set[str] = set()
    for batch in ledger.batches:
        opened |= {row.id for row in batch.opened}
        assert not {row.id for row in batch.settled} & set(granted) - opened
    assert {row.id for batch in ledger.batches for row in batch.settled} == set(settled)
    assert set(granted) <= opened
