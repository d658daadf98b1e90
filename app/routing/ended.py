"""A request that is over, as whoever keeps count of requests is told of it."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from app.domain import Operation, Outcome, Request
from app.errors import HearthError, NodeFailure
from app.routing.trail import Trail

_OK = HTTPStatus.OK.value


class Ended(NamedTuple):
    """One request and what it came to. Everybody is told the same: a report must not change the trail."""

    request: Request | None  # None = refused before it could be read
    id: str  # what its client knows it by
    operation: Operation
    trail: Trail
    outcome: Outcome
    error: HearthError | NodeFailure | None
    seconds: float  # from its arrival to its last byte

    @property
    def status(self) -> int | None:
        """Of the answer; None when the client left before there was one. What breaks later does so after a 200."""
        trail, ok = self.trail, self.outcome is Outcome.OK
        if ok or trail.first_content is not None or trail.kept_alive or isinstance(self.error, NodeFailure):
            return _OK
        return None if self.error is None else self.error.status

    @property
    def code(self) -> str | None:
        if isinstance(self.error, NodeFailure):
            return self.error.failure.value
        return None if self.error is None else self.error.code

    @property
    def said(self) -> str:
        """What went wrong, as the log may say it: without what the node said of the request."""
        if isinstance(self.error, NodeFailure):
            return self.error.summary
        return self.error.logged if self.error is not None else ""


Report = Callable[[Ended], None]
