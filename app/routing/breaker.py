"""When to leave a node alone. The only module that knows pybreaker.

pybreaker is never held across an await, for there it lets every waiting caller through when half-open and takes a
cancelled client for a broken node. Here a call has two synchronous steps instead, admission and outcome:

    permit = breaker.acquire()
    if permit is None:
        ...  # refused; breaker.retry_after_seconds() says for how long
    try:
        ...  # the attempt
        permit.succeed()
    except NodeFailure as failure:
        permit.fail(failure)
    finally:
        permit.neutral()  # does nothing after an outcome

Belongs to one event loop; no step blocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from app.lean import without

# pybreaker imports redis wherever that is installed, for a store that is not used here; and redis OpenTelemetry's
# metrics. Measured: 0.13 s of every start and 8 MiB of every process.
with without("redis"):
    import pybreaker

PROBE_WAIT_SECONDS = 1.0  # what a refused caller is told while the one probe is still out

_JITTER = 0.2  # of the reset timeout, where others watch the same node


class BreakerState(StrEnum):
    """What a breaker does with the next caller: admit it, refuse it, or admit it if it is the only probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED = BreakerState.CLOSED  # to look an enum's value up takes ten times as long, and every request asks all nodes

_STATES = {
    pybreaker.STATE_CLOSED: BreakerState.CLOSED,
    pybreaker.STATE_OPEN: BreakerState.OPEN,
    pybreaker.STATE_HALF_OPEN: BreakerState.HALF_OPEN,
}


