"""The meter of a gateway that is one process, all in memory. It begins with what the ledger says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from app.domain import Period
from app.sharing.meter import Account, Hold, ReadSpent, Refusal, Spent, exhausted
from app.sharing.periods import bounds
from app.sharing.turns import Turns

MINUTE_MS = 60_000
ROUNDING_MS = 0.01  # times since 1970 as floats are good to a quarter of a microsecond, and sums of them less
# A budget that only open holds fill may have room again as soon as one of them is settled.
HELD_RETRY_SECONDS = 1.0

_KEPT_MS = 24 * 3_600_000  # for how long after its end a period still takes settlements
_SWEEP_MS = 3_600_000
_SETTLED_IDS = 10_000  # remembered, in case the ledger is read before it has heard of them
_FLOWS = 10_000

# Told of every settlement: the account, and what was settled in its period before and after. It only grows within a
# period, so that each share of a budget is passed once.
OnSpent = Callable[[Account, int, int], None]


class Pool(NamedTuple):
    """One account's budget in one period: what spending is counted by."""

    scope: str
    period: Period
    start: int
    end: int


def pool_of(account: Account, at: int) -> Pool:
    period = account.budget.period
    return Pool(account.scope, period, *bounds(period, at))


class Part(NamedTuple):
    """One limit of a flow, and what the hold takes of it: `kind` is what it counts, `tokens` or `requests`."""

    scope: str
    kind: Literal["tokens", "requests"]
    limit: int
    amount: int


def parts_of(hold: Hold) -> Iterator[Part]:
    for scope, rate in hold.flows:
        if rate.requests_per_minute is not None:
            yield Part(scope, "requests", rate.requests_per_minute, 1)
        if rate.tokens_per_minute is not None:
            yield Part(scope, "tokens", rate.tokens_per_minute, hold.tokens)


def corrected(hold: Hold) -> Iterator[Part]:
    """The limits that hear how many tokens it was in the end."""
    return (part for part in parts_of(hold) if part.kind == "tokens" and part.limit > 0)


def over_budget(account: Account, hold: Hold, *, only_held: bool) -> Refusal:
    """`only_held`: what is settled alone would leave room."""
    _, end = bounds(account.budget.period, hold.at)
    wait = HELD_RETRY_SECONDS if only_held else (end - hold.at) / 1000
    return Refusal(account.scope, "budget", wait, account.budget.limit)


def over_rate(part: Part, wait_ms: float) -> Refusal:
    return Refusal(part.scope, part.kind, wait_ms / 1000, part.limit)


class _Spending:
    """What is settled and held in one pool, in micro-dollars."""

    __slots__ = ("held", "holds", "settled")

    def __init__(self, settled: int) -> None:
        self.settled = settled
        self.held = 0
        self.holds: dict[str, int] = {}

    def hold(self, hold_id: str, amount: int) -> None:
        self.release(hold_id)
        self.holds[hold_id] = amount
        self.held += amount

    def release(self, hold_id: str) -> bool:
        amount = self.holds.pop(hold_id, None)
        self.held -= amount or 0
        return amount is not None

    def without(self, hold_id: str) -> int:
        return self.settled + self.held - self.holds.get(hold_id, 0)


