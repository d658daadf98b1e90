"""An answer that has begun: what is left of it, and the end of its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from app.domain import Failure, Usage
from app.errors import NodeFailure
from app.providers.base import Answer
from app.providers.written import Sent
from app.routing.attempt import Attempt
from app.routing.trail import EVENT, Trail
from app.routing.windows import window
from app.upstream import NodeResponse

_SMALL_PROMPT_TOKENS = 256  # no context in use is smaller


# What goes on with a stream whose node died: its attempt, why, what was sent, and the usage where nodes counted as they
# went. Returns the rest, or the end of it all; raises the failure.
Rescue = Callable[[Attempt, NodeFailure, Sent, Usage | None], Awaitable["Reply | bytes"]]


class Reply:
    """An answer that has begun. Read it with `next` until it is `over`, and close it always.

    Its node may change on the way, when one dies and another goes on.

    It is `complete` once the node has said all. `deadline` is the whole request's, on the loop's clock.
    """

    __slots__ = (
        "_answer",
        "_attempt",
        "_dropped",
        "_held",
        "_owned",
        "_rescue",
        "_response",
        "_sent",
        "_total",
        "_trail",
        "complete",
        "deadline",
        "first",
        "over",
    )

    def __init__(
        self,
        attempt: Attempt,
        response: NodeResponse,
        answer: Answer,
        trail: Trail,
        first: bytes,
        *,
        over: bool,
        deadline: float,
        total: Callable[[Usage], Usage] | None = None,
    ) -> None:
        """`total` says what all parts took together, from what this last one did."""
        self._attempt = attempt
        self._dropped = 0
        self._held = True  # the node's connection
        self._rescue: Rescue | None = None
        self._sent: Sent | None = None
        self._total = total
        self._owned: asyncio.Task[None] | None = None
        self._response = response
        self._answer = answer
        self._trail = trail
        self.complete = over
        self.deadline = deadline
        self.first = first
        self.over = over
        if over:
            self._complete()

    @property
    def content_type(self) -> bytes:
        return self._answer.content_type

    async def next(self) -> bytes:
        """The client's next bytes; b"" only when over. Raises `NodeFailure` when the node broke after the commit."""
        try:
            while not self.complete:
                data = b"" if self._answer.ended else await self._read()
                out = self._answer.feed(data) if data else b""
                self._trail.events += out.count(EVENT)
                if not data or self._answer.ended:
                    out = self._last(out)
                if out:
                    if self._sent is not None:
                        self._sent.add(out)
                    return out
        except NodeFailure as failure:
            self._trail.usage = self._answer.usage
            self._attempt.fail(failure)
            self._trail.usage = self._usage
            if self._rescue is None or self._sent is None:
                raise
            return await self._go_on(self._rescue, self._sent, failure)
        if not self.over:
            await self._response.drain()
            self.over = True
        return b""

    async def _go_on(self, rescue: Rescue, sent: Sent, failure: NodeFailure) -> bytes:
        """The first bytes of what another node says in the place of this one."""
        self._let_go()
        rest = await rescue(self._attempt, failure, sent, self._usage)
        if isinstance(rest, bytes):
            self.complete = self.over = True
            return rest
        self._attempt, self._response, self._answer = rest._attempt, rest._response, rest._answer
        self._owned, self._total, self._held = rest._owned, rest._total, True
        self._dropped = self._trail.dropped_events
        self.complete, self.over = rest.complete, rest.over
        sent.add(rest.first)
        return rest.first

    @property
    def _usage(self) -> Usage | None:
        """Of all parts."""
        usage = self._answer.usage
        return usage if usage is None or self._total is None else self._total(usage)

    async def _read(self) -> bytes:
        try:
            return await self._response.read()
        except NodeFailure as failure:
            if failure.failure is not Failure.CUT:
                raise
            return b""  # whether anything is missing the answer itself knows best

    def _last(self, out: bytes) -> bytes:
        """Ends the answer. What came before a break is the client's all the same; the next call tells of the break."""
        try:
            rest = self._answer.finish()
        except NodeFailure:
            if not out:
                raise
            return out
        self._trail.events += rest.count(EVENT)
        self._complete()
        return out + rest

    def _complete(self) -> None:
        self.complete = True
        self.over = self._response.at_end
        self._trail.usage = self._answer.usage
        self._trail.finish_reason = self._answer.finish_reason
        self._attempt.timings = self._answer.timings
        self._attempt.succeed()
        usage = self._answer.usage
        self._trail.usage = self._usage
        if usage is not None and usage.prompt_tokens >= _SMALL_PROMPT_TOKENS:
            room = window(self._attempt.candidate, self._trail.num_ctx)
            if room is not None and usage.prompt_tokens >= room:
                self._trail.context_filled = room

    def owns(self, task: asyncio.Task[None]) -> None:
        """A task that is of use for as long as this answer is read, and is cancelled with it."""
        self._owned = task

    def keep(self, rescue: Rescue) -> None:
        """Keeps what is sent from now on, for `rescue` to go on with when the node dies."""
        self._rescue, self._sent = rescue, Sent(self.first)

    def close(self) -> None:
        """Stops the node when it is still at work, and settles the attempt."""
        try:
            self._let_go()
        finally:
            if self._attempt.open:
                self._trail.usage = self._answer.usage  # some nodes count as they go
                self._attempt.abandon()
                self._trail.usage = self._usage

    def _let_go(self) -> None:
        """Gives the node's connection back, once, and up what belongs to it."""
        if not self._held:
            return
        self._held = False
        if self._owned is not None:
            self._owned.cancel()
        # Not every sort of answer has events.
        self._trail.dropped_events = self._dropped + getattr(self._answer, "dropped", 0)
        self._response.close()
