"""What every meter promises, in memory and on Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.domain import Period
from app.sharing.memory import MemoryMeter
from app.sharing.meter import Hold, Spent
from app.sharing.periods import bounds
from app.sharing.shared import SharedMeter
from tests.fakes.spending import DAY_MS, NOON, SpendingLedger, account, flow, hold
from tests.system.harness import until
from tests.unit.meters import Bench, memory_bench, shared_bench


@pytest.fixture(params=["memory", "valkey"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        yield memory_bench()
        return
    async with shared_bench(request.getfixturevalue("valkey_url")) as bench:
        yield bench


async def _told(bench: Bench, entries: int) -> None:
    if isinstance(bench.meter, SharedMeter):
        await bench.meter.spent(account(1), NOON)  # settlements are there before it answers
    assert len(bench.passed) == entries


async def test_a_budget_grants_while_less_than_its_limit_is_spent_and_held(bench: Bench) -> None:
    budget = account(25)

    answers = [await bench.meter.reserve(hold(f"h{n}", budget)) for n in range(4)]

    assert [answer is None for answer in answers] == [True, True, True, False]
    assert await bench.meter.spent(budget, NOON) == 30


async def test_a_budget_of_nothing_grants_nothing(bench: Bench) -> None:
    refusal = await bench.meter.reserve(hold("h", account(0), amount=0))

    assert refusal is not None
    assert (refusal.scope, refusal.why, refusal.limit) == ("gateway", "budget", 0)


async def test_a_hold_is_charged_to_all_its_accounts_or_to_none(bench: Bench) -> None:
    wide, narrow = account(100), account(5, "key:k")
    await bench.meter.reserve(hold("h1", wide, narrow))

    refusal = await bench.meter.reserve(hold("h2", wide, narrow))

    assert refusal is not None
    assert refusal.scope == "key:k"
    assert await bench.meter.spent(wide, NOON) == 10


async def test_a_refused_rate_charges_no_budget_and_a_refused_budget_no_rate(bench: Bench) -> None:
    budget, once, spent = account(100), flow(requests=1), account(0, "key:k")
    await bench.meter.reserve(hold("h0", spent, flows=[once]))
    first = await bench.meter.reserve(hold("h1", budget, flows=[once]))

    second = await bench.meter.reserve(hold("h2", budget, flows=[once]))

    assert first is None
    assert second is not None
    assert await bench.meter.spent(budget, NOON) == 10


async def test_a_settlement_replaces_the_hold_and_gives_the_rest_back(bench: Bench) -> None:
    budget, first = account(10), hold("h1", account(10))
    await bench.meter.reserve(first)

    await bench.meter.settle(first, 4, 0)

    assert await bench.meter.spent(budget, NOON) == 4
    assert await bench.meter.reserve(hold("h2", budget)) is None


async def test_a_hold_of_nothing_may_cost_something(bench: Bench) -> None:
    first = hold("h1", account(10), amount=0)
    await bench.meter.reserve(first)

    await bench.meter.settle(first, 4, 0)

    assert await bench.meter.spent(account(10), NOON) == 4


async def test_the_first_of_several_settlements_counts(bench: Bench) -> None:
    budget, first = account(100), hold("h1", account(100))
    await bench.meter.reserve(first)

    await bench.meter.settle(first, 4, 0)
    assert await bench.meter.spent(budget, NOON) == 4
    await bench.meter.settle(first, 9, 0)

    assert await bench.meter.spent(budget, NOON) == 4
    await _told(bench, 1)


async def test_a_settlement_of_what_was_never_granted_adds_nothing(bench: Bench) -> None:
    budget = account(100)
    await bench.meter.reserve(hold("h1", budget))

    await bench.meter.settle(hold("other", budget), 50, 0)

    assert await bench.meter.spent(budget, NOON) == 10


async def test_settlements_are_told_with_the_sums_before_and_after(bench: Bench) -> None:
    holds = [hold(f"h{n}", account(100), account(50, "key:k")) for n in range(2)]
    for each in holds:
        await bench.meter.reserve(each)
        await bench.meter.settle(each, 7, 0)
        await bench.meter.spent(account(100), NOON)

    assert sorted(bench.passed) == [("gateway", 0, 7), ("gateway", 7, 14), ("key:k", 0, 7), ("key:k", 7, 14)]


async def test_a_meter_begins_with_what_the_ledger_says(bench: Bench) -> None:
    budget = account(100)
    for hold_id, cost in (("done", 40), ("open", None)):
        bench.ledger.open(hold(hold_id, budget))
        if cost is not None:
            bench.ledger.settle(hold_id, cost)

    assert await bench.meter.spent(budget, NOON) == 50


async def test_the_ledger_is_asked_once_however_many_ask(bench: Bench) -> None:
    budget = account(1000)

    await asyncio.gather(*(bench.meter.reserve(hold(f"h{n}", budget)) for n in range(20)))

    assert bench.ledger.reads == 1


async def test_a_hold_that_the_ledger_has_already_counts_once(bench: Bench) -> None:
    budget, first = account(15), hold("h1", account(15))
    bench.ledger.open(first)

    granted = await bench.meter.reserve(first)

    assert granted is None
    assert await bench.meter.spent(budget, NOON) == 10
    await bench.meter.settle(first, 6, 0)
    assert await bench.meter.spent(budget, NOON) == 6


async def test_a_refused_hold_that_the_ledger_has_already_is_let_go(bench: Bench) -> None:
    budget, late = account(10), hold("late", account(10))
    bench.ledger.open(hold("first", budget))
    bench.ledger.open(late)

    refusal = await bench.meter.reserve(late)

    assert refusal is not None
    assert await bench.meter.spent(budget, NOON) == 10


async def test_a_settlement_during_the_first_reading_counts_once(bench: Bench) -> None:
    """The ledger is read while it says that the hold is open still."""
    early = hold("early", account(100))
    bench.ledger.open(early)
    await bench.meter.settle(early, 3, 0)
    if isinstance(bench.meter, SharedMeter):
        await bench.meter._settlements.flush()

    assert await bench.meter.spent(account(100), NOON) == 3


async def test_an_account_that_appears_while_a_hold_is_open_counts_it_once() -> None:
    bench, early = memory_bench(), hold("early", account(100))
    await bench.meter.reserve(early)
    bench.ledger.rows.clear()
    bench.ledger.open(hold("early", account(100, "key:new")))
    assert await bench.meter.spent(account(50, "key:new"), NOON) == 10

    await bench.meter.settle(early, 4, 0)

    assert await bench.meter.spent(account(50, "key:new"), NOON) == 4


@pytest.mark.parametrize(("period", "days"), [(Period.DAY, 0.5), (Period.WEEK, 4.5), (Period.MONTH, 13.5)], ids=str)
async def test_a_spent_budget_says_when_its_next_period_begins(bench: Bench, period: Period, days: float) -> None:
    budget, first = account(10, period=period), hold("h1", account(10, period=period))
    await bench.meter.reserve(first)
    await bench.meter.settle(first, 10, 0)
    await bench.meter.spent(budget, NOON)

    refusal = await bench.meter.reserve(hold("h2", budget))

    assert refusal is not None
    assert refusal.retry_after_seconds == days * 24 * 3600
    assert await bench.meter.reserve(hold("h3", budget, at=NOON + int(days * DAY_MS))) is None


async def test_a_budget_that_only_holds_fill_may_be_asked_again_soon(bench: Bench) -> None:
    budget = account(10)
    await bench.meter.reserve(hold("h1", budget))

    refusal = await bench.meter.reserve(hold("h2", budget))

    assert refusal is not None
    assert refusal.retry_after_seconds == 1


@pytest.mark.parametrize("limit", [1, 3, 7, 59, 61])
async def test_a_flow_lets_a_minutes_requests_through_and_then_says_when(bench: Bench, limit: int) -> None:
    calls = flow(requests=limit)
    burst = [await bench.meter.reserve(hold(f"h{n}", flows=[calls])) for n in range(limit)]

    refusal = await bench.meter.reserve(hold("more", flows=[calls]))

    assert burst == [None] * limit
    assert refusal is not None
    assert (refusal.scope, refusal.why, refusal.limit) == ("provider:p", "requests", limit)
    assert refusal.retry_after_seconds == pytest.approx(60 / limit, abs=0.01)
    bench.clock.now += int(refusal.retry_after_seconds * 1000) + 1
    assert await bench.meter.reserve(hold("later", flows=[calls])) is None


async def test_tokens_are_reserved_and_corrected_when_settled(bench: Bench) -> None:
    calls = flow(tokens=100)
    first = hold("h1", tokens=80, flows=[calls])
    await bench.meter.reserve(first)
    before = await bench.meter.reserve(hold("h2", tokens=50, flows=[calls]))

    await bench.meter.settle(first, 0, 30)
    await _told(bench, 0)
    after = await bench.meter.reserve(hold("h3", tokens=70, flows=[calls]))

    assert before is not None
    assert before.why == "tokens"
    assert before.retry_after_seconds == pytest.approx(18, abs=0.01)
    assert after is None


async def test_more_tokens_than_reserved_are_charged_when_settled(bench: Bench) -> None:
    calls = flow(tokens=100)
    first = hold("h1", tokens=10, flows=[calls])
    await bench.meter.reserve(first)
    await bench.meter.settle(first, 0, 160)
    await _told(bench, 0)

    refusal = await bench.meter.reserve(hold("h2", tokens=100, flows=[calls]))

    assert refusal is not None
    assert refusal.retry_after_seconds == pytest.approx(96, abs=0.01)


@pytest.mark.parametrize("asked", [True, False], ids=["refused", "never asked"])
async def test_what_was_not_granted_gives_no_tokens_back(asked: bool) -> None:
    bench, calls = memory_bench(), flow(tokens=100)
    wanted = [hold(hold_id, tokens=60, flows=[calls]) for hold_id in ("a", "b", "c")]
    granted = await bench.meter.reserve(wanted[0])
    if asked:
        assert await bench.meter.reserve(wanted[1]) is not None

    await bench.meter.settle(wanted[1], 0, 0)

    assert granted is None
    assert await bench.meter.reserve(wanted[2]) is not None


async def test_what_was_granted_before_a_meter_began_anew_still_gives_tokens_back() -> None:
    bench, calls = memory_bench(), flow(tokens=100)
    assert isinstance(bench.meter, MemoryMeter)
    early = hold("early", tokens=60, flows=[calls])
    await bench.meter.reserve(early)
    bench.meter.forget()
    await bench.meter.reserve(hold("h1", tokens=60, flows=[calls]))

    await bench.meter.settle(early, 0, 0)

    assert await bench.meter.reserve(hold("h2", tokens=60, flows=[calls])) is None


async def test_a_request_larger_than_the_flow_goes_when_nothing_else_does(bench: Bench) -> None:
    calls = flow(tokens=100)

    first = await bench.meter.reserve(hold("h1", tokens=500, flows=[calls]))
    second = await bench.meter.reserve(hold("h2", tokens=1, flows=[calls]))

    assert first is None
    assert second is not None


async def test_a_flow_of_nothing_lets_nothing_through(bench: Bench) -> None:
    refusal = await bench.meter.reserve(hold("h", flows=[flow(requests=0)]))

    assert refusal is not None
    assert refusal.retry_after_seconds == 60


async def test_a_reading_that_fails_is_the_askers_error_and_the_next_one_reads_again() -> None:
    ledger, failing = SpendingLedger(), True

    async def read(scope: str, since: int) -> Spent:
        if failing:
            raise OSError("no ledger")
        return await ledger.read_spent(scope, since)

    meter = MemoryMeter(read, lambda: NOON)
    with pytest.raises(OSError):
        await meter.reserve(hold("h1", account(10)))
    failing = False

    assert await meter.reserve(hold("h1", account(10))) is None


async def test_periods_that_are_over_are_forgotten() -> None:
    bench = memory_bench()
    assert isinstance(bench.meter, MemoryMeter)
    for day in range(30):
        bench.clock.now = NOON + day * DAY_MS
        await bench.meter.reserve(hold(f"h{day}", account(10, period=Period.DAY), at=bench.clock.now))

    assert len(bench.meter._pools) <= 3
    assert len(bench.meter._holding) <= 3


async def test_many_at_once_exceed_a_budget_by_one_hold_at_most(bench: Bench) -> None:
    budget = account(1005)
    holds: list[Hold] = [hold(f"h{n}", budget) for n in range(300)]

    answers = await asyncio.gather(*map(bench.meter.reserve, holds))

    assert answers.count(None) == 101
    assert await bench.meter.spent(budget, NOON) == 1010


@pytest.mark.parametrize(
    ("period", "begin", "end"),
    [
        (Period.DAY, 1_773_792_000_000, 1_773_878_400_000),
        (Period.WEEK, 1_773_619_200_000, 1_774_224_000_000),
        (Period.MONTH, 1_772_323_200_000, 1_775_001_600_000),
    ],
)
def test_periods_begin_at_midnight_weeks_on_monday(period: Period, begin: int, end: int) -> None:
    assert bounds(period, NOON) == bounds(period, begin) == bounds(period, end - 1) == (begin, end)
    assert bounds(period, end)[0] == end


async def test_what_is_granted_while_a_budget_is_read_anew_still_counts() -> None:
    """The ledger hears of a hold after the meter has granted it."""
    bench = memory_bench()
    budget = account(25)
    await bench.meter.reserve(hold("h1", budget))
    bench.meter.look_again([budget], NOON)

    assert await bench.meter.spent(budget, NOON) == 10
    await bench.meter.settle(hold("h1", budget), 7, 0)
    assert await bench.meter.spent(budget, NOON) == 7


async def test_a_budget_that_is_looked_at_again_is_what_the_ledger_says(bench: Bench) -> None:
    budget = account(25)
    lost = hold("lost", budget, amount=20)
    bench.ledger.open(lost)
    bench.ledger.settle("lost", 20)
    assert await bench.meter.spent(budget, NOON) == 20
    bench.ledger.settle("lost", 3)

    bench.meter.look_again([budget], NOON)

    async def heard() -> bool:
        if isinstance(bench.meter, SharedMeter):
            await bench.meter.reconcile()
        return await bench.meter.spent(budget, NOON) == 3

    await until(heard, "it is read again", 5)


async def test_a_hold_that_was_lost_since_a_budget_was_read_counts_once() -> None:
    bench, budget = memory_bench(), account(25)
    bench.ledger.open(hold("lost", budget))
    assert await bench.meter.spent(budget, NOON) == 10
    bench.ledger.settle("lost", 10)  # it counts as reserved

    bench.meter.look_again([budget], NOON)

    assert await bench.meter.spent(budget, NOON) == 10
