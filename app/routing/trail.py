"""What happened to one request, from its arrival to its last byte: for headers, the log line and metrics."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from app.domain import AttemptRecord, NodeSpec, Usage
from app.routing.spans import RequestSpan

EVENT = b'"choices"'  # stands once in every event that says something, and in no text, where quotes are escaped
CONTINUED = "continued"  # the turn of a stream with which another node went on
UNROUTED = "unrouted"  # how a request is counted that came to no route


@dataclass(slots=True)
class Trail:
    """Filled in as the request goes on. Times are seconds on the monotonic clock."""

    started: float = field(default_factory=time.perf_counter)
    route: str = ""
    node: str = ""  # the one that was asked last
    tier: int = 0
    spec: NodeSpec | None = None  # that node's
    model: str = ""  # the name that it was asked for
    fallback: str = ""  # why it was not the first choice
    cloud_refusal: str | None = None  # why the gate kept it from the cloud
    unpaid: tuple[str | None, str] | None = None  # why the cloud could not be paid: code, and words for the log
    candidates: int = 0  # how many could serve when it was chosen
    queued_seconds: float = 0.0
    queue_refusal: str = ""  # why it got no place of those that it waited for, or would have
    keep_alive_seconds: float | None = None  # the route's; None = as set for all
    kept_alive: bool = False  # a status was sent before there was an answer
    first_content: float | None = None
    events: int = 0  # of a stream, that were sent on; each has about one token
    document_bytes: int = 0  # of an answer that is no stream
    cost: int = 0  # micro-dollars, of all attempts
    attempts: list[AttemptRecord] = field(default_factory=list)
    tried: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None
    num_ctx: int | None = None  # the route's
    context_filled: int | None = None  # tokens, where the prompt filled the context: some of it was probably cut off
    dropped_events: int = 0  # of the node's stream, which could not be read
    turns: list[str] = field(default_factory=list)  # what became of it each time that its node died in mid-stream
    events_before: int = 0  # of a stream, from nodes before the one that answers now
    trace_id: str = ""  # of the trace that the request belongs to, if any
    span: RequestSpan | None = None  # where the request is traced

    _row: str = ""

    @property
    def row(self) -> str:
        """The request's id in the ledger. Hearth's own, as clients may use theirs twice."""
        if not self._row:
            # In the order of time, so that the ledger's index grows at its end: the larger it is, the cheaper this is.
            self._row = f"{time.time_ns() << 32 | random.getrandbits(32):x}"
        return self._row

    @property
    def routed(self) -> bool:
        return bool(self.route)

    def why(self, policy: str) -> str:
        """Why the node that was asked last, in a few words."""
        return "only candidate" if self.candidates <= 1 else f"{policy} over {self.candidates}"

    def began(self, first: bytes, now: float, *, stream: bool) -> int:
        """Takes a node's first content, and tells how many events of a stream it is."""
        if self.first_content is None:
            self.first_content = now
        if not stream:
            self.document_bytes = len(first)
            return 0
        events = first.count(EVENT)
        self.events += events
        return events

    def part_ended(self) -> None:
        """Another node goes on with the stream."""
        self.events_before, self.usage = self.events, None

    @property
    def continued(self) -> int:
        """How often another node went on."""
        return self.turns.count(CONTINUED)

    def seconds(self) -> float:
        return time.perf_counter() - self.started
