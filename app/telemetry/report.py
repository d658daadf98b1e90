"""The end of a request, told once, in one log line."""

from __future__ import annotations

from typing import Any

from app.domain import AttemptRecord, Outcome, tier_name
from app.errors import HearthError, NodeFailure
from app.routing.ended import Ended
from app.routing.registry import Candidate
from app.routing.trail import UNROUTED
from app.telemetry.advice import Advice
from app.telemetry.logs import Logger, RequestLine


class Reporter:
    """Writes one line for every request, whatever it came to."""

    def __init__(self, log: Logger, line: RequestLine, policy: str) -> None:
        self._line = line
        self._log = log
        self._policy = policy
        self.advice = Advice(log)

    def __call__(self, ended: Ended) -> None:
        fields = self._fields(ended)
        if ended.trail.context_filled is not None:
            self.advice.filled(ended.trail)
        self._line("warning" if ended.outcome is Outcome.FAILED else "info", fields)

    def bug(self, request_id: str, trace: str) -> None:
        """A fault of Hearth's own."""
        self._log.error("bug", id=request_id, trace=trace)

    def not_loaded(self, candidate: Candidate, failure: NodeFailure | HearthError) -> None:
        """A load that no request carried. The words of a refusal are left out: a client could have caused them."""
        reason = failure.summary if isinstance(failure, NodeFailure) else failure.code
        self._log.warning("model not loaded", node=candidate.node.name, model=candidate.model, reason=reason)

    def _fields(self, ended: Ended) -> dict[str, Any]:
        trail, request = ended.trail, ended.request
        fields: dict[str, Any] = {
            "id": ended.id,
            "operation": ended.operation,
            "outcome": ended.outcome,
            "ms": ms(ended.seconds),
            "route": trail.route or UNROUTED,
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
            fields["why"] = trail.why(self._policy)
            fields["attempts"] = [_attempt(record) for record in trail.attempts]
        if trail.fallback:
            fields["fallback"] = trail.fallback
        if trail.turns:
            fields["continued"] = trail.continued
        if trail.queued_seconds:
            fields["queued_ms"] = ms(trail.queued_seconds)
        if trail.queue_refusal:
            fields["queue_refusal"] = trail.queue_refusal
        if trail.kept_alive:
            fields["kept_alive"] = True
        if trail.first_content is not None:
            fields["first_content_ms"] = ms(trail.first_content - trail.started)
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
        if ended.error is not None:
            if isinstance(ended.error, HearthError):
                fields["status"] = ended.error.status
            fields["code"] = ended.code
            if ended.said:
                fields["error"] = ended.said
        return fields


def _attempt(record: AttemptRecord) -> dict[str, Any]:
    told: dict[str, Any] = {"node": record.node, "outcome": record.outcome, "ms": ms(record.ms / 1000)}
    if record.failure is not None:
        told |= {"failure": record.failure, "message": record.message}
    return told


def ms(seconds: float) -> float:
    """As logs and documents show times: rounded to a tenth, which `round` does exactly and slowly."""
    return int(seconds * 10_000 + 0.5) / 10
