"""What a cloud request is measured against before it leaves: budgets and the providers' limits.

Everything that one request may spend is one `Hold`. Reserving it is one step, for all its accounts and flows or for
none. `memory.py` and `shared.py` keep the counts, for one process and for many.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from app.domain import Budget, Rate

GATEWAY = "gateway"


def key_scope(caller_id: str) -> str:
    return f"key:{caller_id}"


def route_scope(route: str) -> str:
    return f"route:{route}"


def provider_scope(node: str) -> str:
    return f"provider:{node}"


class Account(NamedTuple):
    """A budget and whose it is: `gateway`, `key:<id>`, `route:<name>` or `provider:<node>`."""

    scope: str
    budget: Budget


def exhausted(account: Account, spent: int) -> bool:
    """Whether nothing more may be spent. `spent` is what is settled and held: a budget's last hold may go beyond it."""
    return spent >= account.budget.limit


class Flow(NamedTuple):
    """A limit per minute and whose it is."""

    scope: str
    rate: Rate


class Hold(NamedTuple):
    """What one attempt may cost at most. `id` is its row in the ledger, `at` milliseconds since 1970."""

    id: str
    at: int
    amount: int  # micro-dollars
    tokens: int
    accounts: Sequence[Account] = ()
    flows: Sequence[Flow] = ()


class Refusal(NamedTuple):
    """Why a hold was not granted, and when to ask again. `sharing`: the shared counts are out of reach."""

    scope: str
    why: Literal["budget", "requests", "tokens", "sharing"]
    retry_after_seconds: float
    limit: int = 0  # of the budget in micro-dollars, or of the rate


class Spent(NamedTuple):
    """What the ledger says of one scope since some time: settled micro-dollars, and what is open by hold."""

    settled: int
    open: Mapping[str, int]


# (scope, since in ms) -> what the ledger says. How a meter learns what was spent before it began.
ReadSpent = Callable[[str, int], Awaitable[Spent]]


class Meter(Protocol):
    """Grants holds and takes their settlements."""

    async def reserve(self, hold: Hold) -> Refusal | None:
        """Grants the hold, or says why not. A budget grants while less than its limit is spent and held."""
        ...

    async def settle(self, hold: Hold, cost: int, tokens: int) -> None:
        """Replaces a granted hold by what it came to; of several settlements of one hold the first counts."""
        ...

    async def spent(self, account: Account, at: int) -> int:
        """Micro-dollars spent and held in the period that `at` (ms) is in."""
        ...

    def look_again(self, accounts: Iterable[Account], at: int) -> None:
        """Has what these accounts spent in the period that `at` (ms) is in read from the ledger again soon."""
        ...
