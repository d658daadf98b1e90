"""How the last minutes went: requests, tokens and times to the first token, in steps of some seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from app.domain import LOCAL_TIER, Outcome
from app.telemetry.ring import Record

STEP_SECONDS = 5
STEPS = 60  # five minutes

_STEP_MS = STEP_SECONDS * 1000
_MINUTE_STEPS = 60 // STEP_SECONDS
_SAMPLES = 200  # times that are kept of one step; of more, a fair choice

Percentiles = tuple[float | None, float | None]


class _Step:
    """What ended within one step."""

    __slots__ = (
        "_percentiles",
        "cloud",
        "failed",
        "local",
        "number",
        "requests",
        "samples",
        "seen",
        "tokens_cloud",
        "tokens_local",
    )

    def __init__(self, number: int) -> None:
        self.number = number  # since 1970
        self.requests = 0
        self.failed = 0
        self.local = 0  # requests that a local node served
        self.cloud = 0
        self.tokens_local = 0
        self.tokens_cloud = 0
        self.samples: list[float] = []  # ms to the first content
        self.seen = 0
        self._percentiles: Percentiles | None = None  # of the samples, once somebody asked

    def take(self, record: Record) -> None:
        trail = record.trail
        self.requests += 1
        self.failed += record.outcome is Outcome.FAILED
        # What is no stream has its first token with all others, whenever the node made it.
        if record.stream and trail.first_content is not None:
            self._sample((trail.first_content - trail.started) * 1000)
        if not trail.node or record.outcome is not Outcome.OK:
            return
        tokens = trail.events if trail.usage is None else trail.usage.completion_tokens
        if trail.tier == LOCAL_TIER:
            self.local += 1
            self.tokens_local += tokens
        else:
            self.cloud += 1
            self.tokens_cloud += tokens

    def percentiles(self) -> Percentiles:
        """Of the samples. A step that is over is sorted once, however often it is shown."""
        if self._percentiles is None:
            self._percentiles = percentiles(self.samples)
        return self._percentiles

    def _sample(self, ms: float) -> None:
        self._percentiles = None
        self.seen += 1
        if len(self.samples) < _SAMPLES:
            self.samples.append(ms)
        elif (place := random.randrange(self.seen)) < _SAMPLES:
            self.samples[place] = ms


class Pulse:
    """Takes the records of requests in their order. Tokens count when their request is over."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=STEPS + 1)

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            number = record.at // _STEP_MS
            if not self._steps or self._steps[-1].number < number:
                self._steps.append(_Step(number))
            self._steps[-1].take(record)

    def minute(self, now_ms: int, up_seconds: float) -> dict[str, Any]:
        """The last 55 to 60 seconds, or those since the start where that is not so long ago."""
        number = now_ms // _STEP_MS
        steps = [step for step in self._steps if number - _MINUTE_STEPS < step.number <= number]
        seconds = max(1.0, min(up_seconds, (now_ms % _STEP_MS) / 1000 + (_MINUTE_STEPS - 1) * STEP_SECONDS))
        served = sum(step.local + step.cloud for step in steps)
        tokens = sum(step.tokens_local + step.tokens_cloud for step in steps)
        requests = sum(step.requests for step in steps)
        p50, p95 = percentiles([ms for step in steps for ms in step.samples])
        return {
            "requests": requests,
            "failed": sum(step.failed for step in steps),
            "local_share": round(sum(step.local for step in steps) / served, 4) if served else None,
            "requests_per_second": round(requests / seconds, 2),
            "tokens_per_second": round(tokens / seconds, 1),
            "first_content_ms": {"p50": p50, "p95": p95},
        }

    def series(self, now_ms: int) -> dict[str, Any]:
        """Five minutes in steps, the oldest first; the last one is that which runs now. Rates are for each second."""
        last = now_ms // _STEP_MS
        known = {step.number: step for step in self._steps}
        steps = [known.get(number) for number in range(last - STEPS + 1, last + 1)]
        middles = [step.percentiles() if step else (None, None) for step in steps]
        return {
            "step_seconds": STEP_SECONDS,
            "until": (last + 1) * _STEP_MS,
            "requests": [step.requests if step else 0 for step in steps],
            "tokens_local": [round(step.tokens_local / STEP_SECONDS, 1) if step else 0 for step in steps],
            "tokens_cloud": [round(step.tokens_cloud / STEP_SECONDS, 1) if step else 0 for step in steps],
            "first_content_p50": [p50 for p50, _ in middles],
            "first_content_p95": [p95 for _, p95 in middles],
        }


def percentiles(samples: Sequence[float]) -> Percentiles:
    """The 50th and the 95th, of nearest rank; None where there is no sample."""
    if not samples:
        return None, None
    ordered = sorted(samples)
    return tuple(round(ordered[-(-len(ordered) * share // 100) - 1], 1) for share in (50, 95))  # type: ignore[return-value]
