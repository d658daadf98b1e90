"""What really happened to the latest requests, in memory: without prompts, answers and keys, and never more than so
many."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from app.domain import ANYBODY, LOCAL_TIER, MICRO_DOLLARS, AttemptRecord, Operation, Outcome, tier_name
from app.routing.ended import Ended
from app.routing.gate import NO_CLOUD
from app.routing.trail import UNROUTED, Trail
from app.sharing.periods import now_ms
from app.telemetry.report import ms

_ASKED_CHARACTERS = 100
_DEFAULT_SIZE = 1000


class Record(NamedTuple):
    """One request that is over. Holds neither its body nor its error, whose traceback holds the body."""

    seq: int  # grows by one with every request of this process
    at: int  # when it was over, in ms since 1970
    id: str
    operation: Operation
    asked: str | None  # the model; None = the request was refused before it could be read
    stream: bool
    key: str  # the caller's id; "" = none was needed
    key_name: str
    policy: str
    has_cloud: bool  # whether there is any cloud target
    trail: Trail
    outcome: Outcome
    status: int | None  # of the answer; None = the client left before there was one
    code: str | None
    error: str | None  # as the log may say it
    seconds: float

    def document(self) -> dict[str, Any]:
        """For people and JSON. `ms` are milliseconds; every key is always there, None where nothing is known."""
        trail, usage = self.trail, self.trail.usage
        first = trail.first_content
        return {
            "seq": self.seq,
            "id": self.id,
            "at": self.at,
            "operation": self.operation.value,
            "asked": self.asked,
            "stream": self.stream,
            "key": {"id": self.key, "name": self.key_name} if self.key else None,
            "outcome": self.outcome.value,
            "status": self.status,
            "code": self.code,
            "error": self.error,
            "route": trail.route or UNROUTED,
            "node": trail.node or None,
            "tier": tier_name(trail.tier) if trail.node else None,
            "model": trail.model or None,
            "candidates": trail.candidates,
            "why": trail.why(self.policy) if trail.node else None,
            "fallback": str(trail.fallback) or None,
            "attempts": [_attempt(record) for record in trail.attempts],
            "continued": trail.continued,
            "cloud": self.cloud(),
            "queued_ms": ms(trail.queued_seconds),
            "first_content_ms": None if first is None else ms(first - trail.started),
            "ms": ms(self.seconds),
            "tokens_in": None if usage is None else usage.prompt_tokens,
            "tokens_out": None if usage is None else usage.completion_tokens,
            "tokens_cached": None if usage is None else usage.cached_tokens,
            "cost_usd": trail.cost / MICRO_DOLLARS,
            "finish_reason": trail.finish_reason,
            "context_filled": trail.context_filled,
            "dropped_events": trail.dropped_events,
        }

    def cloud(self) -> dict[str, Any]:
        """Whether the cloud was asked, and why (not): `refusal` is the gate's, `unpaid` the code of the purse's."""
        trail = self.trail
        asked = any(record.tier != LOCAL_TIER for record in trail.attempts)
        code, message = trail.unpaid or (None, "")
        return {"asked": asked, "refusal": trail.cloud_refusal, "unpaid": code, "why": self._cloud_why(asked, message)}

    def _cloud_why(self, asked: bool, unpaid: str) -> str:
        trail = self.trail
        if asked:
            return str(trail.fallback).replace("_", " ") or "the route has no local model"
        if trail.cloud_refusal:
            return trail.cloud_refusal
        if not self.has_cloud:
            return NO_CLOUD
        if unpaid:
            return unpaid
        if not trail.routed:
            return "the request came to no route"
        if self.outcome is Outcome.OK:
            return "a local node served it"
        return "it did not come to that, or no cloud target could be asked"


class Ring:
    """A report that remembers the latest requests of this process."""

    def __init__(self, policy: str, has_cloud: bool, size: int = _DEFAULT_SIZE) -> None:
        self._policy = policy
        self._has_cloud = has_cloud
        self._records: deque[Record] = deque(maxlen=size)
        self.seq = 0  # the latest record's

    def __call__(self, ended: Ended) -> None:
        request, request_id, operation, trail, outcome, error, seconds = ended
        self.seq = seq = self.seq + 1
        asked, stream, caller = None, False, ANYBODY
        if request is not None:
            asked, stream, caller = request.model[:_ASKED_CHARACTERS], request.stream, request.caller
        code, said = (None, None) if error is None else (ended.code, ended.said or None)
        self._records.append(
            Record(
                seq,
                now_ms(),
                request_id,
                operation,
                asked,
                stream,
                caller.id,
                caller.name,
                self._policy,
                self._has_cloud,
                trail,
                outcome,
                ended.status,
                code,
                said,
                seconds,
            )
        )

    def __len__(self) -> int:
        return len(self._records)

    def latest(self, count: int) -> list[Record]:
        """At most so many, the newest first."""
        return list(islice(reversed(self._records), max(0, count)))

    def since(self, seq: int) -> list[Record]:
        """Those after the record of this number that are still remembered, the oldest first."""
        new = list(islice(reversed(self._records), max(0, self.seq - seq)))
        new.reverse()
        return new

    def get(self, request_id: str) -> Record | None:
        """The newest one of this id: clients may use theirs twice."""
        return next((record for record in reversed(self._records) if record.id == request_id), None)


def _attempt(record: AttemptRecord) -> dict[str, Any]:
    return {
        "node": record.node,
        "tier": tier_name(record.tier),
        "outcome": record.outcome.value,
        "failure": None if record.failure is None else record.failure.value,
        "message": record.message or None,
        "ms": round(record.ms, 1),
    }
