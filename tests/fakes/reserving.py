"""A process that asks for many holds at once: `python -m tests.fakes.reserving URL LIMIT HOLDS NAME` prints how many
were granted. Each holds 10 micro-dollars."""

from __future__ import annotations

import asyncio
import sys

from app.sharing.link import Link
from app.sharing.memory import MemoryMeter
from app.sharing.shared import SharedMeter
from tests.fakes.spending import Clock, SpendingLedger, account, hold


async def reserve(url: str, limit: int, holds: int, name: str) -> int:
    ledger, clock = SpendingLedger(), Clock()
    fallback = MemoryMeter(ledger.read_spent, clock)
    link = Link(url, lambda *_, **__: None, timeout_seconds=10)
    async with link, SharedMeter(link, ledger.read_spent, "closed", fallback, on_trouble=print, clock=clock) as meter:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        answers = await asyncio.gather(*(meter.reserve(hold(f"{name}-{n}", account(limit))) for n in range(holds)))
        return answers.count(None)


if __name__ == "__main__":
    print(asyncio.run(reserve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])), flush=True)
