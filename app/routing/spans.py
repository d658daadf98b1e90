"""What a request tells of itself to whoever traces it. Routing knows no more of traces than this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from app.domain import AttemptRecord, Request

if TYPE_CHECKING:
    from app.routing.registry import Candidate
    from app.routing.trail import Trail

Forwarded = tuple[tuple[str, str], ...]


class AttemptSpan(Protocol):
    """One attempt, from when it is sent to its outcome."""

    forwarded: Forwarded  # the headers that its node gets, which name this span

    def answering(self) -> None:
        """The node's first content is there."""
        ...

    def settle(self, record: AttemptRecord, trail: Trail) -> None: ...


class RequestSpan(Protocol):
    """One request. Whoever began it hears of its end from the reports."""

    trace_id: str
    forwarded: Forwarded | None  # the headers for nodes where attempts have no spans; None = as the client sent them

    def attempt(self, candidate: Candidate, request: Request) -> AttemptSpan | None:
        """Begins an attempt's span; None when this request is not recorded."""
        ...
