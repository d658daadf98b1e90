"""Rows for tests of the ledger."""

from __future__ import annotations

from typing import Any

from app.ledger.rows import RequestRow, Settlement, SpendRow

NOON = 1_700_000_000_000


def request_row(id: str = "r1", **fields: Any) -> RequestRow:
    """A request that a local node served."""
    row = RequestRow(
        id=id,
        request_id=f"client-{id}",
        at=NOON,
        instance="one",
        key="",
        operation="chat",
        route="llama",
        model="llama3.1:8b",
        node="n0",
        tier=0,
        outcome="ok",
        code="",
        fallback="",
        attempts=1,
        tokens_in=120,
        tokens_out=300,
        tokens_cached=0,
        estimated=False,
        cost=0,
        saved=480,
        queued_ms=0,
        first_content_ms=120,
        ms=3_000,
    )
    return row._replace(**fields)


def spend_row(id: str = "r1-1", **fields: Any) -> SpendRow:
    """What an attempt in the cloud may cost: 500 micro-dollars."""
    row = SpendRow(
        id=id, request="r1", at=NOON, instance="one", key="", route="llama", node="openai", model="gpt", reserved=500
    )
    return row._replace(**fields)


def settlement(id: str = "r1-1", cost: int = 70, **fields: Any) -> Settlement:
    row = Settlement(
        id=id,
        cost=cost,
        tokens_in=10,
        tokens_out=20,
        tokens_cached=0,
        estimated=False,
        outcome="ok",
        settled_at=NOON + 900,
    )
    return row._replace(**fields)
