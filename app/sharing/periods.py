"""The time now, and when the periods of budgets begin and end. Milliseconds since 1970, UTC."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from app.domain import Period


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def bounds(period: Period, at: int) -> tuple[int, int]:
    """The first millisecond of the period that `at` is in, and the first one after it."""
    day = datetime.fromtimestamp(at / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period is Period.DAY:
        return _ms(day), _ms(day + timedelta(days=1))
    if period is Period.WEEK:
        monday = day - timedelta(days=day.weekday())
        return _ms(monday), _ms(monday + timedelta(days=7))
    first = day.replace(day=1)
    return _ms(first), _ms((first + timedelta(days=31)).replace(day=1))


def _ms(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000
