"""Pays for the cloud: reserves what an attempt may cost in every budget that it falls under, and on disk, before its
request leaves; settles it after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from app.domain import MICRO_DOLLARS, Budget, NodeSpec, Operation, Outcome, Request, Usage
from app.errors import LedgerUnavailable, NodeFailure, SpendingRefused
from app.ledger.estimates import TokenEstimator, completion_at_most, prompt_at_most
from app.ledger.prices import Tariff
from app.ledger.rows import Settlement, SpendRow
from app.routing.gate import BudgetState, Quote
from app.routing.registry import Candidate
from app.routing.routes import Route
from app.routing.trail import Trail
from app.sharing.meter import (
    GATEWAY,
    Account,
    Flow,
    Hold,
    Meter,
    Refusal,
    exhausted,
    key_scope,
    provider_scope,
    route_scope,
)
from app.sharing.periods import now_ms


class Prices(Protocol):
    """Who knows what the cloud costs."""

    async def find(self, node: NodeSpec, model: str) -> Tariff | None: ...


class SpendLog(Protocol):
    """Where spending is written down."""

    async def opened(self, row: SpendRow) -> None:
        """Returns once the row is safe. Raises `LedgerUnavailable`."""
        ...

    def settle(self, settlement: Settlement) -> None: ...


class LedgerPurse:
    """The purse of one process. Close it when no request runs any more."""

    def __init__(
        self,
        *,
        prices: Prices,
        meter: Meter,
        log: SpendLog,
        estimator: TokenEstimator,
        budget: Budget | None,
        max_tokens: int,
        instance: str,
        on_trouble: Callable[..., None],
    ) -> None:
        """`budget` is the whole gateway's. `max_tokens` is how long an answer gets that has no limit of its own."""
        self.open = 0  # reservations whose cost is not known yet
        self._prices = prices
        self._meter = meter
        self._log = log
        self._estimator = estimator
        self._budget = budget
        self._max_tokens = max_tokens
        self._instance = instance
        self._on_trouble = on_trouble
        self._settling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for the settlements that are under way."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def accounts(self, request: Request, route: Route, node: NodeSpec) -> list[Account]:
        """The budgets that a request falls under."""
        caller = request.caller
        budgets = (
            (GATEWAY, self._budget),
            (key_scope(caller.id), caller.budget),
            (route_scope(route.name), route.budget),
            (provider_scope(node.name), node.budget),
        )
        return [Account(scope, budget) for scope, budget in budgets if budget is not None]

    async def reserve(self, request: Request, route: Route, candidate: Candidate, trail: Trail) -> _Reservation:
        """Raises `SpendingRefused`. When it returns, the reservation survives this process."""
        node = candidate.node.spec
        tariff = await self._prices.find(node, candidate.model)
        accounts = self.accounts(request, route, node)
        if tariff is None and accounts:
            raise _price_unknown(candidate)
        hold, output_limit = self._hold(request, node, tariff, accounts, trail)
        await self._granted(hold)
        reservation = _Reservation(self, hold, request, tariff, output_limit, trail)
        try:
            await self._log.opened(self._row(hold, request, route, candidate, trail))
        except LedgerUnavailable as error:
            reservation.release()
            raise _unwritten(error) from error
        except BaseException:
            reservation.release()
            raise
        return reservation

    async def look(self, request: Request, route: Route, candidate: Candidate) -> Quote:
        node = candidate.node.spec
        tariff = await self._prices.find(node, candidate.model)
        hold, _ = self._hold(request, node, tariff, self.accounts(request, route, node), Trail())
        states = [await self._state(account, hold.at) for account in hold.accounts]
        over = next((state for state in states if state.refuses), None)
        refusal = None
        if tariff is None and hold.accounts:
            refusal = _price_unknown(candidate)
        elif over is not None:
            refusal = _refused(Refusal(over.scope, "budget", 0.0, over.budget.limit))
        return Quote(None if tariff is None else hold.amount, states, refusal)

    async def _state(self, account: Account, at: int) -> BudgetState:
        spent = await self._meter.spent(account, at)
        return BudgetState(account.scope, account.budget, spent, exhausted(account, spent))

    def _hold(
        self, request: Request, node: NodeSpec, tariff: Tariff | None, accounts: list[Account], trail: Trail
    ) -> tuple[Hold, int | None]:
        """What it may cost at most, and the limit to send along where the client set none."""
        prompt, completion, limit = prompt_at_most(request), 0, None
        if request.operation is not Operation.EMBEDDING:
            completion = completion_at_most(request, self._max_tokens)
            limit = self._max_tokens if accounts and self._max_tokens else None
        return Hold(
            id=f"{trail.row}-{trail.tried + 1}",
            at=now_ms(),
            amount=tariff.at_most(prompt, completion) if tariff is not None else 0,
            tokens=prompt + completion,
            accounts=accounts,
            flows=[Flow(provider_scope(node.name), node.rate)] if node.rate is not None else [],
        ), limit

    async def _granted(self, hold: Hold) -> None:
        if not (hold.accounts or hold.flows):
            return
        if self._settling:  # what has ended makes room first: perhaps this request's own last attempt
            await asyncio.wait(self._settling)
        try:
            refusal = await self._meter.reserve(hold)
        except LedgerUnavailable as error:
            raise _unwritten(error) from error  # what was spent could not even be read
        except BaseException:
            self._settle(hold, 0, 0)  # it may have been granted in the moment in which the client left
            raise
        if refusal is not None:
            raise _refused(refusal)

    def _row(self, hold: Hold, request: Request, route: Route, candidate: Candidate, trail: Trail) -> SpendRow:
        return SpendRow(
            id=hold.id,
            request=trail.row,
            at=hold.at,
            instance=self._instance,
            key=request.caller.id,
            route=route.name,
            node=candidate.node.name,
            model=candidate.model,
            reserved=hold.amount,
        )

    def settled(self, hold: Hold, settlement: Settlement) -> None:
        """Takes a reservation's end: on disk soon, in the budgets at once."""
        self._log.settle(settlement)
        self._settle(hold, settlement.cost, settlement.tokens_in + settlement.tokens_out)

    def _settle(self, hold: Hold, cost: int, tokens: int) -> None:
        if not (hold.accounts or hold.flows):
            return
        task = asyncio.create_task(self._meter.settle(hold, cost, tokens), name="settlement")
        self._settling.add(task)
        task.add_done_callback(self._was_settled)

    def _was_settled(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_trouble("a settlement failed; the budget counts it as reserved", error=repr(error))

    def usage_of(self, request: Request, trail: Trail) -> Usage:
        """A guess at what one node's part of a stream took of which nobody told the usage."""
        return Usage(self._estimator.estimate_prompt(request), trail.events - trail.events_before)


class _Reservation:
    """One attempt's."""

    def __init__(
        self,
        purse: LedgerPurse,
        hold: Hold,
        request: Request,
        tariff: Tariff | None,
        output_limit: int | None,
        trail: Trail,
    ) -> None:
        self.output_limit = output_limit
        self._purse = purse
        self._hold = hold
        self._request = request
        self._tariff = tariff
        self._trail = trail
        self._open = True
        purse.open += 1

    def settle(self, outcome: Outcome, failure: NodeFailure | None, trail: Trail) -> None:
        usage = trail.usage
        if _cost_nothing(outcome, failure):
            self._end(outcome, Usage(0, 0), 0, estimated=False)
        elif usage is not None:
            self._end(outcome, usage, self._cost(usage), estimated=False)
        elif self._request.stream:
            guess = self._purse.usage_of(self._request, trail)
            self._end(outcome, guess, self._cost(guess), estimated=True)
        else:
            # A document is made whether or not anybody waits for it, and its length is known to nobody.
            self._end(outcome, Usage(0, 0), self._hold.amount, estimated=True)

    def release(self) -> None:
        self._end(Outcome.ABANDONED, Usage(0, 0), 0, estimated=False)

    def _cost(self, usage: Usage) -> int:
        return 0 if self._tariff is None else self._tariff.cost(usage)

    def _end(self, outcome: Outcome, usage: Usage, cost: int, *, estimated: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._purse.open -= 1
        self._trail.cost += cost
        settlement = Settlement(
            id=self._hold.id,
            cost=cost,
            tokens_in=usage.prompt_tokens,
            tokens_out=usage.completion_tokens,
            tokens_cached=usage.cached_tokens,
            estimated=estimated,
            outcome=outcome,
            settled_at=now_ms(),
        )
        self._purse.settled(self._hold, settlement)


def _cost_nothing(outcome: Outcome, failure: NodeFailure | None) -> bool:
    """Whether the request never arrived, or was answered with an error: providers charge for neither."""
    if outcome is Outcome.REFUSED:
        return True
    return failure is not None and (not failure.sent or failure.status is not None)


def _price_unknown(candidate: Candidate) -> SpendingRefused:
    return SpendingRefused(
        f"the cloud was not asked: what {candidate.model} costs at {candidate.node.name} is not known, and there is a "
        "budget to keep; set its price in CLOUD_PRICES",
        code="price_unknown",
    )


def _unwritten(error: LedgerUnavailable) -> SpendingRefused:
    return SpendingRefused(
        f"the cloud was not asked, as what it costs could not be written down: {error.message}",
        code="ledger_unavailable",
        status=503,
        retry_after_seconds=2.0,
    )


def _refused(refusal: Refusal) -> SpendingRefused:
    whose = _whose(refusal.scope)
    if refusal.why == "sharing":
        return SpendingRefused(
            "the cloud was not asked, as the budgets that replicas share are out of reach; see REDIS_URL and "
            "SHARING_FAILURE",
            code="sharing_unavailable",
            status=503,
            retry_after_seconds=refusal.retry_after_seconds,
        )
    if refusal.why == "budget":
        return SpendingRefused(
            f"the cloud budget of {whose} is spent: ${refusal.limit / MICRO_DOLLARS:g}",
            retry_after_seconds=refusal.retry_after_seconds,
        )
    return SpendingRefused(
        f"{whose} may take {refusal.limit} {refusal.why} a minute, which are used up",
        code="rate_limit_exceeded",
        retry_after_seconds=refusal.retry_after_seconds,
    )


def _whose(scope: str) -> str:
    kind, _, name = scope.partition(":")
    return {"key": "this API key", "route": f"the route {name}", "provider": name}.get(kind, "this gateway")


def budgets(gateway: Budget | None, routes: Iterator[tuple[str, Budget]], nodes: Iterator[NodeSpec]) -> list[Account]:
    """Every budget of the settings."""
    found = [Account(GATEWAY, gateway)] if gateway is not None else []
    found += [Account(route_scope(name), budget) for name, budget in routes]
    return found + [Account(provider_scope(node.name), node.budget) for node in nodes if node.budget is not None]
