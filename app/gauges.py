"""Asks nodes how busy their engines are, where they say so. Never a reason to call a node down.

A node that does not answer a question is not asked it again for long: many engines have these pages only when they were
started with a flag for it. One that would keep the engine awake is asked only while Hearth itself has use for the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from math import inf
from weakref import WeakKeyDictionary

from app.domain import EngineLoad
from app.providers.base import Gauge
from app.routing.registry import Node

ANSWER_BYTES = 4 * 2**20
_ABSENT_SECONDS = 600.0
_LATE_SECONDS = 30.0  # an engine at work may be slow to answer
_IN_USE_SECONDS = 60.0  # after Hearth's last request

Get = Callable[[str, int], Awaitable[tuple[int, bytes]]]
Clock = Callable[[], float]


class Unanswered(Exception):
    """The node could not be asked, or said more than it may."""


class _Known:
    """What was found out about one node since it last came up."""

    __slots__ = ("constant", "incarnation", "not_before", "picked", "used_at")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.constant = EngineLoad()
        self.not_before: dict[str, float] = {}  # by path
        self.picked = 0
        self.used_at = -inf

    def in_use(self, node: Node, now: float) -> bool:
        """Whether Hearth has asked it lately, and it is awake."""
        if node.in_flight_everywhere or node.picked != self.picked:
            self.picked, self.used_at = node.picked, now
        asleep = node.loaded is not None and not node.loaded
        return now - self.used_at < _IN_USE_SECONDS and not asleep


class Gauges:
    """Of all nodes."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        """`seconds` is how long one answer may take."""
        self._seconds = seconds
        self._clock = clock
        self._known: WeakKeyDictionary[Node, _Known] = WeakKeyDictionary()

    async def read(self, node: Node, get: Get) -> EngineLoad | None:
        """What the engine says now; None when it says nothing.

        `get` takes a path and how many bytes are allowed, and returns status and body, or raises `Unanswered`.
        """
        if node.kind is None or not node.kind.probe.gauges:
            return None
        known = self._known.get(node)
        if known is None or known.incarnation != node.incarnation:
            known = self._known[node] = _Known(node.incarnation)
        load = known.constant
        in_use = known.in_use(node, self._clock())
        for gauge in node.kind.probe.gauges:
            if (gauge.stirs and not in_use) or not any(_unknown(load, gauge)):
                continue
            if self._clock() < known.not_before.get(gauge.path, 0.0):
                continue
            told = await self._ask(known, gauge, get)
            load = load.beside(told)
            if gauge.constant:
                known.constant = known.constant.beside(told)
        return load if any(value is not None for value in load) else None

    async def _ask(self, known: _Known, gauge: Gauge, get: Get) -> EngineLoad:
        pause = _ABSENT_SECONDS
        try:
            async with asyncio.timeout(self._seconds):
                status, body = await get(gauge.path, ANSWER_BYTES)
            if status == 200:
                return gauge.read(body)
        except (TimeoutError, Unanswered):
            pause = _LATE_SECONDS
        except ValueError:
            pass  # an answer, but none of this kind
        known.not_before[gauge.path] = self._clock() + pause
        return EngineLoad()


def _unknown(load: EngineLoad, gauge: Gauge) -> Iterator[bool]:
    return (getattr(load, name) is None for name in gauge.tells)
