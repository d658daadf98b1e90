"""What happened to one request, from its arrival to its last byte: for headers, the log line and metrics."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from app.domain import AttemptRecord, Usage


@dataclass(slots=True)
class Trail:
    """Filled in as the request goes on. Times are seconds on the monotonic clock."""

    started: float = field(default_factory=time.perf_counter)
    route: str = ""
    policy: str = ""
    node: str = ""  # the one that was asked last
    tier: int = 0
    model: str = ""  # the name that it was asked for
    fallback: str = ""  # why it was not the first choice
    candidates: int = 0  # how many could serve when it was chosen
    queued_seconds: float = 0.0
    first_content: float | None = None
    cost: int = 0  # micro-dollars, of all attempts
    attempts: list[AttemptRecord] = field(default_factory=list)
    tried: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None

    _row: str = ""

    @property
    def row(self) -> str:
        """The request's id in the ledger. Hearth's own, as clients may use theirs twice."""
        if not self._row:
            self._row = f"{random.getrandbits(96):024x}"
        return self._row

    def seconds(self) -> float:
        return time.perf_counter() - self.started
