"""When to try again. The only module that knows tenacity.

    retry = Retry(settings.max_attempts)  # one for all requests

    async for attempt in retry.attempts(plan):
        with attempt:
            return await ask_next_node(plan)

Only a `NodeFailure` leads to another attempt: at once while a node is left untried, after a moment when the same one is
asked again, after a wait when one that was busy may be. When attempts, time or nodes run out, the loop raises the last
`NodeFailure`. Everything else, cancellation included, passes straight through.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

from tenacity import (
    AsyncRetrying,
    DoSleep,
    RetryCallState,
    retry_if_exception_type,
)

from app.domain import Failure
from app.errors import NodeFailure

FIRST_BACKOFF_SECONDS = 0.2  # doubled for each further wait of a request
BACKOFF_SECONDS_MAX = 2.0
_DOUBLINGS_MAX = 10  # more would only overflow
# A node that wants a longer pause is not waited for: the client is told instead, and can do something else.
WAIT_SECONDS_MAX = 30.0


Sleep = Callable[[float], Awaitable[None]]


class Prospects(Protocol):
    """What one request can still hope for. Asked after each failure."""

    @property
    def deadline(self) -> float:
        """The time of the event loop at which the request must be over."""
        ...

    def more_candidates(self) -> bool:
        """Whether a node is left that was not tried yet."""
        ...

    def asks_again(self) -> bool:
        """Whether that is the node that has just failed: it gets a moment to recover."""
        ...

    def may_wait(self) -> bool:
        """Whether a node that was tried may be asked again after a wait. Counts only when nobody is left untried."""
        ...


class Attempt:
    """One pass of the loop: takes note of a node's failure. All else passes through, and ends the loop.

    tenacity's own would also catch and raise again what is no failure of a node, and keep the result of a success, at
    a cost, for nobody.
    """

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: NodeFailure | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc_value, NodeFailure):
            return False
        self.failure = exc_value
        return True


class Pace:
    """How long one request waits between its attempts."""

    __slots__ = ("_ready_at", "_repeats", "_waits", "prospects")

    def __init__(self, prospects: Prospects) -> None:
        self.prospects = prospects
        self._ready_at = math.inf  # when the first node that may be asked again wants to be
        self._waits = 0
        self._repeats = 0

    def wait_seconds(self, failure: NodeFailure, now: float, jitter: float) -> float:
        """How long to wait after this failure; infinite when nobody is left to ask."""
        if failure.failure is Failure.BUSY or failure.retry_after_seconds is not None:
            self._ready_at = min(self._ready_at, now + (failure.retry_after_seconds or 0.0))
        if self.prospects.more_candidates():
            return self._before_the_same(jitter) if self.prospects.asks_again() else 0.0
        if not self.prospects.may_wait():
            return math.inf
        pause = max(0.0, self._ready_at - now) if math.isfinite(self._ready_at) else 0.0
        if pause > WAIT_SECONDS_MAX:
            return math.inf
        backoff = _backoff(self._waits)
        # After the wait all busy nodes are asked anew, and say anew for how long they are.
        self._ready_at = math.inf
        self._waits += 1
        return pause + jitter * backoff

    def _before_the_same(self, jitter: float) -> float:
        """Never nothing: a node that starts again needs some time."""
        backoff = _backoff(self._repeats)
        self._repeats += 1
        return backoff * (1 + jitter) / 2


def _backoff(waits: int) -> float:
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(waits, _DOUBLINGS_MAX), BACKOFF_SECONDS_MAX)


class Attempts:
    """The attempts of one request. tenacity has a state of them only once something has failed."""

    __slots__ = ("_last", "_made", "_most", "_prospects", "_retrying", "_sleep", "_state")

    def __init__(self, retrying: AsyncRetrying, sleep: Sleep, prospects: Prospects, made: int, most: int) -> None:
        self._retrying = retrying
        self._sleep = sleep
        self._prospects = prospects
        self._made = made
        self._most = most
        self._state: RetryCallState | None = None
        self._last: Attempt | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Attempt:
        if self._last is not None:
            if self._last.failure is None:
                raise StopAsyncIteration
            await self._go_on(self._last.failure)
        elif self._made >= self._most:
            raise StopAsyncIteration
        self._last = Attempt()
        return self._last

    def _new_state(self) -> RetryCallState:
        state = RetryCallState(self._retrying, None, (Pace(self._prospects),), {})
        state.attempt_number += self._made
        return state

    async def _go_on(self, failure: NodeFailure) -> None:
        self._state = state = self._state or self._new_state()
        state.set_exception((type(failure), failure, failure.__traceback__))
        # tenacity counts in statistics that it expects to exist, per thread; nobody reads them.
        self._retrying.begin()
        decision = await self._retrying.iter(state)
        if not isinstance(decision, DoSleep):
            raise StopAsyncIteration
        state.prepare_for_next_attempt()
        if decision > 0:
            await self._sleep(decision)


class Retry:
    """The policy of all requests. Safe to share: what belongs to one request is in its `Attempts`."""

    def __init__(
        self,
        max_attempts: int,
        *,
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`jitter` is uniform in [0, 1). `clock` is the running event loop's when None."""
        self._max_attempts = max_attempts
        self._sleep = sleep
        self._jitter = jitter
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        # One for all, as building or copying one costs as much as a whole attempt. Its own `async for` keeps the state
        # of the loop on itself, so that requests would get in each other's way; `iter` takes the state from outside.
        self._retrying = AsyncRetrying(
            stop=self._stop,
            wait=self._wait,
            retry=retry_if_exception_type(NodeFailure),
            reraise=True,
        )

    def attempts(self, prospects: Prospects, made: int = 0) -> Attempts:
        """The attempts of one request, for one `async for`; those that are left after so many."""
        return Attempts(self._retrying, self._sleep, prospects, made, self._max_attempts)

    def _wait(self, state: RetryCallState) -> float:
        pace: Pace = state.args[0]
        failure = state.outcome.exception() if state.outcome is not None else None
        assert isinstance(failure, NodeFailure), "tenacity waits only after what is retried"
        return pace.wait_seconds(failure, self._clock(), self._jitter())

    def _stop(self, state: RetryCallState) -> bool:
        if state.attempt_number >= self._max_attempts:
            return True
        pace: Pace = state.args[0]
        return self._clock() + state.upcoming_sleep >= pace.prospects.deadline
