"""A look at something slow, taken for whoever asks, and not more often than it is worth."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

_MOST_OF_THE_TIME = 0.05  # what takes longer is looked at less often


class Look:
    """Takes a look every `every_seconds` at most. Who asks waits a moment; the look goes on without them."""

    def __init__(self, take: Callable[[], Awaitable[None]], name: str, every_seconds: float) -> None:
        self._take = take
        self._name = name
        self._every_seconds = every_seconds
        self._due = 0.0
        self._taking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins one if it is time to."""
        if self._taking is None and time.monotonic() >= self._due:
            self._taking = asyncio.create_task(self._run(), name=self._name)

    async def refresh(self, wait_seconds: float) -> None:
        """Begins one if it is time to, and waits so long for the one that runs, if any."""
        self.begin()
        if self._taking is not None:
            await asyncio.wait([self._taking], timeout=wait_seconds)

    async def close(self) -> None:
        """Ends the one that runs; there is none after it."""
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        self._due = math.inf

    async def _run(self) -> None:
        began = time.monotonic()
        try:
            await self._take()
        finally:
            took = time.monotonic() - began
            self._due = time.monotonic() + max(self._every_seconds, took / _MOST_OF_THE_TIME)
            self._taking = None
