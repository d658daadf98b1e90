"""The attempt loop: one request, tried on one node after another until one begins to answer.

Before the first content nothing has gone to the client, so that a failure costs it only time. What comes after is in
`Reply`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from app.domain import Failure, Request
from app.errors import HearthError, NodeFailure, Overloaded
from app.providers.base import Answer, Call
from app.routing.admission import Admission, Slot
from app.routing.attempt import Attempt, Observer
from app.routing.breaker import Permit
from app.routing.plan import Plan
from app.routing.policies import Policy
from app.routing.registry import Candidate, Node, Registry
from app.routing.reply import Reply
from app.routing.retry import Retry
from app.routing.routes import Routes
from app.routing.trail import Trail
from app.routing.verdict import nobody_left
from app.upstream import Limits, NodeResponse, Target, Upstream

_QUEUE_RETRY_AFTER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    first_token: float
    idle: float
    request: float


class Dispatcher:
    """Finds a node that answers. Holds no state of requests: each has its `Plan` and its `Trail`."""

    def __init__(
        self,
        *,
        registry: Registry,
        routes: Routes,
        policy: Policy,
        admission: Admission,
        retry: Retry,
        upstream: Upstream,
        timeouts: Timeouts,
        observer: Observer,
        suspect: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self._registry = registry
        self._routes = routes
        self._policy = policy
        self._admission = admission
        self._retry = retry
        self._upstream = upstream
        self._timeouts = timeouts
        self._observer = observer
        self._suspect = suspect
        self._targets: WeakKeyDictionary[Node, Target] = WeakKeyDictionary()
        self._choices = 0

    async def dispatch(self, request: Request, trail: Trail) -> Reply:
        """Returns once a node's answer has begun. Raises `HearthError` when none does; nothing has been sent then."""
        route = self._routes.resolve(request.model)
        trail.route = route.name
        deadline = asyncio.get_running_loop().time() + self._timeouts.request
        plan = Plan(request, route, self._registry, trail, deadline)
        try:
            async for attempt in self._retry.attempts(plan):
                with attempt:
                    return await self._attempt(plan)
        except NodeFailure as last:
            raise nobody_left(plan) from last
        raise nobody_left(plan)

    async def _attempt(self, plan: Plan) -> Reply:
        attempt = await self._admit(plan)
        try:
            return await self._ask(plan, attempt)
        except NodeFailure as failure:
            attempt.fail(failure)
            plan.failed(attempt.candidate, failure)
            if not failure.sent or failure.failure is Failure.MODEL_MISSING:
                self._suspect(attempt.candidate.node)
            raise
        except HearthError:
            attempt.refuse()
            raise
        finally:
            if attempt.open and not plan.committed:
                attempt.abandon()

    async def _ask(self, plan: Plan, attempt: Attempt) -> Reply:
        request, candidate, node = plan.request, attempt.candidate, attempt.candidate.node
        kind = node.kind
        assert kind is not None, "the plan offers no node of unknown kind"
        call = self._call(plan, candidate)
        outgoing = kind.translate(call)
        response = await self._upstream.send(
            self._target(node), outgoing.path, request.forwarded, outgoing.body, self._limits(plan)
        )
        try:
            if response.status != 200:
                raise kind.refusal(response.status, response.headers, await response.body())
            return await self._commit(plan, attempt, response, kind.answer(call))
        finally:
            if not plan.committed:
                response.close()

    async def _commit(self, plan: Plan, attempt: Attempt, response: NodeResponse, answer: Answer) -> Reply:
        """Reads until the first content, which may be the whole of a document."""
        held = []
        over = False
        while not (answer.begun or over):
            data = await response.read()
            if data:
                held.append(answer.feed(data))
            over = not data or answer.ended
        if over:
            held.append(answer.finish())
        response.began()
        attempt.answering()
        plan.committed = True
        plan.trail.first_content = time.perf_counter()
        return Reply(attempt, response, answer, plan.trail, b"".join(held), over=over, deadline=plan.deadline)

    async def _admit(self, plan: Plan) -> Attempt:
        """Takes a slot and the breaker's permit on the best node, or raises what the client is told."""
        attempt = await self._admit_in_order(plan)
        if attempt is None and plan.forgive_busy():
            attempt = await self._admit_in_order(plan)
        attempt = attempt or self._last_resort(plan)
        if attempt is None:
            raise nobody_left(plan)
        return attempt

    async def _admit_in_order(self, plan: Plan) -> Attempt | None:
        """Tier by tier; waits where a tier is only full, but not for ever when there is another."""
        for candidates in plan.tiers():
            try:
                attempt = await self._admit_among(plan, candidates)
            except Overloaded as error:
                plan.overloaded = error
            else:
                if attempt is not None:
                    return attempt
        if plan.overloaded is not None:
            raise plan.overloaded
        return None

    async def _admit_among(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        while candidates:
            attempt = self._take(plan, self._ranked(candidates)) or await self._queue(plan, candidates)
            if attempt is not None:
                return attempt
            candidates = plan.open(candidates)
        return None

    def _last_resort(self, plan: Plan) -> Attempt | None:
        for candidate in plan.last_resort():
            slot = self._admission.take(candidate)
            if slot is not None:
                return self._begin(plan, slot, None, 1)
        return None

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """The policy's order, with nodes that just said that they are busy moved to the end."""
        ranked = self._policy.rank(candidates)
        now = time.monotonic()
        for candidate in ranked:
            if candidate.node.penalty_until > now:
                return sorted(ranked, key=lambda candidate: candidate.node.penalty_until > now)
        return ranked

    def _take(self, plan: Plan, ranked: list[Candidate]) -> Attempt | None:
        for candidate in ranked:
            slot = self._admission.take(candidate)
            if slot is not None and (attempt := self._permitted(plan, slot, len(ranked))):
                return attempt
        return None

    async def _queue(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        """Waits for a place on a local node: no other has a limit. None: there is none to wait for any more."""
        if not any(candidate.node.full for candidate in candidates):
            return None
        if plan.overloaded is not None:
            raise plan.overloaded
        began = time.perf_counter()
        seconds = min(self._timeouts.first_token, plan.deadline - asyncio.get_running_loop().time())
        try:
            slot = await self._admission.wait(plan.local, seconds)
        except TimeoutError as error:
            raise Overloaded(
                "no node became free in time; try again later, or raise max_concurrency",
                retry_after_seconds=_QUEUE_RETRY_AFTER_SECONDS,
            ) from error
        finally:
            plan.trail.queued_seconds += time.perf_counter() - began
        return None if slot is None else self._permitted(plan, slot, len(candidates))

    def _permitted(self, plan: Plan, slot: Slot, candidates: int) -> Attempt | None:
        permit = slot.candidate.node.breaker.acquire()
        if permit is None:
            slot.release()
            return None
        return self._begin(plan, slot, permit, candidates)

    def _begin(self, plan: Plan, slot: Slot, permit: Permit | None, candidates: int) -> Attempt:
        candidate, trail = slot.candidate, plan.trail
        self._choices += 1
        candidate.node.picked = self._choices
        plan.choose(candidate)
        trail.node, trail.tier, trail.model = candidate.node.name, candidate.node.spec.tier, candidate.model
        trail.candidates = candidates
        trail.tried += 1
        if plan.failures:
            trail.fallback = plan.failures[-1][1].failure
        elif candidate.node.cloud and plan.route.local is not None:
            trail.fallback = "no_local_node" if plan.overloaded is None else "overloaded"
        return Attempt(slot, permit, trail, self._observer)

    def _call(self, plan: Plan, candidate: Candidate) -> Call:
        info = candidate.info
        return Call(
            plan.request,
            candidate.model,
            num_ctx=plan.route.num_ctx or candidate.node.spec.num_ctx,
            capabilities=info.capabilities if info else None,
            reasoning_content=plan.request.reasoning_content,
        )

    def _target(self, node: Node) -> Target:
        target = self._targets.get(node)
        if target is None:
            target = self._targets[node] = self._upstream.target(node.spec.url, node.spec.api_key)
        return target

    def _limits(self, plan: Plan) -> Limits:
        timeouts = self._timeouts
        return Limits(timeouts.first_token, timeouts.idle, plan.deadline)
