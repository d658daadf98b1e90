"""The meter of many processes: their counts lie in Redis or Valkey, and the ledger says what is true.

A reservation is one script, so that all processes together exceed a budget by one hold at most. What the server does
not know, because it is new or was emptied, it is told from the ledger; and a pool with doubtful or long open holds is
compared with the ledger now and then, so that whatever was lost on the way heals.

Without the server the policy decides. `closed`: nothing is granted. `local`: each process grants by itself, from what
the ledger says when that begins; then every process may spend what was left of a budget, and one hold more, until the
server is back. The ledger has it all, and the pools are set right from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from app.domain import Period
from app.sharing.link import PREFIX, Link, LinkDown
from app.sharing.memory import MemoryMeter, OnSpent, Part, Pool, corrected, over_budget, over_rate, parts_of, pool_of
from app.sharing.meter import GATEWAY, Account, Hold, ReadSpent, Refusal, Spent
from app.sharing.scripts import DOUBT, RESERVE, SET, TAKE_DUE
from app.sharing.settlements import Settlement, Settlements
from app.sharing.turns import Turns

FailurePolicy = Literal["closed", "local"]

_POOL = f"{PREFIX}pool:"
_DUE = f"{PREFIX}due"

_TRIES = 4  # at a reservation, when the server is emptied in the middle of it
_RETRY_SECONDS = 1.0
_KEPT_MS = 24 * 3_600_000  # a pool, after its period
_SETTLED_MS = 60_000  # far longer than the ledger takes to write a settlement
_GRACE_MS = 2_000  # the ledger has heard of a hold by then
_NEW_MS = 1_500  # until a new pool is compared: the ledger has heard of all that was settled before
_DOUBTED_MS = 3_000
_OPEN_MS = 15_000
_LOOK_SECONDS = 0.5
_LOOKED_AT = 20  # pools at a time
_CLAIMED_MS = 5_000


class SharedMeter:
    """A `Meter` for all processes that are linked. Opened and closed with `async with`, after its link.

    `fallback` is for this process alone, and for nothing else. `clock` (ms since 1970) stands in for the server's own
    clock. `on_spent` is told by the process that settles.
    """

    def __init__(
        self,
        link: Link,
        read_spent: ReadSpent,
        failure_policy: FailurePolicy,
        fallback: MemoryMeter,
        *,
        on_trouble: Callable[..., None],
        on_spent: OnSpent | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._link = link
        self._read_spent = read_spent
        self._policy = failure_policy
        self._fallback = fallback
        self._on_trouble = on_trouble
        self._now = clock or (lambda: 0)
        self._settlements = Settlements(link, on_trouble, on_spent)
        self._seeding: Turns[str] = Turns()
        self._alone = False  # the fallback was asked
        self._doubtful: set[str] = set()  # pools that the fallback granted from, or that are to be looked at again
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._settlements.run()), asyncio.create_task(self._look_after())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._settlements.finish()

    async def reserve(self, hold: Hold) -> Refusal | None:
        asked = self._link.up
        try:
            refusal = await self._reserve(hold)
            if refusal is not None and len(self._settlements):
                # What has ended here makes room first: perhaps an attempt that this one is the fallback of.
                await self._settlements.flush()
                refusal = await self._reserve(hold)
            return refusal
        except LinkDown:
            refusal = await self._reserve_alone(hold)
            if refusal is not None and asked:
                self._give_up(hold)
            return refusal
        except BaseException:
            self._give_up(hold)
            raise

    async def settle(self, hold: Hold, cost: int, tokens: int) -> None:
        """Waits for nobody: the settlement goes to the server in the background."""
        if self._fallback.has_settled(hold.id):
            return
        await self._fallback.settle(hold, cost, tokens)
        self._settlements.add(self._settlement(hold, cost, tokens - hold.tokens))

    async def spent(self, account: Account, at: int) -> int:
        pool = pool_of(account, at)
        try:
            await self._settlements.flush()
            for _ in range(_TRIES):
                settled, held = await self._link.call("HMGET", _key(pool), "s", "h")
                if settled is not None:
                    return int(settled) + int(held)
                await self._seed(pool)
        except LinkDown:
            pass
        self._alone = True
        return await self._fallback.spent(account, at)

    def look_again(self, accounts: Iterable[Account], at: int) -> None:
        """Has these accounts' pools compared with the ledger soon."""
        self._doubtful.update(_key(pool_of(account, at)) for account in accounts)

    async def reconcile(self) -> int:
        """Compares the pools that are due with the ledger; returns how many. Raises LinkDown, and what reading raises.

        Each is taken by one process of all.
        """
        await self._doubt()
        began, *due = await self._link.script(TAKE_DUE, [_DUE], [self._now(), _LOOKED_AT, _CLAIMED_MS])
        for key in due:
            pool = _pool(key.decode())
            await self._set(pool, await self._read_spent(pool.scope, pool.start), began)
        return len(due)

    async def _reserve(self, hold: Hold) -> Refusal | None:
        pools = [pool_of(account, hold.at) for account in hold.accounts]
        parts = list(parts_of(hold))
        keys = [_DUE, _settled(hold.id), *map(_key, pools), *map(_part_key, parts)]
        args: list[Any] = [self._now(), hold.id, hold.amount, len(pools), _OPEN_MS]
        args += [account.budget.limit for account in hold.accounts]
        for part in parts:
            args += [part.amount, part.limit]
        for _ in range(_TRIES):
            answer = await self._link.script(RESERVE, keys, args)
            if answer[0] != b"unknown":
                return _refusal(hold, parts, answer)
            for index in answer[1:]:
                await self._seed(pools[index])
        raise LinkDown("the shared state is emptied again and again")

    async def _reserve_alone(self, hold: Hold) -> Refusal | None:
        if self._policy == "closed":
            return Refusal(GATEWAY, "sharing", _RETRY_SECONDS)
        self._alone = True
        refusal = await self._fallback.reserve(hold)
        if refusal is None:
            self._doubtful.update(_key(pool_of(account, hold.at)) for account in hold.accounts)
        return refusal

    def _give_up(self, hold: Hold) -> None:
        """Nobody knows whether the reservation was made: it ends now, and does not begin if it is still under way."""
        self._settlements.add(self._settlement(hold, 0, 0))

    def _settlement(self, hold: Hold, cost: int, difference: int) -> Settlement:
        pools = [pool_of(account, hold.at) for account in hold.accounts]
        parts = list(corrected(hold)) if difference else []
        keys = [_DUE, _settled(hold.id), *map(_key, pools), *map(_part_key, parts)]
        args: list[Any] = [self._now(), hold.id, cost, len(pools), _SETTLED_MS]
        for part in parts:
            args += [difference, part.limit]
        return Settlement(hold.id, keys, args, hold.accounts)

    async def _seed(self, pool: Pool) -> None:
        key = _key(pool)
        async with self._seeding.at(key):
            # Another task may have had its turn before.
            if not await self._link.call("EXISTS", key):
                await self._set(pool, await self._read_spent(pool.scope, pool.start))

    async def _set(self, pool: Pool, spent: Spent, began: bytes = b"") -> None:
        """Makes the pool, or sets it right if the comparison that `began` then is still ours."""
        again_ms = _DOUBTED_MS if began else _NEW_MS
        args: list[Any] = [self._now(), began, spent.settled, pool.end + _KEPT_MS, _GRACE_MS, again_ms, _OPEN_MS]
        for hold_id, amount in spent.open.items():
            args += [hold_id, amount]
        await self._link.script(SET, [_DUE, _key(pool), *map(_settled, spent.open)], args)

    async def _doubt(self) -> None:
        """Has the doubtful pools compared, and the fallback, if it was asked, begin with the ledger next time."""
        if not (self._alone or self._doubtful):
            return
        doubtful = list(self._doubtful)
        await self._link.script(DOUBT, [_DUE, *doubtful], [self._now()])
        self._doubtful.difference_update(doubtful)
        if self._alone:
            self._alone = False
            self._fallback.forget()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._link.up:
                continue
            try:
                with suppress(LinkDown):  # the link has told of it
                    await self.reconcile()
            except Exception as error:
                self._on_trouble("shared budgets could not be compared with the ledger", reason=str(error))


def _key(pool: Pool) -> str:
    return f"{_POOL}{pool.period}:{pool.start}:{pool.end}:{pool.scope}"


def _pool(key: str) -> Pool:
    period, start, end, scope = key.removeprefix(_POOL).split(":", 3)
    return Pool(scope, Period(period), int(start), int(end))


def _settled(hold_id: str) -> str:
    return f"{PREFIX}settled:{hold_id}"


def _part_key(part: Part) -> str:
    return f"{PREFIX}flow:{part.kind}:{part.scope}"


def _refusal(hold: Hold, parts: Sequence[Part], answer: Sequence[Any]) -> Refusal | None:
    match answer:
        case [b"granted"]:
            return None
        case [b"budget", index, only_held]:
            return over_budget(hold.accounts[index], hold, only_held=bool(only_held))
        case [b"rate", index, wait_ms]:
            return over_rate(parts[index], float(wait_ms))
    return Refusal(GATEWAY, "sharing", _RETRY_SECONDS)
