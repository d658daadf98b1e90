"""The end of a request, told once, in one log line."""

from __future__ import annotations

from typing import Any

from app.domain import AttemptRecord, Operation, Outcome, Request, tier_name
from app.errors import HearthError, NodeFailure
from app.routing.trail import Trail
from app.telemetry.advice import Advice
from app.telemetry.logs import Logger, RequestLine

UNROUTED = "unrouted"


class Reporter:
    """Writes one line for every request, whatever it came to."""

    def __init__(self, log: Logger, line: RequestLine, policy: str) -> None:
        self._line = line
        self._log = log
        self._policy = policy
        self.advice = Advice(log)

    def __call__(
        self,
        request: Request | None,
        request_id: str,
        operation: Operation,
        trail: Trail,
        outcome: Outcome,
        error: HearthError | NodeFailure | None,
    ) -> None:
        trail.route = trail.route or UNROUTED
        fields = self._fields(request, request_id, operation, trail, outcome, error)
        if trail.context_filled is not None:
            self.advice.filled(trail)
        self._line("warning" if outcome is Outcome.FAILED else "info", fields)

    def bug(self, request_id: str, trace: str) -> None:
        """A fault of Hearth's own."""
        self._log.error("bug", id=request_id, trace=trace)

    def _fields(
        self,
        request: Request | None,
        request_id: str,
        operation: Operation,
        trail: Trail,
        outcome: Outcome,
        error: HearthError | NodeFailure | None,
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": request_id,
            "operation": operation,
            "outcome": outcome,
            "ms": round(trail.seconds() * 1000, 1),
            "route": trail.route,
        }
        if trail.trace_id:
            fields["trace_id"] = trail.trace_id
        if request is not None:
            fields["asked"] = request.model[:100]
            fields["stream"] = request.stream
        if trail.node:
            fields["node"] = trail.node
            fields["tier"] = tier_name(trail.tier)
            fields["model"] = trail.model
            fields["why"] = self._why(trail)
            fields["attempts"] = [_attempt(record) for record in trail.attempts]
        if trail.fallback:
            fields["fallback"] = trail.fallback
        if trail.queued_seconds:
            fields["queued_ms"] = _ms(trail.queued_seconds)
        if trail.first_content is not None:
            fields["first_content_ms"] = _ms(trail.first_content - trail.started)
        if trail.usage is not None:
            fields["tokens_in"], fields["tokens_out"], cached = trail.usage
            if cached:
                fields["tokens_cached"] = cached
        if trail.context_filled is not None:
            fields["context_filled"] = trail.context_filled
        if trail.dropped_events:
            fields["dropped_events"] = trail.dropped_events
        if trail.finish_reason is not None:
            fields["finish_reason"] = trail.finish_reason
        if error is not None:
            fields |= _told(error)
        return fields

    def _why(self, trail: Trail) -> str:
        """Why this node, in a few words."""
        if trail.candidates <= 1:
            return "only candidate"
        return f"{self._policy} over {trail.candidates}"


def _told(error: HearthError | NodeFailure) -> dict[str, Any]:
    if isinstance(error, NodeFailure):
        return {"error": error.summary, "code": error.failure}
    told: dict[str, Any] = {"status": error.status, "code": error.code}
    if error.logged:
        told["error"] = error.logged
    return told


def _attempt(record: AttemptRecord) -> dict[str, Any]:
    told: dict[str, Any] = {"node": record.node, "outcome": record.outcome, "ms": round(record.ms, 1)}
    if record.failure is not None:
        told |= {"failure": record.failure, "message": record.message}
    return told


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
