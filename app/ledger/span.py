"""Spans of days in UTC: what `--since 7d` means, and what of it a report says."""

from __future__ import annotations

import re
from datetime import date
from typing import NamedTuple

from app.domain import Period
from app.sharing.periods import bounds

DAY_MS = 86_400_000
SINCE_WORDS = "a day (2026-11-01), a number of days (7d), or month, week or day for the one that runs now"

_EPOCH = date(1970, 1, 1).toordinal()
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DAYS_BACK = re.compile(r"([1-9][0-9]{0,3})d")


class Span(NamedTuple):
    """From `since` on, up to but without `until`. Milliseconds since 1970."""

    since: int
    until: int


def span(since: str | None, until: str | None, now_ms: int) -> Span:
    """The time that two words name, `until`'s day included. None = from this month's first day, and till today.

    Raises `ValueError` whose second argument is the name of the word that is wrong.
    """
    begin = _begin(since, now_ms)
    end = midnight(now_ms) + DAY_MS if until is None else _day(until, "until", "a day (2026-11-30)") + DAY_MS
    if end <= begin:
        raise ValueError(f"it ends on {day_of(end - DAY_MS)}, before it begins on {day_of(begin)}", "until")
    return Span(begin, end)


def period_span(period: Period, at_ms: int) -> Span:
    """The month, week or day that a moment is in."""
    return Span(*bounds(period, at_ms))


def midnight(at_ms: int) -> int:
    """When the day began."""
    return at_ms - at_ms % DAY_MS


def day_of(at_ms: int) -> str:
    """The day as 2026-11-01."""
    return date.fromordinal(at_ms // DAY_MS + _EPOCH).isoformat()


def _begin(since: str | None, now_ms: int) -> int:
    if since is None:
        return period_span(Period.MONTH, now_ms).since
    if since in tuple(Period):
        return period_span(Period(since), now_ms).since
    if back := _DAYS_BACK.fullmatch(since):
        return midnight(now_ms) - (int(back[1]) - 1) * DAY_MS
    return _day(since, "since", SINCE_WORDS)


def _day(text: str, name: str, allowed: str) -> int:
    try:
        if not _DAY.fullmatch(text):
            raise ValueError(text)
        return _ms(date.fromisoformat(text))
    except ValueError as error:
        raise ValueError(f"'{text[:100]}' is not {allowed}", name) from error


def _ms(day: date) -> int:
    return (day.toordinal() - _EPOCH) * DAY_MS
