"""What happened to one request, from its arrival to its last byte: for headers, the log line and metrics."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from app.domain import AttemptRecord, NodeSpec, Usage
from app.routing.spans import RequestSpan

EVENT = b"data: "  # begins every event of a stream
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
    trace_id: str = ""  # of the trace that the request belongs to, if any
    span: RequestSpan | None = None  # where the request is traced

    _row: str = ""

    @property
    def row(self) -> str:
        """The request's id in the ledger. Hearth's own, as clients may use theirs twice."""
        if not self._row:
            # In the order of time, so that the ledger's index grows at its end: the larger it is, the cheaper this is.
            self._row = f"{time.time_ns():x}{random.getrandbits(32):08x}"
        return self._row

    @property
    def routed(self) -> bool:
        return bool(self.route)

    def why(self, policy: str) -> str:
        """Why the node that was asked last, in a few words."""
        return "only candidate" if self.candidates <= 1 else f"{policy} over {self.candidates}"

    def began(self, first: bytes, *, stream: bool) -> None:
        """Takes the first content."""
        if stream:
            self.events = first.count(EVENT)
        else:
            self.document_bytes = len(first)

    def seconds(self) -> float:
        return time.perf_counter() - self.started
