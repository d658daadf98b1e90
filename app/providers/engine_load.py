"""Reads what engines say of their own load. Sans-I/O."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

import orjson

from app.domain import EngineLoad
from app.providers.base import Gauge

METRICS_PATH = "/metrics"

_COUNTS_MAX = 10**6  # more requests than any engine has: it is something else then


def metrics(*, running: str, waiting: str, cache_used: tuple[str, ...] = (), stirs: bool = False) -> Gauge:
    """Prometheus metrics by their names: the first of `cache_used` that is there counts. Those of several engines, or
    models, behind one address are added up; of `cache_used` the greatest counts."""
    names = (running, waiting, *cache_used)
    lines = re.compile(rb"^(" + b"|".join(map(re.escape, map(str.encode, names))) + rb")(?:\{.*\})?[ \t]+(\S+)", re.M)

    def read(body: bytes) -> EngineLoad:
        found: dict[str, list[float]] = {}
        for name, text in lines.findall(body):
            found.setdefault(name.decode(), []).append(_number(text))
        if running not in found:
            raise ValueError(f"no {running}")
        share = next((max(found[name]) for name in cache_used if name in found), None)
        return EngineLoad(
            running=_count(sum(found[running])),
            waiting=_count(sum(found.get(waiting, [0.0]))),
            cache_used=None if share is None else min(1.0, max(0.0, share)),
        )

    return Gauge(METRICS_PATH, read, frozenset({"running", "waiting"}), stirs=stirs)


def document(body: bytes) -> Any:
    """Raises ValueError when it is not JSON."""
    return orjson.loads(body)


def positive_count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= _COUNTS_MAX else None


def slots_alone(count: int | None) -> EngineLoad:
    """Raises ValueError when it is not known."""
    if count is None:
        raise ValueError("no number of slots")
    return EngineLoad(slots=count)


def _number(text: bytes) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a figure that is none")
    return value


def _count(value: float) -> int:
    if not 0 <= value <= _COUNTS_MAX:
        raise ValueError("a number of requests that cannot be")
    return round(value)
