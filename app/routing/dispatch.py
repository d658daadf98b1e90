"""The attempt loop: one request, tried on one node after another until one begins to answer.

Before the first content nothing has gone to the client, so that a failure costs it only time. What comes after is in
`Reply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.domain import Failure, Request
from app.errors import HearthError, NodeFailure, RequestRefused
from app.providers.seam import not_continued
from app.routing.asking import Asking
from app.routing.attempt import Attempt
from app.routing.choice import Choice
from app.routing.continuation import Continuation, Where
from app.routing.loads import Loads
from app.routing.pairs import Pairs
from app.routing.plan import Plan
from app.routing.registry import Candidate, Node, Registry
from app.routing.reply import Reply
from app.routing.retry import Retry
from app.routing.routes import Route, Routes
from app.routing.trail import Trail
from app.routing.verdict import nobody_left


class Dispatcher:
    """Finds a node that answers. Holds no state of requests: each has its `Plan` and its `Trail`.

    With `pairs`, a prefill and a decode node share a generation where there are such nodes for its model.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        routes: Routes,
        choice: Choice,
        asking: Asking,
        retry: Retry,
        request_seconds: float,
        pairs: Pairs | None = None,
        loads: Loads | None = None,
        continuation: Where = Where.OFF,
        suspect: Callable[[Node], None] = lambda node: None,
        on_missing: Callable[[Candidate, Route], None] = lambda candidate, route: None,
    ) -> None:
        """`on_missing` hears of a node that says that it does not have the model it is asked for."""
        self._registry = registry
        self._routes = routes
        self._choice = choice
        self._ask = asking.ask if loads is None else loads.ask
        self._retry = retry
        self._request_seconds = request_seconds
        self._pairs = pairs
        self._suspect = suspect
        self._on_missing = on_missing
        self._continuation: Continuation | None = None
        if continuation is not Where.OFF:
            self._continuation = Continuation(continuation, retry, registry, self._attempt)

    async def dispatch(self, request: Request, trail: Trail) -> Reply:
        """Returns once a node's answer has begun. Raises `HearthError` when none does; nothing has been sent then."""
        plan = self.plan(request, trail)
        try:
            async for attempt in self._retry.attempts(plan):
                with attempt:
                    reply = await self._attempt(plan)
                    if self._continuation is not None and request.stream and not reply.complete:
                        self._continuation.watch(plan, reply)
                    return reply
        except NodeFailure as last:
            raise nobody_left(plan) from last
        raise nobody_left(plan)

    def plan(self, request: Request, trail: Trail) -> Plan:
        """Who may be asked for it. Sends nothing. Raises `ModelNotFound`."""
        route = self._routes.resolve(request.model)
        trail.route, trail.num_ctx = route.name, route.num_ctx
        trail.keep_alive_seconds = route.queue.keep_alive_seconds
        deadline = asyncio.get_running_loop().time() + self._request_seconds
        return Plan(request, route, self._registry, trail, deadline, self._pairs)

    async def _attempt(self, plan: Plan) -> Reply:
        pair = None if self._pairs is None else await self._pairs.next(plan)
        attempt = await self._choice.next(plan) if pair is None else pair.decode
        try:
            if pair is None or self._pairs is None:
                return await self._ask(plan, attempt)
            return await self._pairs.ask(plan, pair)
        except NodeFailure as failure:
            self._failed(plan, attempt, failure)
            raise
        except HearthError as error:
            attempt.refuse()
            if isinstance(error, RequestRefused) and error.too_long:
                raise plan.refused(attempt.candidate, error) from error
            if plan.rest is not None:  # the client's own request was taken before
                refusal = not_continued("it refused to go on with another node's answer")
                plan.failed(attempt.candidate, refusal)
                raise refusal from error
            raise
        finally:
            if attempt.open and not plan.committed:
                attempt.abandon()

    def _failed(self, plan: Plan, attempt: Attempt, failure: NodeFailure) -> None:
        if attempt.open:  # else it was the other node of a pair
            attempt.fail(failure)
            plan.failed(attempt.candidate, failure)
        if failure.failure is Failure.MODEL_MISSING:
            self._on_missing(plan.failures[-1][0], plan.route)
        if not failure.sent or failure.failure is Failure.MODEL_MISSING:
            self._suspect(plan.failures[-1][0].node)