class MemoryMeter:
    """A `Meter` for one process. `clock` gives milliseconds since 1970.

    All that is decided is decided between two awaits, so that nothing comes between looking and charging. A flow is a
    bucket of one minute's amount that runs out evenly; it is kept as the time at which it will be empty.
    """

    def __init__(self, read_spent: ReadSpent, clock: Callable[[], float], on_spent: OnSpent | None = None) -> None:
        self._read_spent = read_spent
        self._clock = clock
        self._on_spent = on_spent
        self._pools: dict[Pool, _Spending] = {}
        self._holding: dict[str, set[Pool]] = {}  # by the hold's id
        self._granted: set[str] = set()  # ids of what is open of its own; other holds it knows from the ledger
        self._stale: set[Pool] = set()  # to be read anew
        self._settled: dict[str, int] = {}  # id -> cost, the latest ones
        self._reading: Turns[Pool] = Turns()
        self._empty_at: dict[tuple[str, str], float] = {}
        self._next_sweep = clock() + _SWEEP_MS

    async def reserve(self, hold: Hold) -> Refusal | None:
        pools = [pool_of(account, hold.at) for account in hold.accounts]
        for pool in pools:
            await self._seed(pool)
        # One may have been forgotten while another was read.
        return await self.reserve(hold) if any(pool not in self._pools for pool in pools) else self._grant(hold, pools)

    async def settle(self, hold: Hold, cost: int, tokens: int) -> None:
        if hold.id in self._settled:
            return
        self._remember(hold.id, cost)
        granted = hold.id in self._granted
        self._granted.discard(hold.id)
        pools = self._holding.pop(hold.id, set())
        told = {pool_of(account, hold.at): account for account in hold.accounts} if self._on_spent else {}
        for pool in pools:
            spending = self._pools[pool]
            spending.release(hold.id)
            before = spending.settled
            spending.settled += cost
            if self._on_spent and pool in told:
                self._on_spent(told[pool], before, spending.settled)
        difference = tokens - hold.tokens
        # What was never granted was never charged: it has nothing to give back.
        self._correct(hold, difference if granted else max(0, difference))

    async def spent(self, account: Account, at: int) -> int:
        pool = pool_of(account, at)
        await self._seed(pool)
        spending = self._pools.get(pool)
        return await self.spent(account, at) if spending is None else spending.settled + spending.held

    def has_settled(self, hold_id: str) -> bool:
        return hold_id in self._settled

    def forget(self) -> None:
        """Begins anew, and reads the ledger again for every account. What is settled later still counts once."""
        # What is granted stays so: it is open still, and may give tokens back.
        self._pools.clear()
        self._holding.clear()
        self._stale.clear()
        self._empty_at.clear()

    def look_again(self, accounts: Iterable[Account], at: int) -> None:
        """Reads the ledger anew for these accounts' pools when they are next asked for."""
        self._stale.update(pool_of(account, at) for account in accounts)

    async def _seed(self, pool: Pool) -> None:
        if self._known(pool):
            return
        async with self._reading.at(pool):
            if not self._known(pool):
                spent = await self._read_spent(pool.scope, pool.start)
                self._stale.discard(pool)
                self._begin(pool, spent)

    def _known(self, pool: Pool) -> bool:
        return pool in self._pools and pool not in self._stale

    def _begin(self, pool: Pool, spent: Spent) -> None:
        self._sweep()
        before = self._pools.get(pool)
        if before is not None:
            self._drop(pool)
        spending = self._pools[pool] = _Spending(spent.settled)
        # The ledger may not have heard yet of what was granted here; of other holds it alone knows.
        holds = before.holds if before is not None else {}
        granted = {hold_id: amount for hold_id, amount in holds.items() if hold_id in self._granted}
        for hold_id, amount in {**granted, **spent.open}.items():
            if hold_id in self._settled:  # the ledger will hear of it soon
                spending.settled += self._settled[hold_id]
            else:
                self._hold(pool, hold_id, amount)

    def _grant(self, hold: Hold, pools: list[Pool]) -> Refusal | None:
        # The ledger may have had this hold's own row already.
        refusal = self._over_budget(hold, pools) or self._over_rate(hold)
        if refusal is not None:
            self._granted.discard(hold.id)
            for pool in self._holding.pop(hold.id, set()):
                self._pools[pool].release(hold.id)
            return refusal
        self._granted.add(hold.id)
        for pool in pools:
            self._hold(pool, hold.id, hold.amount)
        now = self._clock()
        for part in parts_of(hold):
            self._fill(part, part.amount, now)
        return None

    def _over_budget(self, hold: Hold, pools: list[Pool]) -> Refusal | None:
        for account, pool in zip(hold.accounts, pools, strict=True):
            spending = self._pools[pool]
            if exhausted(account, spending.without(hold.id)):
                return over_budget(account, hold, only_held=spending.settled < account.budget.limit)
        return None

    def _over_rate(self, hold: Hold) -> Refusal | None:
        now = self._clock()
        for part in parts_of(hold):
            wait = self._wait_ms(part, now)
            if wait > ROUNDING_MS:
                return over_rate(part, wait)
        return None

    def _wait_ms(self, part: Part, now: float) -> float:
        if part.limit <= 0:
            return MINUTE_MS
        # What is larger than the bucket goes when the bucket is empty.
        needed = min(part.amount, part.limit) * MINUTE_MS / part.limit
        return max(self._empty_at.get((part.scope, part.kind), 0.0), now) + needed - now - MINUTE_MS

    def _fill(self, part: Part, amount: int, now: float) -> None:
        key = (part.scope, part.kind)
        if key not in self._empty_at and len(self._empty_at) >= _FLOWS:
            self._empty_at = {key: at for key, at in self._empty_at.items() if at > now}
        self._empty_at[key] = max(self._empty_at.get(key, 0.0), now) + amount * MINUTE_MS / part.limit

    def _correct(self, hold: Hold, difference: int) -> None:
        for part in corrected(hold):
            if difference > 0:
                self._fill(part, difference, self._clock())
            elif (part.scope, part.kind) in self._empty_at:
                self._empty_at[part.scope, part.kind] += difference * MINUTE_MS / part.limit

    def _hold(self, pool: Pool, hold_id: str, amount: int) -> None:
        self._pools[pool].hold(hold_id, amount)
        self._holding.setdefault(hold_id, set()).add(pool)

    def _remember(self, hold_id: str, cost: int) -> None:
        self._settled[hold_id] = cost
        if len(self._settled) > _SETTLED_IDS:
            del self._settled[next(iter(self._settled))]

    def _sweep(self) -> None:
        """Forgets the periods that are over."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_MS
        for pool in [pool for pool in self._pools if pool.end + _KEPT_MS < now]:
            self._drop(pool)

    def _drop(self, pool: Pool) -> None:
        self._stale.discard(pool)
        for hold_id in self._pools.pop(pool).holds:
            pools = self._holding[hold_id]
            pools.discard(pool)
            if not pools:
                del self._holding[hold_id]
