"""Rows of the ledger with known sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Table, insert

from app.ledger.span import DAY_MS, Span
from app.ledger.store import Store


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


NOON = ms("2026-11-10T12:00:00")
NOVEMBER = Span(ms("2026-11-01"), ms("2026-12-01"))


def a_request(id: str, **fields: Any) -> dict[str, Any]:
    """A row: a local node answered."""
    plain = {
        "id": id,
        "request_id": id,
        "at": NOON,
        "instance": "i1",
        "key": "k1",
        "operation": "chat",
        "route": "small",
        "model": "llama3",
        "node": "attic",
        "tier": 0,
        "outcome": "ok",
        "code": "",
        "fallback": "",
        "attempts": 1,
        "tokens_in": 100,
        "tokens_out": 10,
        "tokens_cached": 40,
        "estimated": False,
        "cost": 0,
        "saved": 0,
        "queued_ms": 0,
        "first_content_ms": 200,
        "ms": 900,
    }
    return plain | fields


def a_spend(id: str, **fields: Any) -> dict[str, Any]:
    """A row: an attempt in the cloud that is settled."""
    plain = {
        "id": id,
        "request": id.rpartition("-")[0],
        "at": NOON,
        "instance": "i1",
        "key": "k1",
        "route": "small",
        "node": "openai",
        "model": "gpt-4o-mini",
        "state": "settled",
        "reserved": 9000,
        "cost": 700,
        "tokens_in": 100,
        "tokens_out": 10,
        "tokens_cached": 0,
        "estimated": False,
        "outcome": "ok",
        "settled_at": NOON + 1000,
    }
    return plain | fields


IN_CLOUD = {"node": "openai", "model": "gpt-4o-mini", "tier": 1}
KNOWN_REQUESTS = [
    a_request("r1", saved=500),
    a_request("r2", saved=300, key="k2", first_content_ms=400),
    a_request(
        "r3", outcome="failed", node="", model="", tokens_in=0, tokens_out=0, tokens_cached=0, first_content_ms=None
    ),
    # It spent twice: at one cloud, which broke, and at the next.
    a_request("r4", cost=1000, attempts=3, estimated=True, first_content_ms=600, **IN_CLOUD),
    a_request("r5", at=NOON + DAY_MS, key="k2", route="big", cost=700, **IN_CLOUD),
    # A local node with a price.
    a_request("r6", at=NOON + DAY_MS, route="big", node="cellar", cost=25, saved=75),
]
KNOWN_SPEND = [
    a_spend("r4-1", node="azure", cost=300, outcome="failed"),
    a_spend("r4-2", cost=700),
    a_spend("r5-1", at=NOON + DAY_MS, key="k2", route="big"),
    # Both have no request: one still runs, the other's process died.
    a_spend("r7-1", at=NOON + DAY_MS, state="open", cost=None, settled_at=None, reserved=5000),
    a_spend("r8-1", key="k3", state="lost", cost=None, settled_at=None, reserved=9000),
]


async def fill(store: Store, rows: Mapping[Table, Sequence[dict[str, Any]]]) -> None:
    async with store.begin() as connection:
        for table, values in rows.items():
            if values:
                await connection.execute(insert(table), values)
