"""An answer that has begun: what is left of it, and the end of its attempt."""

from __future__ import annotations

import asyncio

from app.domain import Failure
from app.errors import NodeFailure
from app.providers.base import Answer
from app.routing.attempt import Attempt
from app.routing.trail import EVENT, Trail
from app.routing.windows import window
from app.upstream import NodeResponse

_SMALL_PROMPT_TOKENS = 256  # no context in use is smaller


class Reply:
    """An answer that has begun. Read it with `next` until it is `over`, and close it always.

    It is `complete` once the node has said all. `deadline` is the whole request's, on the loop's clock.
    """

    __slots__ = (
        "_answer",
        "_attempt",
        "_owned",
        "_response",
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
    ) -> None:
        self._attempt = attempt
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
                    return out
        except NodeFailure as failure:
            self._trail.usage = self._answer.usage
            self._attempt.fail(failure)
            raise
        if not self.over:
            await self._response.drain()
            self.over = True
        return b""

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
        if usage is not None and usage.prompt_tokens >= _SMALL_PROMPT_TOKENS:
            room = window(self._attempt.candidate, self._trail.num_ctx)
            if room is not None and usage.prompt_tokens >= room:
                self._trail.context_filled = room

    def owns(self, task: asyncio.Task[None]) -> None:
        """A task that is of use for as long as this answer is read, and is cancelled with it."""
        self._owned = task

    def close(self) -> None:
        """Stops the node when it is still at work, and settles the attempt."""
        if self._owned is not None:
            self._owned.cancel()
        self._trail.dropped_events = getattr(self._answer, "dropped", 0)  # not every sort of answer has events
        try:
            self._response.close()
        finally:
            if self._attempt.open:
                self._trail.usage = self._answer.usage  # some nodes count as they go
                self._attempt.abandon()
