"""The ids by which all that is said of a request is found again: its own, and its trace's."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import NamedTuple

# https://www.w3.org/TR/trace-context/: version, trace, the caller's span, flags. Later versions may add more.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class RequestIds(NamedTuple):
    """`trace` is "" where the request belongs to no trace."""

    request: str
    trace: str


# Set where a request begins. What its task starts and calls sees the same, so that whoever writes a line need not know.
CURRENT: ContextVar[RequestIds | None] = ContextVar("request ids", default=None)


def trace_of(traceparent: bytes) -> str:
    """The trace's id that the header names; "" when it is not valid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return "" if match is None else match[1].decode()
