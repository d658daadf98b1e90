"""The gateway as a process of its own, started as users start it, for what a test's own process would blur."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.system.harness import until

ROOT = Path(__file__).resolve().parents[2]
CAN_MEASURE = Path("/proc/self/statm").exists()
_STOP_SECONDS = 10.0


class Process:
    """A running `python -m app serve`."""

    def __init__(self, url: str, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.url = url
        self.client = client
        self._process = process
        self._errors: list[bytes] = []

    def memory_mib(self) -> float:
        """What it holds in memory now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def sockets(self) -> int:
        """How many sockets it has open."""
        links = Path(f"/proc/{self._process.pid}/fd").iterdir()
        return sum(_link(link).startswith("socket:") for link in links)

    def lines(self) -> list[dict[str, Any]]:
        """What it wrote to its log so far."""
        return [orjson.loads(line) for line in self._errors]

    async def in_flight(self) -> int:
        nodes = (await self.client.get("/admin/nodes")).json()["nodes"]
        return sum(node["in_flight"] for node in nodes)

    async def read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._errors.append(line)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""  # closed meanwhile


@asynccontextmanager
async def process(local_nodes: str, **settings: object) -> AsyncIterator[Process]:
    """The gateway in front of these nodes, ended with the block. `settings` are Settings' own names."""
    port = _free_port()
    own = {"LOCAL_NODES": local_nodes, "PORT": str(port), "LOG_FORMAT": "json", "HEALTH_CHECK_INTERVAL": "0.5"}
    given = {name.upper(): str(value) for name, value in settings.items()}
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app", "serve"),
        cwd=ROOT,
        env={**inherited, **own, **given},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        gateway = Process(url, running, client)
        reading = asyncio.create_task(gateway.read_log())
        try:
            await until(lambda: _answers(client, running), "the gateway serves", 20)
            yield gateway
        finally:
            await _end(running)
            await reading


async def _answers(client: httpx.AsyncClient, running: asyncio.subprocess.Process) -> bool:
    assert running.returncode is None, "the gateway ended at its start"
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/health")).status_code == 200
    return False


async def _end(running: asyncio.subprocess.Process) -> None:
    if running.returncode is None:
        running.terminate()
        try:
            await asyncio.wait_for(running.wait(), _STOP_SECONDS)
        except TimeoutError:
            running.kill()
            await running.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
