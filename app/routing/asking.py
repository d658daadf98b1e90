"""Asks one node, and returns once its answer has begun."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from app.providers.base import Answer, Call, Outgoing
from app.routing.attempt import Attempt
from app.routing.job import Job
from app.routing.plan import Plan
from app.routing.registry import Candidate, Node
from app.routing.reply import Reply
from app.upstream import Limits, NodeResponse, Target, Upstream


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    first_token: float
    idle: float


class Asking:
    """Sends what an attempt asks of its node."""

    def __init__(self, upstream: Upstream, timeouts: Timeouts) -> None:
        self._upstream = upstream
        self._timeouts = timeouts
        self._targets: WeakKeyDictionary[Node, Target] = WeakKeyDictionary()

    async def ask(self, plan: Plan, attempt: Attempt, outgoing: Outgoing | None = None) -> Reply:
        """The answer, which has begun. Raises `NodeFailure`, and `HearthError` when the request was wrong.

        `outgoing` is sent in place of what the node's kind makes of the request.
        """
        call = self.call(plan, attempt.candidate)
        if attempt.reservation is not None:
            call = call._replace(output_limit=attempt.reservation.output_limit)
        kind = attempt.candidate.node.known_kind
        response = await self.send(plan, attempt, outgoing or kind.translate(call))
        try:
            answer = kind.answer(call)
            if plan.rest is not None:
                answer = plan.rest.answer(answer)
            return await self._commit(plan, attempt, response, answer)
        finally:
            if not plan.committed:
                response.close()

    async def send(self, plan: Plan, attempt: Attempt, outgoing: Outgoing) -> NodeResponse:
        """A node's answer of status 200; any other is raised as what it means."""
        node = attempt.candidate.node
        forwarded = attempt.sending(plan.request)
        response = await self._upstream.send(
            self._target(node), outgoing.path, forwarded, outgoing.body, self._limits(plan)
        )
        if response.status == 200:
            return response
        try:
            raise node.known_kind.refusal(response.status, response.headers, await response.body())
        finally:
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
        first = b"".join(held)
        response.began(plan.trail.began(first, time.perf_counter(), stream=plan.request.stream))
        attempt.answering()
        plan.committed = True
        total = None if plan.rest is None else plan.rest.total
        return Reply(attempt, response, answer, plan.trail, first, over=over, deadline=plan.deadline, total=total)

    async def load(self, candidate: Candidate, job: Job) -> None:
        """Returns when the node has the model in memory. Raises `NodeFailure`, and ValueError for kinds that cannot."""
        node = candidate.node
        load = node.known_kind.load
        if load is None:
            raise ValueError(f"a node of kind {node.known_kind.name} loads nothing on demand")
        outgoing = load(candidate.model, job.operation, job.num_ctx or node.spec.num_ctx)
        seconds = self._timeouts.first_token
        limits = Limits(seconds, seconds, asyncio.get_running_loop().time() + seconds)
        response = await self._upstream.send(self._target(node), outgoing.path, (), outgoing.body, limits)
        try:
            body = await response.body()
            if response.status != 200:
                raise node.known_kind.refusal(response.status, response.headers, body)
        finally:
            response.close()

    def call(self, plan: Plan, candidate: Candidate) -> Call:
        """What an attempt on this candidate asks for."""
        info, rest = candidate.info, plan.rest
        return Call(
            plan.request if rest is None else rest.request_for(candidate.node),
            candidate.model,
            num_ctx=plan.route.num_ctx or candidate.node.spec.num_ctx,
            capabilities=info.capabilities if info else None,
            reasoning_content=plan.request.reasoning_content,
            goes_on=rest is not None,
        )

    def _target(self, node: Node) -> Target:
        target = self._targets.get(node)
        if target is None:
            target = self._targets[node] = self._upstream.target(node.spec)
        return target

    def _limits(self, plan: Plan) -> Limits:
        timeouts = self._timeouts
        return Limits(timeouts.first_token, timeouts.idle, plan.deadline)
