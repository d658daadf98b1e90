"""What is written into the ledger, row by row. Fields are the columns of `tables.py`, in its units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RequestRow(NamedTuple):
    """One request that reached a route, once it is over."""

    id: str
    request_id: str
    at: int
    instance: str
    key: str
    operation: str
    route: str
    model: str
    node: str
    tier: int
    outcome: str
    code: str
    fallback: str
    attempts: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    estimated: bool
    cost: int
    saved: int
    queued_ms: int
    first_content_ms: int | None
    ms: int


class SpendRow(NamedTuple):
    """What an attempt may cost, before its request leaves."""

    id: str
    request: str
    at: int
    instance: str
    key: str
    route: str
    node: str
    model: str
    reserved: int


class Settlement(NamedTuple):
    """What an attempt came to. `id` is the one of its `SpendRow`."""

    id: str
    cost: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    estimated: bool
    outcome: str
    settled_at: int


class Batch(NamedTuple):
    """Rows that are written in one transaction: first what was opened, then what was settled."""

    requests: Sequence[RequestRow] = ()
    opened: Sequence[SpendRow] = ()
    settled: Sequence[Settlement] = ()
