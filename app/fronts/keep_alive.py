"""A comment line now and then for a stream that has no answer yet, so that its client does not give up.

With the first one the status 200 is sent, so that a later failure can only be told inside the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from app.fronts.asgi import Headers
from app.routing.trail import Trail

# A line of its own, without the blank line that would end an event: some clients take that for an event without data,
# and read it as broken JSON.
COMMENT = b": waiting\n"

_SECONDS_BETWEEN_MAX = 10.0


class KeepAlive:
    """When streams are kept alive: after `seconds` where the route says nothing else, 0 = never.

    `least` is the least that it may be on any route.
    """

    def __init__(self, seconds: float, least: float) -> None:
        self._seconds = seconds
        self.least = least

    def seconds(self, trail: Trail) -> float:
        """For this request, 0 = never. Known once it has come to a route."""
        return self._seconds if trail.keep_alive_seconds is None else trail.keep_alive_seconds

    def during(self, trail: Trail, say: Callable[[], Awaitable[None]]) -> Beats:
        """While this is entered, `say` is awaited again and again, as often as the request wants it."""
        return Beats(self, trail, say)


class Beats:
    """The comments of one stream. Costs a timer, and from the first comment on a task."""

    __slots__ = ("_keep_alive", "_say", "_task", "_timer", "_trail")

    def __init__(self, keep_alive: KeepAlive, trail: Trail, say: Callable[[], Awaitable[None]]) -> None:
        self._keep_alive = keep_alive
        self._trail = trail
        self._say = say
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive.least, self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            # What went wrong with sending goes wrong with the answer too, and is told there.
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        seconds = self._keep_alive.seconds(self._trail)
        if seconds:
            self._task = asyncio.get_running_loop().create_task(self._run(seconds), name="keep alive")

    async def _run(self, seconds: float) -> None:
        await asyncio.sleep(seconds - self._keep_alive.least)
        while True:
            await self._say()
            await asyncio.sleep(min(seconds, _SECONDS_BETWEEN_MAX))


def told_late(headers: Headers) -> bytes:
    """Headers that came too late to be some, as a comment line."""
    return b": " + b" ".join([b"%b=%b" % header for header in headers]) + b"\n"
