"""Meters against a plain account of what was granted, over histories that nobody thought of."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from fractions import Fraction
from typing import ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from app.domain import Period
from app.sharing.memory import MemoryMeter
from app.sharing.meter import Account, Flow, Hold, Refusal
from app.sharing.periods import bounds
from tests.fakes.spending import Clock, SpendingLedger, account, flow, hold
from tests.unit.meters import Bench, memory_bench, shared_bench

ACCOUNTS = [
    account(60),
    account(25, "key:a", period=Period.DAY),
    account(0, "key:b", period=Period.WEEK),
    account(40, "route:r", period=Period.WEEK),
]
FLOWS = [flow(3, 100, "provider:p"), flow(7, None, "key:a"), flow(None, 61, "key:b")]


class _Bucket:
    """What is in it, as a fraction, and when that was so."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.level = Fraction(0)
        self.at = 0

    def drain(self, now: int) -> None:
        self.level = max(Fraction(0), self.level - Fraction((now - self.at) * self.limit, 60_000))
        self.at = now

    def wait_seconds(self, amount: int) -> Fraction:
        return (self.level + min(amount, self.limit) - self.limit) * 60 / self.limit


class _Model:
    """The rule in its own words. The ledger beside it says what is spent."""

    def __init__(self, ledger: SpendingLedger, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.buckets: dict[tuple[str, str], _Bucket] = {}

    def reserve(self, wanted: Hold) -> tuple[str, str, float] | None:
        for each in wanted.accounts:
            begin, end = bounds(each.budget.period, wanted.at)
            if self.ledger.total(each.scope, begin) >= each.budget.limit:
                settled = self.ledger.total(each.scope, begin) - self._held(each.scope, begin)
                return each.scope, "budget", 1.0 if settled < each.budget.limit else (end - wanted.at) / 1000
        parts = [
            (each.scope, what, bucket, amount)
            for each in wanted.flows
            for what, bucket, amount in self._parts(each, wanted)
        ]
        for scope, what, bucket, amount in parts:
            if bucket.wait_seconds(amount) > 0:
                return scope, what, float(bucket.wait_seconds(amount))
        for _, _, bucket, amount in parts:
            bucket.level += amount
        self.ledger.open(wanted)
        return None

    def settle(self, done: Hold, cost: int, tokens: int) -> None:
        if self.ledger.rows[done.id].cost is not None:
            return
        self.ledger.settle(done.id, cost)
        for each in done.flows:
            for what, bucket, _ in self._parts(each, done):
                if what == "tokens":
                    bucket.level = max(Fraction(0), bucket.level + tokens - done.tokens)

    def _parts(self, each: Flow, wanted: Hold) -> list[tuple[str, _Bucket, int]]:
        limits = {"requests": each.rate.requests_per_minute, "tokens": each.rate.tokens_per_minute}
        amounts = {"requests": 1, "tokens": wanted.tokens}
        found = []
        for what, limit in limits.items():
            if limit is not None:
                bucket = self.buckets.setdefault((each.scope, what), _Bucket(limit))
                bucket.drain(self.clock())
                found.append((what, bucket, amounts[what]))
        return found

    def _held(self, scope: str, since: int) -> int:
        rows = self.ledger.rows.values()
        return sum(row.amount for row in rows if row.cost is None and scope in row.scopes and row.at >= since)


class _Machine(RuleBasedStateMachine):
    """All meters hear the same, and answer as the model does."""

    valkey_url: ClassVar[str | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.ledger, self.clock = SpendingLedger(), Clock()
        self.model = _Model(self.ledger, self.clock)
        self.benches: list[Bench] = []
        self.granted: list[Hold] = []
        self.number = 0

    @initialize()
    def begin(self) -> None:
        self.benches.append(memory_bench())
        if self.valkey_url is not None:
            _empty(self.valkey_url)
            self.benches.append(self.runner.run(self.stack.enter_async_context(shared_bench(self.valkey_url))))
        for bench in self.benches:
            # What they stand on is the same for all.
            bench.ledger.rows = self.ledger.rows
            bench.clock.now = self.clock.now

    @rule(
        accounts=st.lists(st.sampled_from(ACCOUNTS), unique=True, max_size=3),
        flows=st.lists(st.sampled_from(FLOWS), unique=True, max_size=2),
        amount=st.integers(0, 30),
        tokens=st.integers(0, 120),
    )
    def reserve(self, accounts: list[Account], flows: list[Flow], amount: int, tokens: int) -> None:
        self.number += 1
        at = self.clock.now
        wanted = hold(f"h{self.number}", *accounts, amount=amount, tokens=tokens, at=at, flows=flows)
        answers = [self.runner.run(bench.meter.reserve(wanted)) for bench in self.benches]

        expected = self.model.reserve(wanted)

        for answer in answers:
            self._same(answer, expected)
        if expected is None:
            self.granted.append(wanted)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), cost=st.integers(0, 30), tokens=st.integers(0, 150))
    def settle(self, data: st.DataObject, cost: int, tokens: int) -> None:
        done = data.draw(st.sampled_from(self.granted))
        for bench in self.benches:
            self.runner.run(bench.meter.settle(done, cost, tokens))
        self.model.settle(done, cost, tokens)
        self.look(ACCOUNTS[0])

    @rule(budget=st.sampled_from(ACCOUNTS))
    def look(self, budget: Account) -> None:
        now = self.clock.now
        expected = self.ledger.total(budget.scope, bounds(budget.budget.period, now)[0])

        assert [self.runner.run(bench.meter.spent(budget, now)) for bench in self.benches] == [
            expected for _ in self.benches
        ]

    @rule(ms=st.one_of(st.integers(1, 30_000), st.integers(1, 40 * 24 * 3_600_000)))
    def wait(self, ms: int) -> None:
        for clock in (self.clock, *(bench.clock for bench in self.benches)):
            clock.now += ms

    @rule()
    def begin_anew(self) -> None:
        """Memory is empty after a start; so is a server that was restarted."""
        for bench in self.benches:
            if isinstance(bench.meter, MemoryMeter):
                bench.meter.forget()
            else:
                assert self.valkey_url is not None
                _empty(self.valkey_url)
        self.model.buckets.clear()

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    def _same(self, answer: Refusal | None, expected: tuple[str, str, float] | None) -> None:
        if expected is None or answer is None:
            assert (answer, expected) == (None, None)
        else:
            assert answer[:2] == expected[:2]
            assert answer.retry_after_seconds == pytest.approx(expected[2], abs=0.001)


def _empty(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushdb()


def test_the_memory_meter_answers_as_the_rule_says() -> None:
    run_state_machine_as_test(_Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_the_shared_meter_answers_as_the_memory_meter_does(valkey_server_url: str) -> None:
    class Shared(_Machine):
        valkey_url = valkey_server_url

    run_state_machine_as_test(
        Shared,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
