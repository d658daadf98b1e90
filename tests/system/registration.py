"""Nodes that come while the gateway runs: what engines and operators send to it, and what it says of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from demo.httpd import Exchange
from tests.system.harness import until
from tests.system.scripted import DONE, SSE, ScriptedNode, chunk

ADDED, DELETED = '"Added successfully"', '"Deleted successfully"'


class HeldNode(ScriptedNode):
    """Begins every answer at once, and ends none before `release` is set."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.release = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _answer(self, exchange: Exchange) -> None:
        exchange.head(200, SSE)
        exchange.body(chunk("a"))
        await self.release.wait()
        exchange.body(chunk(finish="stop") + DONE)
        exchange.end()


async def add(client: httpx.AsyncClient, url: str, **fields: Any) -> httpx.Response:
    """Adds a node, as a POST to /nodes/add. `models`, `role` and `speed` are its status, other fields its own."""
    told = {name: fields.pop(name) for name in ("models", "role", "speed") if name in fields}
    return await client.post("/nodes/add", json={"url": url, **({"status": told} if told else {}), **fields})


async def added(client: httpx.AsyncClient, url: str, **fields: Any) -> None:
    """Adds a node, and returns once it is healthy."""
    answer = await add(client, url, **fields)
    assert (answer.status_code, answer.text) == (200, ADDED)
    await in_state(client, url, "healthy")


async def status(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """All nodes, by URL."""
    answer = await client.get("/nodes/status")
    assert answer.status_code == 200, answer.text
    nodes: dict[str, dict[str, Any]] = answer.json()
    return nodes


async def in_state(client: httpx.AsyncClient, url: str, state: str) -> None:
    """Waits until the node is in that state."""

    async def there() -> bool:
        return bool((await status(client))[url]["state"] == state)

    await until(there, f"{url} is {state}")


async def registers(client: httpx.AsyncClient, port: int, *models: str, role: int = 1) -> httpx.Response:
    """What an LMDeploy api_server with the default server name sends, byte by byte, before it listens."""
    listed = ",".join(f'"{model}"' for model in models)
    body = f'{{"url":"http://0.0.0.0:{port}","status":{{"models":[{listed}],"role":{role}}}}}'
    headers = {"accept": "application/json", "content-type": "application/json"}
    return await client.post("/nodes/add", content=body.encode(), headers=headers)


def kept(path: Path) -> list[str]:
    """The URLs of the nodes in the gateway's file."""
    return [node["url"] for node in json.loads(path.read_text())["nodes"]] if path.exists() else []
