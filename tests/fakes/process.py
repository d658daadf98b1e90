"""A fake node as a process of its own, which can be killed like a real one."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 10.0
STOP_SECONDS = 5.0


class NodeProcess:
    """Runs `python -m tests.fakes KIND --option value …`. Use with `async with`; it is always reaped.

    Options are those of the command line, with underscores: `NodeProcess("ollama", models="a,b", token_seconds=0.02)`.
    A process that was killed may be started again, on the same port.
    """

    def __init__(self, kind: str = "ollama", **options: Any) -> None:
        self.url = ""
        self._kind = kind
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it, and returns once it listens."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_SECONDS)
            self.url = json.loads(line)["url"]
        except BaseException:
            await self.stop()
            raise

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends the signal, and returns the exit status once the process is gone."""
        if self.alive:
            self._running.send_signal(number)
        return await self._running.wait()

    async def stop(self) -> None:
        """Ends it politely, or by force when it does not listen."""
        if self._process is None:
            return
        if self.alive:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
        await self._process.communicate()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the node was not started")
        return self._process

    def _command(self) -> Sequence[str]:
        options = {**self._options, **({"port": self.port} if self.url else {})}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return [sys.executable, "-m", "tests.fakes", self._kind, "--until-stdin-closes", *flags]
