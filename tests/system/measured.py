"""The gateway as a process whose use of memory and sockets can be seen. On Linux alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import pytest

from tests.system.gateway_process import GatewayProcess

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


class Measured(GatewayProcess):
    """Serves from the start of its block on."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.serving()
        return self

    def memory_mib(self) -> float:
        """What it holds in memory now."""
        pages = int(Path(f"/proc/{self._running.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def sockets(self) -> int:
        """How many sockets it has open."""
        return sum(_target(link).startswith("socket:") for link in Path(f"/proc/{self._running.pid}/fd").iterdir())

    async def in_flight(self) -> int:
        nodes = (await self.client.get("/admin/nodes")).json()["nodes"]
        return sum(node["in_flight"] for node in nodes)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed meanwhile
