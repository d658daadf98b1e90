"""What the shared meter promises when processes are many and the server comes and goes."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest

from app.sharing.link import Link
from app.sharing.memory import pool_of
from app.sharing.meter import Account, Spent
from app.sharing.shared import FailurePolicy, SharedMeter, _key
from tests.fakes.spending import NOON, Clock, SpendingLedger, account, flow, hold
from tests.servers import Valkey
from tests.system.harness import until
from tests.unit.meters import linked, shared, shared_bench


def _now() -> int:
    return int(time.time() * 1000)


async def _sums(link: Link, budget: Account, at: int) -> list[int]:
    """Settled and held, as the server has them."""
    values = await link.call("HMGET", _key(pool_of(budget, at)), "s", "h")
    return [int(value or -1) for value in values]


async def test_four_processes_together_exceed_a_budget_by_one_hold_at_most(valkey_url: str) -> None:
    limit, asked = 4005, 250
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "tests.fakes.reserving", valkey_url, str(limit), str(asked)]
    workers = [await asyncio.create_subprocess_exec(*command, f"p{n}", stdin=pipe, stdout=pipe) for n in range(4)]
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"

    said = await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))

    assert sum(int(out) for out, _ in said) == 401
    async with linked(valkey_url) as link:
        assert await _sums(link, account(limit), NOON) == [0, 4010]


async def test_a_meter_that_meets_another_ones_counts_takes_them(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as one, shared_bench(valkey_url) as two:
        await one.meter.reserve(hold("h1", account(10)))

        refusal = await two.meter.reserve(hold("h2", account(10)))

        assert refusal is not None
        assert two.ledger.reads == 0


async def test_without_the_server_a_closed_meter_grants_nothing(valkey: Valkey) -> None:
    async with linked(valkey.url) as link, shared(link, SpendingLedger()) as meter:
        valkey.kill()

        refusal = await meter.reserve(hold("h1", account(10)))

        assert refusal is not None
        assert (refusal.why, refusal.retry_after_seconds) == ("sharing", 1)


async def test_without_the_server_a_local_meter_grants_what_the_ledger_leaves(valkey: Valkey) -> None:
    ledger = SpendingLedger()
    ledger.open(hold("before", account(25)))
    async with linked(valkey.url) as link, shared(link, ledger, "local") as meter:
        valkey.kill()

        answers = [await meter.reserve(hold(f"h{n}", account(25))) for n in range(3)]

        assert [answer is None for answer in answers] == [True, True, False]
        assert answers[2] is not None
        assert answers[2].why == "budget"


async def test_a_settlement_waits_for_a_server_that_is_away(valkey: Valkey) -> None:
    ledger, first = SpendingLedger(), hold("h1", account(100), at=_now())
    async with linked(valkey.url) as link, shared(link, ledger) as meter:
        await meter.reserve(first)
        valkey.pause()
        link.up = False
        await meter.settle(first, 3, 0)
        valkey.resume()

        await until(lambda: _is(link, first.accounts[0], first.at, [3, 0]), "the settlement is taken")


async def test_a_reservation_that_its_client_left_holds_nothing(valkey: Valkey) -> None:
    left = hold("left", account(100), at=_now())
    async with linked(valkey.url) as link, shared(link, SpendingLedger()) as meter:
        await meter.spent(account(100), left.at)
        valkey.pause()
        asking = asyncio.create_task(meter.reserve(left))
        await asyncio.sleep(0)  # it has begun
        await until(lambda: link._turns._value < 16, "it has asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        valkey.resume()

        await until(lambda: link.up, "the link is up")
        await until(lambda: link.call("EXISTS", "{hearth}:settled:left"), "it is given up")
        assert await _sums(link, account(100), left.at) == [0, 0]


async def test_a_hold_that_was_given_up_is_not_granted_late(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as bench:
        late = hold("late", account(100))
        assert isinstance(bench.meter, SharedMeter)
        bench.meter._give_up(late)
        await bench.meter.spent(account(100), NOON)

        refusal = await bench.meter.reserve(late)

        assert refusal is not None
        assert await bench.meter.spent(account(100), NOON) == 0


async def test_a_hold_that_the_ledger_does_not_have_open_goes_when_it_is_old(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as bench:
        assert isinstance(bench.meter, SharedMeter)
        await bench.meter.reserve(hold("orphan", account(100)))
        await bench.meter.reserve(hold("done", account(100)))
        await bench.meter.reserve(hold("open", account(100)))
        for hold_id in ("done", "open"):
            bench.ledger.open(hold(hold_id, account(100)))
        bench.ledger.settle("done", 4)
        bench.clock.now += 5_000

        await bench.meter.reconcile()

        assert await bench.meter.spent(account(100), NOON) == 14


async def test_a_young_hold_stays_until_the_ledger_must_have_heard_of_it(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as bench:
        assert isinstance(bench.meter, SharedMeter)
        await bench.meter.spent(account(100), NOON)
        bench.clock.now += 1_500
        await bench.meter.reserve(hold("young", account(100)))

        assert await bench.meter.reconcile() == 1
        assert await bench.meter.spent(account(100), NOON) == 10
        bench.clock.now += 3_000
        assert await bench.meter.reconcile() == 1
        assert await bench.meter.spent(account(100), NOON) == 0


async def test_a_settlement_that_the_ledger_has_not_heard_of_survives_a_comparison(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as bench:
        assert isinstance(bench.meter, SharedMeter)
        first = hold("h1", account(100))
        await bench.meter.reserve(first)
        bench.ledger.open(first)
        await bench.meter.settle(first, 3, 0)
        await bench.meter.spent(account(100), NOON)
        bench.clock.now += 1_500

        await bench.meter.reconcile()

        assert await bench.meter.spent(account(100), NOON) == 3


async def test_a_pool_without_doubts_and_holds_is_left_alone(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as bench:
        assert isinstance(bench.meter, SharedMeter)
        await bench.meter.spent(account(100), NOON)
        bench.clock.now += 1_500
        assert await bench.meter.reconcile() == 1

        bench.clock.now += 60_000

        assert await bench.meter.reconcile() == 0
        assert bench.ledger.reads == 2


async def test_what_the_server_keeps_ends_with_its_period(valkey_url: str) -> None:
    async with linked(valkey_url) as link, shared(link, SpendingLedger()) as meter:
        first = hold("h", account(100), flows=[flow(requests=5, tokens=50)], tokens=5, at=_now())
        await meter.reserve(first)
        await meter.settle(first, 1, 9)
        await meter.spent(account(100), first.at)

        keys = [key for key in await link.call("KEYS", "*") if key != b"{hearth}:due"]

        assert len(keys) == 4
        assert all(key.startswith(b"{hearth}:") for key in keys)
        assert min(await link.pipeline([["PTTL", key] for key in keys])) > 0


@pytest.mark.parametrize("policy", ["closed", "local"])
async def test_sums_equal_the_ledgers_soon_after_the_server_was_lost(valkey: Valkey, policy: FailurePolicy) -> None:
    """Under load, with holds that are open before, during and after it."""
    ledger, budget, running = SpendingLedger(), account(10**9), True

    async def work(meter: SharedMeter, name: int) -> None:
        number = 0
        while running:
            number += 1
            each = hold(f"{name}-{number}", budget, at=_now())
            if await meter.reserve(each) is not None:
                await asyncio.sleep(0.02)
                continue
            ledger.open(each)
            await asyncio.sleep(0.01)
            if number % 10:
                await meter.settle(each, number % 7, 0)
                await asyncio.sleep(0.01)  # the ledger is written behind
                ledger.settle(each.id, number % 7)

    link = Link(valkey.url, lambda *_, **__: None)
    async with link, shared(link, ledger, policy) as meter, asyncio.TaskGroup() as workers:
        for name in range(8):
            workers.create_task(work(meter, name))
        await until(lambda: len(ledger.rows) > 100, "there is load")
        valkey.kill()
        await until(lambda: not link.up, "the link is down")
        await asyncio.sleep(0.2)
        valkey.start()
        begin = time.monotonic()
        await until(lambda: link.up, "the link is up")
        rows = len(ledger.rows)
        await until(lambda: len(ledger.rows) > rows + 100, "there is load again")
        running = False

        await until(lambda: _equal(link, ledger, budget), "the sums are equal")

        assert time.monotonic() - begin < 5


async def _equal(link: Link, ledger: SpendingLedger, budget: Account) -> bool:
    settled = sum(row.cost for row in ledger.rows.values() if row.cost is not None)
    sums = await _sums(link, budget, _now())
    return sums == [settled, ledger.total(budget.scope) - settled]


async def _is(link: Link, budget: Account, at: int, sums: list[int]) -> Any:
    return link.up and await _sums(link, budget, at) == sums


async def test_what_is_granted_and_settled_while_the_ledger_is_read_counts(valkey_url: str) -> None:
    """The ledger answers what was so before, and the comparison comes to its end after."""
    async with shared_bench(valkey_url) as bench:
        meter, quick = bench.meter, hold("quick", account(100))
        assert isinstance(meter, SharedMeter)
        await meter.spent(account(100), NOON)
        bench.clock.now += 5_000

        async def read_slowly(scope: str, since: int) -> Spent:
            told = await bench.ledger.read_spent(scope, since)
            during = quick._replace(at=bench.clock.now)
            await meter.reserve(during)
            bench.ledger.open(during)
            await meter.settle(during, 7, 0)
            await meter._settlements.flush()
            return told

        meter._read_spent = read_slowly
        assert await meter.reconcile() == 1

        assert await meter.spent(account(100), NOON) == 7


async def test_a_settlement_that_finds_no_hold_has_the_pool_compared(valkey_url: str) -> None:
    """The server was emptied after the hold was granted, and the ledger was read before it had heard of it."""
    async with shared_bench(valkey_url) as bench:
        lost = hold("lost", account(100))
        assert isinstance(bench.meter, SharedMeter)
        await bench.meter.spent(account(100), NOON)
        bench.clock.now += 1_500
        await bench.meter.reconcile()
        bench.ledger.open(lost)
        bench.ledger.settle("lost", 6)

        await bench.meter.settle(lost, 6, 0)
        await bench.meter.spent(account(100), NOON)
        await bench.meter.reconcile()

        assert await bench.meter.spent(account(100), NOON) == 6


async def test_two_processes_that_make_a_pool_at_once_make_one(valkey_url: str) -> None:
    async with shared_bench(valkey_url) as one, shared_bench(valkey_url) as two:
        first, meter = hold("h1", account(100)), one.meter
        assert isinstance(meter, SharedMeter)

        async def read_slowly(scope: str, since: int) -> Spent:
            told = await one.ledger.read_spent(scope, since)
            await two.meter.reserve(first)
            await two.meter.settle(first, 7, 0)
            await two.meter.spent(account(100), NOON)
            return told

        meter._read_spent = read_slowly

        assert await meter.spent(account(100), NOON) == 7


async def test_what_was_granted_alone_is_brought_to_a_server_that_kept_its_counts(valkey: Valkey) -> None:
    ledger, clock, budget = SpendingLedger(), Clock(), account(25)
    async with linked(valkey.url) as link, shared(link, ledger, "local", clock) as meter:
        before, alone = hold("before", budget), hold("alone", budget)
        await meter.reserve(before)
        ledger.open(before)
        clock.now += 1_500
        await meter.reconcile()
        link._timeout_seconds = 0.1
        valkey.pause()
        await until(lambda: not link.up, "the link is down")
        granted = await meter.reserve(alone)
        ledger.open(alone)
        link._timeout_seconds = 5
        valkey.resume()

        await until(lambda: _is(link, budget, NOON, [0, 20]), "the server knows of it")
        assert granted is None


async def test_being_alone_again_begins_with_the_ledger(valkey: Valkey) -> None:
    """What others spent while the link was up counts."""
    ledger, budget, at = SpendingLedger(), account(25), _now()
    async with linked(valkey.url) as link, shared(link, ledger, "local") as meter:
        link._timeout_seconds = 0.1
        valkey.pause()
        await until(lambda: not link.up, "the link is down")
        await meter.reserve(hold("alone", budget, at=at))
        valkey.resume()
        await until(lambda: link.up and not meter._alone, "it is alone no more")
        ledger.open(hold("others", account(30), amount=25, at=at))
        valkey.pause()
        await until(lambda: not link.up, "the link is down again")

        refusal = await meter.reserve(hold("alone again", budget, at=at))

        assert refusal is not None
        assert refusal.why == "budget"
