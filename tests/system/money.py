"""What tests of money have in common: the settings of a cloud that is paid, and what the ledger says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
from sqlalchemy import select

from app.ledger.store import Store
from app.ledger.tables import requests, spend
from tests.fakes.billing import FARE, BillingCloud
from tests.system.harness import until

MODEL = "gpt-4o-mini"
FAR: Mapping[str, Any] = {"far": {"cloud": MODEL}}  # a route that only the cloud serves

Row = Mapping[str, Any]


def paid(*clouds: BillingCloud, shared: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Settings for these clouds, named c0, c1, ... `far` is served by them alone; lists in `settings` become JSON.

    `shared` is part of each provider's entry, and so is what `settings` has under its name.
    """
    entries = [
        {
            "name": f"c{number}",
            "endpoint": f"{cloud.url}/v1",
            "api_key": cloud.engine.api_key,
            "model": MODEL,
            **(shared or {}),
            **settings.pop(f"c{number}", {}),
        }
        for number, cloud in enumerate(clouds)
    ]
    settings.setdefault("cloud_prices", {"*": FARE.setting})
    settings.setdefault("model_map", FAR)
    found = {"cloud_providers": entries, **settings}
    return {name: json.dumps(each) if isinstance(each, dict | list) else each for name, each in found.items()}


class Books:
    """The ledger behind a gateway's back."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def spends(self) -> list[Row]:
        """In the order in which they were reserved."""
        return await self._rows(spend)

    async def requests(self) -> list[Row]:
        return await self._rows(requests)

    async def closed(self, count: int) -> list[Row]:
        """The spends, once there are so many and none is open."""
        found: list[Row] = []

        async def so() -> bool:
            found[:] = await self.spends()
            return len(found) == count and not any(row["state"] == "open" for row in found)

        await until(so, f"{count} spends, all closed")
        return found

    async def written(self, count: int) -> list[Row]:
        """The requests, once there are so many."""
        found: list[Row] = []

        async def so() -> bool:
            found[:] = await self.requests()
            return len(found) == count

        await until(so, f"{count} requests")
        return found

    async def one(self) -> Row:
        """The only spend, once it is closed."""
        return (await self.closed(1))[0]

    async def _rows(self, table: Any) -> list[Row]:
        async with Store(self.url) as store, store.connect() as connection:
            rows = await connection.execute(select(table).order_by(table.c.at, table.c.id))
            return [dict(row) for row in rows.mappings()]


def counted(rows: list[Row]) -> int:
    """Micro-dollars that these spends count for."""
    return sum(row["reserved"] if row["cost"] is None else row["cost"] for row in rows)


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
