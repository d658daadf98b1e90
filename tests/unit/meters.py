"""Meters for tests: each kind with a ledger and a clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from app.sharing.link import Link
from app.sharing.memory import MemoryMeter
from app.sharing.meter import Account, Meter
from app.sharing.shared import FailurePolicy, SharedMeter
from tests.fakes.spending import Clock, SpendingLedger

Passed = list[tuple[str, int, int]]


@dataclass
class Bench:
    """A meter, and what it stands on. `passed` are the settlements that it told of."""

    meter: Meter
    ledger: SpendingLedger
    clock: Clock
    passed: Passed = field(default_factory=list)


def memory_bench() -> Bench:
    ledger, clock, passed = SpendingLedger(), Clock(), Passed()
    return Bench(MemoryMeter(ledger.read_spent, clock, _note(passed)), ledger, clock, passed)


@asynccontextmanager
async def shared_bench(url: str) -> AsyncIterator[Bench]:
    ledger, clock, passed = SpendingLedger(), Clock(), Passed()
    async with linked(url) as link, shared(link, ledger, clock=clock, on_spent=_note(passed)) as meter:
        yield Bench(meter, ledger, clock, passed)


def linked(url: str, said: list[str] | None = None) -> Link:
    # A busy machine may be slower than the gateway would wait.
    return Link(url, _note_trouble(said), timeout_seconds=5)


def shared(
    link: Link, ledger: SpendingLedger, policy: FailurePolicy = "closed", clock: Clock | None = None, **more: Any
) -> SharedMeter:
    fallback = MemoryMeter(ledger.read_spent, clock or Clock())
    return SharedMeter(link, ledger.read_spent, policy, fallback, on_trouble=_note_trouble(None), clock=clock, **more)


def _note_trouble(said: list[str] | None) -> Any:
    def note(message: str, **_: object) -> None:
        if said is not None:
            said.append(message)

    return note


def _note(passed: Passed) -> Any:
    def note(account: Account, before: int, after: int) -> None:
        passed.append((account.scope, before, after))

    return note
