"""The gateway under test: the real app on a real port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import uvicorn
from fastapi import FastAPI

from app.main import create_app
from app.server import BoundedHttp
from app.settings import Settings
from tests.fakes import KINDS, FakeNode

DEADLINE_SECONDS = 10.0


class Lines:
    """Keeps log lines."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def write(self, line: bytes) -> None:
        self.all.append(orjson.loads(line))

    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.all if line["event"] == "request"]


class Gateway:
    """A running gateway and a client for it."""

    def __init__(self, url: str, app: FastAPI, lines: Lines, client: httpx.AsyncClient) -> None:
        self.url = url
        self.app = app
        self.lines = lines
        self.client = client

    async def chat(self, model: str = "m", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def nodes(self) -> dict[str, dict[str, Any]]:
        answer = await self.client.get("/admin/nodes")
        assert answer.status_code == 200, answer.text
        return {node["name"]: node for node in answer.json()["nodes"]}

    async def in_flight(self) -> int:
        return sum(node["in_flight"] for node in (await self.nodes()).values())

    async def state(self, name: str, state: str) -> None:
        """Waits until the node is in that state."""

        async def there() -> bool:
            return bool((await self.nodes())[name]["state"] == state)

        await until(there, f"{name} is {state}")


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Waits for the condition, plain or awaitable; fails with `what` after a while."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert loop.time() < end, f"not so within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def node_settings(*nodes: FakeNode[Any], **shared: Any) -> str:
    """LOCAL_NODES for fakes: each with its kind given, named n0, n1, ..."""
    return json.dumps(
        [{"url": node.url, "kind": kind_of(node), "name": f"n{index}", **shared} for index, node in enumerate(nodes)]
    )


def kind_of(node: FakeNode[Any]) -> str:
    return next(name for name, make in KINDS.items() if type(node) is make)


@asynccontextmanager
async def gateway(*nodes: FakeNode[Any], **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway in front of these nodes, ended with the block. `settings` are Settings' own names."""
    settings.setdefault("local_nodes", node_settings(*nodes))
    settings.setdefault("health_check_interval", 0.2)
    settings.setdefault("health_check_timeout", 1)
    settings.setdefault("connect_timeout", 1)
    settings.setdefault("log_level", "DEBUG")
    settings.setdefault("log_format", "json")
    settings.setdefault("nodes_file", "off")
    settings.setdefault("database_url", "off")
    lines = Lines()
    app = create_app(Settings(_env_file=None, **settings), lines)
    async with served(app) as client:
        yield Gateway(str(client.base_url).rstrip("/"), app, lines, client)


@asynccontextmanager
async def served(app: FastAPI, headers: dict[str, str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app on a real port, which sends these headers."""
    # The protocol must be named, or asyncio leaves Nagle's algorithm on, which costs 40 ms a request.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(
            uvicorn.Config(app, http=BoundedHttp, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started or serving.done(), "it serves")
            # Nothing is encrypted here, and to read the certificates of all authorities takes longer than most tests.
            async with httpx.AsyncClient(
                base_url=url, timeout=DEADLINE_SECONDS, headers=headers, verify=False
            ) as client:
                yield client
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def used_by_others(node: FakeNode[Any], requests: int) -> AsyncIterator[None]:
    """So many requests of another program are under way on the node."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with httpx.AsyncClient(base_url=node.url, timeout=60, verify=False) as client:
        asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(requests)]
        try:
            await until(lambda: node.open == requests, "the others' requests are there")
            yield
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
