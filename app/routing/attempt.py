"""One try on one node: a slot, the breaker's permit, and exactly one outcome."""

from __future__ import annotations

import time
from typing import Protocol

from app.domain import AttemptRecord, Failure, Outcome, Request, Timings
from app.errors import NodeFailure
from app.routing.admission import Slot
from app.routing.breaker import Permit
from app.routing.forecast import Progress
from app.routing.gate import Reservation
from app.routing.registry import Node
from app.routing.spans import AttemptSpan, Forwarded
from app.routing.trail import Trail

_BUSY_SECONDS = 1.0  # how long a node that said "busy" is asked last, unless it names a time
_BUSY_SECONDS_MAX = 30.0


class Observer(Protocol):
    """Who wants to hear of attempts."""

    def attempt(self, node: Node, record: AttemptRecord) -> None: ...


class Attempt:
    """Settle it with one of `succeed`, `fail`, `refuse`, `abandon`: the first counts, the others do nothing."""

    __slots__ = (
        "_began",
        "_observer",
        "_permit",
        "_settled",
        "_slot",
        "_span",
        "_trail",
        "candidate",
        "progress",
        "reservation",
        "timings",
    )

    def __init__(self, slot: Slot, permit: Permit | None, trail: Trail, observer: Observer) -> None:
        self.candidate = slot.candidate
        self._slot = slot
        self._permit = permit
        self._trail = trail
        self._observer = observer
        self._began = time.perf_counter()
        self._settled = False
        self._span: AttemptSpan | None = None
        self.reservation: Reservation | None = None  # in the cloud only
        self.progress: Progress | None = None  # where the policy learns from it
        self.timings: Timings | None = None  # what the node says of itself at the end

    @property
    def open(self) -> bool:
        return not self._settled

    def sending(self, request: Request) -> Forwarded:
        """The request leaves now, with these headers."""
        span = self._trail.span
        if span is None:
            return request.forwarded
        self._span = span.attempt(self.candidate, request)
        return (span.forwarded or request.forwarded) if self._span is None else self._span.forwarded

    def answering(self) -> None:
        """The node has begun to answer, which is no outcome yet."""
        if self._permit is not None:
            self._permit.answering()
        if self.progress is not None and self.progress.began():
            self._slot.look_again()
        if self._span is not None:
            self._span.answering()

    def succeed(self) -> None:
        if self._permit is not None and not self._settled:
            self._permit.succeed()
        self._settle(Outcome.OK)

    def fail(self, failure: NodeFailure) -> None:
        if self._permit is not None and not self._settled and failure.counts:
            self._permit.fail(failure.summary)
        if failure.failure is Failure.BUSY and not self._settled:
            wait = min(failure.retry_after_seconds or _BUSY_SECONDS, _BUSY_SECONDS_MAX)
            node = self.candidate.node
            node.penalty_until = max(node.penalty_until, time.monotonic() + wait)
        self._settle(Outcome.FAILED, failure)

    def refuse(self) -> None:
        self._settle(Outcome.REFUSED)

    def abandon(self) -> None:
        self._settle(Outcome.ABANDONED)

    def _settle(self, outcome: Outcome, failure: NodeFailure | None = None) -> None:
        if self._settled:
            return
        self._settled = True
        if self._permit is not None:
            self._permit.neutral()  # does nothing after an outcome
        if self.progress is not None:
            self.progress.ended(outcome, self._trail.usage, self.timings)
        self._slot.release()
        node = self.candidate.node
        ms = (time.perf_counter() - self._began) * 1000
        if outcome is Outcome.OK:  # a failure is often fast, and must not make its node look so
            node.latencies.append(ms / 1000)
        if self.reservation is not None:
            self.reservation.settle(outcome, failure, self._trail)
        why, message = (None, "") if failure is None else (failure.failure, failure.summary)
        record = AttemptRecord(node.name, node.spec.tier, outcome, why, message, ms)
        self._trail.attempts.append(record)
        self._observer.attempt(node, record)
        if self._span is not None:
            self._span.settle(record, self._trail)
