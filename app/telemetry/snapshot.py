"""What the gateway does now, as one JSON document a second, made only while somebody looks.

All viewers get the same bytes. One who does not read fast enough misses some, and then gets a whole one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import orjson

from app.domain import tier_name
from app.errors import ShuttingDown, Unavailable
from app.routing.admission import Admission
from app.routing.registry import Node, Registry
from app.telemetry.money import Money
from app.telemetry.pulse import Pulse
from app.telemetry.ring import Ring

MOST_VIEWERS = 32

_EVERY_SECONDS = 1.0
_MOST_REQUESTS = 50  # in one snapshot


class About(NamedTuple):
    """Which gateway this is. `started` is on the monotonic clock."""

    version: str
    instance: str
    strategy: str
    started: float


class Snapshots:
    """Makes snapshots of one process. `closing` tells whether it is about to end: then viewers are sent away."""

    def __init__(
        self,
        about: About,
        *,
        registry: Registry,
        admission: Admission,
        ring: Ring,
        money: Money | None,
        peers: Callable[[], Iterable[str]],
        closing: Callable[[], bool],
        on_trouble: Callable[..., None],
    ) -> None:
        self._about = about
        self._registry = registry
        self._admission = admission
        self._ring = ring
        self._money = money
        self._peers = peers
        self._closing = closing
        self._on_trouble = on_trouble
        self._pulse = Pulse()
        self._counted = 0  # the last request that the pulse knows
        self._told = 0  # the last request that all viewers know
        self._viewers: set[Viewer] = set()
        self._producing: asyncio.Task[None] | None = None

    async def now(self) -> bytes:
        """A whole snapshot."""
        if self._money is not None and not self._viewers:
            await self._money.refresh()
        return self._whole()

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[Viewer]:
        """Snapshots for one viewer, the first at once and a whole one. Raises `Unavailable` when too many look."""
        if self._closing():
            raise ShuttingDown
        if len(self._viewers) >= MOST_VIEWERS:
            raise Unavailable(f"{MOST_VIEWERS} viewers look already; close one", retry_after_seconds=10)
        viewer = Viewer()
        viewer.offer(self._whole())
        self._viewers.add(viewer)
        if self._producing is None:
            self._told = self._ring.seq
            self._producing = asyncio.create_task(self._produce(), name="snapshots")
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                await self._end()

    async def _end(self) -> None:
        producing, self._producing = self._producing, None
        if producing is not None:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def _produce(self) -> None:
        """Shows a snapshot every second. It ends with the process, or by a fault of its own; viewers come again."""
        try:
            while not self._closing():
                if self._money is not None:
                    self._money.begin()
                await asyncio.sleep(_EVERY_SECONDS)
                self._show()
        except Exception as error:
            self._on_trouble("the dashboard's snapshots have ended", reason=repr(error))
        for viewer in self._viewers:
            viewer.end()

    def _show(self) -> None:
        new, self._told = self._make(self._told), self._ring.seq
        whole: bytes | None = None
        for viewer in self._viewers:
            if viewer.behind:
                whole = whole or self._whole()
            viewer.offer(whole if viewer.behind and whole else new)

    def _whole(self) -> bytes:
        return self._make(None)

    def _make(self, since: int | None) -> bytes:
        """With the requests after this one, or with the latest ones, the newest first."""
        now_ms = time.time_ns() // 1_000_000
        up_seconds = time.monotonic() - self._about.started
        self._pulse.take(self._ring.since(self._counted))
        self._counted = self._ring.seq
        count = _MOST_REQUESTS if since is None else min(_MOST_REQUESTS, self._ring.seq - since)
        nodes = list(self._registry)
        about = self._about
        return orjson.dumps(
            {
                "at": now_ms,
                "version": about.version,
                "instance": about.instance,
                "replicas": sorted({about.instance, *self._peers()}),
                "strategy": about.strategy,
                "uptime_seconds": round(up_seconds, 1),
                "queue": self._admission.waiting,
                "in_flight": sum(node.in_flight for node in nodes),
                "nodes": [_node(node) for node in nodes],
                "whole": since is None,
                "seq": self._ring.seq,
                "requests": [record.document() for record in self._ring.latest(count)],
                "minute": self._pulse.minute(now_ms, up_seconds),
                "series": self._pulse.series(now_ms),
                "money": None if self._money is None else self._money.document or {},
            }
        )


class Viewer:
    """Gives one viewer the latest snapshot that it has not had: iterate over it. It holds one at most."""

    __slots__ = ("_ended", "_next", "_wake")

    def __init__(self) -> None:
        self._next: bytes | None = None
        self._ended = False
        self._wake = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Whether it has not even fetched the last snapshot, which the next one replaces."""
        return self._next is not None

    def offer(self, snapshot: bytes) -> None:
        self._next = snapshot
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> Viewer:
        return self

    async def __anext__(self) -> bytes:
        await self._wake.wait()
        self._wake.clear()
        snapshot, self._next = self._next, None
        if self._ended or snapshot is None:
            self._wake.set()
            raise StopAsyncIteration
        return snapshot


def _node(node: Node) -> dict[str, Any]:
    """What there is to see of a node. Its models are counted only: there may be hundreds."""
    spec, loaded = node.spec, node.loaded
    return {
        "name": node.name,
        "url": _without_credentials(spec.url),
        "kind": node.kind.name if node.kind else None,
        "tier": tier_name(spec.tier),
        "role": spec.role.value,
        "state": node.state.value,
        "reason": node.reason or None,
        "draining": node.draining,
        "breaker": {
            "state": node.breaker.state.value,
            "reason": node.breaker.reason,
            "retry_seconds": round(node.breaker.retry_after_seconds(), 1),
        },
        "busy_seconds": round(node.busy_seconds(), 1),
        "in_flight": node.in_flight,
        "others_in_flight": node.others_in_flight,
        "foreign": node.foreign,
        "slots": None if node.engine is None else node.engine.slots,
        "max_concurrency": spec.max_concurrency,
        "models": None if node.models is None else len(node.models),
        "loaded": None
        if loaded is None
        else [
            {"name": model.name, "vram_bytes": model.vram_bytes, "context_length": model.context_length}
            for model in loaded.values()
        ],
        "vram_bytes": None if loaded is None else sum(model.vram_bytes or 0 for model in loaded.values()),
        "vram_gb": spec.vram_gb,
        "num_ctx": spec.num_ctx,
    }


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
