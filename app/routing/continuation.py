"""What becomes of a stream whose node dies after it has begun: another node goes on with it, where that can be done.

The client has a part of the text then. Whoever goes on is an attempt like any other: chosen by the policy among those
not tried yet, bounded by the attempts and the deadline of the request, paid for, and kept local as the request is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial

from app.domain import Failure, Operation, Request, Usage
from app.errors import HearthError, NodeFailure
from app.providers import prefix
from app.providers.base import Answer
from app.providers.seam import AnotherAnswer, BeganAnew, Seam, length_reached, not_continued, tells_little, total
from app.providers.written import Sent, Written
from app.routing import trail
from app.routing.attempt import Attempt
from app.routing.plan import Plan
from app.routing.registry import Node, Registry
from app.routing.reply import Reply
from app.routing.retry import Retry

KEPT_LOCAL = "the rest of an answer stays local; see CONTINUATION"

_PIECES_AT_ONCE = 8  # of what was sent, that are read before others get a turn
_PROMPT_TOKEN_BYTES = 4


class Where(StrEnum):
    """Where the rest of an answer may come from: the values of CONTINUATION."""

    OFF = "off"
    LOCAL = "local"
    ALL = "all"


class Turn(StrEnum):
    """What became of a stream whose node died. The values are metric labels."""

    CONTINUED = trail.CONTINUED  # another node went on
    LENGTH = "length"  # the client's limit was used up, so that there was nothing to go on with
    UNFIT = "unfit"  # more than plain text, or too much of it, or thoughts alone
    NOBODY = "nobody"  # no other node did


class Rest:
    """The rest of one answer, which some node is to write; with `whole` by writing all of it again."""

    __slots__ = ("_merges", "_operation", "_request", "left", "whole", "written")

    def __init__(self, request: Request, written: Written, merges: bool) -> None:
        self._request = request  # the client's
        self._operation = request.operation
        self._merges = merges
        self.left = prefix.tokens_left(request, written.tokens)
        self.whole = False
        self.written = written

    def request(self) -> Request:
        """What is asked for, in the words that all kinds share."""
        if self.whole:
            return self._request
        return prefix.going_on(self._request, self.written, merges=self._merges)

    def request_for(self, node: Node) -> Request:
        """What this very node is asked. Raises `NodeFailure` when it does not know how to go on."""
        if self.whole:
            return self._request
        if not prefix.goes_on(node.known_kind, node.spec, self._operation):
            raise not_continued("it does not know how to go on with another node's answer")
        how = prefix.prefix_of(node.known_kind, node.spec)
        return prefix.going_on(self._request, self.written, merges=self._merges, prefix=how)

    def answer(self, answer: Answer) -> Answer:
        limit = None if self.whole else self.left
        return Seam(answer, self._operation, self.written, whole=self.whole, limit=limit)

    def total(self, usage: Usage) -> Usage:
        """What all parts took, from what the last one did."""
        return total(0 if self.whole else self.written.tokens, usage)


class Continuation:
    """Goes on with streams. `attempt` makes one attempt, as for any request."""

    def __init__(
        self, where: Where, retry: Retry, registry: Registry, attempt: Callable[[Plan], Awaitable[Reply]]
    ) -> None:
        self._where = where
        self._retry = retry
        self._registry = registry
        self._attempt = attempt

    def watch(self, plan: Plan, reply: Reply) -> None:
        """Keeps what the stream says from now on, so that it can be gone on with."""
        reply.keep(partial(self._go_on, plan, plan.request))

    async def _go_on(
        self, plan: Plan, client: Request, attempt: Attempt, failure: NodeFailure, sent: Sent, usage: Usage | None
    ) -> Reply | bytes:
        """The rest of the answer, or its end when there is nothing left to say. Raises `failure` when nobody goes on.

        `usage` is of all parts so far, where nodes counted as they went.
        """
        if failure.failure is Failure.DEADLINE:
            raise failure
        anew = isinstance(failure, BeganAnew)
        if anew:
            usage = None  # it counts what the client has twice
        rest = await self._rest(plan, client, attempt, sent, usage)
        if rest is None:
            plan.trail.turns.append(Turn.UNFIT)
            raise failure
        if rest.left is not None and rest.left <= 0:
            return _length_reached(plan, client, rest.written)
        rest.whole = anew or (tells_little(rest.written, rest.left) and not rest.written.reasoning)
        plan.go_on(rest, attempt.candidate, failure, () if rest.whole else self._unable(client.operation))
        if anew:
            plan.ask_otherwise(attempt.candidate)
        if self._where is not Where.ALL:
            plan.cloud_refusal = plan.cloud_refusal or KEPT_LOCAL
        reply = await self._elsewhere(plan, rest)
        plan.trail.turns.append(Turn.NOBODY if reply is None else Turn.CONTINUED)
        if reply is None:
            raise failure  # the client hears why the node failed that it listened to; the attempts say the rest
        return reply

    async def _rest(
        self, plan: Plan, client: Request, attempt: Attempt, sent: Sent, usage: Usage | None
    ) -> Rest | None:
        """None when the answer is such that nobody could go on with it."""
        if sent.lost or prefix.why_not(client) is not None:
            return None
        if plan.merges is None:
            node = attempt.candidate.node
            plan.merges = prefix.opens_last_message(client, prefix.prefix_of(node.known_kind, node.spec))
        if plan.merges is None:
            return None
        written = await _read(sent, client.operation)
        written.usage = usage
        begun_to_think = bool(written.reasoning) and not written.begins
        if not written.plain or written.finished or not written.head or begun_to_think:
            return None
        return Rest(client, written, plan.merges)

    def _unable(self, operation: Operation) -> list[Node]:
        nodes = (*self._registry.local(), *self._registry.cloud())
        return [each for each in nodes if each.kind is None or not prefix.goes_on(each.kind, each.spec, operation)]

    async def _elsewhere(self, plan: Plan, rest: Rest) -> Reply | None:
        """None when nobody goes on."""
        try:
            async for attempt in self._retry.attempts(plan, made=plan.trail.tried):
                with attempt:
                    return await self._from_one(plan, rest)
        except (NodeFailure, HearthError):
            pass
        return None

    async def _from_one(self, plan: Plan, rest: Rest) -> Reply:
        """One attempt. A node that says the same again is asked for all of it at once, as others would do the same.

        And one that was asked for all of it, and has another answer, is asked to go on with this one.
        """
        try:
            return await self._attempt(plan)
        except (BeganAnew, AnotherAnswer):
            rest.whole = not rest.whole
            plan.ask_otherwise(plan.failures[-1][0])
        try:
            return await self._attempt(plan)
        except NodeFailure:
            rest.whole = not rest.whole
            plan.ask_otherwise()
            raise


async def _read(sent: Sent, operation: Operation) -> Written:
    """What the client has. Long texts are read in steps, as others wait meanwhile."""
    written = Written(operation)
    for number, events in enumerate(sent.pieces(), 1):
        written.read(events)
        if number % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return written


def _length_reached(plan: Plan, client: Request, written: Written) -> bytes:
    plan.trail.turns.append(Turn.LENGTH)
    plan.trail.finish_reason = "length"
    usage = Usage(len(client.body) // _PROMPT_TOKEN_BYTES, written.tokens)
    return length_reached(client.operation, written, usage if client.include_usage else None)
