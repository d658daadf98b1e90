"""What `/metrics` shows, and how it is put together without holding up a stream.

Label values are bounded: configured or listed names, enums and statuses, never a client's string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

import orjson

from app.routing.admission import Admission
from app.routing.registry import Registry
from app.telemetry.counts import Counts
from app.telemetry.exposition import CONTENT_TYPE, Breath
from app.telemetry.gauges import node_gauges
from app.telemetry.lag import LoopLag
from app.telemetry.process import Process
from app.telemetry.slates import Slates
from app.telemetry.tallies import Count, Family, Merge, Samples, Spread, merged

__all__ = ["CONTENT_TYPE", "Metrics"]

_CACHE_SECONDS = 1.0
_WRITE_SECONDS = 1.0


class Source(Protocol):
    """More metrics, which are brought up to date before a scrape."""

    families: tuple[Family, ...]

    async def refresh(self) -> None: ...
    async def close(self) -> None: ...


class Metrics:
    """All metrics of this process, and those of its sister workers where there are `slates`.

    Used with `async with`, while requests run. `counts` is told of requests and attempts.
    """

    def __init__(
        self,
        nodes: Registry,
        admission: Admission,
        slates: Slates | None = None,
        on_trouble: Callable[..., None] = lambda message, **fields: None,
    ) -> None:
        self.counts = Counts()
        self._slates = slates
        self._on_trouble = on_trouble
        self._lag = LoopLag()
        self._families: list[Family] = [
            *self.counts.families,
            *node_gauges(nodes, admission),
            *self._lag.families,
            *Process().families,
        ]
        self._sources: list[Source] = []
        self._rendered = (0.0, b"")
        self._turn = asyncio.Lock()  # whoever reads the metrics: some change as they are read
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, families: Iterable[Family]) -> None:
        self._families += families

    def add_source(self, source: Source) -> None:
        self._sources.append(source)
        self.add(source.families)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._lag.run(), name="event loop lag")]
        if self._slates is not None:
            self._inherit(_decoded(self._slates.inherited()))
            self._tasks.append(asyncio.create_task(self._keep_writing(), name="shared metrics"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self._sources:
            await source.close()
        if self._slates is not None:
            await self._write()

    async def render(self) -> bytes:
        """The exposition text, made off the loop and kept for a second."""
        async with self._turn:
            made, text = self._rendered
            if not text or time.monotonic() - made > _CACHE_SECONDS:
                for source in self._sources:
                    await source.refresh()
                text = await asyncio.to_thread(self._render)
                self._rendered = (time.monotonic(), text)
        return text

    def _render(self) -> bytes:
        breath = Breath()
        own = self._read(breath)
        sisters = [] if self._slates is None else self._share(self._slates, own, breath)
        pieces = []
        for family in self._families:
            samples = own[family.name]
            if sisters and family.merge is not Merge.OWN:
                parts = [samples, *(each[family.name] for each in sisters if family.name in each)]
                samples = merged(family, map(breath.over, parts))
            pieces.append(family.head())
            pieces += breath.over(family.lines(samples))
        return "".join(pieces).encode()

    def _read(self, breath: Breath) -> dict[str, Samples]:
        found = {}
        for family in self._families:
            found[family.name] = family.read()
            breath.take()
        return found

    def _share(self, slates: Slates, own: dict[str, Samples], breath: Breath) -> list[dict[str, Samples]]:
        """Writes down what is about to be shown, so that it is not lost with this process, and reads the others'."""
        self._write_down(slates, own, breath)
        lasting = {family.name for family in self._families if family.lasting}
        sisters = []
        for slate in slates.others():
            found = _decoded(slate.content, breath)
            sisters.append(found if slate.fresh else {name: found[name] for name in found if name in lasting})
        return sisters

    def _write_down(self, slates: Slates, own: dict[str, Samples], breath: Breath) -> None:
        lines = []
        for family in self._families:
            if family.merge is not Merge.OWN:
                lines.append(orjson.dumps([family.name, own[family.name]]))
                breath.take()
        try:
            slates.write(b"\n".join(lines))
        except OSError as error:
            self._on_trouble("this worker's metrics cannot be shared with the others", reason=str(error))
            self._slates = None

    def _inherit(self, found: dict[str, Samples]) -> None:
        for family in self._families:
            if isinstance(family, Count | Spread):
                family.begin(found.get(family.name, ()))

    async def _keep_writing(self) -> None:
        while True:
            await self._write()
            await asyncio.sleep(_WRITE_SECONDS)

    async def _write(self) -> None:
        async with self._turn:
            await asyncio.to_thread(self._write_now)

    def _write_now(self) -> None:
        breath = Breath()
        if self._slates is not None:
            self._write_down(self._slates, self._read(breath), breath)


def _decoded(content: bytes, breath: Breath | None = None) -> dict[str, Samples]:
    """By name. All workers of one parent run the same code, so that what was written can be read."""
    found: dict[str, Any] = {}
    for line in content.splitlines():
        name, samples = orjson.loads(line)
        found[name] = samples
        if breath is not None:
            breath.take()
    return found
