"""The gateway as a process of its own, started as an operator would start it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from app.settings import Settings
from tests.system.harness import until

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 40.0
STOP_SECONDS = 5.0


def children(pid: int) -> list[int]:
    """The processes that this one has started and that run, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(folder.name))
    return sorted(found)


def free_port() -> int:
    """A port that nobody has, and below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class GatewayProcess:
    """Runs `python -m app serve` in a folder of its own. Use with `async with`; it is always reaped.

    `settings` are Settings' own names, and go into the environment, which holds no other setting. `command` may be
    another one that serves on `port`.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        command: Callable[[int], Sequence[str]] | None = None,
        verify: ssl.SSLContext | bool = False,
        **settings: Any,
    ) -> None:
        self.port = free_port()
        scheme = "https" if "ssl_certfile" in settings else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.client = httpx.AsyncClient(base_url=self.url, verify=verify, timeout=10)
        self.stdout = b""
        self.stderr = b""
        self._folder = folder
        self._command = command(self.port) if command else ("-m", "app", "serve", *flags)
        self._settings = {
            "port": self.port,
            "log_format": "json",
            "local_nodes": "[]",
            "database_url": "off",
            **settings,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log so far. Fails on a line that is no JSON object."""
        lines = [json.loads(line) for line in self.stderr.splitlines()]
        assert all(isinstance(line, dict) for line in lines)
        return lines

    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "request"]

    async def start(self) -> None:
        """Starts it, whether or not it comes to serve."""
        ours = {name.upper() for name in Settings.model_fields}
        kept = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        given = {name.upper(): str(value) for name, value in self._settings.items() if value is not None}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._folder,
            env={**kept, "PYTHONPATH": str(ROOT), **given},
        )
        self._reading = [asyncio.create_task(self._read("stdout")), asyncio.create_task(self._read("stderr"))]

    async def serving(self) -> None:
        """Waits until it answers."""
        await self._until_ok("/health")

    async def ready(self) -> None:
        """Waits until it has found a node that serves a model."""
        await self._until_ok("/ready")

    def signal(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    async def ended(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit status, once it has ended and all that it wrote is here."""
        status = await asyncio.wait_for(self._running.wait(), seconds)
        await asyncio.gather(*self._reading)
        return status

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._running.returncode is None:
                self._running.kill()
            await self.ended()
        finally:
            await self.client.aclose()

    async def _until_ok(self, path: str) -> None:
        async def ok() -> bool:
            assert self._running.returncode is None, self.stderr.decode()
            try:
                return (await self.client.get(path)).status_code == 200
            except httpx.TransportError:
                return False

        await until(ok, f"{path} answers 200", START_SECONDS)

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start it first"
        return self._process

    async def _read(self, name: str) -> None:
        stream = getattr(self._running, name)
        while data := await stream.read(65_536):
            setattr(self, name, getattr(self, name) + data)