class Permit:
    """Leave to make one attempt. Only its first outcome counts, so settling in a `finally` is safe."""

    __slots__ = ("_breaker", "_epoch")

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker: Breaker | None = breaker
        self._epoch = epoch

    def answering(self) -> None:
        """The node has begun to answer. That ends a probe, for the rest may take minutes; else the end decides."""
        if self._breaker is not None and self._breaker.state is BreakerState.HALF_OPEN:
            self.succeed()

    def succeed(self) -> None:
        """The node answered."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None and breaker._epoch == self._epoch:
            breaker._record_success()

    def fail(self, exc: BaseException | str) -> None:
        """The node broke. What `exc` says becomes the breaker's `reason`."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None and breaker._epoch == self._epoch:
            breaker._record_failure(exc)

    def neutral(self) -> None:
        """Nothing was learnt of the node: the client left, or its request was wrong."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None and breaker._epoch == self._epoch:
            breaker._probing = False


class Breaker:
    """Opens after `fail_max` failures in a row, and after `reset_timeout_seconds` lets one probe at a time through.

    A `fail_max` of 0 turns it off: it admits everyone. `on_change` hears (old, new) of every change of state.
    Replicas that share their breakers each have one for a node, and tell each other when it opens and closes.
    """

    def __init__(
        self,
        fail_max: int,
        reset_timeout_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[str, str], None] | None = None,
    ) -> None:
        self._off = fail_max == 0
        self._reset_timeout_seconds = reset_timeout_seconds
        self._clock = clock
        self._on_change = on_change
        self._tell: Callable[[], None] | None = None  # other replicas
        self._told = False  # by another replica: what changes now is known there
        self._jitter = 0.0
        self._state = BreakerState.CLOSED
        self._opened_at = 0.0
        self._open_seconds = reset_timeout_seconds
        self._probing = False
        self._last_failure = ""
        self._spotless = True  # closed, and no failure since the last success
        # Every change of state begins an epoch. Outcomes of attempts that were admitted in an older one are ignored:
        # a late failure must not keep the breaker open, nor a late success close it.
        self._epoch = 0
        # Its own time-out is 0 as ours runs on the monotonic clock; pybreaker's would follow the wall clock.
        self._machine = pybreaker.CircuitBreaker(
            fail_max=fail_max,
            reset_timeout=0,
            throw_new_error_on_trip=False,
            listeners=[_Listener(self._changed)],
        )

    @property
    def state(self) -> BreakerState:
        """The state now. An open breaker whose time is up stays open until the next caller becomes its probe."""
        return self._state

    @property
    def reason(self) -> str | None:
        """What the failure said that opened it; None when closed."""
        return None if self._state is BreakerState.CLOSED else self._last_failure

    def would_admit(self) -> bool:
        """Whether `acquire` would give a permit now. Changes nothing."""
        if self._state is _CLOSED:
            return True
        if self._state is BreakerState.OPEN:
            return self._open_seconds_left() <= 0
        return not self._probing

    def acquire(self) -> Permit | None:
        """Admits one attempt, or returns None. The caller owes the permit exactly one outcome."""
        if self._state is not _CLOSED:
            if not self.would_admit():
                return None
            if self._state is BreakerState.OPEN:
                self._machine.half_open()
            self._probing = True
        return Permit(self, self._epoch)

    def retry_after_seconds(self) -> float:
        """How long a refused caller should wait; 0 when it would be admitted."""
        if self.would_admit():
            return 0.0
        return self._open_seconds_left() if self._state is BreakerState.OPEN else PROBE_WAIT_SECONDS

    def try_soon(self) -> None:
        """The node was away and is back: the next caller is the probe, without a further wait."""
        if self._state is BreakerState.OPEN:
            self._open_seconds = 0.0

    def share(self, tell: Callable[[], None]) -> None:
        """Calls `tell` when it opens or closes by what happened here, and probes a bit sooner or later than others."""
        self._tell = tell
        self._jitter = _JITTER

    def open_from_elsewhere(self, reason: str) -> None:
        """Another replica has met failures. One that is open already stays so for another while."""
        if self._off or self._probing:  # the probe that is out will tell
            return
        self._last_failure = reason
        self._spotless = False
        if self._state is BreakerState.OPEN:
            self._begin_open()
            return
        with self._from_elsewhere():
            self._machine.open()

    def close_from_elsewhere(self) -> None:
        """Another replica's probe was answered."""
        if self._state is not BreakerState.CLOSED:
            with self._from_elsewhere():
                self._machine.close()
            self._spotless = True

    @contextmanager
    def _from_elsewhere(self) -> Iterator[None]:
        self._told = True
        try:
            yield
        finally:
            self._told = False

    def _begin_open(self) -> None:
        self._opened_at = self._clock()
        self._open_seconds = self._reset_timeout_seconds * random.uniform(1 - self._jitter, 1 + self._jitter)

    def _open_seconds_left(self) -> float:
        return self._opened_at + self._open_seconds - self._clock()

    def _record_success(self) -> None:
        # A success changes nothing where no failure went before, which is nearly always.
        if not (self._off or self._spotless):
            self._machine.call(_answer)
            self._spotless = True

    def _record_failure(self, exc: BaseException | str) -> None:
        if self._off:
            return
        self._last_failure = str(exc) or type(exc).__name__
        self._spotless = False
        with suppress(_BreakageError):
            self._machine.call(_break)

    def _changed(self, new: BreakerState) -> None:
        old, self._state = self._state, new
        self._epoch += 1
        self._probing = False
        if new is BreakerState.OPEN:
            self._begin_open()
        if self._on_change is not None:
            self._on_change(old, new)
        if self._tell is not None and not self._told and new is not BreakerState.HALF_OPEN:
            self._tell()


class _Listener(pybreaker.CircuitBreakerListener):
    """Tells our breaker of pybreaker's changes."""

    def __init__(self, changed: Callable[[BreakerState], None]) -> None:
        self._changed = changed

    def state_change(
        self,
        cb: pybreaker.CircuitBreaker,
        old_state: pybreaker.CircuitBreakerState | None,
        new_state: pybreaker.CircuitBreakerState,
    ) -> None:
        self._changed(_STATES[new_state.name])


class _BreakageError(Exception):
    """What pybreaker is shown for a failure. The node's own exception would grow pybreaker's traceback."""


def _answer() -> None:
    pass


def _break() -> None:
    raise _BreakageError
