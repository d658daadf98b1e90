"""What the ledger says of usage and budgets, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, text

from app.domain import Budget, Period
from app.ledger.keys import KeyBook
from app.ledger.report import Dimension, Query, Sums, UsageLine
from app.ledger.span import DAY_MS
from app.ledger.store import Store
from app.ledger.tables import keys, requests, spend
from app.ledger.usage import LedgerBooks
from app.sharing.meter import GATEWAY, Account, key_scope, provider_scope, route_scope
from tests.system.usage_rows import KNOWN_REQUESTS, KNOWN_SPEND, NOON, NOVEMBER, a_request, a_spend, fill, ms

DAY, KEY, MODEL, NODE, TIER, ROUTE = Dimension


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with Store(database_url) as store:
        yield store


@pytest.fixture
async def known(store: Store) -> LedgerBooks:
    """A ledger with the known rows."""
    await fill(store, {requests: KNOWN_REQUESTS, spend: KNOWN_SPEND})
    return LedgerBooks(store)


async def lines(books: LedgerBooks, *by: Dimension, **only: str) -> list[UsageLine]:
    report = await books.usage(Query(NOVEMBER, by, {Dimension(name): value for name, value in only.items()}))
    return list(report.lines)


async def column(books: LedgerBooks, field: str, *by: Dimension, **only: str) -> dict[Any, int]:
    found = await lines(books, *by, **only)
    return {line.group if len(by) > 1 else line.group[0]: getattr(line.sums, field) for line in found}


# -- known rows, known sums


async def test_everything_is_summed_once(known: LedgerBooks) -> None:
    (line,) = await lines(known)

    assert line.sums == Sums(
        requests=6,
        failed=1,
        estimated=1,
        tokens_in=500,
        tokens_out=50,
        tokens_cached=200,
        cost=300 + 700 + 700 + 25 + 5000 + 9000,
        saved=875,
        first_content_ms=200 + 400 + 600 + 200 + 200,
        first_contents=5,
    )
    assert all(type(figure) is int for figure in line.sums)
    assert line.sums.mean_first_content_ms == 320
    assert line.sums.estimated_share == 1 / 6


@pytest.mark.parametrize(
    ("by", "counts", "costs"),
    [
        (DAY, {"2026-11-10": 4, "2026-11-11": 2}, {"2026-11-10": 10_000, "2026-11-11": 5725}),
        (KEY, {"k1": 4, "k2": 2, "k3": 0}, {"k1": 6025, "k2": 700, "k3": 9000}),
        (MODEL, {"": 1, "gpt-4o-mini": 2, "llama3": 3}, {"": 0, "gpt-4o-mini": 15_700, "llama3": 25}),
        (
            NODE,
            {"": 1, "attic": 2, "azure": 0, "cellar": 1, "openai": 2},
            {"": 0, "attic": 0, "azure": 300, "cellar": 25, "openai": 15_400},
        ),
        (TIER, {"cloud": 2, "local": 4}, {"cloud": 15_700, "local": 25}),
        (ROUTE, {"big": 2, "small": 4}, {"big": 725, "small": 15_000}),
    ],
)
async def test_every_group_has_its_own_requests_and_costs(
    known: LedgerBooks, by: Dimension, counts: dict[str, int], costs: dict[str, int]
) -> None:
    assert await column(known, "requests", by) == counts
    assert await column(known, "cost", by) == costs


async def test_groups_of_several_dimensions_come_in_their_order(known: LedgerBooks) -> None:
    costs = await column(known, "cost", DAY, KEY)

    assert list(costs.items()) == [
        (("2026-11-10", "k1"), 1000),
        (("2026-11-10", "k2"), 0),
        (("2026-11-10", "k3"), 9000),
        (("2026-11-11", "k1"), 5025),
        (("2026-11-11", "k2"), 700),
    ]


@pytest.mark.parametrize(
    ("only", "requests_cost"),
    [
        ({"key": "k2"}, (2, 700)),
        ({"tier": "local"}, (4, 25)),
        ({"tier": "cloud"}, (2, 15_700)),
        ({"node": "azure"}, (0, 300)),
        ({"route": "big", "key": "k1"}, (1, 25)),
        ({"model": "nobody's"}, (0, 0)),
        ({"key": "' OR 1=1 --"}, (0, 0)),
    ],
)
async def test_filters_keep_what_has_this_value(
    known: LedgerBooks, only: dict[str, str], requests_cost: tuple[int, int]
) -> None:
    (line,) = await lines(known, **only)

    assert (line.sums.requests, line.sums.cost) == requests_cost


async def test_what_is_settled_agrees_with_the_requests(store: Store) -> None:
    settled = [row for row in KNOWN_SPEND if row["state"] == "settled"]
    await fill(store, {requests: KNOWN_REQUESTS, spend: settled})
    books = LedgerBooks(store)

    for by in (KEY, DAY, ROUTE):
        of_requests: dict[str, int] = {}
        for row in KNOWN_REQUESTS:
            value = row[by] if by is not DAY else datetime.fromtimestamp(row["at"] / 1000, UTC).date().isoformat()
            of_requests[value] = of_requests.get(value, 0) + row["cost"]
        assert await column(books, "cost", by) == of_requests


async def test_an_empty_ledger_has_no_lines_and_zero_totals(store: Store) -> None:
    books = LedgerBooks(store)

    report = await books.usage(Query(NOVEMBER, (DAY, KEY)))

    assert (report.lines, report.total, report.cut) == ([], Sums(), False)
    assert [line.sums for line in await lines(books)] == [Sums()]
    assert await books.lost() == []
    assert await books.budgets([], NOON) == []


async def test_days_end_at_midnight_utc(store: Store) -> None:
    ends = [
        ms("2026-11-01"),
        ms("2026-11-02") - 1,
        ms("2026-11-02"),
        NOVEMBER.until - 1,
        NOVEMBER.until,
        NOVEMBER.since - 1,
    ]
    await fill(
        store,
        {
            requests: [a_request(f"r{n}", at=at) for n, at in enumerate(ends)],
            spend: [a_spend(f"r{n}-1", at=at, cost=1) for n, at in enumerate(ends)],
        },
    )
    books = LedgerBooks(store)

    expected = {"2026-11-01": 2, "2026-11-02": 1, "2026-11-30": 1}
    assert await column(books, "requests", DAY) == expected
    assert await column(books, "cost", DAY) == expected


async def test_more_lines_than_wanted_are_cut_and_still_in_the_total(known: LedgerBooks) -> None:
    whole = await known.usage(Query(NOVEMBER, (NODE,), most_lines=5))
    cut = await known.usage(Query(NOVEMBER, (NODE,), most_lines=4))

    assert (len(whole.lines), whole.cut) == (5, False)
    assert (len(cut.lines), cut.cut) == (4, True)
    assert cut.lines == whole.lines[:4]
    assert cut.total == whole.total


async def test_keys_that_have_a_name_are_named(known: LedgerBooks, store: Store) -> None:
    times = {"created_at": NOON, "changed_at": NOON}
    await fill(store, {keys: [{"id": "k1", "name": "laptop", "digest": "d", "hint": "h", "routes": [], **times}]})

    assert (await known.usage(Query(NOVEMBER, (KEY,)))).key_names == {"k1": "laptop"}
    assert (await known.usage(Query(NOVEMBER, (NODE,)))).key_names == {}


# -- whatever the rows


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(NOVEMBER.since - DAY_MS, NOVEMBER.until + DAY_MS),
            "key": st.sampled_from(["", "k1", "k2"]),
            "route": st.sampled_from(["a", "b"]),
            "model": st.sampled_from(["", "m", "é"]),
            "node": st.sampled_from(["", "n1", "n2"]),
            "tier": st.integers(0, 2),
            "outcome": st.sampled_from(["ok", "failed", "refused", "abandoned"]),
            "estimated": st.booleans(),
            "cost": st.integers(0, 10**12),
            "saved": st.integers(0, 10**12),
            "first_content_ms": st.none() | st.integers(0, 10**6),
            "spends": st.lists(
                st.tuples(
                    st.sampled_from(["open", "lost", "settled"]), st.sampled_from(["c1", "c2"]), st.integers(0, 10**9)
                ),
                max_size=3,
            ),
        }
    ),
    max_size=12,
)


@settings(
    max_examples=5,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ROWS)
def test_the_sums_of_every_grouping_are_the_totals(database_url: str, rows: list[dict[str, Any]]) -> None:
    asked, spent = [], []
    for index, row in enumerate(rows):
        fields = {name: value for name, value in row.items() if name != "spends"}
        asked.append(a_request(f"r{index}", **fields))
        for number, (state, node, cost) in enumerate(row["spends"]):
            settled = {"state": state, "reserved": cost, "cost": cost if state == "settled" else None}
            same = {name: row[name] for name in ("at", "key", "route")}
            spent.append(a_spend(f"r{index}-{number}", node=node, **same, **settled))
    within = [row for row in asked if NOVEMBER.since <= row["at"] < NOVEMBER.until]
    cost = sum(row["cost"] for row in within if row["tier"] == 0 and not rows[int(row["id"][1:])]["spends"])
    cost += sum(row["reserved"] for row in spent if NOVEMBER.since <= row["at"] < NOVEMBER.until)

    async def check() -> None:
        async with Store(database_url) as store:
            async with store.begin() as connection:
                await connection.execute(delete(requests))
                await connection.execute(delete(spend))
            await fill(store, {requests: asked, spend: spent})
            total = (await lines(LedgerBooks(store)))[0].sums
            for by in [*combinations(Dimension, 1), (DAY, KEY), tuple(Dimension)]:
                groups = await lines(LedgerBooks(store), *by)
                assert Sums(*map(sum, zip(Sums(), *(line.sums for line in groups), strict=True))) == total
                assert len({line.group for line in groups}) == len(groups)
            assert total.requests == len(within)
            assert total.saved == sum(row["saved"] for row in within)
            assert total.cost == cost

    asyncio.run(check())


# -- budgets


async def test_budgets_count_what_is_settled_and_what_is_held(known: LedgerBooks) -> None:
    month = Budget(20_000)
    accounts = [
        Account(GATEWAY, month),
        Account(GATEWAY, Budget(1_000, Period.DAY)),
        Account(key_scope("k1"), month),
        Account(key_scope("k3"), month),
        Account(key_scope("k9"), month),
        Account(route_scope("big"), month),
        Account(provider_scope("azure"), Budget(20_000, Period.WEEK)),
    ]

    states = await known.budgets(accounts, NOON + DAY_MS)

    assert [state.account for state in states] == accounts
    assert [(state.spent, state.held, state.left) for state in states] == [
        (1700, 14_000, 4300),
        (700, 5000, 0),
        (1000, 5000, 14_000),
        (0, 9000, 11_000),
        (0, 0, 20_000),
        (700, 0, 19_300),
        (300, 0, 19_700),
    ]
    assert [state.span.until for state in states[:2]] == [NOVEMBER.until, ms("2026-11-12")]


async def test_budgets_of_keys_are_shown_too(known: LedgerBooks, store: Store) -> None:
    await KeyBook(store).create("free", {})
    key, _ = await KeyBook(store).create("laptop", {"budget_limit": 5_000, "budget_period": Period.WEEK})
    await fill(store, {spend: [a_spend("r9-1", key=key.id, cost=100)]})

    (state,) = await known.budgets([], NOON)

    assert state.account == Account(key_scope(key.id), Budget(5_000, Period.WEEK))
    assert (state.spent, state.held, state.left) == (100, 0, 4_900)


async def test_a_spent_budget_begins_anew_with_its_period(known: LedgerBooks) -> None:
    (state,) = await known.budgets([Account(GATEWAY, Budget(20_000))], NOVEMBER.until)

    assert (state.spent, state.held) == (0, 0)


# -- lost spends


async def test_a_lost_spend_counts_as_reserved_until_it_is_reconciled(known: LedgerBooks) -> None:
    (lost,) = await known.lost()
    before = await column(known, "cost", KEY)
    settled = await known.reconcile(lost.id, 12)
    after = await column(known, "cost", KEY)

    assert (lost.id, lost.request, lost.key, lost.reserved) == ("r8-1", "r8", "k3", 9000)
    assert settled == lost
    assert (before["k3"], after["k3"]) == (9000, 12)
    assert await known.lost() == []


@pytest.mark.parametrize("id", ["r8-1", "r7-1", "r4-1", "r9-1", ""])
async def test_only_a_lost_spend_can_be_reconciled_and_only_once(known: LedgerBooks, id: str) -> None:
    await known.reconcile("r8-1", 12)
    before = await column(known, "cost", NODE)

    assert await known.reconcile(id, 1) is None
    assert await column(known, "cost", NODE) == before


# -- speed


_MANY = """
INSERT INTO requests WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 99999)
SELECT 'r' || n, 'r' || n, :since + n * 25000, 'i', 'k' || (n % 20), 'chat', 'r', 'm' || (n % 7), 'n' || (n % 5), n % 2,
    'ok', '', '', 1, 100, 10, 0, n % 3 = 0, n % 2 * 7, 5, 0, 200, 900 FROM n
"""
_MANY_SPEND = """
INSERT INTO spend SELECT id || '-1', id, at, instance, "key", route, node, model, 'settled', 9, cost,
    0, 0, 0, 0, 'ok', at FROM requests WHERE tier = 1
"""


async def test_a_hundred_thousand_requests_are_grouped_within_a_second(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path / 'big.db'}") as store:
        async with store.begin() as connection:
            await connection.execute(text(_MANY), {"since": NOVEMBER.since})
            await connection.execute(text(_MANY_SPEND))

        began = time.process_time()  # of all threads: others may have the processor meanwhile
        report = await LedgerBooks(store).usage(Query(NOVEMBER, (DAY, KEY)))
        seconds = time.process_time() - began

    assert report.total.requests == 100_000
    assert report.total.cost == 350_000
    assert len(report.lines) == 29 * 20
    assert seconds < 1
