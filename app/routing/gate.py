"""May this request leave for the cloud, and can it be paid? Every path to a tier above 0 passes here, and nowhere else
is it decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from app.domain import Budget, Outcome, Request
from app.errors import NodeFailure, SpendingRefused
from app.routing.registry import Candidate
from app.routing.routes import Route
from app.routing.trail import Trail

NO_CLOUD = "no cloud target is configured; set CLOUD_API_KEY"


class Reservation(Protocol):
    """What one attempt in the cloud may cost, kept for it. Settle it once; of several settlements the first counts."""

    output_limit: int | None  # the longest answer that it pays for, in tokens, where the client set no limit

    def settle(self, outcome: Outcome, failure: NodeFailure | None, trail: Trail) -> None:
        """Replaces it by what the attempt came to, by the trail's usage or, without one, its events."""
        ...

    def release(self) -> None:
        """Gives it back whole: nothing was sent."""
        ...


class BudgetState(NamedTuple):
    """A budget that a request falls under, whose it is, and what is spent and held of it (micro-dollars)."""

    scope: str
    budget: Budget
    spent: int
    refuses: bool


class Quote(NamedTuple):
    """What an attempt would be told now. `at_most` is in micro-dollars; None = the price is not known."""

    at_most: int | None
    budgets: Sequence[BudgetState]
    refusal: SpendingRefused | None


class Purse(Protocol):
    """Who pays for the cloud."""

    async def reserve(self, request: Request, route: Route, candidate: Candidate, trail: Trail) -> Reservation:
        """Keeps what an attempt on the candidate may cost. Raises `SpendingRefused`; nothing may be sent then."""
        ...

    async def look(self, request: Request, route: Route, candidate: Candidate) -> Quote:
        """What `reserve` would say of prices and budgets, with nothing kept. Limits per minute are not looked at."""
        ...


def cloud_refusal(request: Request, route: Route) -> str | None:
    """Why this request must stay local, or None when it may go to the cloud. In doubt it stays."""
    if request.local_only:
        return "the request is local only"
    if request.caller.local_only:
        return "the API key is local only"
    if route.local_only:
        return f"the route {route.name} is local only"
    if not route.cloud_allowed:
        return f"the route {route.name} has no cloud model"
    return None
